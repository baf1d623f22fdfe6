"""Correction of the mismatch between the trainer's policy π_o and the engine's q: weights without gradient.

    w = exp(agg_t(log π_o − log q)),   agg: token (itself), sequence (sum), geometric (mean)

TIS: Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025). IcePop: Ling team,
"Every Step Evolves" (arXiv 2510.18855). MIS, rejection and veto: Liu et al., "When Speed Kills Stability" (2025).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from vime_trainer.algorithms.checks import require
from vime_trainer.algorithms.metrics import Averager, Metrics, as_mean
from vime_trainer.algorithms.tensors import row_sum

Level = Literal["token", "sequence", "geometric"]
Mode = Literal["truncate", "clip", "mask"]
LOG_BOUND = 20.0
"""|log w| beyond which exp is not evaluated; every sensible bound lies far inside."""


@dataclass(frozen=True)
class Rejection:
    """Tokens (or whole samples) whose ratio at `level` is outside [low, high] get weight 0."""

    level: Level = "sequence"
    high: float = 2.0
    low: float | None = None
    """None: 1 / high."""

    def __post_init__(self) -> None:
        _check_bounds(self, self.lower, self.high)

    @property
    def lower(self) -> float:
        """The lower bound in force."""
        return 1.0 / self.high if self.low is None else self.low


@dataclass(frozen=True)
class CorrectionConfig:
    """Weight, then rejection, then veto. `tis()`, `icepop()` and `mis()` build the usual ones."""

    level: Level = "token"
    mode: Mode = "truncate"
    """truncate: min(w, high). clip: clamp(w, low, high). mask: w inside [low, high], else rejected."""
    high: float = 2.0
    low: float | None = None
    """None: 1 / high."""
    rejection: Rejection | None = None
    """A second criterion with its own level and bounds."""
    veto: float | None = None
    """A sample with any token ratio below this (1e-4 in the original) is rejected whole. None: off."""
    batch_normalize: bool = False
    """Divide by the mean weight of the global batch (over kept tokens), so that the mean is 1."""
    renormalize: bool = False
    """Take rejected tokens out of the denominators. Off: they stay, as in the originals."""
    prefix: str = "mis_"
    """Of the metrics; `tis()` and `icepop()` report under the plain tis names besides."""

    def __post_init__(self) -> None:
        require(self.level in ("token", "sequence", "geometric"), self, "level", "token, sequence or geometric")
        require(self.mode in ("truncate", "clip", "mask"), self, "mode", "truncate, clip or mask")
        _check_bounds(self, self.lower, self.high)
        require(self.veto is None or 0 < self.veto < 1, self, "veto", "must be in (0, 1)")

    @property
    def lower(self) -> float:
        """The lower bound in force."""
        return 1.0 / self.high if self.low is None else self.low

    @property
    def needs_whole_batch(self) -> bool:
        """The weights or the denominators depend on every token of the batch (see `batch_denominators`)."""
        return self.batch_normalize or self.renormalize


def _check_bounds(settings: Rejection | CorrectionConfig, lower: float, high: float) -> None:
    require(0 < high < math.exp(LOG_BOUND), settings, "high", f"must be in (0, e^{LOG_BOUND:g})")
    require(0 <= lower < high, settings, "low", f"must be in [0, high={high:g}); None means 1/high={1 / high:g}")


def tis(high: float = 2.0, low: float = 0.0) -> CorrectionConfig:
    """Truncated importance sampling: w_t = clamp(π_o/q, low, high)."""
    return CorrectionConfig(level="token", mode="clip", low=low, high=high)


def icepop(low: float = 0.5, high: float = 2.0) -> CorrectionConfig:
    """IcePop: w_t = π_o/q inside [low, high], else 0."""
    return CorrectionConfig(level="token", mode="mask", low=low, high=high)


def mis(
    level: Level = "token", mode: Mode = "truncate", high: float = 2.0, veto: float | None = 1e-4
) -> CorrectionConfig:
    """Masked or truncated importance sampling at any level, with veto."""
    return CorrectionConfig(level=level, mode=mode, high=high, veto=veto)


@dataclass(frozen=True)
class Correction:
    """`weight_BT`: w, 0 where rejected, before batch normalisation; no gradient. `kept_BT`: bool, False where
    rejected or masked. `ratio_BT`: w before bounds, [B, T] or [B, 1].
    """

    weight_BT: Tensor
    kept_BT: Tensor
    ratio_BT: Tensor
    log_ratio_BT: Tensor


def correct(old_BT: Tensor, rollout_BT: Tensor, mask_BT: Tensor, config: CorrectionConfig) -> Correction:
    """Weights of one micro-batch; each sample depends on itself alone. `mask_BT` bool."""
    log_ratio_BT = (old_BT.detach() - rollout_BT.detach()).masked_fill(~mask_BT, 0.0)
    ratio_BT = _ratio(log_ratio_BT, mask_BT, config.level)
    kept_BT = mask_BT
    if config.mode == "truncate":
        weight_BT = ratio_BT.clamp(max=config.high)
    elif config.mode == "clip":
        weight_BT = ratio_BT.clamp(config.lower, config.high)
    else:
        weight_BT = ratio_BT
        kept_BT = kept_BT & _inside(ratio_BT, config.lower, config.high)
    if config.rejection is not None:
        second_BT = _ratio(log_ratio_BT, mask_BT, config.rejection.level)
        kept_BT = kept_BT & _inside(second_BT, config.rejection.lower, config.rejection.high)
    if config.veto is not None:
        kept_BT = kept_BT & ~_catastrophic(log_ratio_BT, config.veto).any(-1, keepdim=True)
    return Correction(weight_BT * kept_BT.to(weight_BT.dtype), kept_BT, ratio_BT, log_ratio_BT)


def _ratio(log_ratio_BT: Tensor, mask_BT: Tensor, level: Level) -> Tensor:
    """exp of the aggregated log ratio: [B, T], or [B, 1] for a level above the token."""
    log_w = log_ratio_BT
    if level != "token":
        tokens_B1 = mask_BT.sum(-1, keepdim=True).clamp(min=1) if level == "geometric" else 1
        log_w = log_ratio_BT.sum(-1, keepdim=True) / tokens_B1
    return log_w.clamp(-LOG_BOUND, LOG_BOUND).exp()


def _inside(ratio_BT: Tensor, low: float, high: float) -> Tensor:
    return (ratio_BT >= low) & (ratio_BT <= high)


def _catastrophic(log_ratio_BT: Tensor, veto: float) -> Tensor:
    return log_ratio_BT < math.log(veto)


def correction_metrics(made: Correction, config: CorrectionConfig, average: Averager) -> Metrics:
    """`tis*` and `mis_*`, over all unmasked tokens, rejected ones included."""
    ratio_BT, weight_BT = made.ratio_BT, made.weight_BT
    changed_BT = (ratio_BT != weight_BT) & average.mask_BT
    metrics = {
        "tis": average(ratio_BT),
        "tis_clipfrac": average(changed_BT),
        "tis_abs": average((ratio_BT - 1).abs()),
        "mis_mean_is_weight_before_clip": average(ratio_BT),
        "mis_ratio_mean_after_mis": average(weight_BT),
    }
    high_BT, low_BT = ratio_BT > config.high, ratio_BT < config.lower
    if config.mode == "truncate":
        metrics["mis_truncate_fraction"] = average(_wide(high_BT, average))
    else:
        metrics[f"mis_{config.mode}_fraction_low"] = average(_wide(low_BT, average))
        metrics[f"mis_{config.mode}_fraction_high"] = average(_wide(high_BT, average))
    if config.rejection is not None or config.veto is not None or config.mode == "mask":
        metrics["mis_rejected_fraction"] = average(average.mask_BT & ~made.kept_BT)
    if config.veto is not None:
        bad_BT = _catastrophic(made.log_ratio_BT, config.veto)
        metrics["mis_catastrophic_token_fraction"] = average(bad_BT)
        metrics["mis_catastrophic_seq_fraction"] = as_mean(bad_BT.any(-1), average.tokens_B > 0)
    return metrics


def _wide(x: Tensor, average: Averager) -> Tensor:
    return x.expand(average.mask_BT.shape)


def mean_weight(made: Correction) -> tuple[Tensor, Tensor]:
    """(Σ w, number) over kept tokens, float64: the parts of the batch mean."""
    ones_BT = made.kept_BT.to(made.weight_BT.dtype)
    return row_sum(made.weight_BT, ones_BT).double().sum(), made.kept_BT.sum().double()
