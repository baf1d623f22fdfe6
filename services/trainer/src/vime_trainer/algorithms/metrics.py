"""Metrics that add: over micro-batches, then over ranks, to the value of the whole batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vime_trainer.algorithms.masking import Mask


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


class Averages:
    """Means of per-token quantities, taken as the loss takes them: over tokens, or as a mean of per-sample means.

    `add` keeps a sum per sample; `metrics` turns all of them into numbers together, since a dozen metrics of a
    micro-batch would otherwise cost a dozen times the same small operations.
    """

    def __init__(self, mask: Mask, over_tokens: bool) -> None:
        self.mask = mask
        self.tokens_B = mask.tokens_B
        self._over_tokens = over_tokens
        self._sums: dict[str, Tensor] = {}
        self._scale: dict[str, float] = {}
        self._per_sample: set[str] = set()

    def join(self, others: Sequence[Averages]) -> None:
        """Take in the samples of `others`, which hold the same names."""
        parts = [self, *others]
        self.tokens_B = torch.cat([part.tokens_B for part in parts])
        self._sums = {name: torch.cat([part._sums[name] for part in parts]) for name in self._sums}

    def add(
        self,
        name: str,
        x_BT: Tensor,
        *,
        masked: float | None = None,
        scale: float = 1.0,
        per_sample: bool = False,
    ) -> None:
        """Report `scale` times the mean of `x_BT`, which is finite where masked.

        `masked`: the value that it has there, if it has but one; that saves a pass over memory. [B, 1] stands for a
        value shared by the sample's tokens. `per_sample`: a mean of per-sample means, whatever the loss does.
        """
        x_BT = x_BT.detach()
        if masked is None or x_BT.shape[-1] == 1:
            sum_B = self.mask.sum(x_BT).double()
        elif masked == 0:
            sum_B = x_BT.sum(-1).double()
        else:  # small deviations are summed as such: beside thousands of ones float32 would not see them
            sum_B = (x_BT - masked).sum(-1).double() + masked * self.tokens_B
        self._sums[name] = sum_B
        self._scale[name] = scale
        if per_sample:
            self._per_sample.add(name)

    def same(self, name: str, other: str) -> None:
        """Report under `name` what `other` reports."""
        self._sums[name], self._scale[name] = self._sums[other], self._scale[other]

    def metrics(self) -> Metrics:
        """All of them; every micro-batch and rank has the same names."""
        if not self._sums:
            return {}
        tokens_B = self.tokens_B
        has_tokens_B = (tokens_B > 0).double()
        weights_B2 = torch.stack([has_tokens_B / tokens_B.clamp(min=1), has_tokens_B], dim=1)
        samples, tokens = has_tokens_B.sum(), tokens_B.sum()
        scale_M1 = torch.tensor(list(self._scale.values()), dtype=torch.float64, device=tokens.device)[:, None]
        means, sums = (scale_M1 * (torch.stack(list(self._sums.values())) @ weights_B2)).unbind(1)
        return {
            name: Metric(mean, samples) if name in self._per_sample or not self._over_tokens else Metric(total, tokens)
            for name, mean, total in zip(self._sums, means.unbind(), sums.unbind(), strict=True)
        }


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
