"""The RL algorithm family as a pure library: tensors in, tensors and numbers out, torch alone.

A step, on every data-parallel rank (see docs/algorithms.md):

    advantages = compute_advantages(AdvantageInputs(...), AdvantageConfig("grpo"), reduce)
    batch      = PolicyBatch(logprobs, advantages.advantages_BT, advantages.loss_mask_BT, old, rollout)
    counts     = batch_denominators(batch, config, trajectories, reduce)         # once, over the global batch
    for rows in micro_batches:
        output = policy_loss(batch.rows(rows), config, counts.rows(rows))        # shares add up
        output.loss.backward()
"""

from vime_trainer.algorithms.advantages import (
    ESTIMATORS,
    AdvantageConfig,
    AdvantageInputs,
    Advantages,
    Estimate,
    Estimator,
    compute_advantages,
    whiten,
)
from vime_trainer.algorithms.groups import GroupStatistics, group_statistics
from vime_trainer.algorithms.index import Index, index_of
from vime_trainer.algorithms.kl import KL_ESTIMATORS, kl_estimate
from vime_trainer.algorithms.losses import (
    OBJECTIVES,
    CorrectionConfig,
    DPOConfig,
    Head,
    LossOutput,
    PolicyBatch,
    PolicyLossConfig,
    PreferenceSide,
    Rejection,
    ValueBatch,
    ValueLossConfig,
    batch_denominators,
    dpo_loss,
    head_distillation_loss,
    icepop,
    message_mask,
    mis,
    pair_count,
    policy_loss,
    sampled_distillation_loss,
    sft_loss,
    tis,
    value_loss,
)
from vime_trainer.algorithms.metrics import Metric, Metrics, merge, pack, unpack, values
from vime_trainer.algorithms.ranks import LOCAL, Reduce
from vime_trainer.algorithms.reducers import REDUCERS, Denominators, denominators
from vime_trainer.algorithms.tensors import pad_rows

__all__ = [
    "ESTIMATORS",
    "KL_ESTIMATORS",
    "LOCAL",
    "OBJECTIVES",
    "REDUCERS",
    "AdvantageConfig",
    "AdvantageInputs",
    "Advantages",
    "CorrectionConfig",
    "DPOConfig",
    "Denominators",
    "Estimate",
    "Estimator",
    "GroupStatistics",
    "Head",
    "Index",
    "LossOutput",
    "Metric",
    "Metrics",
    "PolicyBatch",
    "PolicyLossConfig",
    "PreferenceSide",
    "Reduce",
    "Rejection",
    "ValueBatch",
    "ValueLossConfig",
    "batch_denominators",
    "compute_advantages",
    "denominators",
    "dpo_loss",
    "group_statistics",
    "head_distillation_loss",
    "icepop",
    "index_of",
    "kl_estimate",
    "merge",
    "message_mask",
    "mis",
    "pack",
    "pad_rows",
    "pair_count",
    "policy_loss",
    "sampled_distillation_loss",
    "sft_loss",
    "tis",
    "unpack",
    "value_loss",
    "values",
    "whiten",
]
