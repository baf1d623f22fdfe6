"""REINFORCE++: token-level KL in the reward, discounted return, whitened over the global batch. Hu et al.
(arXiv 2501.03262).

    A_t = Σ_{j≥t} γ^(j−t) r_j,  t over unmasked tokens; then whitening
"""

from __future__ import annotations

from torch import Tensor

from vime_trainer.algorithms.advantages.base import AdvantageConfig, AdvantageInputs, Estimate, by_rows
from vime_trainer.algorithms.advantages.scan import Packing, suffix_sum
from vime_trainer.algorithms.advantages.token_rewards import token_rewards
from vime_trainer.algorithms.ranks import Reduce


def reinforce_plus_plus(inputs: AdvantageInputs, config: AdvantageConfig, reduce: Reduce) -> Estimate:
    """The discounted return of each unmasked token. A fully masked sample simply has none."""
    return Estimate(*by_rows(inputs, lambda rows: (_returns(rows, config),)))


def _returns(inputs: AdvantageInputs, config: AdvantageConfig) -> Tensor:
    packing = Packing(inputs.loss_mask_BT)
    returns_BT = suffix_sum(packing.pack(token_rewards(inputs, config)), config.gamma)
    return packing.unpack(returns_BT)
