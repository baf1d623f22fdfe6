"""Decisions around a step, as pure functions: which groups to keep, what a reward is, how long is too long."""

from vime_trainer.algorithms.decisions.dynamic_sampling import (
    DynamicSamplingConfig,
    GroupDecision,
    RefillDecision,
    decide_group,
    decide_refill,
)
from vime_trainer.algorithms.decisions.overlong import (
    SoftOverlong,
    drop_truncated,
    soft_overlong_penalty,
    trajectory_lengths,
)
from vime_trainer.algorithms.decisions.pass_at_k import pass_at_k, pass_rates
from vime_trainer.algorithms.decisions.responses import is_repetitive, repetition_frac, truncated_ratio
from vime_trainer.algorithms.decisions.rewards import ParsedRewards, RewardConfig, parse_rewards, shape_rewards

__all__ = [
    "DynamicSamplingConfig",
    "GroupDecision",
    "ParsedRewards",
    "RefillDecision",
    "RewardConfig",
    "SoftOverlong",
    "decide_group",
    "decide_refill",
    "drop_truncated",
    "is_repetitive",
    "parse_rewards",
    "pass_at_k",
    "pass_rates",
    "repetition_frac",
    "shape_rewards",
    "soft_overlong_penalty",
    "trajectory_lengths",
    "truncated_ratio",
]
