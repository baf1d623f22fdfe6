"""From rewards to advantages: estimator, then distillation term, then whitening, then zero where masked."""

from __future__ import annotations

import torch
from torch import Tensor

from vime_trainer.algorithms.advantages.base import (
    AdvantageConfig,
    AdvantageInputs,
    Advantages,
    Estimate,
    Estimator,
    EstimatorFunction,
)
from vime_trainer.algorithms.advantages.distillation import reverse_kl, teacher_alone
from vime_trainer.algorithms.advantages.gae import gae
from vime_trainer.algorithms.advantages.grpo import dr_grpo, grpo
from vime_trainer.algorithms.advantages.reinforce_plus_plus import reinforce_plus_plus
from vime_trainer.algorithms.advantages.reinforce_plus_plus_baseline import reinforce_plus_plus_baseline
from vime_trainer.algorithms.advantages.rloo import rloo
from vime_trainer.algorithms.advantages.whiten import whiten
from vime_trainer.algorithms.checks import choice
from vime_trainer.algorithms.groups import group_statistics
from vime_trainer.algorithms.masking import Mask, row_blocks
from vime_trainer.algorithms.metrics import Averages, Metrics, as_sum
from vime_trainer.algorithms.ranks import LOCAL, Reduce

ESTIMATORS: dict[str, Estimator] = {
    "grpo": Estimator(grpo),
    "dr_grpo": Estimator(dr_grpo),
    "gspo": Estimator(grpo),
    "cispo": Estimator(grpo),
    "rloo": Estimator(rloo),
    "opd": Estimator(teacher_alone),
    "reinforce_plus_plus": Estimator(reinforce_plus_plus, whitens=True, reads_kl=True, reads_gamma=True),
    "reinforce_plus_plus_baseline": Estimator(reinforce_plus_plus_baseline, whitens=True, reads_kl=True),
    "gae": Estimator(gae, reads_kl=True, reads_gamma=True, reads_values=True),
    "ppo": Estimator(gae, reads_kl=True, reads_gamma=True, reads_values=True),
}
"""A new estimator is one file beside these and one line here."""


def compute_advantages(
    inputs: AdvantageInputs,
    config: AdvantageConfig,
    reduce: Reduce = LOCAL,
    estimator: EstimatorFunction | None = None,
) -> Advantages:
    """Advantages of one rank's samples; statistics over the global batch through `reduce`.

    `estimator` is a user's own function; it replaces the one that `config` names. Group statistics are taken before
    any truncation filter: mask truncated samples afterwards. Raises `ValueError` for a setting that the estimator
    would ignore, for missing inputs and when an estimator returns another shape: causes that every rank sees alike. A
    non-finite advantage (from non-finite logprobs or values) does not raise, because the other ranks would wait for
    this one; it is counted by sample, makes the loss non-finite, and the trainer skips the step.
    """
    entry = resolve(config, estimator)
    mask_BT = inputs.loss_mask_BT
    estimate = entry.function(inputs, config, reduce)
    advantages_BT = _checked(estimate, mask_BT)
    metrics = _group_metrics(inputs, reduce)
    if config.opd_kl_coef > 0:
        opd_BT = reverse_kl(inputs, config)
        advantages_BT = advantages_BT - config.opd_kl_coef * opd_BT.to(advantages_BT.dtype)
        averages = Averages(Mask(mask_BT), over_tokens=False)
        averages.add("opd_reverse_kl", opd_BT, masked=0.0)
        metrics |= averages.metrics()
    if entry.whitens if config.whiten is None else config.whiten:
        advantages_BT = whiten(advantages_BT, mask_BT, reduce)
    advantages_BT, total_B = _zero_masked(advantages_BT, mask_BT)
    metrics["non_finite_advantages"] = as_sum(~torch.isfinite(total_B))  # NaN and ±inf survive a sum
    returns_BT = None if estimate.returns_BT is None else _zero_masked(estimate.returns_BT, mask_BT)[0]
    return Advantages(advantages_BT, mask_BT, returns_BT, ~torch.isfinite(inputs.rewards_B), metrics)


def resolve(config: AdvantageConfig, estimator: EstimatorFunction | None = None) -> Estimator:
    """The estimator of `config`, after refusing settings that it would ignore. A user's function may read them all."""
    if estimator is not None:
        return Estimator(estimator, reads_kl=True, reads_gamma=True, reads_values=True)
    entry: Estimator = choice(config.estimator, "advantage estimator", ESTIMATORS)
    ignored = {
        "kl_coef": config.kl_coef != 0 and not entry.reads_kl,
        "gamma": config.gamma != 1 and not entry.reads_gamma,
        "lam": config.lam != 1 and not entry.reads_values,
    }
    for field in (field for field, is_ignored in ignored.items() if is_ignored):
        hint = "; use kl_loss_coef of the policy loss" if field == "kl_coef" else ""
        raise ValueError(f"AdvantageConfig.{field}={getattr(config, field)}: {config.estimator} ignores it{hint}")
    return entry


def _checked(estimate: Estimate, mask_BT: Tensor) -> Tensor:
    if estimate.advantages_BT.shape != mask_BT.shape:
        got, expected = tuple(estimate.advantages_BT.shape), tuple(mask_BT.shape)
        raise ValueError(f"the estimator returned advantages of shape {got}, expected {expected}")
    return estimate.advantages_BT


def _zero_masked(x_BT: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    """`x_BT` with 0 at masked tokens, and its row sums [B]."""
    zeroed_BT = torch.empty(mask_BT.shape, dtype=x_BT.dtype, device=x_BT.device)
    total_B = torch.empty(len(mask_BT), dtype=x_BT.dtype, device=x_BT.device)
    for rows in row_blocks(mask_BT):
        Mask(mask_BT[rows]).zero(x_BT[rows], out=zeroed_BT[rows])
        total_B[rows] = zeroed_BT[rows].sum(-1)
    return zeroed_BT, total_B


def _group_metrics(inputs: AdvantageInputs, reduce: Reduce) -> Metrics:
    """Samples that carry no signal, counted per sample so that ranks add up."""
    group = group_statistics(inputs.rewards_B, inputs.groups, inputs.trajectories, reduce)
    single_B = group.scored_B & (group.count_B == 1)
    return {
        "unscored_samples": as_sum(~group.scored_B),
        "singleton_group_samples": as_sum(single_B),
        "zero_std_group_samples": as_sum(group.scored_B & group.equal_B & ~single_B),
    }
