"""A mask and the few things one does with it, each a single fast pass.

`torch.where` and `masked_fill` cost ten times a multiplication on the CPU, but a multiplication does not stop a NaN
that stands in the padding. A bitwise AND with an all-ones or all-zeros integer does both: it is as fast as a
multiplication, and what is masked is exactly 0 whatever it was.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

_INTEGER = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_bool(mask_BT: Tensor) -> Tensor:
    """`mask_BT` as bool: every non-zero entry is trained."""
    return mask_BT if mask_BT.dtype == torch.bool else mask_BT != 0


class Mask:
    """Which tokens are trained."""

    def __init__(self, mask_BT: Tensor) -> None:
        self.bool_BT = as_bool(mask_BT)
        self._ones: dict[torch.dtype, Tensor] = {}
        self._bit_masks: dict[torch.dtype, Tensor] = {}

    @property
    def _bytes(self) -> Tensor:
        """The mask as 0 and 1; kernels that read bytes are vectorised, those that read bools are not."""
        return self.bool_BT.view(torch.int8)

    @cached_property
    def tokens_B(self) -> Tensor:
        """Trained tokens of each sample, float64."""
        # every trained token is -1 there; a sum of 32-bit integers is the fastest of all ways to count
        return -self._bits(torch.int32).sum(-1, dtype=torch.int32).double()

    def ones(self, dtype: torch.dtype) -> Tensor:
        """1 where trained, else 0."""
        if dtype not in self._ones:
            self._ones[dtype] = self._bytes.to(dtype)
        return self._ones[dtype]

    def zero(self, x_BT: Tensor, out: Tensor | None = None) -> Tensor:
        """`x_BT` where trained, exactly 0 elsewhere, also for what is not finite; its gradient likewise.

        `out`: where to write it, then without gradient.
        """
        bits_BT = self._bits(_INTEGER[x_BT.element_size()])
        if out is not None:
            torch.bitwise_and(x_BT.detach().view(bits_BT.dtype), bits_BT, out=out.view(bits_BT.dtype))
            return out
        return _and(x_BT, bits_BT)

    def difference(self, x_BT: Tensor, y_BT: Tensor) -> Tensor:
        """`zero(x_BT - y_BT)` in one buffer, with gradient in `x_BT` alone."""
        bits_BT = self._bits(_INTEGER[x_BT.element_size()])
        zeroed: Tensor = _Difference.apply(x_BT, y_BT.detach(), bits_BT)  # type: ignore[no-untyped-call]  # torch's
        return zeroed

    def _bits(self, integer: torch.dtype) -> Tensor:
        """All ones where trained, all zeros elsewhere."""
        if integer not in self._bit_masks:
            self._bit_masks[integer] = (-self._bytes).to(integer)  # -1 is all ones
        return self._bit_masks[integer]

    def sum(self, x_BT: Tensor) -> Tensor:
        """Σ_t x_t m_t of each sample, [B]. `x_BT` is finite where masked; [B, 1] is shared by a sample's tokens."""
        if x_BT.shape[-1] == 1:
            return x_BT[:, 0] * self.tokens_B.to(x_BT.dtype)
        return row_sum(x_BT, self.ones(x_BT.dtype))

    def mean(self, x_BT: Tensor) -> Tensor:
        """Mean over each sample's trained tokens, [B]; 0 for a sample without any."""
        return self.sum(x_BT) / self.tokens_B.clamp(min=1).to(x_BT.dtype)


def _and(x: Tensor, bits: Tensor) -> Tensor:
    if x.requires_grad and torch.is_grad_enabled():
        masked: Tensor = _And.apply(x, bits)  # type: ignore[no-untyped-call]
        return masked
    return (x.view(bits.dtype) & bits).view(x.dtype)


class _And(torch.autograd.Function):
    """x & bits, on the bits of a float; linear, so its gradient is the same operation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bits: Tensor) -> Tensor:
        ctx.save_for_backward(bits)
        return _and(x, bits)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        (bits,) = ctx.saved_tensors
        return _and(upstream, bits), None


class _Difference(torch.autograd.Function):
    """(x − y) & bits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, bits: Tensor) -> Tensor:
        ctx.save_for_backward(bits)
        gap = x - y
        gap.view(bits.dtype).bitwise_and_(bits)
        return gap

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        (bits,) = ctx.saved_tensors
        return _and(upstream, bits), None, None


def row_sum(x_BT: Tensor, weights_BT: Tensor) -> Tensor:
    """Σ_t x_t w_t of each sample, [B], in the dtype of both."""
    total_B: Tensor = torch.linalg.vecdot(x_BT, weights_BT, dim=-1)
    return total_B


def where_true(compare: Callable[..., Tensor], x: Tensor, y: Tensor | float) -> Tensor:
    """A comparison (`torch.gt`, …) as 1.0 and 0.0 in x's dtype, without gradient: sums need numbers, and the kernel
    that writes bools is slower than the one that writes floats.
    """
    other = y.detach() if isinstance(y, Tensor) else y
    return compare(x.detach(), other, out=torch.empty(0, dtype=x.dtype, device=x.device))


def with_slope(value: Tensor, slope: Tensor, x: Tensor) -> Tensor:
    """`value`, with d value / d x = `slope`: for a function whose derivative is known, written beside its value.

    All three have one shape; `value` and `slope` are taken without gradient.
    """
    joined: Tensor = _Slope.apply(x, value.detach(), slope.detach())  # type: ignore[no-untyped-call]
    return joined


class _Slope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, slope: Tensor) -> Tensor:
        ctx.save_for_backward(slope)
        return value.view_as(value)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        (slope,) = ctx.saved_tensors
        return upstream * slope, None, None


BLOCK_ENTRIES = 1 << 18
"""Entries of a [B, T] tensor that are worked on at once on the CPU: 1 MiB in float32, so that the dozen tensors that
live at one time fit the last-level cache and the fixed cost of a block stays small."""


def row_blocks(x_BT: Tensor) -> list[slice]:
    """Slices of rows that cover `x_BT`, each of about `BLOCK_ENTRIES` entries; on an accelerator, one slice."""
    rows, width = x_BT.shape[:2]
    height = max(BLOCK_ENTRIES // max(width, 1), 1) if x_BT.device.type == "cpu" else max(rows, 1)
    return [slice(start, start + height) for start in range(0, rows, height)] or [slice(0, 0)]
