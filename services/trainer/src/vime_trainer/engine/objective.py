"""What the engine asks of a loss, and the library's losses in that form."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from vime_trainer.algorithms.index import Index
from vime_trainer.algorithms.losses import (
    LossOutput,
    Objective,
    PolicyBatch,
    PolicyLossConfig,
    batch_denominators,
    policy_loss,
    sft_loss,
)
from vime_trainer.algorithms.ranks import Reduce
from vime_trainer.algorithms.reducers import Denominators, Reducer, denominators
from vime_trainer.engine.batch import response_column
from vime_trainer.engine.sample import Sample


class Loss(Protocol):
    """A loss over micro-batches whose shares add up to that of the global mini-batch."""

    @property
    def needs_old_logprobs(self) -> bool:
        """True if `counts` reads old logprobs, so that they must exist before the first micro-batch."""

    @property
    def needs_entropy_gradient(self) -> bool:
        """True if the loss is differentiated through the entropy."""

    def counts(self, batch: PolicyBatch, trajectories: Index, reduce: Reduce) -> Denominators:
        """Denominators of the global mini-batch from each rank's whole share. `batch.logprobs_BT` holds zeros."""

    def share(self, batch: PolicyBatch, counts: Denominators) -> LossOutput:
        """One micro-batch's share; `counts` are the mini-batch's, restricted to its samples."""


@dataclass(frozen=True)
class PolicyLoss:
    """Any objective of the library, with corrections, KL and entropy.

    See `policy_loss` for `objective` and `reducer`.
    """

    config: PolicyLossConfig
    objective: Objective | None = None
    reducer: Reducer | None = None

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether the mismatch correction is normalised over the batch."""
        return self.config.correction is not None and self.config.correction.needs_whole_batch

    @property
    def needs_entropy_gradient(self) -> bool:
        """Whether there is an entropy bonus."""
        return self.config.entropy_coef != 0

    def counts(self, batch: PolicyBatch, trajectories: Index, reduce: Reduce) -> Denominators:
        """`batch_denominators` of the library."""
        return batch_denominators(batch, self.config, trajectories, reduce)

    def share(self, batch: PolicyBatch, counts: Denominators) -> LossOutput:
        """`policy_loss` of the library."""
        return policy_loss(batch, self.config, counts, self.objective, self.reducer)


@dataclass(frozen=True)
class SupervisedLoss:
    """Negative log-likelihood, token mean over the global mini-batch unless another reducer is named."""

    reducer: str = "token_mean"
    fixed_length: int | None = None
    needs_old_logprobs: bool = False
    needs_entropy_gradient: bool = False

    def counts(self, batch: PolicyBatch, trajectories: Index, reduce: Reduce) -> Denominators:
        """Counts of the mask alone."""
        return denominators(batch.loss_mask_BT, trajectories, reduce)

    def share(self, batch: PolicyBatch, counts: Denominators) -> LossOutput:
        """`sft_loss` of the library."""
        return sft_loss(batch.logprobs_BT, batch.loss_mask_BT, counts, self.reducer, self.fixed_length)


def policy_batch(
    samples: Sequence[Sample],
    logprobs: torch.Tensor,
    old: Sequence[torch.Tensor] | None,
    device: torch.device,
    *,
    entropy: torch.Tensor | None = None,
    reference: bool = False,
) -> PolicyBatch:
    """What the loss reads of `samples`, whose current `logprobs` are [rows, longest response] on `device`.

    `old`: their logprobs before the first optimizer step, None if this is it. `reference`: whether every rank's samples
    have reference logprobs.
    """
    given = [row for sample in samples if (row := sample.reference_logprobs) is not None]
    return PolicyBatch(
        logprobs_BT=logprobs,
        advantages_BT=response_column([sample.advantages for sample in samples], device),
        loss_mask_BT=response_column([sample.loss_mask.bool() for sample in samples], device),
        old_logprobs_BT=None if old is None else response_column(old, device),
        rollout_logprobs_BT=response_column([sample.rollout_logprobs for sample in samples], device),
        ref_logprobs_BT=response_column(given, device) if reference else None,
        entropy_BT=entropy,
    )
