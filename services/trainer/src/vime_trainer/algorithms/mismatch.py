"""How far the trainer's logprobs are from the engine's, on the tokens the engine sampled.

    δ_t = log π_o − log q

`train_rollout_logprob_abs_diff` is a mean of per-sample means; the others follow `over_tokens`. Since the tokens
come from q, KL(q ‖ π_o) is estimated by k1 = −δ and k3 = e^δ − 1 − δ, and χ²(π_o ‖ q) by E[(π_o/q)²] − 1.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from vime_trainer.algorithms.checks import same_shape
from vime_trainer.algorithms.losses.correction import LOG_BOUND
from vime_trainer.algorithms.metrics import Averager, Metrics, as_mean
from vime_trainer.algorithms.tensors import as_mask, row_sum


def mismatch_metrics(
    train_logprobs_BT: Tensor, rollout_logprobs_BT: Tensor, loss_mask_BT: Tensor, over_tokens: bool = False
) -> Metrics:
    """`train_rollout_logprob_abs_diff`, `mismatch_kl` (k3) and the `mis_*` family. No gradient."""
    same_shape(train_logprobs_BT, rollout_logprobs_BT=rollout_logprobs_BT, loss_mask_BT=loss_mask_BT)
    mask_BT = as_mask(loss_mask_BT)
    train_BT = train_logprobs_BT.detach().masked_fill(~mask_BT, 0.0)
    rollout_BT = rollout_logprobs_BT.detach().masked_fill(~mask_BT, 0.0)
    delta_BT = train_BT - rollout_BT
    average = Averager(mask_BT, over_tokens)
    k3_BT = torch.expm1(delta_BT) - delta_BT
    metrics = {
        "train_rollout_logprob_abs_diff": Averager(mask_BT, over_tokens=False)(delta_BT.abs()),
        "mismatch_kl": average(k3_BT),
        "mis_kl": average(-delta_BT),
        "mis_k3_kl": average(k3_BT),
        "mis_chi2_token": average((2 * delta_BT).clamp(max=LOG_BOUND).exp() - 1),
    }
    return metrics | _sequence_metrics(train_BT, rollout_BT, mask_BT)


def _sequence_metrics(train_BT: Tensor, rollout_BT: Tensor, mask_BT: Tensor) -> Metrics:
    """One value per sample, then the mean over samples with tokens. ppl = exp(−mean log p)."""
    ones_BT = mask_BT.to(train_BT.dtype)
    tokens_B = mask_BT.sum(-1)
    train_B, rollout_B = row_sum(train_BT, ones_BT).double(), row_sum(rollout_BT, ones_BT).double()
    train_log_ppl_B, rollout_log_ppl_B = (-x_B / tokens_B.clamp(min=1) for x_B in (train_B, rollout_B))
    gap_B = train_log_ppl_B - rollout_log_ppl_B  # positive: the trainer finds the tokens less likely
    per_sample = {
        "mis_training_log_ppl": train_log_ppl_B,
        "mis_training_ppl": train_log_ppl_B.exp(),
        "mis_rollout_log_ppl": rollout_log_ppl_B,
        "mis_rollout_ppl": rollout_log_ppl_B.exp(),
        "mis_log_ppl_diff": gap_B,
        "mis_log_ppl_abs_diff": gap_B.abs(),
        "mis_ppl_ratio": gap_B.exp(),
        "mis_chi2_seq": (2 * (train_B - rollout_B)).clamp(max=LOG_BOUND).exp() - 1,
    }
    return {name: as_mean(x_B, tokens_B > 0) for name, x_B in per_sample.items()}


def mismatch_by_class(
    train_logprobs_BT: Tensor,
    rollout_logprobs_BT: Tensor,
    loss_mask_BT: Tensor,
    classes: Mapping[str, Tensor],
) -> Metrics:
    """`train_rollout_logprob_abs_diff/<class>` and `mismatch_kl/<class>` for each bool [B] (or [B, T]) selection.

    Used to tell the engine's own mismatch (one version, staleness 0) from off-policy drift (older, several versions).
    """
    metrics: Metrics = {}
    for name, chosen in classes.items():
        chosen_BT = as_mask(loss_mask_BT) & (chosen if chosen.ndim == 2 else chosen[:, None])
        found = mismatch_metrics(train_logprobs_BT, rollout_logprobs_BT, chosen_BT)
        for metric in ("train_rollout_logprob_abs_diff", "mismatch_kl"):
            metrics[f"{metric}/{name}"] = found[metric]
    return metrics
