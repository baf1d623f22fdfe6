"""On-policy distillation as an advantage: the reverse KL to a teacher, on the tokens the student sampled.
Agarwal et al., GKD (arXiv 2306.13649); Lu et al., "On-Policy Distillation" (Thinking Machines, 2025).

    A_t ← A_t − opd_kl_coef · (log π_o − log π_T)
"""

from __future__ import annotations

from torch import Tensor

from vime_trainer.algorithms.advantages.base import AdvantageConfig, AdvantageInputs
from vime_trainer.algorithms.masking import Mask


def reverse_kl(inputs: AdvantageInputs, config: AdvantageConfig) -> Tensor:
    """log π_o − log π_T per token, [B, T], 0 at masked tokens. Raises `ValueError` when a logprob is missing."""
    if inputs.old_logprobs_BT is None or inputs.teacher_logprobs_BT is None:
        raise ValueError(f"opd_kl_coef={config.opd_kl_coef} needs old_logprobs_BT and teacher_logprobs_BT")
    return Mask(inputs.loss_mask_BT).zero(inputs.old_logprobs_BT.detach() - inputs.teacher_logprobs_BT.detach())
