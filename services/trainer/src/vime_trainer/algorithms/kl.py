"""KL(π ‖ π_r) from samples of π: per-token estimators of δ = log π − log π_r.

John Schulman, "Approximating KL divergence" (2020). `low_var_kl` is k3 clamped to ±10. The unbiased form weighs the
estimator by ρ = π / π_o, with its gradient, so that the expectation holds under samples of the older policy π_o
(DeepSeek-V3.2, arXiv 2512.02556).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vime_trainer.algorithms.checks import choice
from vime_trainer.algorithms.masking import with_slope

LOW_VAR_BOUND = 10.0


Estimator = Callable[[Tensor], tuple[Tensor, Tensor]]
"""δ → (value, d value / dδ)."""


def k1(delta: Tensor) -> tuple[Tensor, Tensor]:
    """δ. Unbiased, high variance. As a loss term its gradient is ∇log π: zero on average, so it does not pull."""
    return delta, torch.ones_like(delta)


def k2(delta: Tensor) -> tuple[Tensor, Tensor]:
    """δ²/2. Biased as a value; its gradient δ·∇log π is the gradient of the KL in expectation."""
    return delta.square() / 2, delta


def k3(delta: Tensor) -> tuple[Tensor, Tensor]:
    """e^(−δ) − 1 + δ ≥ 0, low variance; slope 1 − e^(−δ). By `expm1`, or a small δ would drown in 1 + 1e-7."""
    shrink = torch.expm1(-delta)
    return shrink + delta, -shrink


KL_ESTIMATORS: dict[str, Estimator] = {"k1": k1, "k2": k2, "k3": k3, "low_var_kl": k3}


def kl_of(delta_BT: Tensor, kind: str, log_ratio_BT: Tensor | None = None) -> Tensor:
    """Per-token KL estimate from δ, differentiable in δ and in log ρ.

    `log_ratio_BT` = log π − log π_o makes it the unbiased form. Raises `ValueError` for an unknown `kind`.
    """
    estimator: Estimator = choice(kind, "KL estimator", KL_ESTIMATORS)
    value_BT, slope_BT = estimator(delta_BT.detach())
    kl_BT = with_slope(value_BT, slope_BT, delta_BT)
    if log_ratio_BT is not None:
        kl_BT = kl_BT * log_ratio_BT.exp()
    return kl_BT.clamp(-LOW_VAR_BOUND, LOW_VAR_BOUND) if kind == "low_var_kl" else kl_BT


def kl_estimate(logprobs_BT: Tensor, ref_logprobs_BT: Tensor, kind: str, log_ratio_BT: Tensor | None = None) -> Tensor:
    """`kl_of` the difference; in this order, π first."""
    return kl_of(logprobs_BT - ref_logprobs_BT, kind, log_ratio_BT)
