"""Generalised advantage estimation, the advantage of PPO. Schulman et al. (arXiv 1506.02438, 1707.06347).

    δ_t = r_t + γ V_{t+1} − V_t          V after the last token is 0
    A_t = Σ_{j≥t} (γλ)^(j−t) δ_j
    G_t = A_t + V_t                      value target

t runs over the **unmasked** tokens only: V_{t+1} is the value at the next unmasked token. A tool's output between
two actions therefore has no TD error, adds no discount and cannot swallow the final reward; implementations that
ignore the mask here give tool tokens advantages and lose R when the last token is masked.
"""

from __future__ import annotations

from torch import Tensor

from vime_trainer.algorithms.advantages.base import AdvantageConfig, AdvantageInputs, Estimate, by_rows
from vime_trainer.algorithms.advantages.scan import Packing, suffix_sum
from vime_trainer.algorithms.advantages.token_rewards import token_rewards
from vime_trainer.algorithms.ranks import Reduce


def gae(inputs: AdvantageInputs, config: AdvantageConfig, reduce: Reduce) -> Estimate:
    """Advantages and value targets from `values_BT`, the critic's values before the step."""
    if inputs.values_BT is None:
        raise ValueError("gae needs values_BT, the critic's value of every response token")
    return Estimate(*by_rows(inputs, lambda rows: _gae(rows, config)))


def _gae(inputs: AdvantageInputs, config: AdvantageConfig) -> tuple[Tensor, Tensor]:
    assert inputs.values_BT is not None  # checked above
    packing = Packing(inputs.loss_mask_BT)
    r_BT = packing.pack(token_rewards(inputs, config))
    v_BT = packing.pack(inputs.values_BT.detach().to(inputs.dtype))
    delta_BT = r_BT - v_BT
    delta_BT[:, :-1] += config.gamma * v_BT[:, 1:]
    a_BT = suffix_sum(delta_BT, config.gamma * config.lam)
    return packing.unpack(a_BT), packing.unpack(a_BT + v_BT)
