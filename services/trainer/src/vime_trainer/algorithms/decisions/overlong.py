"""Truncated and overlong responses. Yu et al., DAPO (arXiv 2503.14476), equation 13.

    penalty = 0                              |y| ≤ L − C
            = ((L − C) − |y|) / C            L − C < |y| ≤ L
            = −1                             L < |y|

L: `max_length`, C: `cache`, the soft zone before it.
"""

from __future__ import annotations

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


def drop_truncated(loss_mask_BT: Tensor, truncated_B: Tensor) -> Tensor:
    """The mask without truncated samples (DAPO's overlong filtering). Call it **after** `compute_advantages`: the
    group's statistics include them, its loss does not.
    """
    return as_bool(loss_mask_BT) & ~truncated_B.bool()[:, None]
