"""The critic's loss. Schulman et al. (arXiv 1707.06347); value clipping as in OpenAI's baselines.

L_t = max((V − G)², (clip(V, V_old ± ε) − G)²)      no ½
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vime_trainer.algorithms.checks import require, same_shape
from vime_trainer.algorithms.losses.batch import LossOutput
from vime_trainer.algorithms.masking import Mask, where_true
from vime_trainer.algorithms.metrics import Averages, as_sum
from vime_trainer.algorithms.reducers import Denominators, sample_weights, weighted_sum


@dataclass(frozen=True)
class ValueLossConfig:
    """Settings of the value loss."""

    value_clip: float | None = 0.2
    """ε: how far V may move from V_old per batch. None: plain squared error."""
    reducer: str = "sequence_mean"
    fixed_length: int | None = None

    def __post_init__(self) -> None:
        require(self.value_clip is None or self.value_clip > 0, self, "value_clip", "must be > 0, or None for no clip")
        fixed = self.reducer == "fixed_length"
        require(
            fixed == (self.fixed_length is not None),
            self,
            "fixed_length",
            "must be given with the fixed_length reducer, and only with it",
        )


@dataclass(frozen=True)
class ValueBatch:
    """[B, T]: V with gradient; V_old, the values that the advantages were computed from; targets G; mask."""

    values_BT: Tensor
    old_values_BT: Tensor
    returns_BT: Tensor
    loss_mask_BT: Tensor

    def __post_init__(self) -> None:
        same_shape(
            self.values_BT,
            old_values_BT=self.old_values_BT,
            returns_BT=self.returns_BT,
            loss_mask_BT=self.loss_mask_BT,
        )


def value_loss(batch: ValueBatch, config: ValueLossConfig, counts: Denominators) -> LossOutput:
    """The micro-batch's share; metrics `value_loss`, `value_clipfrac`."""
    mask = Mask(batch.loss_mask_BT)
    v_BT, old_BT, g_BT = (
        mask.zero(x_BT) for x_BT in (batch.values_BT, batch.old_values_BT.detach(), batch.returns_BT.detach())
    )
    loss_BT = free_BT = (v_BT - g_BT).square()
    clipped_BT = torch.zeros_like(free_BT)
    if config.value_clip is not None:
        # not old + clamp(V − old): where nothing is cut, that is V but for its rounding, which would count as clipped
        near_BT = v_BT.clamp(old_BT - config.value_clip, old_BT + config.value_clip)
        bound_BT = (near_BT - g_BT).square()
        loss_BT, clipped_BT = torch.maximum(free_BT, bound_BT), where_true(torch.gt, bound_BT, free_BT)
    weight_B = sample_weights(counts, config.reducer, config.fixed_length)
    loss = weighted_sum(loss_BT, weight_B)
    averages = Averages(mask, over_tokens=config.reducer == "token_mean")
    averages.add("value_clipfrac", clipped_BT)
    return LossOutput(loss, averages.metrics() | {"value_loss": as_sum(loss)})
