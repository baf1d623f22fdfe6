"""Advantage and loss as a recipe writes them. `build_*` make the library's own settings, which import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from vime_service.config import ConfigModel

if TYPE_CHECKING:
    from vime_trainer.algorithms.advantages import AdvantageConfig
    from vime_trainer.algorithms.losses import CorrectionConfig, PolicyLossConfig


class CorrectionSettings(ConfigModel):
    """Correction of the mismatch between engine and trainer; weights carry no gradient."""

    kind: Literal["none", "tis", "icepop", "mis"] = "none"
    """tis: truncated importance sampling. icepop: zero outside the bounds. mis: any level and mode, with veto."""

    level: Literal["token", "sequence", "geometric"] = "token"
    """mis: over what the ratio is taken."""

    mode: Literal["truncate", "clip", "mask"] = "truncate"
    """mis: what happens beyond the bounds."""

    high: float = Field(default=2.0, gt=0)
    """Upper bound of the ratio."""

    low: float | None = Field(default=None, ge=0)
    """Lower bound. Unset: 0 for tis, 0.5 for icepop, 1 / high for mis."""

    veto: float | None = Field(default=None, gt=0, lt=1)
    """mis: a sample with any token ratio below this is rejected whole."""

    batch_normalize: bool = False
    """Divide by the mean weight of the global batch."""

    renormalize: bool = False
    """Take rejected tokens out of the denominators. Off: they stay, as in the originals."""


class AlgorithmConfig(ConfigModel):
    """GRPO with a clip is the default; every other member of the family is a change of these settings."""

    estimator: str = "grpo"
    """grpo, dr_grpo, gspo, cispo, rloo, reinforce_plus_plus, reinforce_plus_plus_baseline, ppo."""

    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount per unmasked token (ppo, reinforce_plus_plus)."""

    lam: float = Field(default=1.0, ge=0, le=1)
    """λ of GAE (ppo)."""

    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL to the reference inside the reward."""

    whiten: bool | None = None
    """Whiten advantages over the global batch. Unset: as the estimator's paper does."""

    objective: Literal["clip", "gspo", "cispo", "reinforce"] = "clip"
    """The policy-gradient objective."""

    eps_clip: float = Field(default=0.2, gt=0)
    """ε of the clip, below and (unless eps_clip_high is set) above."""

    eps_clip_high: float | None = Field(default=None, gt=0)
    """ε above (DAPO: 0.28)."""

    eps_clip_c: float | None = Field(default=None, gt=1)
    """Dual clip's c. Unset: off."""

    opsm_delta: float | None = Field(default=None, ge=0)
    """Off-policy sequence masking. Unset: off."""

    reducer: Literal["token_mean", "sequence_mean", "fixed_length"] = "token_mean"
    """How per-token losses become one number, over the global batch."""

    fixed_length: int | None = Field(default=None, gt=0)
    """Length of the fixed_length reducer, in tokens (Dr.GRPO: the response budget)."""

    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""

    kl_loss_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL to the reference in the loss."""

    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = "k3"
    """Estimator of that KL."""

    correction: CorrectionSettings = CorrectionSettings()
    """Correction of the mismatch."""

    use_rollout_logprobs: bool = False
    """Take the engine's logprobs as those of the old policy, instead of the trainer's own. For k > 0 this is the
    usual choice: the clip then bounds the distance to the policy that sampled."""

    mini_batches: int = Field(default=1, ge=1)
    """Optimizer steps per batch."""

    mask_truncated: bool = False
    """Leave samples that were cut by the budget out of the loss and its denominators (after the statistics)."""

    @model_validator(mode="after")
    def _roles_exist(self) -> AlgorithmConfig:
        if self.estimator in ("ppo", "gae"):
            raise ValueError(f"estimator = '{self.estimator}' needs a critic, which is not there yet")
        return self


def needs_reference(config: AlgorithmConfig) -> bool:
    """True if a KL to the reference policy is in the reward or in the loss."""
    return config.kl_coef > 0 or config.kl_loss_coef > 0


def build_advantage(config: AlgorithmConfig) -> AdvantageConfig:
    """The library's settings. Raises ValueError for combinations that an estimator would ignore."""
    from vime_trainer.algorithms.advantages import AdvantageConfig
    from vime_trainer.algorithms.advantages.compute import resolve

    made = AdvantageConfig(
        estimator=config.estimator,
        gamma=config.gamma,
        lam=config.lam,
        kl_coef=config.kl_coef,
        whiten=config.whiten,
    )
    resolve(made)
    return made


def build_loss(config: AlgorithmConfig) -> PolicyLossConfig:
    """The library's settings. Raises ValueError for values out of range."""
    from vime_trainer.algorithms.losses import PolicyLossConfig

    return PolicyLossConfig(
        objective=config.objective,
        eps_clip=config.eps_clip,
        eps_clip_high=config.eps_clip_high,
        eps_clip_c=config.eps_clip_c,
        opsm_delta=config.opsm_delta,
        correction=_build_correction(config.correction),
        entropy_coef=config.entropy_coef,
        kl_loss_coef=config.kl_loss_coef,
        kl_loss_type=config.kl_loss_type,
        reducer=config.reducer,
        fixed_length=config.fixed_length,
    )


def _build_correction(config: CorrectionSettings) -> CorrectionConfig | None:
    from vime_trainer.algorithms.losses import CorrectionConfig

    if config.kind == "none":
        return None
    level, mode, low = config.level, config.mode, config.low
    if config.kind == "tis":
        level, mode, low = "token", "clip", 0.0 if low is None else low
    elif config.kind == "icepop":
        level, mode, low = "token", "mask", 0.5 if low is None else low
    return CorrectionConfig(
        level=level,
        mode=mode,
        high=config.high,
        low=low,
        veto=config.veto,
        batch_normalize=config.batch_normalize,
        renormalize=config.renormalize,
    )
