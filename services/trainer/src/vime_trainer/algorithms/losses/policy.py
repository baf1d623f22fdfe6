"""The policy loss of one micro-batch: objective, corrections, KL, entropy, and the metrics that explain it.

    L = Σ_t w_t · (L_t · mismatch weight_t + kl_loss_coef · KL_t − entropy_coef · H_t)

with the weights w_t of the reducer, which depend on the global batch alone; shares of micro-batches add up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vime_trainer.algorithms.checks import choice
from vime_trainer.algorithms.index import Index
from vime_trainer.algorithms.kl import kl_estimate
from vime_trainer.algorithms.losses.batch import LossOutput, PolicyBatch, Terms, TokenLoss
from vime_trainer.algorithms.losses.cispo import cispo
from vime_trainer.algorithms.losses.clip import clip, gspo
from vime_trainer.algorithms.losses.config import PolicyLossConfig
from vime_trainer.algorithms.losses.correction import correct, correction_metrics, mean_weight
from vime_trainer.algorithms.losses.opsm import opsm_dropped
from vime_trainer.algorithms.losses.score_centering import reinforce, score_centering
from vime_trainer.algorithms.metrics import Averager, Metrics, as_sum
from vime_trainer.algorithms.ranks import LOCAL, Reduce
from vime_trainer.algorithms.reducers import Denominators, Reducer, denominators, sample_weights, weighted_sum

Objective = Callable[[Terms, PolicyLossConfig], TokenLoss]

OBJECTIVES: dict[str, Objective] = {
    "clip": clip,
    "gspo": gspo,
    "cispo": cispo,
    "reinforce": reinforce,
    "score_centering": score_centering,
}
"""A new objective is one file beside these and one line here."""


@dataclass(frozen=True)
class PolicyTokens:
    """The loss before it is summed. [B, T] (or [B, 1]); `weight_B`, `pg_weight_B` float64 [B]. `pg_BT` includes
    OPSM and the mismatch weight `correction_BT`.

    L = Σ_b pg_weight_b Σ_t m·pg + Σ_b weight_b Σ_t m·(kl_loss_coef · kl − entropy_coef · entropy)
    """

    terms: Terms
    pg_BT: Tensor
    clipped_BT: Tensor | None
    correction_BT: Tensor | None
    kl_BT: Tensor | None
    entropy_BT: Tensor | None
    pg_weight_B: Tensor
    weight_B: Tensor
    metrics: Metrics


def policy_loss(
    batch: PolicyBatch,
    config: PolicyLossConfig,
    counts: Denominators,
    objective: Objective | None = None,
    reducer: Reducer | None = None,
) -> LossOutput:
    """The micro-batch's share of the batch loss, in float64, with gradient in `logprobs_BT` (and `entropy_BT`).

    `counts`: `batch_denominators` of the whole batch, restricted to these samples with `rows`. `objective` and
    `reducer` are a user's own; `reducer` then weighs the objective alone, not the KL and entropy terms.
    A batch without a single unmasked token gives 0 with zero gradient. Raises `ValueError` for missing inputs.
    """
    tokens = policy_tokens(batch, config, counts, objective, reducer)
    ones_BT, metrics = tokens.terms.ones_BT, dict(tokens.metrics)
    loss = weighted_sum(tokens.pg_BT, ones_BT, tokens.pg_weight_B)
    metrics["pg_loss"] = as_sum(loss)
    if tokens.kl_BT is not None:
        kl = weighted_sum(tokens.kl_BT, ones_BT, tokens.weight_B)
        metrics["kl_loss"] = as_sum(kl)
        loss = loss + config.kl_loss_coef * kl if config.kl_loss_coef else loss
    if tokens.entropy_BT is not None:
        entropy = weighted_sum(tokens.entropy_BT, ones_BT, tokens.weight_B)
        metrics["entropy_loss"] = as_sum(entropy)
        loss = loss - config.entropy_coef * entropy if config.entropy_coef else loss
    return LossOutput(loss, metrics | {"loss": as_sum(loss)})


def policy_tokens(
    batch: PolicyBatch,
    config: PolicyLossConfig,
    counts: Denominators,
    objective: Objective | None = None,
    reducer: Reducer | None = None,
) -> PolicyTokens:
    """Everything `policy_loss` adds up, token by token; arguments and errors are the same."""
    terms = Terms.of(batch)
    average = Averager(terms.mask_BT, over_tokens=config.reducer == "token_mean")
    function: Objective = objective or choice(config.objective, "objective", OBJECTIVES)
    token = function(terms, config)
    metrics = _ratio_metrics(terms, token, average)
    pg_BT = token.loss_BT
    if config.opsm_delta is not None:
        dropped_BT = opsm_dropped(terms, config.opsm_delta)
        pg_BT = pg_BT.masked_fill(dropped_BT, 0.0)
        metrics["opsm_clipfrac"] = average(dropped_BT)
    correction_BT = None
    if config.correction is not None:
        correction_BT, correction = _correction(terms, config, counts, average)
        pg_BT = pg_BT * correction_BT
        metrics |= correction
    weight_B = sample_weights(counts, config.reducer, config.fixed_length)
    return PolicyTokens(
        terms=terms,
        pg_BT=pg_BT,
        clipped_BT=token.clipped_BT,
        correction_BT=correction_BT,
        kl_BT=_kl(terms, config),
        entropy_BT=_entropy(terms, config),
        pg_weight_B=weight_B if reducer is None else sample_weights(counts, reducer),
        weight_B=weight_B,
        metrics=metrics,
    )


def batch_denominators(
    batch: PolicyBatch, config: PolicyLossConfig, trajectories: Index | None = None, reduce: Reduce = LOCAL
) -> Denominators:
    """`denominators` of a rank's whole `batch`, plus what the correction needs to know of every rank.

    Only when the correction renormalises or is batch-normalised does this read more than the mask; then the old
    logprobs must exist before the first micro-batch, or `ValueError`. Every rank must call it.
    """
    correction = config.correction
    if correction is None or not correction.needs_whole_batch:
        return denominators(batch.loss_mask_BT, trajectories, reduce)
    if batch.old_logprobs_BT is None or batch.rollout_logprobs_BT is None:
        raise ValueError("renormalize and batch_normalize need old_logprobs_BT and rollout_logprobs_BT of the batch")
    made = correct(batch.old_logprobs_BT, batch.rollout_logprobs_BT, batch.loss_mask_BT, correction)
    counts = denominators(made.kept_BT if correction.renormalize else batch.loss_mask_BT, trajectories, reduce)
    if not correction.batch_normalize:
        return counts
    total, number = reduce.sum(torch.stack(mean_weight(made))).unbind()
    return replace(counts, correction_mean=torch.where(number > 0, total / number.clamp(min=1), 1.0))


def _kl(terms: Terms, config: PolicyLossConfig) -> Tensor | None:
    """Measured whenever there is a reference; pulls, with gradient, when it has a coefficient."""
    if terms.batch.ref_logprobs_BT is None:
        if config.kl_loss_coef:
            raise ValueError(f"kl_loss_coef={config.kl_loss_coef} needs ref_logprobs_BT")
        return None
    ref_BT = terms.batch.ref_logprobs_BT.detach().masked_fill(~terms.mask_BT, 0.0)
    with torch.set_grad_enabled(torch.is_grad_enabled() and config.kl_loss_coef != 0):
        log_ratio_BT = terms.log_ratio_BT if config.unbiased_kl else None
        return kl_estimate(terms.logprobs_BT, ref_BT, config.kl_loss_type, log_ratio_BT)


def _entropy(terms: Terms, config: PolicyLossConfig) -> Tensor | None:
    if terms.batch.entropy_BT is None:
        if config.entropy_coef:
            raise ValueError(f"entropy_coef={config.entropy_coef} needs entropy_BT")
        return None
    return terms.batch.entropy_BT.masked_fill(~terms.mask_BT, 0.0)


def _correction(
    terms: Terms, config: PolicyLossConfig, counts: Denominators, average: Averager
) -> tuple[Tensor, Metrics]:
    assert config.correction is not None  # the caller asked
    if terms.batch.rollout_logprobs_BT is None:
        raise ValueError("the correction needs rollout_logprobs_BT, the engine's logprobs of the sampled tokens")
    made = correct(terms.batch.proximal_BT, terms.batch.rollout_logprobs_BT, terms.mask_BT, config.correction)
    metrics = correction_metrics(made, config.correction, average)
    if not config.correction.batch_normalize:
        return made.weight_BT, metrics
    if counts.correction_mean is None:
        raise ValueError("batch_normalize needs denominators from batch_denominators")
    return made.weight_BT / counts.correction_mean.to(made.weight_BT.dtype), metrics


def _ratio_metrics(terms: Terms, token: TokenLoss, average: Averager) -> Metrics:
    log_ratio_BT = terms.log_ratio_BT.detach()
    metrics = {"ppo_kl": average(-log_ratio_BT), "ois": average(log_ratio_BT.exp())} | (token.metrics or {})
    if token.clipped_BT is not None:
        metrics["pg_clipfrac"] = average(token.clipped_BT)
    if terms.batch.rollout_logprobs_BT is not None:
        gap_BT = (terms.batch.proximal_BT - terms.batch.rollout_logprobs_BT).masked_fill(~terms.mask_BT, 0.0)
        metrics["train_rollout_logprob_abs_diff"] = Averager(terms.mask_BT, over_tokens=False)(gap_BT.abs())
    return metrics
