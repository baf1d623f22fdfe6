"""The ranks as the loop sees them: a failed start is no start, commands take turns, a stop leaves nobody waiting."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from vime.common.v1.trajectory_pb2 import Sample, TrajectoryGroup
from vime.trainer.v1 import rank_service_pb2 as pb
from vime.trainer.v1.trainer_service_pb2 import ScoreSamplesRequest, TrainStepRequest
from vime_service import errors
from vime_trainer.adapters.ranks import PEER_FAILED, CommandFailed, GrpcRanks
from vime_trainer.loop.ports import RankDied
from vime_trainer.loop.versions import Version
from vime_trainer.ranks.processes import Death, RankProcesses
from vime_trainer.servicers import TrainerServicer


class Processes(RankProcesses):
    """Ranks that attach by themselves, unless the start shall fail."""

    def __init__(self, failures: int = 0, world_size: int = 1) -> None:
        super().__init__(Path(), world_size, Path())
        self.failures = failures
        self.ranks: GrpcRanks
        self.starts = 0

    async def start(self, launch: int, environment: Mapping[str, str]) -> None:
        self.starts += 1
        if self.starts <= self.failures:
            raise OSError("no more processes")
        for rank in range(self._world_size):
            await self.ranks.mailbox.attach(environment["VIME_LAUNCH_ID"], rank, "host:1")

    async def wait_for_death(self, poll_s: float = 0.3) -> Death:
        await asyncio.Event().wait()
        raise AssertionError


def make_ranks(processes: Processes, start_timeout_s: float = 2.0) -> GrpcRanks:
    ranks = GrpcRanks(processes, processes._world_size, Path(), 1, 1, start_timeout_s, command_timeout_s=5.0)
    processes.ranks = ranks
    return ranks


async def _next(ranks: GrpcRanks, after: int, rank: int = 0) -> tuple[int, pb.NextCommandResponse]:
    found = await ranks.mailbox.next(ranks.mailbox._launch_id, rank, after, 2.0)
    assert found is not None
    return found


async def _report(ranks: GrpcRanks, sequence: int, rank: int = 0, **result: object) -> None:
    report = pb.ReportResultRequest(sequence=sequence, rank=rank, **result)
    await ranks.mailbox.report(ranks.mailbox._launch_id, rank, sequence, report)


async def test_ranks_whose_start_failed_are_started_again_and_not_taken_for_running():
    processes = Processes(failures=1)
    ranks = make_ranks(processes)
    with pytest.raises(OSError, match="no more processes"):
        await ranks.start()
    with pytest.raises(RankDied, match="the ranks are not started"):
        await ranks.load(None)
    await ranks.start()
    assert processes.starts == 2
    await ranks.stop()


async def test_scores_asked_for_while_the_loop_trains_wait_for_their_turn():
    ranks = make_ranks(Processes())
    await ranks.start()
    loading = asyncio.create_task(ranks.load(None))
    sequence, command = await _next(ranks, 0)
    assert command.WhichOneof("command") == "load"
    scoring = asyncio.create_task(ranks.score([], 1.0, replay=False))
    await asyncio.sleep(0.05)
    assert not scoring.done()
    await _report(ranks, sequence, load=pb.LoadResult(parameters=3))
    assert (await loading).parameters == 3
    sequence, command = await _next(ranks, sequence)
    assert command.WhichOneof("command") == "score"
    await _report(ranks, sequence, score=pb.ScoreResult())
    assert await scoring == []
    await ranks.stop()


async def test_a_stop_ends_the_command_that_runs_and_those_that_wait():
    ranks = make_ranks(Processes())
    await ranks.start()
    calls = [asyncio.create_task(ranks.load(None)) for _ in range(3)]
    await asyncio.sleep(0.05)
    async with asyncio.timeout(1.0):
        await ranks.stop()
        ends = await asyncio.gather(*calls, return_exceptions=True)
    assert [str(end) for end in ends] == ["the ranks were stopped", *["the ranks are not started"] * 2]


async def test_a_caller_that_goes_away_leaves_the_command_its_turn_until_every_rank_has_done_it():
    ranks = make_ranks(Processes())
    await ranks.start()
    scoring = asyncio.create_task(ranks.score([], 1.0, replay=False))
    sequence, _ = await _next(ranks, 0)
    scoring.cancel()
    loading = asyncio.create_task(ranks.load(None))
    await asyncio.sleep(0.05)
    assert await ranks.mailbox.next(ranks.mailbox._launch_id, 0, sequence, 0.05) is None
    await _report(ranks, sequence, score=pb.ScoreResult())
    sequence, command = await _next(ranks, sequence)
    assert command.WhichOneof("command") == "load"
    await _report(ranks, sequence, load=pb.LoadResult(parameters=3))
    assert (await loading).parameters == 3
    await ranks.stop()


@pytest.mark.parametrize("name", ["train", "score", "save", "describe"])
async def test_ranks_that_one_of_them_left_alone_are_given_no_other_command(monkeypatch, name):
    monkeypatch.setattr("vime_trainer.adapters.ranks._PEERS_S", 0.05)
    ranks = make_ranks(Processes(world_size=2))
    await ranks.start()
    calls = {
        "train": lambda: ranks.train_groups([], None),
        "score": lambda: ranks.score([], 1.0, replay=False),
        "save": lambda: ranks.save(1, {}, hf=False),
        "describe": lambda: ranks.describe(Version("run", 1, 1)),
    }
    running = asyncio.create_task(calls[name]())
    sequence, _ = await _next(ranks, 0)
    await _report(ranks, sequence, error="ValueError: no sample", error_reason="INVALID_FIELD")
    with pytest.raises(CommandFailed, match="no sample"):
        await running
    with pytest.raises(RankDied, match=r"ranks \[1\] wait for it"):
        await ranks.load(None)
    assert ranks.mailbox.used  # so that the next start makes fresh ones
    await ranks.stop()


async def test_a_failure_that_every_rank_tells_leaves_the_launch_well_and_quotes_the_rank_that_had_it():
    ranks = make_ranks(Processes(world_size=2))
    await ranks.start()
    saving = asyncio.create_task(ranks.save(1, {}, hf=False))
    sequence, _ = await _next(ranks, 0)
    await _report(ranks, sequence, error="PeerFailed: another rank failed", error_reason=PEER_FAILED)
    await _report(ranks, sequence, rank=1, error="CheckpointError: disk full", error_reason="INVALID_FIELD")
    with pytest.raises(CommandFailed, match="rank 1 could not save: CheckpointError: disk full"):
        await saving
    scoring = asyncio.create_task(ranks.score([], 1.0, replay=False))
    sequence, _ = await _next(ranks, sequence)
    for rank in range(2):
        await _report(ranks, sequence, rank=rank, score=pb.ScoreResult())
    assert await scoring == []
    await ranks.stop()


async def test_groups_that_no_rank_can_train_are_refused_to_whoever_drives_and_the_ranks_go_on():
    ranks = make_ranks(Processes())
    await ranks.start()
    with pytest.raises(CommandFailed, match="2 groups, but these ids are given more than once: a"):
        await ranks.train_groups([TrajectoryGroup(group_id="a")] * 2, None)
    training = asyncio.create_task(ranks.train_groups([TrajectoryGroup(group_id="a")], None))
    sequence, _ = await _next(ranks, 0)
    await _report(ranks, sequence, train=pb.TrainResult(skipped=True, unusable_groups={"a": "of another model"}))
    with pytest.raises(CommandFailed, match="group a: of another model"):
        await training
    loading = asyncio.create_task(ranks.load(None))
    sequence, _ = await _next(ranks, sequence)
    await _report(ranks, sequence, load=pb.LoadResult(parameters=3))
    assert (await loading).parameters == 3
    await ranks.stop()


class Slow(Processes):
    """Ranks that are up after `looks` looks at the processor time they used, which grows by `speed` a look."""

    def __init__(self, looks: int, speed: float) -> None:
        super().__init__(world_size=1)
        self.looks, self.speed, self.looked = looks, speed, 0
        self.attached: asyncio.Task[None] | None = None

    async def start(self, launch: int, environment: Mapping[str, str]) -> None:
        self.launch_id = environment["VIME_LAUNCH_ID"]

    def cpu_seconds(self, rank: int) -> float:
        self.looked += 1
        if self.looked == self.looks:
            self.attached = asyncio.create_task(self.ranks.mailbox.attach(self.launch_id, 0, "host:1"))
        return self.looked * self.speed


async def test_ranks_that_still_import_are_waited_for_beyond_their_time_out(monkeypatch):
    monkeypatch.setattr("vime_trainer.adapters.ranks._LOOK_S", 0.02)
    ranks = make_ranks(Slow(looks=20, speed=1.0), start_timeout_s=0.1)
    starting = asyncio.create_task(ranks.start())
    await asyncio.sleep(0.1)
    assert "not up yet: rank 0 (" in ranks.starting
    await starting
    assert ranks.starting == ""
    await ranks.stop()


@pytest.mark.parametrize(("speed", "at_most"), [(0.0, 10), (1.0, 2)])
async def test_ranks_that_stand_still_or_never_come_are_not_waited_for_for_ever(monkeypatch, speed, at_most):
    monkeypatch.setattr("vime_trainer.adapters.ranks._LOOK_S", 0.02)
    monkeypatch.setattr("vime_trainer.adapters.ranks._STARTS_AT_MOST", at_most)
    ranks = make_ranks(Slow(looks=1000, speed=speed), start_timeout_s=0.1)
    with pytest.raises(RankDied, match=r"not up yet: rank 0 \(.*rank_start_timeout_s = 0\.1"):
        await ranks.start()


async def test_the_rank_that_died_is_named_to_whoever_waits_for_it():
    processes = Processes()
    dies = asyncio.Event()

    async def wait_for_death(poll_s: float = 0.3) -> Death:
        await dies.wait()
        return Death(0, "rank 0 (pid 7) was killed by SIGKILL")

    processes.wait_for_death = wait_for_death
    ranks = make_ranks(processes)
    await ranks.start()
    trainer = SimpleNamespace(driving=lambda _: contextlib.nullcontext())
    servicer = TrainerServicer(trainer, None, ranks)
    calls = [
        servicer.TrainStep(TrainStepRequest(groups=[TrajectoryGroup(group_id="a")]), None),
        servicer.ScoreSamples(ScoreSamplesRequest(samples=[Sample()]), None),
    ]
    running = [asyncio.create_task(call) for call in calls]
    await _next(ranks, 0)
    dies.set()
    for task in running:
        with pytest.raises(errors.RankDied, match=r"killed by SIGKILL|not started") as raised:
            await task
        assert raised.value.reason == "RANK_DIED"
        assert set(raised.value.metadata) == {"rank", "cause"}
    assert running[0].exception().metadata["rank"] == "0"
    await ranks.stop()
