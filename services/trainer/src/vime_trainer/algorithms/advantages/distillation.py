"""On-policy distillation as an advantage: the reverse KL to a teacher, on the tokens the student sampled.
Agarwal et al., GKD (arXiv 2306.13649); Lu et al., "On-Policy Distillation" (Thinking Machines, 2025).

    A_t ← A_t − opd_kl_coef · (log π_o − log π_T)

With the estimator `opd` the right-hand A_t is 0: the teacher alone says what is good, the reward is only measured.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vime_trainer.algorithms.advantages.base import AdvantageConfig, AdvantageInputs, Estimate
from vime_trainer.algorithms.masking import Mask
from vime_trainer.algorithms.ranks import Reduce


def teacher_alone(inputs: AdvantageInputs, config: AdvantageConfig, reduce: Reduce) -> Estimate:
    """A_t = 0, to which `opd_kl_coef` adds the distillation."""
    return Estimate(inputs.per_token(torch.zeros_like(inputs.rewards_B)))


def reverse_kl(inputs: AdvantageInputs, config: AdvantageConfig) -> Tensor:
    """log π_o − log π_T per token, [B, T], 0 at masked tokens. Raises `ValueError` when a logprob is missing."""
    if inputs.old_logprobs_BT is None or inputs.teacher_logprobs_BT is None:
        raise ValueError(f"opd_kl_coef={config.opd_kl_coef} needs old_logprobs_BT and teacher_logprobs_BT")
    return Mask(inputs.loss_mask_BT).zero(inputs.old_logprobs_BT.detach() - inputs.teacher_logprobs_BT.detach())
