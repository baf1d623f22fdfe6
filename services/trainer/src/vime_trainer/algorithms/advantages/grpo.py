"""Group-relative advantages. Shao et al., DeepSeekMath (arXiv 2402.03300); Liu et al., Dr.GRPO (arXiv 2503.20783).

    A_t = (R − mean(R)) / (std(R) + 1e-6)      GRPO; also what GSPO and CISPO use
    A_t =  R − mean(R)                         Dr.GRPO

mean and std (unbiased) over the scored trajectories of the sample's group.
"""

from __future__ import annotations

from torch import Tensor

from vime_trainer.algorithms.advantages.base import AdvantageConfig, AdvantageInputs, Estimate
from vime_trainer.algorithms.groups import STD_EPS, GroupStatistics, group_statistics
from vime_trainer.algorithms.ranks import Reduce


def grpo_scores(group: GroupStatistics) -> Tensor:
    """A of each sample, float64 [B]; exactly 0 in a group of equal rewards, of one, and for unscored samples."""
    return group.centred_B / (group.std_B + STD_EPS)


def grpo(inputs: AdvantageInputs, config: AdvantageConfig, reduce: Reduce) -> Estimate:
    """GRPO: centred and divided by the group's std."""
    group = group_statistics(inputs.rewards_B, inputs.groups, inputs.trajectories, reduce)
    return Estimate(inputs.per_token(grpo_scores(group)))


def dr_grpo(inputs: AdvantageInputs, config: AdvantageConfig, reduce: Reduce) -> Estimate:
    """Dr.GRPO: centred only, so that easy and hard prompts keep their weight."""
    group = group_statistics(inputs.rewards_B, inputs.groups, inputs.trajectories, reduce)
    return Estimate(inputs.per_token(group.centred_B))
