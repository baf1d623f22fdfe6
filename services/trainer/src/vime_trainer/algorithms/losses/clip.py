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

from vime_trainer.algorithms.losses.batch import Terms, TokenLoss
from vime_trainer.algorithms.losses.config import PolicyLossConfig
from vime_trainer.algorithms.masking import where_true, with_slope


def clip(terms: Terms, config: PolicyLossConfig) -> TokenLoss:
    """PPO's clip on the token ratio."""
    # d/d log ρ is d/d log π; the slope is 0 where masked, so the step through the masked difference is saved
    return _clipped(terms.batch.logprobs_BT, terms.ratio_BT, terms, config)


def gspo(terms: Terms, config: PolicyLossConfig) -> TokenLoss:
    """The same on s = exp(mean_t log ρ_t), one ratio for all tokens of the sample."""
    mean_BT = terms.mask.mean(terms.log_ratio_BT)[:, None].expand(terms.log_ratio_BT.shape)
    return _clipped(mean_BT, mean_BT.detach().exp(), terms, config)


def _clipped(log_BT: Tensor, ratio_BT: Tensor, terms: Terms, config: PolicyLossConfig) -> TokenLoss:
    """L as above, and dL / d `log_BT` = −ρ A where nothing was clipped, else 0. Both are 0 where A is masked."""
    a_BT = terms.advantages_BT
    free_BT = ratio_BT * a_BT
    gain_BT = ratio_BT.clamp(config.ratio_low, config.ratio_high).mul_(a_BT)
    torch.minimum(gain_BT, free_BT, out=gain_BT)
    clipped_BT = cut_BT = where_true(torch.ne, gain_BT, free_BT)
    bounded_BT = None
    if config.eps_clip_c is not None:
        floor_BT = torch.where(a_BT < 0, config.eps_clip_c * a_BT, -torch.inf)
        bounded_BT = where_true(torch.lt, gain_BT, floor_BT)
        torch.maximum(gain_BT, floor_BT, out=gain_BT)
        cut_BT = clipped_BT + bounded_BT  # never both: the clip cuts a negative advantage below 1, dual clip above
    loss_BT = gain_BT.neg_()
    # −ρ A where not cut; from loss_BT, since free_BT may have overflowed where cut
    slope_BT = torch.addcmul(loss_BT, loss_BT, cut_BT, value=-1, out=free_BT)
    return TokenLoss(with_slope(loss_BT, slope_BT, log_BT), clipped_BT, bounded_BT, zeroed=True)
