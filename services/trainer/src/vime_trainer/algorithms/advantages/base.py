"""What an advantage estimator reads and returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vime_trainer.algorithms.checks import require, same_shape
from vime_trainer.algorithms.index import Index
from vime_trainer.algorithms.kl import KL_ESTIMATORS
from vime_trainer.algorithms.masking import as_bool, row_blocks
from vime_trainer.algorithms.metrics import Metrics
from vime_trainer.algorithms.ranks import Reduce


@dataclass(frozen=True)
class AdvantageConfig:
    """Settings of the advantage. The defaults are GRPO without KL."""

    estimator: str = "grpo"
    """A name in `ESTIMATORS`."""
    gamma: float = 1.0
    """Discount γ per unmasked token (gae, reinforce_plus_plus)."""
    lam: float = 1.0
    """λ of GAE: 1 is Monte Carlo, 0 is one-step TD."""
    kl_coef: float = 0.0
    """Weight of the KL to the reference in the reward. Refused for estimators that do not read it."""
    kl_estimator: str = "k1"
    """k1, k2, k3 or low_var_kl."""
    whiten: bool | None = None
    """Whiten the advantages over the global batch. None: as the estimator's paper does."""
    opd_kl_coef: float = 0.0
    """Weight of on-policy distillation: A_t −= opd_kl_coef · (log π_o − log π_T)."""

    def __post_init__(self) -> None:
        require(0 <= self.gamma <= 1, self, "gamma", "must be in [0, 1]")
        require(0 <= self.lam <= 1, self, "lam", "must be in [0, 1]")
        require(self.kl_coef >= 0, self, "kl_coef", "must be >= 0 (a positive weight pulls towards the reference)")
        require(self.opd_kl_coef >= 0, self, "opd_kl_coef", "must be >= 0")
        require(self.kl_estimator in KL_ESTIMATORS, self, "kl_estimator", f"known: {', '.join(KL_ESTIMATORS)}")


@dataclass(frozen=True)
class AdvantageInputs:
    """One rank's samples. `rewards_B` float, NaN or infinite = unscored; everything else padded [B, T].

    `loss_mask_BT` becomes bool, and False for unscored samples. `trajectories` is needed when trajectories forked or
    when groups are reduced over ranks. Raises `ValueError` for shapes that disagree.
    """

    rewards_B: Tensor
    loss_mask_BT: Tensor
    groups: Index
    trajectories: Index | None = None
    old_logprobs_BT: Tensor | None = None
    ref_logprobs_BT: Tensor | None = None
    teacher_logprobs_BT: Tensor | None = None
    values_BT: Tensor | None = None

    def __post_init__(self) -> None:
        if self.loss_mask_BT.ndim != 2 or self.rewards_B.shape != self.loss_mask_BT.shape[:1]:
            shapes = f"{tuple(self.rewards_B.shape)} and {tuple(self.loss_mask_BT.shape)}"
            raise ValueError(f"rewards_B and loss_mask_BT must be [B] and [B, T], got {shapes}")
        same_shape(self.rewards_B, group_ids_B=self.groups.ids_B)
        if self.trajectories is not None:
            same_shape(self.rewards_B, trajectory_ids_B=self.trajectories.ids_B)
        same_shape(
            self.loss_mask_BT,
            old_logprobs_BT=self.old_logprobs_BT,
            ref_logprobs_BT=self.ref_logprobs_BT,
            teacher_logprobs_BT=self.teacher_logprobs_BT,
            values_BT=self.values_BT,
        )
        mask_BT, scored_B = as_bool(self.loss_mask_BT), torch.isfinite(self.rewards_B)
        if not bool(scored_B.all()):
            mask_BT = mask_BT & scored_B[:, None]
        object.__setattr__(self, "loss_mask_BT", mask_BT)

    def rows(self, selection: Tensor | slice) -> AdvantageInputs:
        """The selected samples."""

        def pick(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[selection]

        return AdvantageInputs(
            self.rewards_B[selection],
            self.loss_mask_BT[selection],
            self.groups.rows(selection),
            None if self.trajectories is None else self.trajectories.rows(selection),
            pick(self.old_logprobs_BT),
            pick(self.ref_logprobs_BT),
            pick(self.teacher_logprobs_BT),
            pick(self.values_BT),
        )

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of advantages: that of the logprobs or values, at least (and without either) float32."""
        given = (self.old_logprobs_BT, self.values_BT)
        dtype = next((tensor.dtype for tensor in given if tensor is not None), torch.float32)
        return torch.promote_types(dtype, torch.float32)

    def per_token(self, score_B: Tensor) -> Tensor:
        """A_t = score for every token of the sample, as a [B, T] view."""
        return score_B.to(self.dtype)[:, None].expand(self.loss_mask_BT.shape)


@dataclass(frozen=True)
class Estimate:
    """[B, T]; what stands at masked tokens is ignored. `returns_BT` are value targets G, for the critic."""

    advantages_BT: Tensor
    returns_BT: Tensor | None = None


EstimatorFunction = Callable[[AdvantageInputs, AdvantageConfig, Reduce], Estimate]


@dataclass(frozen=True)
class Estimator:
    """A registered estimator and what it reads, so that a setting it would ignore is refused."""

    function: EstimatorFunction
    whitens: bool = False
    """Its paper whitens over the batch, so `whiten=None` does."""
    reads_kl: bool = False
    """It puts `kl_coef` · KL into the reward."""
    reads_gamma: bool = False
    reads_values: bool = False


@dataclass(frozen=True)
class Advantages:
    """`advantages_BT`: 0 at masked tokens. `loss_mask_BT`: bool, False for unscored samples; the mask for loss and
    denominators. `returns_BT`: value targets or None. `unscored_B`: which samples were left out, to log their ids.
    """

    advantages_BT: Tensor
    loss_mask_BT: Tensor
    returns_BT: Tensor | None
    unscored_B: Tensor
    metrics: Metrics


def by_rows(inputs: AdvantageInputs, function: Callable[[AdvantageInputs], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """`function` of a block of samples at a time, for what needs no other sample: its intermediates stay in cache."""
    blocks = row_blocks(inputs.loss_mask_BT)
    whole: tuple[Tensor, ...] = ()
    for rows in blocks:
        parts = function(inputs.rows(rows))
        if not whole:
            whole = tuple(part.new_empty(inputs.loss_mask_BT.shape) for part in parts)
        for out, part in zip(whole, parts, strict=True):
            out[rows] = part
    return whole
