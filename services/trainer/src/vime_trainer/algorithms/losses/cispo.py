"""CISPO: clip the weight, never the gradient. MiniMax-M1 (arXiv 2506.13585).

    L_t = −sg(clip(ρ_t, 1−ε, 1+ε_hi)) · A_t · log π_t

ε ≥ 1 removes the lower bound, which is how the paper runs it.
"""

from __future__ import annotations

import torch

from vime_trainer.algorithms.losses.batch import Terms, TokenLoss
from vime_trainer.algorithms.losses.config import PolicyLossConfig
from vime_trainer.algorithms.masking import where_true


def cispo(terms: Terms, config: PolicyLossConfig) -> TokenLoss:
    """Every token keeps a gradient; `clipped_BT` marks the tokens whose weight was bounded."""
    ratio_BT = terms.ratio_BT
    weight_BT = ratio_BT.clamp(config.ratio_low, config.ratio_high)
    return TokenLoss(-weight_BT * terms.advantages_BT * terms.logprobs_BT, where_true(torch.ne, weight_BT, ratio_BT))
