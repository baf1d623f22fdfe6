"""Truncated and overlong responses. Yu et al., DAPO (arXiv 2503.14476), equation 13.

    penalty = 0                              |y| ≤ L − C
            = ((L − C) − |y|) / C            L − C < |y| ≤ L
            = −1                             L < |y|

L: `max_length`, C: `cache`, the soft zone before it. |y| is the length of one response, which the budget L bounds. A
trajectory that forked into several responses has one reward and so one penalty: that of its longest response, since
each of them had the budget to itself.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from torch import Tensor

from vime_trainer.algorithms.checks import require
from vime_trainer.algorithms.masking import as_bool


@dataclass(frozen=True)
class SoftOverlong:
    """Settings of the penalty, in response tokens."""

    max_length: int
    cache: int
    factor: float = 1.0
    """Multiplies the penalty."""

    def __post_init__(self) -> None:
        require(self.max_length > 0, self, "max_length", "must be > 0")
        require(0 < self.cache <= self.max_length, self, "cache", f"must be in (0, max_length={self.max_length}]")
        require(self.factor >= 0, self, "factor", "must be >= 0")


def soft_overlong_penalty(response_lengths_B: Tensor, config: SoftOverlong) -> Tensor:
    """The penalty of each response, float64 [B], in [−factor, 0]; add it to the reward."""
    free = config.max_length - config.cache
    return config.factor * ((free - response_lengths_B.double()) / config.cache).clamp(-1.0, 0.0)


def trajectory_lengths(trajectories: Sequence[Hashable], lengths: Sequence[int]) -> list[int]:
    """Of each sample, the longest response of its trajectory; samples of one trajectory share an entry of
    `trajectories`."""
    longest: dict[Hashable, int] = {}
    for trajectory, length in zip(trajectories, lengths, strict=True):
        longest[trajectory] = max(length, longest.get(trajectory, 0))
    return [longest[trajectory] for trajectory in trajectories]


def drop_truncated(loss_mask_BT: Tensor, truncated_B: Tensor) -> Tensor:
    """The mask without truncated samples (DAPO's overlong filtering). Call it **before** `compute_advantages`: the
    group's statistics read rewards, which are all there still, and whitening is over what is trained.
    """
    return as_bool(loss_mask_BT) & ~truncated_B.bool()[:, None]
