"""The reference policy: a second set of weights that the same model scores with, on the host while not in use."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


class ReferenceWeights:
    """A frozen copy of a model's weights, taken when it is made."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._weights = {n: p.detach().to("cpu", copy=True) for n, p in module.named_parameters()}

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Inside of the block the model computes with the frozen weights; its own come back bit for bit afterwards."""
        own = {n: p.detach().clone() for n, p in self._module.named_parameters()}
        try:
            self._fill(self._weights)
            yield
        finally:
            self._fill(own)

    @torch.no_grad()
    def _fill(self, weights: dict[str, torch.Tensor]) -> None:
        # In place: the optimizer holds views of these very tensors.
        for name, parameter in self._module.named_parameters():
            parameter.copy_(weights[name])
