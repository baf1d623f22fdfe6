"""One batch on one rank: score it, value it, give it advantages, train the policy, train the critic, measure."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from vime.common.v1.trajectory_pb2 import FinishReason, Prompt, TrajectoryGroup
from vime.common.v1.trajectory_pb2 import Sample as SampleProto
from vime.trainer.v1 import rank_service_pb2 as pb
from vime_trainer.adapters.protos import enum_name, prompt_text
from vime_trainer.algorithm_config import (
    AlgorithmConfig,
    build_loss,
    build_value_loss,
    needs_reference,
    needs_teacher,
)
from vime_trainer.engine.backward import Updates
from vime_trainer.engine.distributed import GLOBAL, any_rank
from vime_trainer.engine.engine import Engine
from vime_trainer.engine.objective import Loss, PolicyLoss, SupervisedLoss
from vime_trainer.engine.sample import Sample
from vime_trainer.engine.step import StepResult
from vime_trainer.rank.groups import Share, name_of, shaped_rewards, with_advantages
from vime_trainer.rank.measures import (
    mismatch_family,
    mismatch_measures,
    reduced,
    reward_part_measures,
    rollout_measures,
    shaping_measures,
    value_measures,
)
from vime_trainer.rank.usable import select_usable


@dataclass(frozen=True)
class _Trained:
    """What became of the policy; `result` is None where the critic is trained alone."""

    result: StepResult | None
    critic: Updates | None
    logprobs: list[torch.Tensor]
    """float32 [response] per sample, of the policy before the step."""

    @property
    def decisive(self) -> Updates:
        """The policy's, or the critic's where it is trained alone: skipped, neither was changed."""
        decisive = self.critic if self.result is None else self.result
        assert decisive is not None  # one of them is always trained
        return decisive


class BatchTraining:
    """The step of an algorithm on an engine. All ranks run the same calls in the same order."""

    def __init__(self, engine: Engine, algorithm: AlgorithmConfig) -> None:
        self._engine, self._algorithm = engine, algorithm
        self._supervised = algorithm.objective == "sft"
        self._loss: Loss = (
            SupervisedLoss(algorithm.reducer, algorithm.fixed_length)
            if self._supervised
            else PolicyLoss(build_loss(algorithm))
        )

    def run(
        self, command: pb.TrainCommand, groups: Sequence[TrajectoryGroup], places: Sequence[int], fetch_s: float
    ) -> pb.TrainResult:
        """One step on this rank's groups, which stand at `places` of the batch. Where any rank has a group that cannot
        be trained, no rank trains."""
        clock = Laps()
        share, unusable = select_usable(groups, places, self._algorithm, self._engine)
        if any_rank(bool(unusable)):
            return pb.TrainResult(skipped=True, unusable_groups=unusable)
        clock.lap("perf/data_preprocess_time")
        share, before = self._scored(share, clock)
        unreplayed = self._score_without_replay(share) if command.score_without_replay else None
        clock.lap("perf/log_probs_time")
        judged: dict[str, float] = {}
        if not self._supervised:  # a demonstration is learnt as it is, whatever its reward
            samples, advantages = with_advantages(share, len(command.group_ids), self._algorithm, GLOBAL)
            share = replace(share, samples=samples)
            judged = {f"rollout/{name}": value for name, value in reduced(advantages.metrics, GLOBAL).items()}
        samples = share.samples
        rate = command.learning_rate if command.HasField("learning_rate") else None
        trained = self._train(samples, before, rate, clock)
        # The estimator sees no unscored sample any more, so that it counts none: the count is that of the batch.
        metrics = judged | rollout_measures(share, GLOBAL)
        metrics |= reward_part_measures(share, GLOBAL)
        metrics |= self._role_measures(share)
        metrics |= _step_measures(trained)
        if not self._supervised:  # a demonstration has no engine's logprobs to compare with
            policy = int(command.policy_version.step)
            over_tokens = self._algorithm.reducer == "token_mean"
            metrics |= mismatch_measures(samples, trained.logprobs, policy, GLOBAL)
            metrics |= mismatch_family(samples, trained.logprobs, over_tokens, GLOBAL)
            if unreplayed is not None:
                without = mismatch_measures(samples, unreplayed, policy, GLOBAL)
                metrics |= {f"{name}_no_replay": value for name, value in without.items()}
        metrics |= clock.seconds
        metrics["perf/data_preprocess_time"] += fetch_s
        return pb.TrainResult(
            metrics=metrics,
            skipped=trained.decisive.skipped,
            trained_samples=[f"{group_id}#{index}" for group_id, index in trained.decisive.trained],
            left_out=share.left_out,
            sample_json=_sample_texts(share, groups, trained.logprobs, command.sample_texts),
        )

    # ------------------------------------------------------------------ before the step

    def _scored(self, share: Share, clock: Laps) -> tuple[Share, list[torch.Tensor] | None]:
        """The samples with the logprobs and values that the algorithm asks for; and the policy's own logprobs, unless
        the first forward pass of the training gives them anyway."""
        algorithm, before = self._algorithm, None
        columns: dict[str, Sequence[Any]] = {}
        if needs_reference(algorithm):
            columns["reference_logprobs"] = self._score(share, "reference", replay=self._engine.replays)
            clock.lap("perf/ref_log_probs_time")
        if needs_teacher(algorithm):
            # The teacher's own routes: those of the rollout belong to the student's router.
            columns["teacher_logprobs"] = self._score(share, "teacher", replay=False)
            clock.lap("perf/teacher_log_probs_time")
        shaped = (algorithm.kl_coef > 0 or needs_teacher(algorithm)) and not algorithm.use_rollout_logprobs
        if shaped or algorithm.mini_batches > 1:
            before = self._score(share, "current", replay=self._engine.replays)
            if not algorithm.use_rollout_logprobs:
                columns["old_logprobs"] = before
            clock.lap("perf/log_probs_time")
        if self._engine.critic is not None:
            columns["values"] = self._engine.critic.values(share.samples)
            clock.lap("perf/values_time")
        samples = [
            replace(sample, **{name: column[row] for name, column in columns.items()})
            for row, sample in enumerate(share.samples)
        ]
        return replace(share, samples=samples), before

    def _score(
        self, share: Share, weights: Literal["current", "reference", "teacher"], *, replay: bool
    ) -> list[torch.Tensor]:
        return self._engine.score(share.samples, replay=replay, weights=weights)

    def _score_without_replay(self, share: Share) -> list[torch.Tensor] | None:
        return self._score(share, "current", replay=False) if self._engine.replays else None

    # ------------------------------------------------------------------ the step

    def _train(
        self, samples: Sequence[Sample], before: list[torch.Tensor] | None, lr: float | None, clock: Laps
    ) -> _Trained:
        """The policy first: where its step is skipped, the critic's is too, so that a skipped step changes nothing.
        The order decides no number, since the values that both learn from are those of before the step.
        """
        critic, result = self._engine.critic, None
        if critic is None or not critic.warming_up:
            result = self._engine.train_step(samples, self._loss, mini_batches=self._algorithm.mini_batches, lr=lr)
            clock.lap("perf/actor_train_time")
            before = result.logprobs if before is None else before
        elif before is None:
            before = self._engine.score(samples, replay=self._engine.replays)
            clock.lap("perf/log_probs_time")
        fitted = None
        if critic is not None and (result is None or not result.skipped):
            fitted = critic.train(samples, build_value_loss(self._algorithm))
            clock.lap("perf/critic_train_time")
        return _Trained(result, fitted, before)

    def _role_measures(self, share: Share) -> dict[str, float]:
        found: dict[str, float] = {}
        if self._algorithm.overlong is not None:
            found |= shaping_measures(share, shaped_rewards(share, self._algorithm), GLOBAL)
        if self._engine.critic is not None:
            found |= value_measures(share.samples, GLOBAL)
        return found


def _step_measures(trained: _Trained) -> dict[str, float]:
    """Loss, gradient and learning rate of what was trained."""
    found: dict[str, float] = {}
    parts: list[tuple[str, str, Updates | None]] = [
        ("train/", "train/lr-pg_0", trained.result),
        ("train/critic-", "train/critic-lr", trained.critic),
    ]
    for prefix, lr, part in parts:
        if part is None:
            continue
        found |= {f"{prefix}{name}": value for name, value in part.metrics.items() if value is not None}
        found |= {
            f"{prefix}loss": part.loss,
            f"{prefix}grad_norm": part.grad_norm,
            lr: part.lr,
            f"{prefix}optimizer_steps": float(part.steps_taken),
            f"{prefix}optimizer_steps_skipped": float(part.steps_skipped),
        }
    return found


class Laps:
    """Seconds between laps, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, name: str) -> None:
        """The time since the last lap was spent on `name`."""
        now = time.monotonic()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now


# ---------------------------------------------------------------------- samples for people


def _sample_texts(
    share: Share, groups: Sequence[TrajectoryGroup], logprobs: Sequence[torch.Tensor], count: int
) -> list[str]:
    """Some samples as people read them: the first of each group, then the second, ... up to `count`."""
    prompts = {group.group_id: group.prompt for group in groups}
    order = sorted(range(len(share.samples)), key=lambda i: (share.protos[i].sample_index, share.places[i]))
    return [_sample_text(share.protos[i], share.samples[i], prompts, logprobs[i]) for i in order[:count]]


def _sample_text(proto: SampleProto, sample: Sample, prompts: Mapping[str, Prompt], logprobs: torch.Tensor) -> str:
    prompt = prompts[proto.group_id]
    gap = (logprobs - sample.rollout_logprobs)[sample.loss_mask] if proto.rollout_logprobs else logprobs[:0]
    return json.dumps(
        {
            "sample": name_of(proto),
            "prompt": prompt_text(prompt),
            "record": prompt.record_json,
            "response": proto.response_text,
            "reward": proto.reward,
            "advantage": float(sample.advantages[0]),
            "tokens": len(proto.response_token_ids),
            "finish_reason": enum_name(FinishReason, proto.finish_reason),
            "logprob_abs_diff": float(gap.abs().mean()) if gap.numel() else None,
            "versions": list(sample.weight_versions),
            "engine": proto.engine_id,
        }
    )
