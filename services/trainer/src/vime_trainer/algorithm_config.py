"""Advantage and loss as a recipe writes them. `build_*` make the library's own settings, which import torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from vime_service.config import ConfigModel
from vime_trainer.engine.config import CriticConfig, Weight

if TYPE_CHECKING:
    from vime_trainer.algorithms.advantages import AdvantageConfig
    from vime_trainer.algorithms.decisions import SoftOverlong
    from vime_trainer.algorithms.losses import CorrectionConfig, PolicyLossConfig, ValueLossConfig


class CorrectionSettings(ConfigModel):
    """Correction of the mismatch between engine and trainer; weights carry no gradient."""

    kind: Literal["none", "tis", "icepop", "mis"] = "none"
    """tis: truncated importance sampling. icepop: zero outside the bounds. mis: any level and mode, with veto."""

    level: Literal["token", "sequence", "geometric"] = "token"
    """mis: over what the ratio is taken."""

    mode: Literal["truncate", "clip", "mask"] = "truncate"
    """mis: what happens beyond the bounds."""

    high: float = Field(default=2.0, ge=1, lt=4.8e8)
    """Upper bound of the ratio."""

    low: float | None = Field(default=None, ge=0, le=1)
    """Lower bound. Unset: 0 for tis, 0.5 for icepop, 1 / high for mis."""

    veto: float | None = Field(default=None, gt=0, lt=1)
    """mis: a sample with any token ratio below this is rejected whole."""

    batch_normalize: bool = False
    """Divide by the mean weight of the global batch."""

    renormalize: bool = False
    """Take rejected tokens out of the denominators. Off: they stay, as in the originals."""

    def idle(self) -> Mapping[str, str]:
        """What the kind of correction does not read."""
        kind = f"kind = '{self.kind}'"
        if self.kind == "none":
            return {name: kind for name in type(self).model_fields if name != "kind"}
        idle = {} if self.kind == "mis" else {"level": kind, "mode": kind}
        mode = {"tis": "clip", "icepop": "mask"}.get(self.kind, self.mode)
        if mode == "truncate":
            idle["low"] = "mode = 'truncate'"
        if mode != "mask" and self.veto is None:  # nothing is rejected
            idle["renormalize"] = f"{kind}, " + ("mode = '" + mode + "' " if self.kind == "mis" else "") + "and no veto"
        return idle


class OverlongSettings(ConfigModel):
    """DAPO's soft punishment of long responses, added to the reward before the group's statistics."""

    max_length: int = Field(gt=0)
    """Response tokens from which the full punishment counts; usually the table's max_tokens."""

    cache: int = Field(gt=0)
    """Tokens before max_length over which it grows from 0."""

    factor: float = Field(default=1.0, gt=0, le=1e6)
    """The full punishment."""

    @model_validator(mode="after")
    def _cache_fits(self) -> OverlongSettings:
        if self.cache > self.max_length:
            raise ValueError(f"cache = {self.cache} must not exceed max_length = {self.max_length}")
        return self


class AlgorithmConfig(ConfigModel):
    """GRPO with a clip is the default; every other member of the family is a change of these settings."""

    estimator: str = "grpo"
    """grpo, dr_grpo, gspo, cispo, rloo, reinforce_plus_plus, reinforce_plus_plus_baseline, ppo (with a critic), opd
    (the teacher alone)."""

    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount per unmasked token (ppo, reinforce_plus_plus)."""

    lam: float = Field(default=1.0, ge=0, le=1)
    """λ of GAE (ppo)."""

    kl_coef: Weight = 0.0
    """Weight of the KL to the reference inside the reward."""

    whiten: bool | None = None
    """Whiten advantages over the global batch. Unset: as the estimator's paper does."""

    opd_kl_coef: Weight = 0.0
    """Weight of on-policy distillation: the reverse KL to the teacher (model.teacher) is taken from the advantage."""

    overlong: OverlongSettings | None = None
    """Soft punishment of long responses. Unset: off."""

    critic: CriticConfig | None = None
    """The critic of estimator ppo; unset: its defaults."""

    objective: Literal["clip", "gspo", "cispo", "reinforce", "sft"] = "clip"
    """The policy-gradient objective; or sft, which learns the demonstrations of the table `sft` and reads neither
    reward nor advantage."""

    eps_clip: float = Field(default=0.2, gt=0, le=1e6)
    """ε of the clip, below and (unless eps_clip_high is set) above."""

    eps_clip_high: float | None = Field(default=None, gt=0, le=1e6)
    """ε above (DAPO: 0.28)."""

    eps_clip_c: float | None = Field(default=None, gt=1, le=1e6)
    """Dual clip's c. Unset: off."""

    opsm_delta: Weight | None = None
    """Off-policy sequence masking. Unset: off."""

    reducer: Literal["token_mean", "sequence_mean", "fixed_length"] = "token_mean"
    """How per-token losses become one number, over the global batch."""

    fixed_length: int | None = Field(default=None, gt=0)
    """Length of the fixed_length reducer, in tokens (Dr.GRPO: the response budget)."""

    entropy_coef: Weight = 0.0
    """Weight of the entropy bonus."""

    kl_loss_coef: Weight = 0.0
    """Weight of the KL to the reference in the loss."""

    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = "k3"
    """Estimator of that KL."""

    reference_refresh_interval: int = Field(default=0, ge=0)
    """Batches after which the policy becomes the reference; 0: the reference stays the starting model."""

    correction: CorrectionSettings = CorrectionSettings()
    """Correction of the mismatch."""

    use_rollout_logprobs: bool = False
    """Take the engine's logprobs as those of the old policy, instead of the trainer's own. For k > 0 this is the
    usual choice: the clip then bounds the distance to the policy that sampled."""

    mini_batches: int = Field(default=1, ge=1)
    """Optimizer steps per batch."""

    mask_truncated: bool = False
    """Leave samples that were cut by the budget out of the loss and its denominators (after the statistics)."""

    def idle(self) -> Mapping[str, str]:
        """What the objective, the estimator and the rest do not read."""
        objective, estimator = f"objective = '{self.objective}'", f"estimator = '{self.estimator}'"
        if self.objective == "sft":
            read = {"objective", "reducer", "mini_batches"}
            idle = {name: objective for name in type(self).model_fields if name not in read}
        else:
            rules = {
                "eps_clip": (self.objective == "reinforce", objective),
                "eps_clip_high": (self.objective == "reinforce", objective),
                "eps_clip_c": (self.objective not in ("clip", "gspo"), objective),
                "kl_loss_type": (self.kl_loss_coef == 0, "kl_loss_coef = 0"),
                "critic": (not needs_critic(self), f"{estimator}, which has no critic; only ppo has one"),
                "overlong": (self.estimator == "opd", f"{estimator}, which reads no reward"),
                "reference_refresh_interval": (not needs_reference(self), "kl_coef = 0 and kl_loss_coef = 0"),
            }
            idle = {name: why for name, (is_idle, why) in rules.items() if is_idle}
            if self.correction.kind != "none" and self.objective == "reinforce":
                idle["correction"] = objective
            elif self.correction.kind != "none" and self.use_rollout_logprobs:
                idle["correction"] = "use_rollout_logprobs = true: they have no mismatch with themselves"
        if self.reducer == "fixed_length":
            idle.pop("fixed_length", None)
        else:
            idle["fixed_length"] = f"reducer = '{self.reducer}'"
        return idle

    @model_validator(mode="after")
    def _there_is_something_to_learn(self) -> AlgorithmConfig:
        if self.estimator == "opd" and not needs_teacher(self) and self.objective != "sft":
            raise ValueError("estimator = 'opd' with opd_kl_coef = 0 has nothing to learn from; set opd_kl_coef")
        return self


def needs_reference(config: AlgorithmConfig) -> bool:
    """True if a KL to the reference policy is in the reward or in the loss."""
    return config.kl_coef > 0 or config.kl_loss_coef > 0


def needs_critic(config: AlgorithmConfig) -> bool:
    """True if the advantages come from values."""
    return config.estimator in ("ppo", "gae")


def needs_teacher(config: AlgorithmConfig) -> bool:
    """True if the advantages come from a teacher's logprobs."""
    return config.opd_kl_coef > 0


def critic_config(config: AlgorithmConfig) -> CriticConfig | None:
    """Settings of the critic; None for estimators without one."""
    return (config.critic or CriticConfig()) if needs_critic(config) else None


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
        opd_kl_coef=config.opd_kl_coef,
    )
    resolve(made)
    return made


def build_value_loss(config: AlgorithmConfig) -> ValueLossConfig:
    """The library's settings; reduced as the policy's loss is."""
    from vime_trainer.algorithms.losses import ValueLossConfig

    critic = config.critic or CriticConfig()
    return ValueLossConfig(
        value_clip=critic.value_clip or None, reducer=config.reducer, fixed_length=config.fixed_length
    )


def build_overlong(config: AlgorithmConfig) -> SoftOverlong | None:
    """The library's settings; None if long responses are not punished."""
    from vime_trainer.algorithms.decisions import SoftOverlong

    chosen = config.overlong
    return None if chosen is None else SoftOverlong(chosen.max_length, chosen.cache, chosen.factor)


def build_loss(config: AlgorithmConfig) -> PolicyLossConfig:
    """The library's settings. Raises ValueError for values out of range and for sft, which is no policy loss."""
    from vime_trainer.algorithms.losses import PolicyLossConfig

    if config.objective == "sft":
        raise ValueError("objective = 'sft' is no policy loss")
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
