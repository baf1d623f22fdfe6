"""KL in the reward: per-token rewards whose sum is the sample's penalised reward.

r_t = −kl_coef · k(log π_o − log π_r)_t,   plus R at the last unmasked token
"""

from __future__ import annotations

import torch
from torch import Tensor

from vime_trainer.algorithms.advantages.base import AdvantageConfig, AdvantageInputs
from vime_trainer.algorithms.kl import kl_of
from vime_trainer.algorithms.masking import Mask
from vime_trainer.algorithms.tensors import last_unmasked


def kl_penalty(inputs: AdvantageInputs, config: AdvantageConfig) -> Tensor:
    """kl_coef · k_t, [B, T] in the inputs' dtype, 0 at masked tokens. Raises `ValueError` when a logprob it needs is
    missing.
    """
    if inputs.old_logprobs_BT is None or inputs.ref_logprobs_BT is None:
        raise ValueError(f"kl_coef={config.kl_coef} needs old_logprobs_BT and ref_logprobs_BT")
    delta_BT = inputs.old_logprobs_BT.detach() - inputs.ref_logprobs_BT.detach()
    kl_BT = kl_of(Mask(inputs.loss_mask_BT).zero(delta_BT.to(inputs.dtype)), config.kl_estimator)
    return config.kl_coef * kl_BT


def token_rewards(inputs: AdvantageInputs, config: AdvantageConfig) -> Tensor:
    """r_t, [B, T] in the inputs' dtype, 0 at masked tokens.

    R lands on the last **unmasked** token, so a trailing tool output cannot swallow it; an unscored or fully masked
    sample has no rewards at all.
    """
    r_BT = torch.zeros(inputs.loss_mask_BT.shape, dtype=inputs.dtype, device=inputs.loss_mask_BT.device)
    if config.kl_coef > 0:
        r_BT = -kl_penalty(inputs, config)
    if r_BT.shape[1]:
        last_B, any_B = last_unmasked(inputs.loss_mask_BT)
        reward_B = torch.where(any_B, inputs.rewards_B, 0.0).nan_to_num(0.0, 0.0, 0.0)
        r_BT.scatter_add_(1, last_B[:, None], reward_B[:, None].to(inputs.dtype))
    return r_BT
