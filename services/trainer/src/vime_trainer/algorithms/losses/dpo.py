"""Direct preference optimisation. Rafailov et al. (arXiv 2305.18290); label smoothing: Mitchell, "cDPO" (2023).

m = β · [Σ_t (log π − log π_r)(chosen) − Σ_t (log π − log π_r)(rejected)]
L = −(1 − s) log σ(m) − s log σ(−m),      mean over the pairs of the global batch
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import logsigmoid

from vime_trainer.algorithms.checks import require, same_shape
from vime_trainer.algorithms.losses.batch import LossOutput
from vime_trainer.algorithms.masking import Mask, as_bool
from vime_trainer.algorithms.metrics import as_mean, as_sum
from vime_trainer.algorithms.ranks import LOCAL, Reduce


@dataclass(frozen=True)
class DPOConfig:
    """Settings of DPO."""

    beta: float = 0.1
    """β: how strongly the policy is held to the reference."""
    label_smoothing: float = 0.0
    """s: the share of preferences taken to be wrong."""

    def __post_init__(self) -> None:
        require(self.beta > 0, self, "beta", "must be > 0")
        require(0 <= self.label_smoothing < 0.5, self, "label_smoothing", "must be in [0, 0.5)")


@dataclass(frozen=True)
class PreferenceSide:
    """One side of B pairs: logprobs with gradient, the reference's, and the mask; [B, T] (T may differ by side)."""

    logprobs_BT: Tensor
    ref_logprobs_BT: Tensor
    loss_mask_BT: Tensor

    def __post_init__(self) -> None:
        same_shape(self.logprobs_BT, ref_logprobs_BT=self.ref_logprobs_BT, loss_mask_BT=self.loss_mask_BT)
        object.__setattr__(self, "loss_mask_BT", as_bool(self.loss_mask_BT))

    def log_ratio(self) -> Tensor:
        """Σ_t (log π − log π_r) over unmasked tokens, [B]."""
        mask = Mask(self.loss_mask_BT)
        return mask.sum(mask.zero(self.logprobs_BT - self.ref_logprobs_BT.detach()))


def valid_pairs(chosen: PreferenceSide, rejected: PreferenceSide) -> Tensor:
    """Bool [B]: both sides have an unmasked token; the other pairs are left out of loss and denominator."""
    return chosen.loss_mask_BT.any(-1) & rejected.loss_mask_BT.any(-1)


def pair_count(chosen: PreferenceSide, rejected: PreferenceSide, reduce: Reduce = LOCAL) -> Tensor:
    """Valid pairs of the global batch, float64: the denominator for every micro-batch. Every rank must call it."""
    return reduce.sum(valid_pairs(chosen, rejected).sum().double())


def dpo_loss(chosen: PreferenceSide, rejected: PreferenceSide, config: DPOConfig, pairs: Tensor) -> LossOutput:
    """The micro-batch's share; `pairs` from `pair_count`. Metrics: `loss`, reward accuracy, margin, both rewards."""
    valid_B = valid_pairs(chosen, rejected)
    chosen_B, rejected_B = config.beta * chosen.log_ratio(), config.beta * rejected.log_ratio()
    m_B = (chosen_B - rejected_B).masked_fill(~valid_B, 0.0)
    s = config.label_smoothing
    loss_B = -(1 - s) * logsigmoid(m_B) - s * logsigmoid(-m_B)
    loss = loss_B.double().masked_fill(~valid_B, 0.0).sum() / pairs.clamp(min=1)
    metrics = {
        "loss": as_sum(loss),
        "dpo_accuracy": as_mean(m_B > 0, valid_B),
        "dpo_margin": as_mean(m_B, valid_B),
        "dpo_chosen_reward": as_mean(chosen_B, valid_B),
        "dpo_rejected_reward": as_mean(rejected_B, valid_B),
    }
    return LossOutput(loss, metrics)
