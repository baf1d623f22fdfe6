"""Correction of the mismatch between the trainer's policy π_o and the engine's q: weights without gradient.

    w = exp(agg_t(log π_o − log q)),   agg: token (itself), sequence (sum), geometric (mean)

TIS: Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025). IcePop: Ling team,
"Every Step Evolves" (arXiv 2510.18855). MIS, rejection and veto: Liu et al., "When Speed Kills Stability" (2025).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vime_trainer.algorithms.checks import require
from vime_trainer.algorithms.masking import Mask, where_true
from vime_trainer.algorithms.metrics import Averages

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
    require(1 <= high < math.exp(LOG_BOUND), settings, "high", f"must be in [1, e^{LOG_BOUND:g}): 1 is no mismatch")
    require(0 <= lower <= 1, settings, "low", "must be in [0, 1]: 1 is no mismatch")
    require(lower < high, settings, "low", f"must be below high={high:g}; None means 1/high={1 / high:g}")


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
    rejected or masked, None when nothing can be rejected. `ratio_BT`: w before bounds. `weight_BT` and `ratio_BT`
    may be [B, 1] for a level above the token. `log_ratio_BT` = log π_o − log q.
    """

    weight_BT: Tensor
    kept_BT: Tensor | None
    ratio_BT: Tensor
    log_ratio_BT: Tensor


def correct(log_ratio_BT: Tensor, mask: Mask, config: CorrectionConfig) -> Correction:
    """Weights of one micro-batch from log π_o − log q, 0 at masked tokens; each sample depends on itself alone."""
    ratio_BT = _ratio(log_ratio_BT, mask, config.level)
    rejects = config.mode == "mask" or config.rejection is not None or config.veto is not None
    if not rejects:
        low = 0.0 if config.mode == "truncate" else config.lower
        return Correction(ratio_BT.clamp(low, config.high), None, ratio_BT, log_ratio_BT)
    kept_BT, weight_BT = mask.bool_BT, ratio_BT
    if config.mode == "mask":
        kept_BT = kept_BT & _inside(ratio_BT, config.lower, config.high)
    else:
        weight_BT = ratio_BT.clamp(0.0 if config.mode == "truncate" else config.lower, config.high)
    if config.rejection is not None:
        second_BT = _ratio(log_ratio_BT, mask, config.rejection.level)
        kept_BT = kept_BT & _inside(second_BT, config.rejection.lower, config.rejection.high)
    if config.veto is not None:
        worst_B1 = log_ratio_BT.amin(-1, keepdim=True) if log_ratio_BT.shape[-1] else log_ratio_BT.sum(-1, keepdim=True)
        kept_BT = kept_BT & (worst_B1 >= math.log(config.veto))
    return Correction(Mask(kept_BT).zero(weight_BT.expand(kept_BT.shape)), kept_BT, ratio_BT, log_ratio_BT)


def _ratio(log_ratio_BT: Tensor, mask: Mask, level: Level) -> Tensor:
    """exp of the aggregated log ratio: [B, T], or [B, 1] for a level above the token."""
    if level == "token":
        log_w = log_ratio_BT
    else:
        log_w = (mask.sum(log_ratio_BT) if level == "sequence" else mask.mean(log_ratio_BT))[:, None]
    return log_w.clamp(-LOG_BOUND, LOG_BOUND).exp()


def _inside(ratio_BT: Tensor, low: float, high: float) -> Tensor:
    return (ratio_BT >= low) & (ratio_BT <= high)


def measure_correction(made: Correction, config: CorrectionConfig, averages: Averages) -> None:
    """`tis*` and `mis_*`, over all unmasked tokens, rejected ones included."""
    ratio_BT, weight_BT = made.ratio_BT, made.weight_BT
    # Where masked the ratio is 1, and comparisons are 0, since the bounds hold 1; that saves passes over memory.
    averages.add("tis", ratio_BT, masked=1.0)
    averages.same("mis_mean_is_weight_before_clip", "tis")
    averages.add("tis_abs", (ratio_BT - 1).abs_(), masked=0.0)
    if made.kept_BT is None:
        averages.add("mis_ratio_mean_after_mis", weight_BT, masked=1.0)
    else:
        averages.add("mis_ratio_mean_after_mis", weight_BT)
    averages.add(
        "tis_clipfrac", where_true(torch.ne, ratio_BT, weight_BT), masked=0.0 if made.kept_BT is None else None
    )
    high = "mis_truncate_fraction" if config.mode == "truncate" else f"mis_{config.mode}_fraction_high"
    averages.add(high, where_true(torch.gt, ratio_BT, config.high), masked=0.0)
    if config.mode != "truncate":
        # a ratio is never below 0
        low_BT = (
            where_true(torch.lt, ratio_BT, config.lower) if config.lower > 0 else ratio_BT.new_zeros(len(ratio_BT), 1)
        )
        averages.add(f"mis_{config.mode}_fraction_low", low_BT, masked=0.0)
    if made.kept_BT is not None:
        averages.add("mis_rejected_fraction", (~made.kept_BT).to(ratio_BT.dtype))
    if config.veto is not None:
        bad_BT = where_true(torch.lt, made.log_ratio_BT, math.log(config.veto))
        averages.add("mis_catastrophic_token_fraction", bad_BT)
        any_B1 = (averages.mask.sum(bad_BT) > 0).to(bad_BT.dtype)[:, None]
        averages.add("mis_catastrophic_seq_fraction", any_B1, per_sample=True)


def mean_weight(made: Correction, mask: Mask) -> tuple[Tensor, Tensor]:
    """(Σ w, number) over kept tokens, float64: the parts of the batch mean."""
    kept = mask if made.kept_BT is None else Mask(made.kept_BT)
    return kept.sum(made.weight_BT).double().sum(), kept.tokens_B.sum()
