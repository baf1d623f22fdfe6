"""REINFORCE++ with the group's mean as baseline, whitened over the global batch. Hu et al. (arXiv 2501.03262).

A_t = R − mean(R) − kl_coef · k_t;  then whitening
"""

from __future__ import annotations

from vime_trainer.algorithms.advantages.base import AdvantageConfig, AdvantageInputs, Estimate
from vime_trainer.algorithms.advantages.token_rewards import kl_penalty
from vime_trainer.algorithms.groups import group_statistics
from vime_trainer.algorithms.ranks import Reduce


def reinforce_plus_plus_baseline(inputs: AdvantageInputs, config: AdvantageConfig, reduce: Reduce) -> Estimate:
    """Centred reward minus each token's own KL penalty."""
    group = group_statistics(inputs.rewards_B, inputs.groups, inputs.trajectories, reduce)
    if config.kl_coef == 0:
        return Estimate(inputs.per_token(group.centred_B))
    return Estimate(inputs.per_token(group.centred_B) - kl_penalty(inputs, config))
