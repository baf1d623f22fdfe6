"""The rank processes as the loop's ranks: commands and results over the mailbox."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from vime.common.v1.trajectory_pb2 import Sample, TrajectoryGroup
from vime.trainer.v1 import rank_service_pb2 as pb
from vime_trainer.adapters.protos import seconds, to_seconds, version_to_proto
from vime_trainer.loop.ports import Described, Loaded, RankDied, Refused, Saved, Trained
from vime_trainer.loop.versions import Version
from vime_trainer.ranks.mailbox import Mailbox
from vime_trainer.ranks.processes import RankProcesses

logger = logging.getLogger(__name__)

_PROPAGATOR = TraceContextTextMapPropagator()

PEER_FAILED = "RANK_DIED"
"""Reason of a rank that is well and did not do its command because another failed."""

# How long the other ranks have to answer once one has failed: they know by then, or wait for it in a collective.
_PEERS_S = 15.0
# Between two looks at ranks that start; and how many times its time-out a start takes at the very most.
_LOOK_S = 2.0
_STARTS_AT_MOST = 10

Command = pb.NextCommandResponse
Result = pb.ReportResultRequest


class GrpcRanks:
    """Implements `loop.ports.Ranks`. Results come in through `servicers.RankServicer`, which reads `mailbox`."""

    def __init__(
        self,
        processes: RankProcesses,
        world_size: int,
        checkpoints: Path,
        keep_last: int,
        canary_prompts: int,
        start_timeout_s: float,
        command_timeout_s: float,
    ) -> None:
        self._processes, self._world_size = processes, world_size
        self._checkpoints, self._keep_last, self._canary_prompts = checkpoints, keep_last, canary_prompts
        self._start_timeout_s, self._command_timeout_s = start_timeout_s, command_timeout_s
        self._launches = 0
        self._watch: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._turn = asyncio.Lock()
        self.address = ""
        self.starting = ""
        """What a start waits for, for people; empty if it waits for nothing."""
        self.mailbox: Mailbox[Command, Result] | None = None
        self.components: dict[str, str] = {}

    @property
    def data_parallel(self) -> int:
        """Data-parallel size: today every rank is one."""
        return self._world_size

    @property
    def pids(self) -> Mapping[int, int]:
        """Process ids by rank, for tests and logs."""
        return self._processes.pids

    async def start(self) -> None:
        """Have fresh processes, all attached: those that run already if they were given no command yet."""
        async with self._starting:
            if self.mailbox is None or self.mailbox.used:
                await self._start()

    async def _start(self) -> None:
        await self.stop()
        self._launches += 1
        launch_id = secrets.token_urlsafe(16)
        mailbox = self.mailbox = Mailbox(self._world_size, launch_id)
        environment = {"VIME_LAUNCH_ID": launch_id, "VIME_TRAINER_ADDRESS": self.address}
        try:
            await self._processes.start(self._launches, environment)
            self._watch = asyncio.create_task(self._watch_deaths(mailbox), name="watch-ranks")
            await self._wait_attached(mailbox)
        except BaseException:  # half-started ranks must not pass for fresh ones
            await self.stop()
            raise

    async def _wait_attached(self, mailbox: Mailbox[Command, Result]) -> None:
        """Until every rank is up, as long as those that are missing get on: imports may take minutes."""
        began = moved = time.monotonic()
        used: dict[int, float] = {}
        while mailbox.missing:
            try:
                await mailbox.wait_attached(_LOOK_S)
            except TimeoutError:
                now, latest = time.monotonic(), {r: self._processes.cpu_seconds(r) for r in mailbox.missing}
                if any(latest[rank] > used.get(rank, 0.0) for rank in latest):
                    moved, used = now, latest
                self.starting = _progress(latest, now - began)
                limit = self._start_timeout_s
                if now - moved > limit or now - began > _STARTS_AT_MOST * limit:
                    raise RankDied(
                        f"{self.starting} and used no processor for {now - moved:.0f} s "
                        f"(trainer.faults.rank_start_timeout_s = {limit:g})"
                    ) from None
        self.starting = ""

    async def stop(self) -> None:
        """End the processes; whoever waits for a command gets RankDied."""
        mailbox, self.mailbox = self.mailbox, None
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if mailbox is not None:
            await mailbox.fail(RankDied("the ranks were stopped"))
        await self._processes.stop()

    async def _watch_deaths(self, mailbox: Mailbox[Command, Result]) -> None:
        death = await self._processes.wait_for_death()
        logger.error("%s", death.cause)
        await mailbox.fail(RankDied(death.cause, death.rank))

    async def _run(self, command: Command, timeout_s: float | None = None) -> list[Result]:
        limit = self._command_timeout_s if timeout_s is None else timeout_s
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier)
        command.traceparent = carrier.get("traceparent", "")
        # ScoreSamples may come while the loop trains; ranks do one thing at a time.
        # bounded by: the limit of the command in hand
        await self._turn.acquire()
        running = asyncio.create_task(self._in_turn(command, limit))
        running.add_done_callback(lambda _: self._turn.release())
        # A caller that goes away does not take the command with it: some ranks may have it, others not yet, and those
        # would meet in different collectives. The next command waits until it is done.
        return await asyncio.shield(running)

    async def _in_turn(self, command: Command, limit: float) -> list[Result]:
        mailbox = self.mailbox
        if mailbox is None:
            raise RankDied("the ranks are not started")
        try:
            results = await mailbox.run(command, limit, lambda result: bool(result.error), _PEERS_S)
        except TimeoutError as error:  # a rank that hangs is as good as dead: only a restart frees it
            raise RankDied(str(error)) from error
        # A rank that failed only with another is not the one to quote.
        failures = sorted((r for r in results.values() if r.error), key=lambda r: r.error_reason == PEER_FAILED)
        if not failures:
            return list(results.values())
        failure = _error(command, failures[0])
        if silent := sorted(set(range(self._world_size)) - set(results)):
            # They wait in a collective for the rank that left it; the next command must not meet them there.
            await mailbox.fail(RankDied(f"{failure}; ranks {silent} wait for it, only a restart frees them"))
        raise failure

    async def load(self, checkpoint: str | None) -> Loaded:
        """See the port."""
        results = await self._run(Command(load=pb.LoadCommand(checkpoint=checkpoint or "")))
        loaded = results[0].load
        return Loaded(json.loads(loaded.state_json) if loaded.state_json else {}, loaded.parameters)

    async def train(
        self,
        step: int,
        group_ids: Sequence[str],
        group_ranks: Sequence[int],
        policy: Version,
        *,
        score_without_replay: bool,
        sample_texts: int,
    ) -> Trained:
        """See the port."""
        command = pb.TrainCommand(
            train_step=step,
            group_ids=group_ids,
            group_ranks=group_ranks,
            policy_version=version_to_proto(policy),
            score_without_replay=score_without_replay,
            sample_texts=sample_texts,
        )
        return _trained(await self._run(Command(train=command)))

    async def train_groups(self, groups: Sequence[TrajectoryGroup], learning_rate: float | None) -> Trained:
        """Train a step on groups given by the caller, split over the ranks in turn. Groups that cannot be trained raise
        CommandFailed: a caller that drives has nobody who would make them again."""
        ids = [group.group_id for group in groups]
        if twice := sorted({group_id for group_id in ids if ids.count(group_id) > 1}):
            raise CommandFailed(f"{len(ids)} groups, but these ids are given more than once: {', '.join(twice)}")
        command = pb.TrainCommand(
            inline_groups=groups,
            group_ids=ids,
            group_ranks=[i % self._world_size for i in range(len(groups))],
            learning_rate=learning_rate,
            score_without_replay=True,
        )
        trained = _trained(await self._run(Command(train=command)))
        if trained.unusable_groups:
            raise CommandFailed("; ".join(f"group {name}: {why}" for name, why in trained.unusable_groups.items()))
        return trained

    async def score(self, samples: Sequence[Sample], temperature: float, replay: bool) -> list[list[float]]:
        """Logprobs of each sample's response, in order."""
        command = pb.ScoreCommand(samples=samples, temperature=temperature, replay=replay)
        results = await self._run(Command(score=command))
        return [list(score.logprobs) for score in results[0].score.scores]

    async def describe(self, version: Version) -> Described:
        """See the port."""
        command = pb.DescribeCommand(version=version_to_proto(version), canary_prompts=self._canary_prompts)
        described = (await self._run(Command(describe=command)))[0].describe
        return Described(
            version=version,
            manifest=described.manifest,
            digest=described.manifest.digest,
            total_bytes=described.manifest.total_bytes,
            store_address=described.store_address,
            canary=list(described.canary),
        )

    async def send(self, described: Described, generation: int, world: int, timeout_s: float) -> float:
        """See the port. A failed transfer raises Refused: the ranks are well."""
        command = pb.SendCommand(
            version=version_to_proto(described.version),
            generation=generation,
            world_size=world,
            timeout=seconds(timeout_s),
        )
        results = await self._run(Command(send=command), timeout_s + 30.0)
        return to_seconds(results[0].send.transfer_time)

    async def save(self, step: int, state: dict[str, Any], hf: bool) -> Saved:
        """See the port."""
        command = pb.SaveCommand(
            folder=str(self._checkpoints),
            train_step=step,
            state_json=json.dumps(state),
            keep_last=self._keep_last,
            hf=hf,
        )
        saved = (await self._run(Command(save=command)))[0].save
        return Saved(saved.path, list(saved.kept_steps), saved.hf_path)


class CommandFailed(Exception):
    """A rank is well but could not do what it was told; the message is the rank's."""


def _error(command: Command, result: Result) -> Exception:
    name = command.WhichOneof("command") or "command"
    message = f"rank {result.rank} could not {name}: {result.error}"
    if result.error_reason == "TRANSFER_FAILED" and name == "send":
        return Refused(message)
    # A damaged group is made again by the next incarnation, in its place in the batch; a rank that failed with another
    # which told nothing failed with a dead one.
    if result.error_reason in ("CORRUPTED", PEER_FAILED):
        return RankDied(message, result.rank)
    return CommandFailed(message)


def _progress(cpu_s: Mapping[int, float], waited_s: float) -> str:
    missing = ", ".join(f"rank {rank} ({used:.0f} s of processor time)" for rank, used in sorted(cpu_s.items()))
    return f"after {waited_s:.0f} s not up yet: {missing}"


def _trained(results: Sequence[Result]) -> Trained:
    parts = [result.train for result in results]
    return Trained(
        metrics=dict(parts[0].metrics),
        skipped=parts[0].skipped,
        sample_json=[text for part in parts for text in part.sample_json],
        left_out={name: why for part in parts for name, why in part.left_out.items()},
        trained_samples=[name for part in parts for name in part.trained_samples],
        unusable_groups={name: why for part in parts for name, why in part.unusable_groups.items()},
    )
