"""Losses: one idea per file; `policy_loss` composes the objectives in `OBJECTIVES` with corrections, KL and entropy."""

from vime_trainer.algorithms.losses.batch import Head, LossOutput, PolicyBatch, Terms, TokenLoss
from vime_trainer.algorithms.losses.config import PolicyLossConfig
from vime_trainer.algorithms.losses.correction import (
    Correction,
    CorrectionConfig,
    Rejection,
    correct,
    icepop,
    mis,
    tis,
)
from vime_trainer.algorithms.losses.distillation import head_distillation_loss, sampled_distillation_loss
from vime_trainer.algorithms.losses.dpo import DPOConfig, PreferenceSide, dpo_loss, pair_count
from vime_trainer.algorithms.losses.policy import (
    OBJECTIVES,
    Objective,
    PolicyTokens,
    batch_denominators,
    policy_loss,
    policy_tokens,
)
from vime_trainer.algorithms.losses.sft import message_mask, sft_loss
from vime_trainer.algorithms.losses.value import ValueBatch, ValueLossConfig, value_loss

__all__ = [
    "OBJECTIVES",
    "Correction",
    "CorrectionConfig",
    "DPOConfig",
    "Head",
    "LossOutput",
    "Objective",
    "PolicyBatch",
    "PolicyLossConfig",
    "PolicyTokens",
    "PreferenceSide",
    "Rejection",
    "Terms",
    "TokenLoss",
    "ValueBatch",
    "ValueLossConfig",
    "batch_denominators",
    "correct",
    "dpo_loss",
    "head_distillation_loss",
    "icepop",
    "message_mask",
    "mis",
    "pair_count",
    "policy_loss",
    "policy_tokens",
    "sampled_distillation_loss",
    "sft_loss",
    "tis",
    "value_loss",
]
