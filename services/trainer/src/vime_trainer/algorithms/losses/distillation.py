"""Distillation losses on tokens that the student sampled. Agarwal et al., GKD (arXiv 2306.13649); Gu et al., MiniLLM
(arXiv 2306.08543).

    sampled   L_t = sg(log π − log π_T) · log π       ∇L is an unbiased ∇KL(π ‖ π_T) of the token
    head      L_t = Σ_{v∈H} π_T,v (log π_T,v − log π_v)   forward KL on the teacher's top-K

The advantage form, which also takes a reward and old logprobs, is `AdvantageConfig.opd_kl_coef`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vime_trainer.algorithms.checks import same_shape
from vime_trainer.algorithms.losses.batch import LossOutput
from vime_trainer.algorithms.masking import Mask
from vime_trainer.algorithms.metrics import Averages, as_sum
from vime_trainer.algorithms.reducers import Denominators, Reducer, sample_weights, weighted_sum


def sampled_distillation_loss(
    logprobs_BT: Tensor,
    teacher_logprobs_BT: Tensor,
    loss_mask_BT: Tensor,
    counts: Denominators,
    reducer: str | Reducer = "token_mean",
) -> LossOutput:
    """Reverse KL by its score function; the tokens must come from the current policy. `opd_reverse_kl` reports it."""
    same_shape(logprobs_BT, teacher_logprobs_BT=teacher_logprobs_BT, loss_mask_BT=loss_mask_BT)
    mask = Mask(loss_mask_BT)
    log_pi_BT = mask.zero(logprobs_BT)
    kl_BT = log_pi_BT.detach() - mask.zero(teacher_logprobs_BT.detach())
    loss = weighted_sum(kl_BT * log_pi_BT, sample_weights(counts, reducer))
    averages = Averages(mask, over_tokens=False)
    averages.add("opd_reverse_kl", kl_BT, masked=0.0)
    return LossOutput(loss, averages.metrics() | {"loss": as_sum(loss)})


def head_distillation_loss(
    logprobs_BTK: Tensor,
    teacher_logprobs_BTK: Tensor,
    loss_mask_BT: Tensor,
    counts: Denominators,
    reducer: str | Reducer = "token_mean",
) -> LossOutput:
    """Forward KL on the teacher's top-K tokens (−inf where fewer), not renormalised: exact when K is the vocabulary."""
    same_shape(logprobs_BTK, teacher_logprobs_BTK=teacher_logprobs_BTK)
    same_shape(logprobs_BTK[..., 0], loss_mask_BT=loss_mask_BT)
    mask = Mask(loss_mask_BT)
    present_BTK = torch.isfinite(teacher_logprobs_BTK) & mask.bool_BT[..., None]
    log_t_BTK = teacher_logprobs_BTK.detach().masked_fill(~present_BTK, 0.0)
    log_pi_BTK = logprobs_BTK.masked_fill(~present_BTK, 0.0)
    kl_BT = (log_t_BTK.exp() * present_BTK * (log_t_BTK - log_pi_BTK)).sum(-1)
    loss = weighted_sum(kl_BT, sample_weights(counts, reducer))
    return LossOutput(loss, {"loss": as_sum(loss)})
