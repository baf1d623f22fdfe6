"""The same loss, computed a block of rows at a time, so that intermediates stay in the processor's cache.

A loss of a dozen element-wise steps over [512, 8192] reads and writes main memory for every step, and keeps every
intermediate for the backward pass. Samples are independent given the global denominators, and the loss is a sum: so
each block's loss **and gradient** are computed at once, and only the gradient [B, T] is kept for the backward pass.
On the CPU that is the difference between 50 and 10 times the cost of touching the logprobs once
(`make bench NAME=algorithms`); accelerators get one block, their kernels are not cache-bound.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from vime_trainer.algorithms.losses.batch import LossOutput, PolicyBatch
from vime_trainer.algorithms.masking import row_blocks
from vime_trainer.algorithms.metrics import Metrics, merge

Share = Callable[[PolicyBatch, slice], LossOutput]
"""(rows of the batch, which rows) → their share of loss and metrics."""


def in_blocks(batch: PolicyBatch, share: Share) -> LossOutput:
    """Σ over blocks of `share`, differentiable once in `logprobs_BT`, `entropy_BT` and the head's logprobs.

    `share` must depend on nothing else that needs a gradient.
    """
    blocks = row_blocks(batch.loss_mask_BT)
    if len(blocks) == 1:
        return share(batch, slice(None))
    leaves = _leaves(batch)
    if not (leaves and torch.is_grad_enabled()):
        parts = [share(batch.rows(rows), rows) for rows in blocks]
        return LossOutput(torch.stack([part.loss for part in parts]).sum(), merge(part.metrics for part in parts))
    metrics: list[Metrics] = []
    loss: Tensor = _Blockwise.apply(batch, share, blocks, metrics, list(leaves), *leaves.values())  # type: ignore[no-untyped-call]
    return LossOutput(loss, merge(metrics))


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


class _Blockwise(torch.autograd.Function):
    """Forward computes loss and gradient; backward scales the gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        batch: PolicyBatch,
        share: Share,
        blocks: list[slice],
        metrics: list[Metrics],
        names: list[str],
        *leaves: Tensor,
    ) -> Tensor:
        gradients = [torch.empty_like(x) for x in leaves]
        losses = []
        for rows in blocks:
            with torch.enable_grad():
                own = [x[rows].detach().requires_grad_() for x in leaves]
                output = share(_with_leaves(batch.rows(rows), dict(zip(names, own, strict=True))), rows)
                found = torch.autograd.grad(output.loss, own, allow_unused=True)
            for gradient, part in zip(gradients, found, strict=True):
                gradient[rows] = 0.0 if part is None else part
            losses.append(output.loss.detach())
            metrics.append(output.metrics)
        ctx.save_for_backward(*gradients)
        return torch.stack(losses).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradients: tuple[Tensor, ...] = ctx.saved_tensors
        if upstream != 1:  # what `loss.backward()` sends; then the pass over memory is saved
            gradients = tuple(upstream.to(gradient.dtype) * gradient for gradient in gradients)
        return (None, None, None, None, None, *gradients)
