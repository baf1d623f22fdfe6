"""Off-policy sequence masking: drop what the policy has already moved away from. DeepSeek-V3.2 (arXiv 2512.02556).

token dropped  ⇔  A_t < 0  and  mean_t(log π_o − log π) > δ
"""

from __future__ import annotations

from torch import Tensor

from vime_trainer.algorithms.losses.batch import Terms


def opsm_dropped(terms: Terms, delta: float) -> Tensor:
    """Bool [B, T]. Dropped tokens stay in the denominator: the mask depends on the current policy, so no global
    count of it exists before the step.
    """
    drift_B1 = -terms.mask.mean(terms.log_ratio_BT.detach())[:, None]
    return (terms.advantages_BT < 0) & (drift_B1 > delta) & terms.mask.bool_BT
