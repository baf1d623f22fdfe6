"""What a policy loss reads and returns."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from vime_trainer.algorithms.checks import same_shape
from vime_trainer.algorithms.metrics import Metrics
from vime_trainer.algorithms.tensors import as_mask, row_sum


@dataclass(frozen=True)
class Head:
    """The engine's top-K tokens at each position, for score centering. All [B, T, K], −inf where fewer than K.

    `rollout_logprobs_BTK`: log q of the engine. `logprobs_BTK`: log p of the current policy for the same token ids,
    with gradient.
    """

    rollout_logprobs_BTK: Tensor
    logprobs_BTK: Tensor

    def rows(self, selection: Tensor | slice) -> Head:
        """The same, for a selection of samples."""
        return Head(self.rollout_logprobs_BTK[selection], self.logprobs_BTK[selection])


@dataclass(frozen=True)
class PolicyBatch:
    """A micro-batch, right-padded [B, T] over response tokens. Logprobs are those of the sampled tokens under the
    distribution that was sampled from (temperature applied).

    `logprobs_BT`: log π, current policy, with gradient. `advantages_BT`, `loss_mask_BT`: from `compute_advantages`.
    `old_logprobs_BT`: log π_o, the policy before this batch's first optimizer step; None when this *is* the first
    step, then π_o = sg(π). `rollout_logprobs_BT`: log q, the engine's. `ref_logprobs_BT`: log π_r, the reference.
    `entropy_BT`: H of the current policy, with gradient. Only what is masked may be non-finite.
    Raises `ValueError` for shapes that disagree.
    """

    logprobs_BT: Tensor
    advantages_BT: Tensor
    loss_mask_BT: Tensor
    old_logprobs_BT: Tensor | None = None
    rollout_logprobs_BT: Tensor | None = None
    ref_logprobs_BT: Tensor | None = None
    entropy_BT: Tensor | None = None
    head: Head | None = None

    def __post_init__(self) -> None:
        same_shape(
            self.logprobs_BT,
            advantages_BT=self.advantages_BT,
            loss_mask_BT=self.loss_mask_BT,
            old_logprobs_BT=self.old_logprobs_BT,
            rollout_logprobs_BT=self.rollout_logprobs_BT,
            ref_logprobs_BT=self.ref_logprobs_BT,
            entropy_BT=self.entropy_BT,
        )
        if self.head is not None:
            same_shape(self.logprobs_BT, head_logprobs_BT=self.head.logprobs_BTK[..., 0])
            same_shape(self.head.logprobs_BTK, rollout_logprobs_BTK=self.head.rollout_logprobs_BTK)
        object.__setattr__(self, "loss_mask_BT", as_mask(self.loss_mask_BT))

    @property
    def proximal_BT(self) -> Tensor:
        """log π_o without gradient: `old_logprobs_BT`, or sg(log π) on the first step."""
        return (self.logprobs_BT if self.old_logprobs_BT is None else self.old_logprobs_BT).detach()

    def rows(self, selection: Tensor | slice) -> PolicyBatch:
        """A micro-batch: the selected samples."""

        def pick(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[selection]

        return PolicyBatch(
            self.logprobs_BT[selection],
            self.advantages_BT[selection],
            self.loss_mask_BT[selection],
            pick(self.old_logprobs_BT),
            pick(self.rollout_logprobs_BT),
            pick(self.ref_logprobs_BT),
            pick(self.entropy_BT),
            None if self.head is None else self.head.rows(selection),
        )


@dataclass(frozen=True)
class LossOutput:
    """`loss`: scalar with gradient, this micro-batch's share of the batch loss (shares add up).
    `metrics`: shares too; `merge` them over micro-batches and ranks.
    """

    loss: Tensor
    metrics: Metrics


@dataclass(frozen=True)
class Terms:
    """What an objective reads. `log_ratio_BT` = log π − log π_o, with gradient, 0 at masked tokens; `logprobs_BT`
    with gradient, 0 at masked tokens; `tokens_B`: unmasked tokens; `ones_BT`: the mask in the logprobs' dtype.
    """

    batch: PolicyBatch
    logprobs_BT: Tensor
    log_ratio_BT: Tensor
    mask_BT: Tensor
    ones_BT: Tensor
    tokens_B: Tensor

    @property
    def advantages_BT(self) -> Tensor:
        """A_t, a constant of the loss."""
        return self.batch.advantages_BT.detach()

    @staticmethod
    def of(batch: PolicyBatch) -> Terms:
        """Masked differences first: whatever stands at a masked token must reach neither the loss nor the gradient."""
        mask_BT = batch.loss_mask_BT
        logprobs_BT = batch.logprobs_BT.masked_fill(~mask_BT, 0.0)
        log_ratio_BT = logprobs_BT - batch.proximal_BT.masked_fill(~mask_BT, 0.0)
        ones_BT = mask_BT.to(logprobs_BT.dtype)
        return Terms(batch, logprobs_BT, log_ratio_BT, mask_BT, ones_BT, mask_BT.sum(-1))


@dataclass(frozen=True)
class TokenLoss:
    """Per-token policy loss, [B, T]. `clipped_BT` (bool): where the clip cut the objective (its gradient, mostly).
    `metrics`: what the objective alone knows.
    """

    loss_BT: Tensor
    clipped_BT: Tensor | None = None
    metrics: Metrics | None = None


def sequence_mean_of(x_BT: Tensor, terms: Terms) -> Tensor:
    """Mean of `x_BT` over each sample's unmasked tokens, [B, 1]; 0 for a sample without any."""
    return (row_sum(x_BT, terms.ones_BT) / terms.tokens_B.clamp(min=1))[:, None]
