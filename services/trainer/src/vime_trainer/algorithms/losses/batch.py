"""What a policy loss reads and returns."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from vime_trainer.algorithms.checks import same_shape
from vime_trainer.algorithms.masking import Mask, as_bool
from vime_trainer.algorithms.metrics import Metrics


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
        object.__setattr__(self, "loss_mask_BT", as_bool(self.loss_mask_BT))

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


class Terms:
    """What an objective reads. Everything is 0 at masked tokens whatever stood there (ratios are 1), so that neither
    the loss nor the gradient can be reached by padding.

    `log_ratio_BT` = log π − log π_o, with gradient; `ratio_BT` ρ, without; `advantages_BT` A, without.
    """

    def __init__(self, batch: PolicyBatch) -> None:
        self.batch = batch
        self.mask = Mask(batch.loss_mask_BT)
        self.log_ratio_BT = self.mask.difference(batch.logprobs_BT, batch.proximal_BT)
        self.ratio_BT = self.log_ratio_BT.detach().exp()
        self.advantages_BT = self.mask.zero(batch.advantages_BT.detach())

    @cached_property
    def logprobs_BT(self) -> Tensor:
        """log π, with gradient."""
        return self.mask.zero(self.batch.logprobs_BT)

    @cached_property
    def mismatch_BT(self) -> Tensor | None:
        """log π_o − log q, without gradient; None without the engine's logprobs."""
        if self.batch.rollout_logprobs_BT is None:
            return None
        return self.mask.difference(self.batch.proximal_BT, self.batch.rollout_logprobs_BT)


@dataclass(frozen=True)
class TokenLoss:
    """Per-token policy loss, [B, T], finite where masked; `zeroed`: even 0 there, which saves a pass over memory.

    `clipped_BT` (0 or 1): where the clip cut the objective (its gradient, mostly). `bounded_BT` likewise: where dual
    clip did, which the field counts apart. `measured`: what the objective
    alone knows, reported as its mean by name; finite where masked.
    """

    loss_BT: Tensor
    clipped_BT: Tensor | None = None
    bounded_BT: Tensor | None = None
    measured: dict[str, Tensor] | None = None
    zeroed: bool = False
