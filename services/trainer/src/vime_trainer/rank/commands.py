"""Runs one command after the other on the engine. All ranks run the same commands in the same order."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from vime.common.v1.trajectory_pb2 import FinishReason, Prompt, TrajectoryGroup
from vime.common.v1.trajectory_pb2 import Sample as SampleProto
from vime.trainer.v1 import rank_service_pb2 as pb
from vime.trainer.v1.trainer_service_pb2 import SampleLogprobs
from vime_service.bulk.wire import manifest_to_proto, version_from_proto
from vime_trainer.adapters.protos import seconds, to_seconds
from vime_trainer.algorithm_config import build_loss, needs_reference
from vime_trainer.algorithms.ranks import Reduce
from vime_trainer.config import TrainerSettings
from vime_trainer.engine import distributed
from vime_trainer.engine.engine import Engine
from vime_trainer.engine.objective import PolicyLoss
from vime_trainer.engine.sample import Sample
from vime_trainer.engine.step import StepResult
from vime_trainer.rank.groups import Share, bare_sample, name_of, select, with_advantages
from vime_trainer.rank.measures import mismatch_measures, reduced, rollout_measures
from vime_trainer.rank.transfer import Sender, reachable_host

GLOBAL = Reduce(sum=distributed.all_reduce_sum, max=distributed.all_reduce_max)


class Commands:
    """The engine and what the commands need beside it. Blocking: runs in one thread of its own."""

    def __init__(self, settings: TrainerSettings) -> None:
        self._settings = settings
        self._engine: Engine | None = None
        self._sender: Sender | None = None
        self._loss = PolicyLoss(build_loss(settings.algorithm))

    @property
    def engine(self) -> Engine:
        """The engine; LoadCommand makes it."""
        if self._engine is None:
            raise RuntimeError("no weights are loaded: LoadCommand comes first")
        return self._engine

    def load(self, command: pb.LoadCommand) -> pb.LoadResult:
        """Build the engine from the starting model; with a checkpoint, take everything from there."""
        if self._engine is None:
            config = self._settings.engine.model_copy(
                update={"keep_reference": needs_reference(self._settings.algorithm)}
            )
            self._engine = Engine.from_hf(self._settings.model_path, config)
        self._sender = Sender(self._engine, reachable_host()) if distributed.data_parallel_rank() == 0 else None
        state = self._engine.load_checkpoint(Path(command.checkpoint).parent) if command.checkpoint else None
        parameters = sum(tensor.numel() for _, tensor in self._engine.export())
        return pb.LoadResult(state_json=json.dumps(state or {}), parameters=parameters)

    def my_groups(self, command: pb.TrainCommand) -> list[int]:
        """Places in the batch of the groups that this rank trains."""
        rank = distributed.data_parallel_rank()
        return [place for place, owner in enumerate(command.group_ranks) if owner == rank]

    def train(self, command: pb.TrainCommand, groups: Sequence[TrajectoryGroup], fetch_s: float) -> pb.TrainResult:
        """One step on this rank's groups."""
        clock = Laps()
        algorithm = self._settings.algorithm
        share = select(groups, self.my_groups(command), algorithm)
        clock.lap("perf/data_preprocess_time")
        if needs_reference(algorithm):
            share = self._with_reference(share)
            clock.lap("perf/ref_log_probs_time")
        unreplayed = self._score_without_replay(share) if command.score_without_replay else None
        clock.lap("perf/log_probs_time")
        samples, advantages = with_advantages(share, len(command.group_ids), algorithm, GLOBAL)
        result = self.engine.train_step(samples, self._loss, mini_batches=algorithm.mini_batches)
        clock.lap("perf/actor_train_time")
        metrics = self._metrics(command, share, result, unreplayed) | clock.seconds
        metrics |= {f"rollout/{name}": value for name, value in reduced(advantages.metrics, GLOBAL).items()}
        metrics["perf/data_preprocess_time"] += fetch_s
        return pb.TrainResult(
            metrics=metrics,
            skipped=result.skipped,
            trained_samples=[f"{group}#{index}" for group, index in result.trained],
            left_out=share.left_out,
            sample_json=_sample_texts(share, samples, groups, result, command.sample_texts),
        )

    def _with_reference(self, share: Share) -> Share:
        """The samples with the reference policy's logprobs, and with the trainer's own where the KL needs them."""
        reference = self.engine.score(share.samples, replay=self.engine.replays, reference=True)
        old = [sample.old_logprobs for sample in share.samples]
        if self._settings.algorithm.kl_coef > 0 and not self._settings.algorithm.use_rollout_logprobs:
            old = list(self.engine.score(share.samples, replay=self.engine.replays))
        samples = [
            replace(sample, reference_logprobs=ref, old_logprobs=o)
            for sample, ref, o in zip(share.samples, reference, old, strict=True)
        ]
        return replace(share, samples=samples)

    def _score_without_replay(self, share: Share) -> list[torch.Tensor] | None:
        if not self.engine.replays:
            return None
        return self.engine.score(share.samples, replay=False)

    def _metrics(
        self,
        command: pb.TrainCommand,
        share: Share,
        result: StepResult,
        unreplayed: list[torch.Tensor] | None,
    ) -> dict[str, float]:
        policy = int(command.policy_version.step)
        metrics = rollout_measures(share, GLOBAL)
        metrics |= {f"train/{name}": value for name, value in result.metrics.items() if value is not None}
        metrics |= {
            "train/loss": result.loss,
            "train/grad_norm": result.grad_norm,
            "train/lr-pg_0": result.lr,
            "train/optimizer_steps": float(result.steps_taken),
            "train/optimizer_steps_skipped": float(result.steps_skipped),
        }
        metrics |= mismatch_measures(share.samples, result.logprobs, policy, "", GLOBAL)
        if unreplayed is not None:
            metrics |= mismatch_measures(share.samples, unreplayed, policy, "_no_replay", GLOBAL)
        return metrics

    def score(self, command: pb.ScoreCommand) -> pb.ScoreResult:
        """Logprobs of given samples; every rank scores all of them, since there are few."""
        samples = [bare_sample(sample, command.temperature or 1.0) for sample in command.samples]
        scored = self.engine.score(samples, replay=command.replay)
        return pb.ScoreResult(scores=[SampleLogprobs(logprobs=logprobs.tolist()) for logprobs in scored])

    def describe(self, command: pb.DescribeCommand) -> pb.DescribeResult:
        """Snapshot, hash and canary of the weights held."""
        if self._sender is None:
            return pb.DescribeResult()
        manifest = self._sender.describe(version_from_proto(command.version))
        return pb.DescribeResult(
            manifest=manifest_to_proto(manifest),
            store_address=self._sender.store_address,
            canary=self._sender.canary(command.canary_prompts),
        )

    def send(self, command: pb.SendCommand) -> pb.SendResult:
        """Broadcast the weights described to the engines of a generation."""
        if self._sender is None:
            return pb.SendResult()
        stats = self._sender.send(
            version_from_proto(command.version),
            command.generation,
            command.world_size,
            to_seconds(command.timeout),
        )
        return pb.SendResult(bytes=stats.nbytes, transfer_time=seconds(stats.seconds))

    def save(self, command: pb.SaveCommand) -> pb.SaveResult:
        """Commit a checkpoint."""
        folder, step = Path(command.folder), int(command.train_step)
        saved = self.engine.save_checkpoint(folder, step, json.loads(command.state_json), int(command.keep_last))
        if command.hf:
            self._export(folder.parent / "hf" / f"step_{step:06d}")
        return pb.SaveResult(path=str(saved.path), kept_steps=[saved.oldest_kept_step, saved.step])

    def _export(self, folder: Path) -> None:
        """Write an HF folder that appears whole: one of a torn export is replaced."""
        work = folder.with_name(folder.name + ".tmp")
        if distributed.data_parallel_rank() == 0:
            folder.parent.mkdir(parents=True, exist_ok=True)
            for left in (work, folder):
                shutil.rmtree(left, ignore_errors=True)
        distributed.barrier()
        self.engine.save_hf(work)
        if distributed.data_parallel_rank() == 0:
            work.rename(folder)

    def close(self) -> None:
        """Leave the groups."""
        if self._sender is not None:
            self._sender.close()
        distributed.shutdown()


class Laps:
    """Seconds between laps, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, name: str) -> None:
        """The time since the last lap was spent on `name`."""
        now = time.monotonic()
        self.seconds[name] = now - self._last
        self._last = now


def _sample_texts(
    share: Share, samples: Sequence[Sample], groups: Sequence[TrajectoryGroup], result: StepResult, count: int
) -> list[str]:
    """Some samples as people read them: the first of each group, then the second, ... up to `count`."""
    prompts = {group.group_id: group.prompt for group in groups}
    order = sorted(range(len(samples)), key=lambda i: (share.protos[i].sample_index, share.places[i]))
    return [_sample_text(share.protos[i], samples[i], prompts, result.logprobs[i]) for i in order[:count]]


def _sample_text(proto: SampleProto, sample: Sample, prompts: Mapping[str, Prompt], logprobs: torch.Tensor) -> str:
    prompt = prompts[proto.group_id]
    gap = (logprobs - sample.rollout_logprobs)[sample.loss_mask]
    return json.dumps(
        {
            "sample": name_of(proto),
            "prompt": prompt.text or [m.content for m in prompt.chat.messages] or None,
            "record": prompt.record_json,
            "response": proto.response_text,
            "reward": proto.reward,
            "advantage": float(sample.advantages[0]),
            "tokens": len(proto.response_token_ids),
            "finish_reason": FinishReason.Name(proto.finish_reason).removeprefix("FINISH_REASON_").lower(),
            "logprob_abs_diff": float(gap.abs().mean()) if gap.numel() else None,
            "versions": list(sample.weight_versions),
            "engine": proto.engine_id,
        }
    )
