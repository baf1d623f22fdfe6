"""Frozen policies that the one model scores with: the reference of a KL, and the teacher of a distillation.

Their weights lie on the host and are swapped in for a forward pass.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from vime_trainer.engine.errors import CheckpointError

WEIGHTS = "reference.safetensors"


class FrozenWeights:
    """A copy of a model's weights, taken when it is made."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._weights = self._own()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Inside of the block the model computes with the frozen weights; its own come back bit for bit afterwards."""
        own = {n: p.detach().clone() for n, p in self._module.named_parameters()}
        try:
            self._fill(self._weights)
            yield
        finally:
            self._fill(own)

    def _own(self) -> dict[str, torch.Tensor]:
        return {n: p.detach().to("cpu", copy=True) for n, p in self._module.named_parameters()}

    @torch.no_grad()
    def _fill(self, weights: dict[str, torch.Tensor]) -> None:
        # In place: the optimizer holds views of these very tensors.
        for name, parameter in self._module.named_parameters():
            parameter.copy_(weights[name])


class ReferenceWeights(FrozenWeights):
    """The reference policy: the starting model, or, with a refresh interval, the policy of some batches ago."""

    def __init__(self, module: nn.Module, refresh_interval: int = 0) -> None:
        super().__init__(module)
        self._interval = refresh_interval
        self._age, self._refreshes = 0, 0

    @property
    def age(self) -> int:
        """Batches that changed the policy since it last was the reference; counted only with a refresh interval."""
        return self._age

    def batch_trained(self) -> None:
        """Tell it that a batch changed the policy. The policy becomes the reference when the interval is over."""
        if self._interval == 0:
            return
        self._age += 1
        if self._age >= self._interval:
            self._weights = self._own()
            self._age, self._refreshes = 0, self._refreshes + 1

    # ------------------------------------------------------------------ checkpoints, see checkpoint.Part

    name = "reference"

    def facts(self) -> dict[str, Any]:
        """How old it is, and whether it still is the starting model (which needs no file)."""
        return {"age": self._age, "refreshes": self._refreshes}

    def write(self, work: Path, rank: int) -> None:
        """The weights, if they are no longer those of the starting model."""
        if rank == 0 and self._refreshes:
            save_file({n: t.clone() for n, t in self._weights.items()}, work / WEIGHTS, metadata={"format": "pt"})

    def restore(self, path: Path, facts: dict[str, Any] | None) -> None:
        """As it was saved. A checkpoint that says nothing of a reference never had another one than the starting
        model."""
        if facts is None or not facts["refreshes"]:
            self._age, self._refreshes = (0 if facts is None else int(facts["age"])), 0
            return
        saved = load_file(path / WEIGHTS)
        if saved.keys() != self._weights.keys():
            raise CheckpointError(
                f"{path / WEIGHTS}: other parameters, {sorted(saved.keys() ^ self._weights.keys())[:4]}"
            )
        self._weights = saved
        self._age, self._refreshes = int(facts["age"]), int(facts["refreshes"])
