"""The training loop: LeaseBatch → train → publish → CompleteStep, a checkpoint now and then. The only loop of a run.

The order decides what a crash costs (docs/recovery.md): the ledger holds the batch before it is trained, the fleet the
version before the step is completed, the pointer the checkpoint before the ledger forgets.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from opentelemetry import trace

from vime_service.errors import FailedPrecondition
from vime_trainer.config import TrainerSettings
from vime_trainer.loop.checkpoints import Resume
from vime_trainer.loop.events import EvalEvent, EventLog, State, Status, StepEvent
from vime_trainer.loop.plan import assign_groups
from vime_trainer.loop.ports import Batch, Completed, Ledger, Ranks, Trained, Unusable
from vime_trainer.loop.publisher import Published, Publisher
from vime_trainer.loop.versions import Version
from vime_trainer.run_files import RunFiles

logger = logging.getLogger(__name__)

_EVAL_POLL_S = 0.25
_EVAL_SAY_S = 2.0

_tracer = trace.get_tracer("vime_trainer")


class LoopFailed(Exception):
    """The run cannot go on; the message is the one sentence to show."""


@dataclass
class StepClock:
    """Where the time of one step goes; seconds by part."""

    parts: dict[str, float] = field(default_factory=dict)
    _began: float = field(default_factory=time.monotonic)

    async def measure(self, part: str, work: Awaitable[Any]) -> Any:
        """Await `work` and add its time to `part`."""
        started = time.monotonic()
        try:
            # bounded by: the work itself; every call of the ports has a deadline
            return await work
        finally:
            self.parts[part] = self.parts.get(part, 0.0) + time.monotonic() - started

    def metrics(self) -> dict[str, float]:
        """The step's times under their metric names."""
        total = time.monotonic() - self._began
        wait = self.parts.get("wait", 0.0)
        known = sum(self.parts.values())
        return {
            "perf/step_time": total,
            "perf/train_wait_time": wait,
            "perf/wait_time_ratio": wait / total if total > 0 else 0.0,
            "perf/rank_time": self.parts.get("train", 0.0),
            "perf/update_weights_time": self.parts.get("publish", 0.0),
            "perf/save_model_time": self.parts.get("save", 0.0),
            "perf/unaccounted_time": max(0.0, total - known),
        }


@dataclass(frozen=True)
class _Completion:
    """How a step was completed."""

    step: int
    trained: bool
    published: Version | None


class TrainingLoop:
    """One incarnation: from the newest checkpoint to the last step. `run` may be called once; the controller makes
    another loop for the next incarnation."""

    def __init__(
        self,
        settings: TrainerSettings,
        ledger: Ledger,
        ranks: Ranks,
        publisher: Publisher,
        files: RunFiles,
        events: EventLog,
        find_resume: Callable[[], Resume],
        recipe_digest: str,
    ) -> None:
        self._settings, self._ledger, self._ranks = settings, ledger, ranks
        self._publisher, self._files, self._events = publisher, files, events
        self._find_resume, self._recipe_digest = find_resume, recipe_digest
        self._stop = asyncio.Event()
        self._status = Status(State.IDLE, settings.run_id, settings.steps)
        self._highest_known = 0
        self._skipped_in_a_row = 0
        self._pending_evals: list[tuple[str, int]] = []
        self._opened_evals: set[tuple[str, int]] = set()
        self._published_step = 0
        self._trained_step = 0
        self._saved_step = 0
        self._last_completion: _Completion | None = None
        self._saved_path = ""
        self._wanted_save: asyncio.Future[tuple[int, str]] | None = None

    @property
    def status(self) -> Status:
        """Where it stands."""
        return self._status

    def stop(self) -> None:
        """End after the step in hand."""
        self._stop.set()

    async def save_soon(self) -> tuple[int, str]:
        """Step and path of a checkpoint after the step in hand; of the last one, where nothing was trained since.
        Raises FailedPrecondition if the loop ends before."""
        if self._wanted_save is None:
            self._wanted_save = asyncio.get_running_loop().create_future()
        return await asyncio.shield(self._wanted_save)

    async def run(self) -> None:
        """Train to the last step. Raises LoopFailed, PublishFailed, RankDied or what the ledger raises."""
        try:
            await self._run()
        finally:
            if self._wanted_save is not None and not self._wanted_save.done():
                self._wanted_save.set_exception(
                    FailedPrecondition("the loop ended before it could save", state="ended", wanted="RUNNING")
                )

    async def _run(self) -> None:
        version = await self._open_incarnation()
        if version.step >= self._settings.steps:
            await self._say(detail=f"nothing is left to train: step {version.step} of {self._settings.steps} is done")
        for step in range(version.step + 1, self._settings.steps + 1):
            await self._report_evals(version)
            if self._stop.is_set():
                break
            with _tracer.start_as_current_span("trainer.step", attributes={"vime.train_step": step}):
                finished = await self._step(step, version)
            if finished is None:
                version = await self._end_of_data(version)
                break
            version = finished
        await self._report_evals(version, final=True)
        await self._save_before_the_end(version)
        stopped = self._stop.is_set() and self._status.train_step < self._settings.steps
        missing = "" if stopped else await self._missing()
        detail = "; ".join(part for part in (self._status.detail, missing) if part)
        state = State.INCOMPLETE if missing else State.FINISHED
        await self._say(state=state, activity="", stopped=stopped, detail=detail)

    async def _missing(self) -> str:
        """What a loop that came to its end in good order did not do for want of prompts that were given up; empty if
        it did all that its data allowed."""
        found = await self._ledger.harvest()
        lost, limit = sum(found.given_up.values()), self._settings.faults.max_given_up_share
        prompts = lost + found.made
        if not lost:
            return ""
        reasons = ", ".join(f"{why} {n}" for why, n in found.given_up.items())
        told = f"{lost} of {prompts} prompts were given up ({reasons})"
        if lost > limit * prompts:
            return f"{told}, which is more than trainer.faults.max_given_up_share = {limit:g} of them"
        steps = (found.stored + lost) // max(1, found.groups_per_step)
        if steps and self._status.train_step < self._settings.steps:
            return f"{told}, with which {steps} more steps would have been trained"
        return ""

    # ------------------------------------------------------------------ incarnations

    async def _open_incarnation(self) -> Version:
        """Load the newest checkpoint (or the starting model), open an incarnation and publish what it holds."""
        resume = self._find_resume()
        self._highest_known = max(self._highest_known, resume.incarnation)
        await self._say(state=State.STARTING, activity="loading weights", checkpoint_step=resume.step_or_none)
        loaded = await self._ranks.load(resume.path)
        opened = await self._ledger.open_incarnation(
            self._settings.run_id, resume.step, self._highest_known, self._recipe_digest
        )
        self._highest_known = opened.incarnation
        version = Version(self._settings.run_id, opened.incarnation, resume.step)
        logger.info(
            "incarnation %d from step %d: %d parameters, %d groups rewound, %d prompts re-queued",
            opened.incarnation,
            resume.step,
            loaded.parameters,
            opened.rewound_groups,
            opened.requeued_prompts,
        )
        if resume.path is not None:  # the last life may have died between the pointer's rename and telling the ledger
            await self._ledger.checkpoint_committed(opened.incarnation, resume.step, resume.oldest_kept_step)
        self._pending_evals.clear()
        self._opened_evals.clear()
        await self._say(activity="publishing to the fleet", incarnation=opened.incarnation, train_step=resume.step)
        published = await self._publisher.publish(version)
        self._files.incarnation(version, resume.step, opened.rewound_groups, _publish_metrics(published))
        self._open_evals(await self._ledger.announce(version), resume.step)
        self._published_step = self._saved_step = self._trained_step = resume.step
        self._saved_path = resume.path or ""
        kept = loaded.state
        self._last_completion = _Completion(resume.step, kept["trained"], None) if "trained" in kept else None
        await self._say(state=State.RUNNING, published=version, skipped_steps=int(kept.get("skipped_steps", 0)))
        return version

    # ------------------------------------------------------------------ one step

    async def _step(self, step: int, policy: Version) -> Version | None:
        """Train one batch; the policy version afterwards. None: no batch will ever come."""
        clock = StepClock()
        unusable = 0
        while True:
            batch: Batch = await clock.measure("wait", self._lease(step, policy))
            if batch.ended:
                logger.info("no batch for step %d: %s", step, batch.blocked_by)
                return None
            await self._say(activity=f"training step {step}")
            trained: Trained = await clock.measure("train", self._train(step, batch, policy))
            if not trained.unusable_groups:
                break
            unusable += len(trained.unusable_groups)
            # The ledger ends this: after too many in a row it refuses, and prompts have their attempts.
            await clock.measure("wait", self._quarantine(step, batch, trained.unusable_groups, policy))
        trained.metrics["rollout/unusable_groups"] = float(unusable)
        version, published = await self._publish(step, policy, trained, clock)
        final = step == self._settings.steps
        self._last_completion = _Completion(step, not trained.skipped, None if published is None else version)
        completed = await self._complete(policy, self._last_completion, final)
        due = completed.checkpoint_wanted or step % self._settings.checkpoint.interval == 0
        if final or due or self._wanted_save is not None:
            await clock.measure("save", self._save(step, version, final))
        await self._report_step(step, version, batch, trained, published, clock)
        return version

    async def _complete(self, policy: Version, done: _Completion, final: bool) -> Completed:
        completed = await self._ledger.complete_step(
            policy.incarnation, done.step, trained=done.trained, published=done.published, final=final
        )
        self._open_evals(completed.opened_evals, done.step)
        return completed

    async def _end_of_data(self, policy: Version) -> Version:
        """The data ended before the steps did: the last completed step turns out to have been the final one, and its
        weights are published if they were not due; the policy version afterwards."""
        done = self._last_completion
        if self._stop.is_set():
            return policy
        await self._say(detail=f"the data ended after step {self._status.train_step} of {self._settings.steps}")
        if done is None:
            return policy
        if policy.step < self._trained_step:
            policy = replace(policy, step=self._trained_step)
            await self._say(activity=f"publishing {policy}")
            await self._publisher.publish(policy)
            await self._say(published=policy)
            self._last_completion = done = replace(done, published=policy)
            # rounds of this step ran on the version before, and are opened once more
            self._opened_evals = {(table, step) for table, step in self._opened_evals if step != done.step}
        await self._complete(policy, done, final=True)
        await self._save(done.step, policy, final=True)
        return policy

    async def _lease(self, step: int, policy: Version) -> Batch:
        """Ask for the batch until it comes; between two calls, look after engines that lag behind."""
        while True:
            batch = await self._ledger.lease_batch(policy.incarnation, step, self._settings.lease_wait_s)
            if batch.groups or batch.ended:
                return batch
            if self._stop.is_set():
                return Batch(ended=True, blocked_by="stopped")
            counts = ", ".join(f"{name} {value}" for name, value in sorted(batch.counts.items()))
            if batch.blocked_by == "retained_bytes":  # only a checkpoint lets the ledger forget payloads
                if self._saved_step >= step - 1:
                    raise LoopFailed(
                        f"step {step} can have no batch: the groups since the oldest of "
                        f"{self._settings.checkpoint.keep_last} checkpoints fill the ledger's budget ({counts}), and "
                        f"step {step - 1} is saved already; raise retained_bytes or lower checkpoint.keep_last"
                    )
                await self._save(step - 1, policy, final=False)
                continue
            if self._wanted_save is not None and step > 1:  # the step in hand may wait for long
                if self._saved_step < step - 1:
                    await self._save(step - 1, policy, final=False)
                self._tell_saved()
            await self._say(activity=f"step {step} waits: {batch.blocked_by} ({batch.detail or counts})")
            if caught_up := await self._publisher.catch_up(policy):
                logger.info("brought %s to %s", ", ".join(caught_up), policy)

    async def _quarantine(self, step: int, batch: Batch, unusable: Mapping[str, str], policy: Version) -> None:
        """Take what the ranks could not use out of the batch, with their reasons."""
        for group_id, detail in unusable.items():
            logger.warning("step %d cannot use group %s: %s", step, group_id, detail)
        await self._say(activity=f"step {step}: {len(unusable)} of {len(batch.groups)} groups cannot be trained")
        attempts = {group.group_id: group.attempt for group in batch.groups}
        groups = [Unusable(group_id, attempts[group_id], detail) for group_id, detail in unusable.items()]
        await self._ledger.quarantine(policy.incarnation, step, groups)

    async def _train(self, step: int, batch: Batch, policy: Version) -> Trained:
        metrics = self._settings.metrics
        interval = metrics.no_replay_interval
        return await self._ranks.train(
            step,
            [g.group_id for g in batch.groups],
            assign_groups([g.tokens for g in batch.groups], self._ranks.data_parallel),
            policy,
            score_without_replay=interval > 0 and (step == 1 or step % interval == 0),
            sample_texts=metrics.sample_texts,
        )

    async def _publish(
        self, step: int, policy: Version, trained: Trained, clock: StepClock
    ) -> tuple[Version, Published | None]:
        """Publish the step's weights if it is due; the policy version afterwards."""
        if trained.skipped:
            self._skipped_in_a_row += 1
            limit = self._settings.faults.max_skipped_in_a_row
            await self._say(skipped_steps=self._status.skipped_steps + 1)
            if self._skipped_in_a_row >= limit:
                raise LoopFailed(
                    f"{limit} steps in a row had no finite loss and gradient or no trainable token; "
                    f"the last was step {step} (grad norm {trained.metrics.get('train/grad_norm')})"
                )
        else:
            self._skipped_in_a_row = 0
            self._trained_step = step
        version = replace(policy, step=self._trained_step)
        # Counted from the last publish, not by multiples: one that was due at a skipped step is due at the next.
        due = step - self._published_step >= self._settings.publish.interval and not trained.skipped
        final = step == self._settings.steps and policy.step < self._trained_step
        if not (due or final):
            return policy, None
        await self._say(activity=f"publishing {version}")
        published: Published = await clock.measure("publish", self._publisher.publish(version))
        await self._say(published=version)
        self._published_step = version.step
        return version, published

    async def _save(self, step: int, version: Version, final: bool) -> None:
        await self._say(activity=f"saving step {step}")
        state = {"run_id": version.run_id, "incarnation": version.incarnation, "step": step}
        state |= {"version_step": version.step, "skipped_steps": self._status.skipped_steps}
        if self._last_completion is not None:
            state["trained"] = self._last_completion.trained
        saved = await self._ranks.save(step, state, self._settings.checkpoint.export_hf or final)
        await self._ledger.checkpoint_committed(version.incarnation, step, min(saved.kept_steps))
        self._saved_step, self._saved_path = step, saved.path
        self._tell_saved()
        await self._say(checkpoint_step=step, model_path=saved.hf_path or self._status.model_path)

    def _tell_saved(self) -> None:
        """Answer whoever asked for a checkpoint."""
        if self._wanted_save is not None and not self._wanted_save.done():
            self._wanted_save.set_result((self._saved_step, self._saved_path))
        self._wanted_save = None

    async def _save_before_the_end(self, policy: Version) -> None:
        """A loop that was stopped leaves nothing to be trained again."""
        done = self._last_completion
        if done is not None and done.step > self._saved_step:
            await self._save(done.step, policy, final=False)

    # ------------------------------------------------------------------ reports

    async def _report_step(
        self,
        step: int,
        version: Version,
        batch: Batch,
        trained: Trained,
        published: Published | None,
        clock: StepClock,
    ) -> None:
        staleness = [g.staleness for g in batch.groups]
        metrics = dict(trained.metrics) | await self._ledger.counts() | clock.metrics()
        metrics |= {
            "staleness/mean": sum(staleness) / len(staleness),
            "staleness/max": float(max(staleness)),
            "train/step": float(step),
        }
        tokens = sum(g.tokens for g in batch.groups)
        metrics["perf/tokens_per_s"] = tokens / metrics["perf/step_time"]
        metrics["perf/other_time"] = max(
            0.0,
            metrics["perf/step_time"]
            - sum(
                metrics.get(part, 0.0)
                for part in (
                    "perf/train_wait_time",
                    "perf/log_probs_time",
                    "perf/actor_train_time",
                    "perf/update_weights_time",
                )
            ),
        )
        if published is not None:
            metrics |= _publish_metrics(published)
        ids = [g.group_id for g in batch.groups]
        self._files.step(step, version, trained.skipped, ids, metrics)
        self._files.samples(step, trained.sample_json)
        for sample, reason in trained.left_out.items():
            logger.warning("step %d left out sample %s: %s", step, sample, reason)
        await self._say(train_step=step, activity="")
        await self._events.add(
            StepEvent(step, metrics, ids, trained.skipped, None if published is None else published.version)
        )

    def _open_evals(self, tables: list[str], step: int) -> None:
        """Note rounds to report; a repeated call names those that are known, too."""
        fresh = [(table, step) for table in tables if (table, step) not in self._opened_evals]
        self._opened_evals.update(fresh)
        self._pending_evals += fresh

    async def _report_evals(self, policy: Version, final: bool = False) -> None:
        """Report the rounds that are done; wait for those that hold training up, at the end for all, after a stop for
        none. Their time belongs to no step."""
        for table, step in tuple(self._pending_evals):
            done = await self._await_eval(table, step, policy, final)
            if done is None:
                continue
            self._pending_evals.remove((table, step))
            self._files.evaluation(table, step, done)
            if prompts := self._settings.metrics.sample_texts:
                self._files.eval_samples(table, step, await self._ledger.eval_answers(table, step, prompts))
            await self._events.add(EvalEvent(table, step, done))

    async def _await_eval(self, table: str, step: int, policy: Version, final: bool) -> dict[str, float] | None:
        """The round's result; None if it is not done and not to be waited for."""
        looked_after = time.monotonic()
        said = 0.0
        while True:
            current = await self._ledger.eval_round(table, step)
            if current.done:
                return current.metrics
            if self._stop.is_set() or not (current.holds or final):
                return None
            if time.monotonic() - said > _EVAL_SAY_S:
                await self._say(activity=f"{table} at step {step}: {current.progress}")
                said = time.monotonic()
            if time.monotonic() - looked_after > self._settings.lease_wait_s:
                await self._publisher.catch_up(policy)
                looked_after = time.monotonic()
            # The ledger has no call that waits for a round; a quarter second is short beside any round.
            await asyncio.sleep(_EVAL_POLL_S)

    async def _say(self, **changes: Any) -> None:
        """Change the status and tell the watchers, if anything changed."""
        changed = replace(self._status, **changes)
        if changed != self._status:
            self._status = changed
            await self._events.add(changed)


def _publish_metrics(published: Published) -> dict[str, float]:
    """A weight update under its metric names."""
    metrics = {
        "perf/update_weights_time": published.seconds,
        "perf/update_weights_wire_bytes": float(published.bytes_sent),
        "perf/update_weights_pause_time": published.pause_s,
        "perf/engines_committed": float(len(published.committed)),
    }
    if published.canary_difference is not None:
        metrics["train/canary_logprob_abs_diff"] = published.canary_difference
    return metrics
