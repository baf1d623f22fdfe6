"""Runs one command after the other on the engine. All ranks run the same commands in the same order."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from vime.common.v1.trajectory_pb2 import TrajectoryGroup
from vime.trainer.v1 import rank_service_pb2 as pb
from vime.trainer.v1.trainer_service_pb2 import SampleLogprobs
from vime_service.bulk.wire import manifest_to_proto, version_from_proto
from vime_trainer.adapters.protos import seconds, to_seconds
from vime_trainer.algorithm_config import critic_config, needs_reference
from vime_trainer.config import TrainerSettings
from vime_trainer.engine import distributed
from vime_trainer.engine.engine import Engine
from vime_trainer.engine.errors import EngineError
from vime_trainer.rank.groups import bare_sample
from vime_trainer.rank.training import BatchTraining
from vime_trainer.rank.transfer import Sender, canary, reachable_host
from vime_trainer.rank.usable import check_routes


class Commands:
    """The engine and what the commands need beside it. Blocking: runs in one thread of its own."""

    def __init__(self, settings: TrainerSettings) -> None:
        self._settings = settings
        self._engine: Engine | None = None
        self._sender: Sender | None = None

    @property
    def engine(self) -> Engine:
        """The engine; LoadCommand makes it."""
        if self._engine is None:
            raise EngineError("no weights are loaded: start the loop or acquire the mode first")
        return self._engine

    def load(self, command: pb.LoadCommand) -> pb.LoadResult:
        """Build the engine from the starting model; with a checkpoint, take everything from there."""
        if self._engine is None:
            self._engine = self._build()
        self._sender = Sender(self._engine, reachable_host()) if distributed.data_parallel_rank() == 0 else None
        state = self._engine.load_checkpoint(Path(command.checkpoint).parent) if command.checkpoint else None
        parameters = sum(tensor.numel() for _, tensor in self._engine.export())
        return pb.LoadResult(state_json=json.dumps(state or {}), parameters=parameters)

    def _build(self) -> Engine:
        settings, algorithm = self._settings, self._settings.algorithm
        changes: dict[str, object] = {
            "keep_reference": needs_reference(algorithm),
            "reference_refresh_interval": algorithm.reference_refresh_interval,
        }
        if algorithm.objective == "sft":
            changes["routing_replay"] = False  # a demonstration was not generated, so it has no routes
        config = settings.engine.model_copy(update=changes)
        return Engine.from_hf(settings.model_path, config, critic_config(algorithm), settings.teacher_path)

    def my_groups(self, command: pb.TrainCommand) -> list[int]:
        """Places in the batch of the groups that this rank trains."""
        rank = distributed.data_parallel_rank()
        return [place for place, owner in enumerate(command.group_ranks) if owner == rank]

    def fetched(self, failure: Exception | None) -> None:
        """Every rank has its groups, or none trains. Raises `failure`; PeerFailed where only another rank has one."""

        def tell() -> None:
            if failure is not None:
                raise failure

        distributed.together("fetch the groups", tell)

    def train(self, command: pb.TrainCommand, groups: Sequence[TrajectoryGroup], fetch_s: float) -> pb.TrainResult:
        """One step on this rank's groups."""
        return BatchTraining(self.engine, self._settings.algorithm).run(
            command, groups, self.my_groups(command), fetch_s
        )

    def score(self, command: pb.ScoreCommand) -> pb.ScoreResult:
        """Logprobs of given samples; every rank scores all of them, since there are few."""
        if command.replay:
            for sample in command.samples:
                check_routes(sample, self.engine.model_shape)
        samples = [bare_sample(sample, command.temperature) for sample in command.samples]
        scored = self.engine.score(samples, replay=command.replay)
        return pb.ScoreResult(scores=[SampleLogprobs(logprobs=logprobs.tolist()) for logprobs in scored])

    def describe(self, command: pb.DescribeCommand) -> pb.DescribeResult:
        """Snapshot, hash and canary of the weights held. Rank 0 tells them; every rank scores, since that is
        collective."""
        sender, version = self._sender, version_from_proto(command.version)
        distributed.together("describe the weights", lambda: sender and sender.describe(version))
        prompts = canary(self.engine, command.canary_prompts)
        if sender is None:
            return pb.DescribeResult()
        manifest = manifest_to_proto(sender.describe(version))
        return pb.DescribeResult(manifest=manifest, store_address=sender.store_address, canary=prompts)

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
        """Commit a checkpoint. Its HF folder comes first: a run resumed from the last step exports nothing again."""
        folder, step = Path(command.folder), int(command.train_step)
        exported = folder.parent / "hf" / f"step_{step:06d}"
        if command.hf:
            self._export(exported)
        saved = self.engine.save_checkpoint(folder, step, json.loads(command.state_json), int(command.keep_last))
        return pb.SaveResult(
            path=str(saved.path), kept_steps=saved.kept_steps, hf_path=str(exported) if command.hf else ""
        )

    def _export(self, folder: Path) -> None:
        """Write an HF folder that appears whole: one of a torn export is replaced."""
        work = folder.with_name(folder.name + ".tmp")

        def clear() -> None:
            folder.parent.mkdir(parents=True, exist_ok=True)
            for left in (work, folder):
                shutil.rmtree(left, ignore_errors=True)

        distributed.rank_0_alone(f"make room for {folder}", clear)
        self.engine.save_hf(work)
        distributed.rank_0_alone(f"name {folder}", lambda: work.rename(folder))

    def close(self) -> None:
        """Leave the groups."""
        if self._sender is not None:
            self._sender.close()
        distributed.shutdown()
