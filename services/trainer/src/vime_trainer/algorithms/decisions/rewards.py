"""What a reward function returned, as numbers; and the processing between raw and trained reward.

A reward that is missing, NaN, infinite or not a number makes its sample *unscored*: NaN here, and from there out of
statistics, loss and denominators. It is never 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vime_trainer.algorithms.checks import require


@dataclass(frozen=True)
class ParsedRewards:
    """`rewards_B`: float64, NaN = unscored. `reasons`: sample → why it has no score, for the log."""

    rewards_B: Tensor
    reasons: dict[int, str]


def parse_rewards(raw: Sequence[Any], key: str | None = None) -> ParsedRewards:
    """Numbers out of what user code returned. Bools, ints, floats and 0-dim array scalars are numbers; `key` picks
    from a mapping. Nothing raises: a strange value unscores its own sample.
    """
    parsed = [_parse(value, key) for value in raw]
    numbers = [number if isinstance(number, float) else math.nan for number in parsed]
    reasons = {sample: reason for sample, reason in enumerate(parsed) if isinstance(reason, str)}
    return ParsedRewards(torch.tensor(numbers, dtype=torch.float64), reasons)


def _parse(value: Any, key: str | None) -> float | str:
    """The number, or why there is none."""
    if isinstance(value, Mapping):
        if key is None:
            return "a mapping, and no reward key is set"
        if key not in value:
            return f"no key {key!r}"
        value = value[key]
    if value is None:
        return "missing"
    if not isinstance(value, bool | int | float) and getattr(value, "shape", None) == ():
        value = value.item()  # a numpy or torch scalar
    if not isinstance(value, bool | int | float):
        return f"not a number: {type(value).__name__}"
    try:
        number = float(value)
    except OverflowError:  # an int beyond 1.8e308
        return "infinite"
    return number if math.isfinite(number) else "NaN" if math.isnan(number) else "infinite"


@dataclass(frozen=True)
class RewardConfig:
    """From raw to trained reward: clamp, then scale. Filters and `raw_reward` keep reading the raw one."""

    scale: float = 1.0
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        require(math.isfinite(self.scale) and self.scale != 0, self, "scale", "must be finite and not 0")
        bounded = self.low is not None and self.high is not None
        require(not bounded or self.low < self.high, self, "low", f"must be below high={self.high}")  # type: ignore[operator]


def shape_rewards(raw_B: Tensor, config: RewardConfig, penalty_B: Tensor | None = None) -> Tensor:
    """scale · (clamp(raw) + penalty), float64 [B]; unscored stays NaN. `penalty_B`: e.g. `soft_overlong_penalty`."""
    shaped_B = raw_B.double()
    if config.low is not None or config.high is not None:
        shaped_B = shaped_B.clamp(config.low, config.high)
    return config.scale * (shaped_B if penalty_B is None else shaped_B + penalty_B)
