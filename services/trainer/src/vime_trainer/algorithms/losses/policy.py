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
from vime_trainer.algorithms.kl import kl_of
from vime_trainer.algorithms.losses.batch import LossOutput, PolicyBatch, Terms, TokenLoss
from vime_trainer.algorithms.losses.blockwise import RowSums, in_blocks, weighted
from vime_trainer.algorithms.losses.cispo import cispo
from vime_trainer.algorithms.losses.clip import clip, gspo
from vime_trainer.algorithms.losses.config import PolicyLossConfig
from vime_trainer.algorithms.losses.correction import CorrectionConfig, correct, mean_weight, measure_correction
from vime_trainer.algorithms.losses.opsm import opsm_dropped
from vime_trainer.algorithms.losses.score_centering import reinforce, score_centering
from vime_trainer.algorithms.masking import Mask
from vime_trainer.algorithms.metrics import Averages, Metric
from vime_trainer.algorithms.ranks import LOCAL, Reduce
from vime_trainer.algorithms.reducers import Denominators, Reducer, denominators, sample_weights

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
    """The loss before it is summed: [B, T], 0 where masked (`correction_BT` may be [B, 1]).

    `pg_BT` includes OPSM and the mismatch weight `correction_BT`; `clipped_BT`: by either clip;
    `averages` holds what is only measured.
    """

    terms: Terms
    pg_BT: Tensor
    clipped_BT: Tensor | None
    correction_BT: Tensor | None
    kl_BT: Tensor | None
    entropy_BT: Tensor | None
    averages: Averages


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
    weight_B = sample_weights(counts, config.reducer, config.fixed_length)
    each = {
        "pg_loss": weight_B if reducer is None else sample_weights(counts, reducer),
        "kl_loss": weight_B,
        "entropy_loss": weight_B,
    }
    factors = {"pg_loss": 1.0, "kl_loss": config.kl_loss_coef, "entropy_loss": -config.entropy_coef}
    weights = {name: factor * each[name] for name, factor in factors.items() if factor != 0}

    def summing(part: PolicyBatch) -> RowSums:
        return _row_sums(policy_tokens(part, config, counts.correction_mean, objective))

    if objective is None:
        loss, sums = in_blocks(batch, summing, weights)
    else:  # a user's objective may close over anything that needs a gradient, so autograd sees it whole
        sums = summing(batch)
        loss = weighted(sums.terms, weights)
    terms = {name: weighted({name: term_B.detach()}, {name: each[name]}) for name, term_B in sums.terms.items()}
    metrics = {name: Metric(term) for name, term in terms.items()} | {"loss": Metric(loss.detach())}
    return LossOutput(loss, sums.averages.metrics() | metrics)


def _row_sums(tokens: PolicyTokens) -> RowSums:
    terms = {"pg_loss": tokens.pg_BT, "kl_loss": tokens.kl_BT, "entropy_loss": tokens.entropy_BT}
    return RowSums({name: x_BT.sum(-1) for name, x_BT in terms.items() if x_BT is not None}, tokens.averages)


def policy_tokens(
    batch: PolicyBatch,
    config: PolicyLossConfig,
    correction_mean: Tensor | None = None,
    objective: Objective | None = None,
) -> PolicyTokens:
    """Everything `policy_loss` adds up, token by token. `correction_mean`: of the denominators. Errors are the same."""
    terms = Terms(batch)
    averages = Averages(terms.mask, over_tokens=config.reducer == "token_mean")
    # each is measured while it is still in the cache
    averages.add("ppo_kl", terms.log_ratio_BT, masked=0.0, scale=-1.0)
    averages.add("ois", terms.ratio_BT, masked=1.0)
    gap_BT, correction_BT = terms.mismatch_BT, None
    if gap_BT is not None:
        averages.add("train_rollout_logprob_abs_diff", gap_BT.abs(), masked=0.0, per_sample=True)
    function: Objective = objective or choice(config.objective, "objective", OBJECTIVES)
    token = function(terms, config)
    if token.clipped_BT is not None:
        averages.add("pg_clipfrac", token.clipped_BT, masked=0.0 if token.zeroed else None)
    if token.bounded_BT is not None:
        averages.add("pg_clipfrac_lower", token.bounded_BT, masked=0.0 if token.zeroed else None)
    for name, x_BT in (token.measured or {}).items():
        averages.add(name, x_BT)
    pg_BT = token.loss_BT if token.zeroed else terms.mask.zero(token.loss_BT)
    if config.opsm_delta is not None:
        dropped_BT = opsm_dropped(terms, config.opsm_delta)
        pg_BT = pg_BT.masked_fill(dropped_BT, 0.0)
        averages.add("opsm_clipfrac", dropped_BT.to(pg_BT.dtype), masked=0.0)
    if config.correction is not None:
        if gap_BT is None:
            raise ValueError("the correction needs rollout_logprobs_BT, the engine's logprobs of the sampled tokens")
        made = correct(gap_BT, terms.mask, config.correction)
        measure_correction(made, config.correction, averages)
        correction_BT = _normalised(made.weight_BT, config.correction, correction_mean)
        pg_BT = pg_BT * correction_BT
    clipped_BT = token.clipped_BT
    if clipped_BT is not None and token.bounded_BT is not None:
        clipped_BT = clipped_BT + token.bounded_BT
    return PolicyTokens(
        terms=terms,
        pg_BT=pg_BT,
        clipped_BT=clipped_BT,
        correction_BT=correction_BT,
        kl_BT=_kl(terms, config),
        entropy_BT=_entropy(terms, config),
        averages=averages,
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
    mask = Mask(batch.loss_mask_BT)
    gap_BT = mask.difference(batch.old_logprobs_BT.detach(), batch.rollout_logprobs_BT)
    made = correct(gap_BT, mask, correction)
    kept_BT = mask.bool_BT if made.kept_BT is None or not correction.renormalize else made.kept_BT
    counts = denominators(kept_BT, trajectories, reduce)
    if not correction.batch_normalize:
        return counts
    total, number = reduce.sum(torch.stack(mean_weight(made, mask))).unbind()
    return replace(counts, correction_mean=torch.where(number > 0, total / number.clamp(min=1), 1.0))


def _kl(terms: Terms, config: PolicyLossConfig) -> Tensor | None:
    """Measured whenever there is a reference; pulls, with gradient, when it has a coefficient."""
    if terms.batch.ref_logprobs_BT is None:
        if config.kl_loss_coef:
            raise ValueError(f"kl_loss_coef={config.kl_loss_coef} needs ref_logprobs_BT")
        return None
    with torch.set_grad_enabled(torch.is_grad_enabled() and config.kl_loss_coef != 0):
        delta_BT = terms.mask.difference(terms.batch.logprobs_BT, terms.batch.ref_logprobs_BT)
        return kl_of(delta_BT, config.kl_loss_type, terms.log_ratio_BT if config.unbiased_kl else None)


def _entropy(terms: Terms, config: PolicyLossConfig) -> Tensor | None:
    if terms.batch.entropy_BT is None:
        if config.entropy_coef:
            raise ValueError(f"entropy_coef={config.entropy_coef} needs entropy_BT")
        return None
    return terms.mask.zero(terms.batch.entropy_BT)


def _normalised(weight_BT: Tensor, config: CorrectionConfig, correction_mean: Tensor | None) -> Tensor:
    if not config.batch_normalize:
        return weight_BT
    if correction_mean is None:
        raise ValueError("batch_normalize needs denominators from batch_denominators")
    return weight_BT / correction_mean.to(weight_BT.dtype)
