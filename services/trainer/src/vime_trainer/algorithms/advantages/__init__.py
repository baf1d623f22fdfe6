"""Advantage estimators: one file each, registered in `ESTIMATORS`."""

from vime_trainer.algorithms.advantages.base import (
    AdvantageConfig,
    AdvantageInputs,
    Advantages,
    Estimate,
    Estimator,
    EstimatorFunction,
)
from vime_trainer.algorithms.advantages.compute import ESTIMATORS, compute_advantages
from vime_trainer.algorithms.advantages.gae import gae
from vime_trainer.algorithms.advantages.grpo import dr_grpo, grpo, grpo_scores
from vime_trainer.algorithms.advantages.reinforce_plus_plus import reinforce_plus_plus
from vime_trainer.algorithms.advantages.reinforce_plus_plus_baseline import reinforce_plus_plus_baseline
from vime_trainer.algorithms.advantages.rloo import rloo, rloo_scores
from vime_trainer.algorithms.advantages.scan import suffix_sum
from vime_trainer.algorithms.advantages.whiten import whiten

__all__ = [
    "ESTIMATORS",
    "AdvantageConfig",
    "AdvantageInputs",
    "Advantages",
    "Estimate",
    "Estimator",
    "EstimatorFunction",
    "compute_advantages",
    "dr_grpo",
    "gae",
    "grpo",
    "grpo_scores",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "rloo",
    "rloo_scores",
    "suffix_sum",
    "whiten",
]
