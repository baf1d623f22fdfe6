"""REINFORCE with an importance weight, and score centering of it (arXiv 2609.20807).

    L_t = −sg(A_t) · [sg(w) · log p_a − C_t],     w = f(p_a / q_a)
    C_t = Σ_{v∈H} sg[q_v f(p_v/q_v) − r f(1/r) p_v] · log p_v,   r = (1 − Q_H) / (1 − P_H)

a: the sampled token; q: the engine; p: the current policy; H: the engine's top-K with masses Q_H, P_H. ∇C is the
expectation of w ∇log p under q when the tail outside H is taken proportional to p, so the bracket has mean zero: a
baseline in score space. `reinforce` is the same with C = 0.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vime_trainer.algorithms.checks import choice
from vime_trainer.algorithms.losses.batch import Head, Terms, TokenLoss
from vime_trainer.algorithms.losses.config import PolicyLossConfig

Importance = Callable[[Tensor, float, float], Tensor]

IMPORTANCE: dict[str, Importance] = {
    "one": lambda x, low, high: torch.ones_like(x),
    "identity": lambda x, low, high: x,
    "truncate": lambda x, low, high: x.clamp(low, high),
    "mask": lambda x, low, high: torch.where((x >= low) & (x <= high), x, 0.0),
}
"""f(ratio, low, high): the importance weight as a function of p/q."""


def reinforce(terms: Terms, config: PolicyLossConfig) -> TokenLoss:
    """−sg(A · f(p/q)) · log p. Needs `rollout_logprobs_BT` unless f is 1."""
    weight_BT = _weight(terms, config)
    return TokenLoss(-terms.advantages_BT * weight_BT * terms.logprobs_BT, measured={"sc_importance_weight": weight_BT})


def score_centering(terms: Terms, config: PolicyLossConfig) -> TokenLoss:
    """The centred form; needs `head`."""
    head = terms.batch.head
    if head is None:
        raise ValueError("objective score_centering needs head: the engine's top-K logprobs and the trainer's for them")
    weight_BT = _weight(terms, config)
    correction_BT, masses = _correction(head, terms, config)
    loss_BT = -terms.advantages_BT * (weight_BT * terms.logprobs_BT - correction_BT)
    measured = {"sc_importance_weight": weight_BT, "sc_correction": correction_BT, **masses}
    return TokenLoss(loss_BT, measured=measured)


def _f(x: Tensor, config: PolicyLossConfig) -> Tensor:
    function: Importance = choice(config.importance, "importance weight", IMPORTANCE)
    return function(x, config.importance_low, config.importance_high)


def _weight(terms: Terms, config: PolicyLossConfig) -> Tensor:
    p_BT = terms.logprobs_BT.detach()
    if config.importance == "one":
        return torch.ones_like(p_BT)
    if terms.batch.rollout_logprobs_BT is None:
        raise ValueError(f"importance={config.importance!r} needs rollout_logprobs_BT")
    log_ratio_BT = terms.mask.difference(terms.batch.logprobs_BT.detach(), terms.batch.rollout_logprobs_BT)
    return _f(log_ratio_BT.exp(), config)


def _correction(head: Head, terms: Terms, config: PolicyLossConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """C_t with gradient, 0 at masked tokens, and the head's masses."""
    present_BTK = torch.isfinite(head.rollout_logprobs_BTK) & torch.isfinite(head.logprobs_BTK)
    present_BTK = present_BTK & terms.mask.bool_BT[..., None]
    log_p_BTK = head.logprobs_BTK.masked_fill(~present_BTK, 0.0)
    log_q_BTK = head.rollout_logprobs_BTK.detach().masked_fill(~present_BTK, 0.0)
    p_BTK = log_p_BTK.detach().exp() * present_BTK
    q_BTK = log_q_BTK.exp() * present_BTK
    mass_p_BT1, mass_q_BT1 = p_BTK.sum(-1, keepdim=True), q_BTK.sum(-1, keepdim=True)
    f_BTK = _f((log_p_BTK.detach() - log_q_BTK).exp(), config)
    score_BTK = q_BTK * f_BTK - _tail(mass_q_BT1, mass_p_BT1, config) * p_BTK
    masses = {"sc_sampler_head_mass": mass_q_BT1[..., 0], "sc_train_head_mass": mass_p_BT1[..., 0]}
    return (score_BTK * log_p_BTK).sum(-1), masses


def _tail(mass_q: Tensor, mass_p: Tensor, config: PolicyLossConfig) -> Tensor:
    """r f(1/r). A head that holds all of p or of q has no tail: 0, since Σ p ∇log p over all tokens vanishes."""
    tail_q, tail_p = (1 - mass_q).clamp(min=0), (1 - mass_p).clamp(min=0)
    has_tail = (tail_q > torch.finfo(tail_q.dtype).eps) & (tail_p > torch.finfo(tail_p.dtype).eps)
    r = torch.where(has_tail, tail_q, 1.0) / torch.where(has_tail, tail_p, 1.0)
    return torch.where(has_tail, r * _f(1 / r, config), 0.0)
