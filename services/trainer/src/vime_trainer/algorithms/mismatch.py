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
from vime_trainer.algorithms.masking import Mask
from vime_trainer.algorithms.metrics import Averages, Metrics, as_mean


def mismatch_metrics(
    train_logprobs_BT: Tensor, rollout_logprobs_BT: Tensor, loss_mask_BT: Tensor, over_tokens: bool = False
) -> Metrics:
    """`train_rollout_logprob_abs_diff`, `mismatch_kl` (k3) and the `mis_*` family. No gradient."""
    same_shape(train_logprobs_BT, rollout_logprobs_BT=rollout_logprobs_BT, loss_mask_BT=loss_mask_BT)
    mask = Mask(loss_mask_BT)
    train_BT, rollout_BT = mask.zero(train_logprobs_BT.detach()), mask.zero(rollout_logprobs_BT.detach())
    delta_BT = train_BT - rollout_BT
    k3_BT = torch.expm1(delta_BT) - delta_BT
    averages = Averages(mask, over_tokens)
    averages.add("train_rollout_logprob_abs_diff", delta_BT.abs(), masked=0.0, per_sample=True)
    averages.add("mismatch_kl", k3_BT, masked=0.0)
    averages.add("mis_kl", -delta_BT, masked=0.0)
    averages.add("mis_k3_kl", k3_BT, masked=0.0)
    averages.add("mis_chi2_token", torch.expm1((2 * delta_BT).clamp(max=LOG_BOUND)), masked=0.0)
    return averages.metrics() | _sequence_metrics(train_BT, rollout_BT, mask)


def _sequence_metrics(train_BT: Tensor, rollout_BT: Tensor, mask: Mask) -> Metrics:
    """One value per sample, then the mean over samples with tokens. ppl = exp(−mean log p)."""
    tokens_B = mask.tokens_B
    train_B, rollout_B = mask.sum(train_BT).double(), mask.sum(rollout_BT).double()
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
        "mis_chi2_seq": torch.expm1((2 * (train_B - rollout_B)).clamp(max=LOG_BOUND)),
    }
    return {name: as_mean(x_B, tokens_B > 0) for name, x_B in per_sample.items()}


def mismatch_by_class(
    train_logprobs_BT: Tensor,
    rollout_logprobs_BT: Tensor,
    loss_mask_BT: Tensor,
    classes: Mapping[str, Tensor],
) -> Metrics:
    """`train_rollout_logprob_abs_diff<class>` and `mismatch_kl<class>` (over tokens) for each bool [B] selection.

    Used to tell the engine's own mismatch (one version, staleness 0) from off-policy drift (older, several versions).
    """
    metrics: Metrics = {}
    for name, chosen in classes.items():
        found = mismatch_metrics(
            train_logprobs_BT[chosen], rollout_logprobs_BT[chosen], loss_mask_BT[chosen], over_tokens=True
        )
        for metric in ("train_rollout_logprob_abs_diff", "mismatch_kl"):
            metrics[f"{metric}{name}"] = found[metric]
    return metrics
