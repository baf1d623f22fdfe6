"""Metrics that add: over micro-batches, then over ranks, to the value of the whole batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vime_trainer.algorithms.tensors import row_sum


@dataclass(frozen=True)
class Metric:
    """A sum (`count` is None; already divided by a global denominator, or a plain count) or a mean total / count.

    Both parts are float64 0-dim tensors without gradient, left on their device: nothing waits for a GPU until `value`.
    """

    total: Tensor
    count: Tensor | None = None

    def __add__(self, other: Metric) -> Metric:
        if (self.count is None) != (other.count is None):
            raise ValueError("a sum and a mean do not add")
        count = None if self.count is None or other.count is None else self.count + other.count
        return Metric(self.total + other.total, count)

    @property
    def value(self) -> float | None:
        """The number to report; None for a mean over nothing."""
        if self.count is None:
            return float(self.total)
        return float(self.total / self.count) if self.count != 0 else None


Metrics = dict[str, Metric]


def as_sum(x: Tensor) -> Metric:
    """All elements of `x`, summed in float64."""
    return Metric(x.detach().double().sum())


def as_mean(x_B: Tensor, weight_B: Tensor) -> Metric:
    """Mean of `x_B` over the samples with `weight_B` 1 (0 leaves a sample out, whatever its `x_B`)."""
    weight_B = weight_B.double()
    return Metric(torch.where(weight_B > 0, x_B.detach().double() * weight_B, 0.0).sum(), weight_B.sum())


class Averager:
    """Averages per-token quantities the way the loss does: over tokens, or as a mean of per-sample means."""

    def __init__(self, mask_BT: Tensor, over_tokens: bool) -> None:
        self.mask_BT = mask_BT
        self.tokens_B = mask_BT.sum(-1)
        self.over_tokens = over_tokens

    def __call__(self, x_BT: Tensor) -> Metric:
        """`x_BT` is finite where masked; [B, 1] stands for a value shared by the sample's tokens."""
        if x_BT.dtype == torch.bool:
            total_B = (x_BT & self.mask_BT).sum(-1)
        elif x_BT.shape[-1] == 1 != self.mask_BT.shape[-1]:
            total_B = x_BT.detach()[:, 0] * self.tokens_B
        else:
            total_B = row_sum(x_BT.detach(), self.mask_BT.to(x_BT.dtype))
        if self.over_tokens:
            return Metric(total_B.double().sum(), self.tokens_B.double().sum())
        return as_mean(total_B.double() / self.tokens_B.clamp(min=1), self.tokens_B > 0)


def merge(parts: Iterable[Mapping[str, Metric]]) -> Metrics:
    """Add the metrics of micro-batches by name."""
    merged: Metrics = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = merged[name] + metric if name in merged else metric
    return merged


def pack(metrics: Mapping[str, Metric]) -> Tensor:
    """[2, M] float64 (totals, counts) in order of name, for one all-reduce over ranks that hold the same names."""
    totals = [metrics[name].total for name in sorted(metrics)]
    counts = [torch.zeros_like(m.total) if m.count is None else m.count for _, m in sorted(metrics.items())]
    return torch.stack([*totals, *counts]).reshape(2, len(totals)) if totals else torch.zeros(2, 0).double()


def unpack(packed_2M: Tensor, like: Mapping[str, Metric]) -> Metrics:
    """The inverse of `pack`; `like` gives names and kinds."""
    return {
        name: Metric(packed_2M[0, m], None if like[name].count is None else packed_2M[1, m])
        for m, name in enumerate(sorted(like))
    }


def values(metrics: Mapping[str, Metric]) -> dict[str, float | None]:
    """Plain numbers, ready to report."""
    return {name: metric.value for name, metric in metrics.items()}
