"""The clipped surrogate. Schulman et al., PPO (arXiv 1707.06347); separate upper bound from DAPO (2503.14476); dual
clip from Ye et al. (1912.09729); sequence ratio from Zheng et al., GSPO (2507.18071).

    ρ_t = exp(log π − log π_o)
    L_t = max(−ρ_t A, −clip(ρ_t, 1−ε, 1+ε_hi) A)
    L_t = min(L_t, −c A)   where A < 0, with dual clip

ρ is not clamped: a ratio that overflows makes the loss non-finite, and the trainer skips and counts the step. A
clamp would turn the same broken sample into a large finite loss with no gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vime_trainer.algorithms.losses.batch import Terms, TokenLoss, sequence_mean_of
from vime_trainer.algorithms.losses.config import PolicyLossConfig


def clip(terms: Terms, config: PolicyLossConfig) -> TokenLoss:
    """PPO's clip on the token ratio."""
    return _clipped(terms.log_ratio_BT.exp(), terms, config)


def gspo(terms: Terms, config: PolicyLossConfig) -> TokenLoss:
    """The same on s = exp(mean_t log ρ_t), one ratio for all tokens of the sample."""
    return _clipped(sequence_mean_of(terms.log_ratio_BT, terms).exp(), terms, config)


def _clipped(ratio: Tensor, terms: Terms, config: PolicyLossConfig) -> TokenLoss:
    """`ratio` [B, T], or [B, 1] for a ratio per sequence."""
    minus_a_BT = -terms.advantages_BT
    free_BT = ratio * minus_a_BT
    bound_BT = ratio.clamp(config.ratio_low, config.ratio_high) * minus_a_BT
    loss_BT = torch.maximum(free_BT, bound_BT)
    clipped_BT = bound_BT.detach() > free_BT.detach()
    if config.eps_clip_c is not None:
        ceiling_BT = config.eps_clip_c * minus_a_BT
        dual_BT = (minus_a_BT > 0) & (loss_BT.detach() > ceiling_BT)
        loss_BT = torch.where(dual_BT, ceiling_BT, loss_BT)
        clipped_BT = clipped_BT | dual_BT
    return TokenLoss(loss_BT, clipped_BT)
