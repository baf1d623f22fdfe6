"""KL in the reward: per-token rewards whose sum is the sample's penalised reward.

r_t = −kl_coef · k(log π_o − log π_r)_t,   plus R at the last unmasked token
"""

from __future__ import annotations

import torch
from torch import Tensor

from vime_trainer.algorithms.advantages.base import AdvantageConfig, AdvantageInputs
from vime_trainer.algorithms.kl import kl_estimate
from vime_trainer.algorithms.masking import Mask
from vime_trainer.algorithms.tensors import last_unmasked


def kl_penalty(inputs: AdvantageInputs, config: AdvantageConfig) -> Tensor:
    """kl_coef · k_t, float64 [B, T], 0 at masked tokens. Raises `ValueError` when a logprob it needs is missing."""
    mask_BT = inputs.loss_mask_BT
    if config.kl_coef == 0:
        return torch.zeros(mask_BT.shape, dtype=torch.float64, device=mask_BT.device)
    if inputs.old_logprobs_BT is None or inputs.ref_logprobs_BT is None:
        raise ValueError(f"kl_coef={config.kl_coef} needs old_logprobs_BT and ref_logprobs_BT")
    mask = Mask(mask_BT)
    old_BT, ref_BT = (mask.zero(x_BT.detach().double()) for x_BT in (inputs.old_logprobs_BT, inputs.ref_logprobs_BT))
    return config.kl_coef * kl_estimate(old_BT, ref_BT, config.kl_estimator)


def token_rewards(inputs: AdvantageInputs, config: AdvantageConfig) -> Tensor:
    """r_t, float64 [B, T], 0 at masked tokens. R lands on the last **unmasked** token, so a trailing tool output
    cannot swallow it; an unscored or fully masked sample has no rewards at all.
    """
    reward_B1 = inputs.rewards_B.double().nan_to_num(0.0, 0.0, 0.0)[:, None]
    final_BT = torch.where(last_unmasked(inputs.loss_mask_BT), reward_B1, 0.0)
    return final_BT - kl_penalty(inputs, config)
