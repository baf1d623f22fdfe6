"""One training batch of the policy: old logprobs, mini-batches, optimizer steps."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch

from vime_trainer.algorithms.index import Index
from vime_trainer.algorithms.losses import LossOutput, PolicyBatch
from vime_trainer.engine.backward import Accumulated, Updates, accumulate, connect, train_in_parts
from vime_trainer.engine.batch import MicroBatch, response_column, rows_of
from vime_trainer.engine.distributed import GLOBAL, all_reduce_max
from vime_trainer.engine.forward import Forward, per_sample
from vime_trainer.engine.logprobs import token_entropy, token_logprobs
from vime_trainer.engine.objective import Loss, policy_batch
from vime_trainer.engine.optimizer import OptimizerOutcome, Updater
from vime_trainer.engine.sample import Sample
from vime_trainer.engine.trajectories import cut, global_trajectories


@dataclass(frozen=True)
class StepResult(Updates):
    """What one call trained. `trained` and `logprobs` are this rank's; everything else is the same on every rank."""

    logprobs: list[torch.Tensor] = field(default_factory=list)
    """float32 [response] per sample: the policy's, at the moment when the sample's mini-batch came up."""


class Trainer:
    """Trains one wrapped model batch by batch."""

    def __init__(self, forward: Forward, updater: Updater, seed: int) -> None:
        self._forward, self._updater, self._seed = forward, updater, seed
        connect(forward, updater)

    def train(
        self, samples: Sequence[Sample], loss: Loss, *, mini_batches: int, replay: bool, lr: float | None = None
    ) -> StepResult:
        """Train on this rank's `samples` in `mini_batches` optimizer steps, at the schedule's rate or at `lr`.

        The global batch is shuffled by the run's seed and the steps taken, see `trajectories.cut`. Every rank calls it,
        also without samples.
        """
        trajectories = global_trajectories(samples, GLOBAL, self._forward.device)
        seed = f"policy/{self._seed}/{self._updater.steps_taken}"
        parts = cut(samples, trajectories, mini_batches, seed, GLOBAL)
        old = self._old_logprobs(samples, loss, mini_batches, replay)
        seen: dict[int, torch.Tensor] = {}

        def train(part: list[int]) -> tuple[Accumulated, OptimizerOutcome]:
            chosen = [samples[i] for i in part]
            mine = trajectories.rows(rows_of(part, self._forward.device))
            mini = _MiniBatch(self._forward, chosen, mine, None if old is None else [old[i] for i in part], loss)
            made = accumulate(self._forward, self._updater, chosen, mini.share, replay=replay)
            outcome = self._updater.apply(made.loss, empty=mini.empty, lr=lr)
            seen.update(zip(part, mini.logprobs, strict=True))
            return made, outcome

        updates = train_in_parts(samples, parts, train, self._forward.device)
        return StepResult(**vars(updates), logprobs=[seen[i] for i in range(len(samples))])

    def _old_logprobs(
        self, samples: Sequence[Sample], loss: Loss, mini_batches: int, replay: bool
    ) -> list[torch.Tensor] | None:
        """What the samples bring, else a scoring pass; None when the first (and only) pass gives them anyway."""
        given = [s.old_logprobs for s in samples if s.old_logprobs is not None]
        lacking = torch.tensor([float(len(samples) - len(given))], device=self._forward.device)
        if not bool(all_reduce_max(lacking).item()):
            return given
        if mini_batches == 1 and not loss.needs_old_logprobs:
            return None
        return self._forward.score(samples, replay)


class _MiniBatch:
    """The policy loss of one mini-batch, micro-batch by micro-batch, and the logprobs seen on the way."""

    def __init__(
        self,
        forward: Forward,
        samples: Sequence[Sample],
        trajectories: Index,
        old: Sequence[torch.Tensor] | None,
        loss: Loss,
    ) -> None:
        self._device, self._samples, self._old, self._loss = forward.device, samples, old, loss
        lacking = torch.tensor([float(any(s.reference_logprobs is None for s in samples))], device=self._device)
        self._has_reference = not bool(all_reduce_max(lacking).item())
        self._counts = loss.counts(self._whole_batch(), trajectories, GLOBAL)
        self.empty = self._counts.empty
        self._seen: dict[int, torch.Tensor] = {}

    @property
    def logprobs(self) -> list[torch.Tensor]:
        """float32 [response] per sample, in order; complete once every micro-batch had its turn."""
        return [self._seen[i] for i in range(len(self._samples))]

    def share(self, micro: MicroBatch, logits: torch.Tensor) -> LossOutput:
        """See `backward.Share`."""
        with nullcontext() if self._loss.needs_entropy_gradient else torch.no_grad():
            entropy = micro.response(token_entropy(logits, micro.temperatures))
        logprobs = micro.response(token_logprobs(logits, micro.targets, micro.temperatures))
        self._seen |= per_sample(micro, logprobs)
        counts = self._counts.rows(rows_of(micro.rows, self._device))
        return self._loss.share(self._policy_batch(micro.rows, logprobs, entropy), counts)

    def _whole_batch(self) -> PolicyBatch:
        lengths = [s.response_token_ids.numel() for s in self._samples]
        zeros = response_column([torch.zeros(n) for n in lengths], self._device)
        return self._policy_batch(list(range(len(self._samples))), zeros, None)

    def _policy_batch(self, rows: list[int], logprobs: torch.Tensor, entropy: torch.Tensor | None) -> PolicyBatch:
        old = None if self._old is None else [self._old[i] for i in rows]
        chosen = [self._samples[i] for i in rows]
        return policy_batch(chosen, logprobs, old, self._device, entropy=entropy, reference=self._has_reference)
