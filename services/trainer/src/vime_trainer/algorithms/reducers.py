"""From per-token losses to one number, the same for every split into micro-batches and ranks.

Every reducer is linear: loss = Σ_b w_b Σ_t x_bt m_bt, with weights w that depend on the **global** batch alone. A
micro-batch sums its own tokens with these weights, so micro-batch losses (and gradients) add up to the batch's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vime_trainer.algorithms.checks import choice
from vime_trainer.algorithms.index import Index
from vime_trainer.algorithms.masking import Mask
from vime_trainer.algorithms.ranks import LOCAL, Reduce


@dataclass(frozen=True)
class Denominators:
    """Counts of the global batch, computed once and handed to every micro-batch. float64.

    `tokens`: unmasked tokens. `sequences`: trajectories with at least one unmasked token (a trajectory that forked
    into several samples counts once). `trajectory_tokens_B`: unmasked tokens of the whole trajectory that each local
    sample belongs to. `correction_mean`: mean correction weight, only when the correction is batch-normalised.
    """

    tokens: Tensor
    sequences: Tensor
    trajectory_tokens_B: Tensor
    correction_mean: Tensor | None = None

    def rows(self, selection: Tensor | slice) -> Denominators:
        """The denominators of a micro-batch: the same global counts, the selected samples."""
        return replace(self, trajectory_tokens_B=self.trajectory_tokens_B[selection])

    @property
    def empty(self) -> bool:
        """Nothing to train on in the whole batch: the loss is 0 and the step should be skipped and counted."""
        return bool(self.tokens == 0)


def denominators(mask_BT: Tensor, trajectories: Index | None = None, reduce: Reduce = LOCAL) -> Denominators:
    """Count the global batch from each rank's `mask_BT` [B, T], which is the mask returned by `compute_advantages`.

    `trajectories` (global ids) is needed only when trajectories forked; then siblings may live on different ranks.
    Every rank must call it, also one without samples.
    """
    tokens_B = Mask(mask_BT).tokens_B
    if trajectories is None:
        local = torch.stack([tokens_B.sum(), (tokens_B > 0).double().sum()])
        tokens, sequences = reduce.sum(local).unbind()
        return Denominators(tokens, sequences, tokens_B)
    tokens_J = torch.zeros(trajectories.size, dtype=torch.float64, device=tokens_B.device)
    tokens_J = reduce.sum(tokens_J.index_add(0, trajectories.ids_B, tokens_B))
    return Denominators(tokens_J.sum(), (tokens_J > 0).double().sum(), tokens_J[trajectories.ids_B])


def _inverse(x: Tensor) -> Tensor:
    """1/x, and 0 for 0: a sample without tokens weighs nothing."""
    return torch.where(x > 0, 1.0 / x.clamp(min=1.0), 0.0)


def token_mean(counts: Denominators, length: int | None = None) -> Tensor:
    """w_b = 1 / N, N the unmasked tokens of the global batch: every token weighs the same (DAPO, arXiv 2503.14476)."""
    return _inverse(counts.tokens).expand_as(counts.trajectory_tokens_B)


def sequence_mean(counts: Denominators, length: int | None = None) -> Tensor:
    """w_b = 1 / (S · n_b), n_b the tokens of b's trajectory: every trajectory weighs the same (GRPO, 2402.03300)."""
    return _inverse(counts.sequences) * _inverse(counts.trajectory_tokens_B)


def fixed_length(counts: Denominators, length: int | None = None) -> Tensor:
    """w_b = 1 / (S · L), L a constant: no length bias within or between samples (Dr.GRPO, arXiv 2503.20783)."""
    if length is None:
        raise ValueError("the fixed_length reducer needs fixed_length, the constant divisor in tokens")
    return (_inverse(counts.sequences) / length).expand_as(counts.trajectory_tokens_B)


Reducer = Callable[[Denominators, int | None], Tensor]
"""(denominators, fixed_length) → weights w_B, float64 [B]; a user's reducer is one more of these."""

REDUCERS: dict[str, Reducer] = {"token_mean": token_mean, "sequence_mean": sequence_mean, "fixed_length": fixed_length}


def sample_weights(counts: Denominators, reducer: str | Reducer, fixed_length: int | None = None) -> Tensor:
    """The weights w_B of a reducer given by name or as a function."""
    function: Reducer = choice(reducer, "reducer", REDUCERS) if isinstance(reducer, str) else reducer
    return function(counts, fixed_length)


def weighted_sum(x_BT: Tensor, weight_B: Tensor) -> Tensor:
    """Σ_b w_b Σ_t x_bt as a float64 scalar, differentiable in `x_BT`; rows in x's dtype, samples in float64.

    `x_BT` must be 0 where masked (`Mask.zero`).
    """
    return torch.dot(x_BT.sum(-1).double(), weight_B)
