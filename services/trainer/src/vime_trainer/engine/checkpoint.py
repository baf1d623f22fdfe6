"""What a checkpoint holds: weights, optimizer, schedule, generators, and the caller's own state. Safetensors and JSON
only.

All ranks write into one shared directory. Rank 0 writes the weights (data-parallel ranks hold the same) and the
manifest; every rank writes its pieces of the optimizer and its generators.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from vime_trainer.engine import distributed, hf, optimizer_state
from vime_trainer.engine.distributed import all_reduce_max, data_parallel_rank
from vime_trainer.engine.errors import CheckpointError, PeerFailed
from vime_trainer.engine.optimizer import Updater
from vime_trainer.engine.shape import ModelShape
from vime_trainer.engine.store import Committed, Store, read_manifest

FORMAT = 1
WEIGHTS = "model.safetensors"


class Part(Protocol):
    """What is committed and restored together with the policy: a critic, a reference policy."""

    name: str
    """Its key in the manifest's `parts`."""

    def facts(self) -> dict[str, Any]:
        """What the manifest keeps, JSON."""

    def write(self, work: Path, rank: int) -> None:
        """Write this rank's files into a save in progress. Raises CheckpointError or OSError."""

    def restore(self, path: Path, facts: dict[str, Any] | None) -> None:
        """Restore from a committed checkpoint; `facts` is None if it holds no such part. Raises CheckpointError."""


class Checkpointer:
    """Saves and loads one model with its optimizer and its `parts`. Every method is collective."""

    def __init__(
        self,
        module: nn.Module,
        shape: ModelShape,
        updater: Updater,
        device: torch.device,
        parts: Sequence[Part] = (),
    ) -> None:
        self._module, self._shape, self._updater, self._device = module, shape, updater, device
        self._parts = parts

    def save(self, store: Store, step: int, state: dict[str, Any]) -> Committed:
        """Commit a checkpoint of `step` and prune. `state` is the caller's, JSON; rank 0's counts.

        Raises CheckpointError on a rank that could not write or holds a weight that is not finite, PeerFailed on the
        others: the former checkpoint then stays the latest.
        """
        rank = data_parallel_rank()
        token = str(self._pid_of_rank_0())
        work = store.working_directory(step, token)
        facts = {
            "format": FORMAT,
            "architecture": self._shape.architecture,
            "ranks": dist.get_world_size(),
            "optimizer_steps": self._updater.steps_taken,
            "parts": {part.name: part.facts() for part in self._parts},
            "state": state,
        }
        try:
            self._together(f"create {work}", lambda: store.begin(step, token), only_rank_0=True)
            self._together(f"write {work}", lambda: self._write(work, rank))
            self._together(f"commit {work}", lambda: store.commit(work, step, facts), only_rank_0=True)
        except (CheckpointError, PeerFailed):
            if rank == 0:
                store.abandon(work)
            raise
        return store.committed()

    def load(self, store: Store) -> dict[str, Any] | None:
        """Restore the latest checkpoint and return the caller's state; None if there is none. Bit for bit what was
        saved.

        The number of data-parallel ranks may differ from that of the save; the learning-rate schedule is today's
        settings at the saved position. Raises CheckpointError if it is damaged or of another model, WeightMapError if
        its tensors do not fit.
        """
        self._together("check the checkpoint", store.verify, only_rank_0=True)
        path = store.latest()
        if path is None:
            return None
        manifest = read_manifest(path)
        if manifest.get("format") != FORMAT:
            raise CheckpointError(f"{path} has format {manifest.get('format')!r}, this version reads {FORMAT}")
        if manifest["architecture"] != self._shape.architecture:
            raise CheckpointError(f"{path} is a {manifest['architecture']}, the model is a {self._shape.architecture}")
        self._together(f"read {path}", lambda: self._restore(path, manifest))
        state: dict[str, Any] = manifest["state"]
        return state

    def _restore(self, path: Path, manifest: dict[str, Any]) -> None:
        hf.load(self._module, self._shape, hf.Checkpoint(path))
        files = sorted(path.glob("optimizer.rank*.safetensors"))
        optimizer_state.restore(self._updater.optimizer, self._module, files)
        self._updater.resume_at(int(manifest["optimizer_steps"]))
        for part in self._parts:
            part.restore(path, manifest.get("parts", {}).get(part.name))
        _restore_generators(path)

    def _write(self, work: Path, rank: int) -> None:
        if rank == 0:
            weights = {name: t.detach().cpu().clone() for name, t in hf.export(self._module, self._shape)}
            bad = optimizer_state.finite(weights)
            if bad is not None:
                raise CheckpointError(f"{bad} holds a value that is not finite; such weights are not saved")
            save_file(weights, work / WEIGHTS, metadata={"format": "pt"})
        pieces = optimizer_state.dump(self._updater.optimizer, self._module, rank)
        save_file(pieces, work / f"optimizer.rank{rank:05d}.safetensors")
        for part in self._parts:
            part.write(work, rank)
        save_file(_generators(), work / f"generators.rank{rank:05d}.safetensors")

    def _together(self, what: str, action: Callable[[], object], only_rank_0: bool = False) -> None:
        """`distributed.together`, with what can go wrong with files as a CheckpointError."""
        try:
            (distributed.rank_0_alone if only_rank_0 else distributed.together)(what, action)
        except (OSError, SafetensorError, CheckpointError, ValueError, TypeError) as error:
            raise CheckpointError(f"could not {what}: {error}") from error

    def _pid_of_rank_0(self) -> int:
        pid = torch.tensor([os.getpid() if data_parallel_rank() == 0 else 0], device=self._device)
        return int(all_reduce_max(pid).item())


def _generators() -> dict[str, torch.Tensor]:
    """States of torch's generators and of Megatron's tracker, as bytes."""
    states = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    tracked: dict[str, torch.Tensor] = get_cuda_rng_tracker().get_states()
    return {n: s.clone() for n, s in (states | {f"tracker.{k}": v for k, v in tracked.items()}).items()}


def _restore_generators(path: Path) -> None:
    """This rank's generators; a rank that did not exist at the save keeps the seeds it started with."""
    file = path / f"generators.rank{data_parallel_rank():05d}.safetensors"
    if not file.exists():
        return
    states = load_file(file)
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    tracked = {n.removeprefix("tracker."): s for n, s in states.items() if n.startswith("tracker.")}
    get_cuda_rng_tracker().set_states(tracked)
