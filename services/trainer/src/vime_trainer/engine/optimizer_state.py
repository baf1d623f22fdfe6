"""The optimizer's state as named pieces of parameters, so that a save can be loaded by another number of ranks.

Megatron's DistributedOptimizer gives each data-parallel rank a contiguous range of each flattened parameter. A piece
is such a range with its float32 main weights (if the model's are narrower) and its moments. Reading assembles a rank's
ranges from whatever pieces there are. For models that are sharded over tensor-, pipeline- or expert-parallel ranks
Megatron's `dist_checkpointing` is the way.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer
from safetensors import safe_open
from torch import nn

from vime_trainer.engine.errors import CheckpointError

MAIN = "main"


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of a flattened parameter, with the tensor and the state that the inner optimizer holds."""

    name: str
    start: int
    stop: int
    main: torch.Tensor
    is_copy: bool
    """`main` is not the model's own weight but a wider copy of it."""
    state: dict[str, torch.Tensor]

    def key(self, what: str) -> str:
        """Name of one tensor of this piece in a file."""
        return f"{self.name}|{self.start}|{self.stop}|{what}"


def pieces(optimizer: MegatronOptimizer, module: nn.Module) -> Iterator[Piece]:
    """This rank's pieces."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for model_parameter, main, start in _owned(part):
            copied = main.dtype != model_parameter.dtype
            state = part.optimizer.state[main]
            yield Piece(names[model_parameter], start, start + main.numel(), main, copied, state)


def _owned(part: Any) -> Iterator[tuple[nn.Parameter, torch.Tensor, int]]:
    """(model parameter, the inner optimizer's tensor, where it starts in the flattened parameter)."""
    if isinstance(part, DistributedOptimizer):
        for parameter, (group, order) in part.model_param_group_index_map.items():
            main = part.optimizer.param_groups[group]["params"][order]
            yield parameter, main, part._get_model_param_range_map(parameter)["param"].start
    elif isinstance(part, FP32Optimizer):
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter, parameter, 0
    else:
        narrow = zip(part.float16_groups, part.fp32_from_float16_groups, strict=True)
        wide = zip(part.fp32_from_fp32_groups, part.fp32_from_fp32_groups, strict=True)
        for models, mains in (*narrow, *wide):
            for parameter, main in zip(models, mains, strict=True):
                yield parameter, main, 0


def dump(optimizer: MegatronOptimizer, module: nn.Module, rank: int) -> dict[str, torch.Tensor]:
    """This rank's pieces as tensors for one safetensors file; copies, on the host.

    What all ranks hold, rank 0 writes.
    """
    out: dict[str, torch.Tensor] = {}
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    if rank > 0 and not all(isinstance(part, DistributedOptimizer) for part in parts):
        return out
    for piece in pieces(optimizer, module):
        tensors = dict(piece.state) | ({MAIN: piece.main} if piece.is_copy else {})
        out |= {piece.key(what): _host(tensor) for what, tensor in tensors.items()}
    return out


def _host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().clone()


def restore(optimizer: MegatronOptimizer, module: nn.Module, files: list[Path]) -> None:
    """Fill this rank's pieces from all ranks' files.

    Raises CheckpointError naming a parameter whose elements are missing.
    """
    index = _Index(files)
    for piece in pieces(optimizer, module):
        if piece.is_copy:
            with torch.no_grad():
                piece.main.copy_(index.read(piece, MAIN).view_as(piece.main))
        for what in index.state_names(piece.name):
            value = index.read(piece, what).to(piece.main.device)
            piece.state[what] = value if value.dim() == 0 else value.view_as(piece.main)


class _Index:
    """Which file holds which range of which parameter."""

    def __init__(self, files: list[Path]) -> None:
        self._where: dict[tuple[str, str], list[tuple[int, int, Path, str]]] = {}
        for file in files:
            with safe_open(file, framework="pt") as stream:
                for key in stream.keys():  # noqa: SIM118 - not a mapping
                    name, start, stop, what = key.rsplit("|", 3)
                    self._where.setdefault((name, what), []).append((int(start), int(stop), file, key))

    def state_names(self, name: str) -> list[str]:
        """Names of the optimizer's state of a parameter; none before the first step."""
        return sorted(what for n, what in self._where if n == name and what != MAIN)

    def read(self, piece: Piece, what: str) -> torch.Tensor:
        """Elements [piece.start, piece.stop), or the scalar that all pieces share."""
        found = sorted(self._where.get((piece.name, what), []), key=lambda entry: entry[:2])
        out: torch.Tensor | None = None
        filled = 0
        for start, stop, file, key in found:
            low, high = max(start, piece.start), min(stop, piece.stop)
            if low >= high:
                continue
            with safe_open(file, framework="pt") as stream:
                tensor: torch.Tensor = stream.get_tensor(key)
            if tensor.dim() == 0:
                return tensor
            out = tensor.new_empty(piece.stop - piece.start) if out is None else out
            out[low - piece.start : high - piece.start] = tensor.flatten()[low - start : high - start]
            filled += high - low
        wanted = piece.stop - piece.start
        if out is None or filled != wanted:
            raise CheckpointError(f"{piece.name}: {filled} of {wanted} elements of {what!r} are in the checkpoint")
        return out


def finite(tensors: Mapping[str, torch.Tensor]) -> str | None:
    """Name of the first tensor with a value that is not finite; None if all are."""
    return next((n for n, t in tensors.items() if t.is_floating_point() and not bool(torch.isfinite(t).all())), None)
