"""Settings of the policy loss."""

from __future__ import annotations

from dataclasses import dataclass

from vime_trainer.algorithms.checks import require
from vime_trainer.algorithms.kl import KL_ESTIMATORS
from vime_trainer.algorithms.losses.correction import CorrectionConfig


@dataclass(frozen=True)
class PolicyLossConfig:
    """Settings of the policy loss. The defaults are PPO's clip, a mean over sequences, no KL, no entropy."""

    objective: str = "clip"
    """A name in `OBJECTIVES`: clip (PPO, GRPO, DAPO, Dr.GRPO, RLOO, REINFORCE++), gspo, cispo, reinforce,
    score_centering."""
    eps_clip: float = 0.2
    """ε: the ratio is clipped below at 1 − ε. For gspo use the paper's 3e-4; for cispo ε ≥ 1 removes the bound."""
    eps_clip_high: float | None = None
    """ε_hi: clipped above at 1 + ε_hi. None: as eps_clip. DAPO's clip-higher is 0.28."""
    eps_clip_c: float | None = None
    """c > 1 of dual clip: for A < 0 the loss is at most −cA. None: off."""
    opsm_delta: float | None = None
    """Off-policy sequence masking threshold; 1e-4 in the original. None: off."""
    correction: CorrectionConfig | None = None
    """Correction of the mismatch between engine and trainer: `tis()`, `icepop()`, `mis()`. None: off."""
    importance: str = "one"
    """f of the weight f(p/q) in reinforce and score_centering: one, identity, truncate or mask."""
    importance_low: float = 0.0
    importance_high: float = 2.0
    """Bounds of truncate and mask."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus: −entropy_coef · H is added to the loss."""
    kl_loss_coef: float = 0.0
    """Weight of KL(π ‖ π_r), added with a plus sign."""
    kl_loss_type: str = "k1"
    """k1, k2, k3 or low_var_kl. k1 has zero gradient on average: choose k2 or k3 when the term is meant to pull."""
    unbiased_kl: bool = False
    """Weigh the KL estimator by π/π_o, with gradient."""
    reducer: str = "sequence_mean"
    """token_mean (DAPO), sequence_mean (GRPO) or fixed_length (Dr.GRPO)."""
    fixed_length: int | None = None
    """L of the fixed_length reducer, in tokens."""

    def __post_init__(self) -> None:
        require(self.eps_clip > 0, self, "eps_clip", "must be > 0")
        one_sided = self.objective == "cispo"
        require(self.eps_clip < 1 or one_sided, self, "eps_clip", "must be < 1 (only cispo may drop the lower bound)")
        high = self.eps_clip if self.eps_clip_high is None else self.eps_clip_high
        require(high > 0, self, "eps_clip_high", "must be > 0")
        require(self.eps_clip_c is None or self.eps_clip_c > 1, self, "eps_clip_c", "must be > 1")
        require(
            self.eps_clip_c is None or self.objective in ("clip", "gspo"),
            self,
            "eps_clip_c",
            f"objective {self.objective} has no dual clip",
        )
        require(self.opsm_delta is None or self.opsm_delta >= 0, self, "opsm_delta", "must be >= 0")
        require(self.kl_loss_coef >= 0, self, "kl_loss_coef", "must be >= 0 (a positive weight pulls to the reference)")
        require(self.kl_loss_type in KL_ESTIMATORS, self, "kl_loss_type", f"known: {', '.join(KL_ESTIMATORS)}")
        require(
            0 <= self.importance_low < self.importance_high,
            self,
            "importance_low",
            f"must be in [0, importance_high={self.importance_high})",
        )
        fixed = self.reducer == "fixed_length"
        require(
            fixed == (self.fixed_length is not None),
            self,
            "fixed_length",
            "must be given with the fixed_length reducer, and only with it",
        )
        require(self.fixed_length is None or self.fixed_length > 0, self, "fixed_length", "must be > 0")
        centred = self.objective in ("reinforce", "score_centering")
        require(
            not centred or self.correction is None,
            self,
            "correction",
            f"objective {self.objective} weighs by `importance` itself",
        )
        require(centred or self.importance == "one", self, "importance", f"objective {self.objective} ignores it")

    @property
    def ratio_low(self) -> float:
        """1 − ε, not below 0."""
        return max(1.0 - self.eps_clip, 0.0)

    @property
    def ratio_high(self) -> float:
        """1 + ε_hi."""
        return 1.0 + (self.eps_clip if self.eps_clip_high is None else self.eps_clip_high)
