"""The same loss, computed a block of rows at a time, so that intermediates stay in the processor's cache.

A loss of two dozen element-wise steps over [512, 8192] reads and writes main memory for every step, and keeps every
intermediate for the backward pass. Samples are independent given the global denominators, and the loss is a weighted
sum over samples: so each block's gradient is computed at once, and only the gradient [B, T] is kept for the backward
pass. On the CPU that is worth a factor of four (`make bench NAME=algorithms`); accelerators get one block, since their
kernels are not cache-bound.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from vime_trainer.algorithms.losses.batch import PolicyBatch
from vime_trainer.algorithms.masking import row_blocks
from vime_trainer.algorithms.metrics import Averages


@dataclass(frozen=True)
class RowSums:
    """Of some samples: each term of the loss summed over the sample's tokens, [B], with gradient; and averages."""

    terms: dict[str, Tensor]
    averages: Averages


Summing = Callable[[PolicyBatch], RowSums]


def weighted(terms: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> Tensor:
    """Σ_terms Σ_b weight_b · term_b, a float64 scalar. A term without weights is only measured."""
    return torch.stack([torch.dot(terms[name].double(), weight_B) for name, weight_B in weights.items()]).sum()


def in_blocks(batch: PolicyBatch, summing: Summing, weights: Mapping[str, Tensor]) -> tuple[Tensor, RowSums]:
    """`weighted` over the whole batch and its row sums, worked out block by block.

    The loss is differentiable once, in `logprobs_BT`, `entropy_BT` and the head's logprobs; `summing` must depend on
    nothing else that needs a gradient.
    """
    blocks = row_blocks(batch.loss_mask_BT)
    leaves = _leaves(batch)
    if len(blocks) == 1 or not (leaves and torch.is_grad_enabled()):
        sums = summing(batch)
        return weighted(sums.terms, weights), sums
    parts: list[RowSums] = []
    work = _Work(batch, summing, weights, blocks, list(leaves), parts)
    loss: Tensor = _Blockwise.apply(work, *leaves.values())  # type: ignore[no-untyped-call]
    return loss, _joined(parts)


def _leaves(batch: PolicyBatch) -> dict[str, Tensor]:
    """The tensors of the batch that a gradient may flow to."""
    candidates = {"logprobs_BT": batch.logprobs_BT, "entropy_BT": batch.entropy_BT}
    candidates["head"] = None if batch.head is None else batch.head.logprobs_BTK
    return {name: x for name, x in candidates.items() if x is not None and x.requires_grad}


def _with_leaves(batch: PolicyBatch, leaves: dict[str, Tensor]) -> PolicyBatch:
    columns: dict[str, Any] = {name: x for name, x in leaves.items() if name != "head"}
    if "head" in leaves and batch.head is not None:
        columns["head"] = replace(batch.head, logprobs_BTK=leaves["head"])
    return replace(batch, **columns)


def _joined(parts: list[RowSums]) -> RowSums:
    averages = parts[0].averages
    averages.join([part.averages for part in parts[1:]])
    return RowSums({name: torch.cat([part.terms[name] for part in parts]) for name in parts[0].terms}, averages)


@dataclass(frozen=True)
class _Work:
    """What `_Blockwise` does; `parts` is filled with each block's row sums."""

    batch: PolicyBatch
    summing: Summing
    weights: Mapping[str, Tensor]
    blocks: list[slice]
    names: list[str]
    parts: list[RowSums]


class _Blockwise(torch.autograd.Function):
    """Forward computes loss and gradient; backward scales the gradient."""

    @staticmethod
    def forward(ctx: Any, work: _Work, *leaves: Tensor) -> Tensor:
        gradients = [torch.empty_like(x) for x in leaves]
        losses = []
        for rows in work.blocks:
            with torch.enable_grad():
                own = [x[rows].detach().requires_grad_() for x in leaves]
                sums = work.summing(_with_leaves(work.batch.rows(rows), dict(zip(work.names, own, strict=True))))
                part = {name: weight_B[rows] for name, weight_B in work.weights.items()}
                pulling = [name for name in part if sums.terms[name].requires_grad]
                found = torch.autograd.grad(
                    [sums.terms[name] for name in pulling],
                    own,
                    [part[name].to(sums.terms[name].dtype) for name in pulling],
                    allow_unused=True,
                )
            for gradient, slope in zip(gradients, found, strict=True):
                gradient[rows] = 0.0 if slope is None else slope
            terms = {name: term_B.detach() for name, term_B in sums.terms.items()}
            losses.append(weighted(terms, part))
            work.parts.append(RowSums(terms, sums.averages))
        ctx.save_for_backward(*gradients)
        return torch.stack(losses).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradients: tuple[Tensor, ...] = ctx.saved_tensors
        if upstream != 1:  # what `loss.backward()` sends; then the pass over memory is saved
            gradients = tuple(upstream.to(gradient.dtype) * gradient for gradient in gradients)
        return (None, *gradients)
