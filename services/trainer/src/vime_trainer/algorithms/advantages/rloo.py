"""REINFORCE leave-one-out. Kool et al. (2019); Ahmadian et al., "Back to Basics" (arXiv 2402.14740).

A_t = R_i − 1/(n−1) Σ_{j≠i} R_j = n/(n−1) · (R_i − mean(R))
"""

from __future__ import annotations

from torch import Tensor

from vime_trainer.algorithms.advantages.base import AdvantageConfig, AdvantageInputs, Estimate
from vime_trainer.algorithms.groups import GroupStatistics, group_statistics
from vime_trainer.algorithms.ranks import Reduce


def rloo_scores(group: GroupStatistics) -> Tensor:
    """A of each sample, float64 [B]; 0 for a group of one, which leaves nothing to compare with."""
    n_B = group.count_B
    return group.centred_B * n_B / (n_B - 1).clamp(min=1)


def rloo(inputs: AdvantageInputs, config: AdvantageConfig, reduce: Reduce) -> Estimate:
    """RLOO: the baseline of a sample is the mean reward of its siblings."""
    group = group_statistics(inputs.rewards_B, inputs.groups, inputs.trajectories, reduce)
    return Estimate(inputs.per_token(rloo_scores(group)))
