"""One training batch: forward, loss, backward and optimizer steps, the same numbers for every split.

Denominators are those of the global mini-batch, computed before the first micro-batch; each micro-batch adds its share.
Megatron divides a micro-batch's loss by their number and averages gradients over the data-parallel ranks: both are
undone here.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func

from vime_trainer.algorithms.losses import PolicyBatch
from vime_trainer.algorithms.metrics import Metric, Metrics, merge, pack, unpack, values
from vime_trainer.algorithms.ranks import Reduce
from vime_trainer.engine.batch import MicroBatch, response_column
from vime_trainer.engine.distributed import all_reduce_max, all_reduce_sum, data_parallel_size
from vime_trainer.engine.forward import Forward, per_sample
from vime_trainer.engine.logprobs import token_entropy, token_logprobs
from vime_trainer.engine.objective import Loss
from vime_trainer.engine.optimizer import OptimizerOutcome, Updater
from vime_trainer.engine.sample import Sample
from vime_trainer.engine.trajectories import global_trajectories

GLOBAL = Reduce(sum=all_reduce_sum, max=all_reduce_max)


@dataclass(frozen=True)
class StepResult:
    """What one call trained. `trained` and `logprobs` are this rank's; everything else is the same on every rank."""

    metrics: dict[str, float | None]
    """The loss's metrics over the global batch, by its names.

    A metric that is a sum is the mean over optimizer steps.
    """
    loss: float
    """Global loss, mean over the optimizer steps. Not finite if one was skipped for it."""
    grad_norm: float
    """Largest global norm before clipping among the optimizer steps.

    The non-finite one if a step was skipped for it.
    """
    lr: float
    """Learning rate of the last optimizer step."""
    steps_taken: int
    """Optimizer steps that changed the weights."""
    steps_skipped: int
    """Optimizer steps left out: loss or gradient not finite, or no token to train on."""
    trained: list[tuple[str, int]] = field(default_factory=list)
    """(group_id, sample_index) of every sample that went through the loss."""
    logprobs: list[torch.Tensor] = field(default_factory=list)
    """float32 [response] per sample: the policy's, at the moment when the sample's mini-batch came up."""

    @property
    def skipped(self) -> bool:
        """True when nothing was changed: no weight, no moment, no schedule."""
        return self.steps_taken == 0


class Trainer:
    """Trains one wrapped model batch by batch."""

    def __init__(self, forward: Forward, updater: Updater) -> None:
        self._forward, self._updater = forward, updater
        settings = forward.model.config
        settings.finalize_model_grads_func = finalize_model_grads
        settings.grad_scale_func = updater.optimizer.scale_loss
        settings.no_sync_func = forward.model.no_sync

    def train(self, samples: Sequence[Sample], loss: Loss, *, mini_batches: int, replay: bool) -> StepResult:
        """Train on this rank's `samples` in `mini_batches` optimizer steps.

        Every rank calls it, also without samples.
        """
        if mini_batches < 1:
            raise ValueError(f"mini_batches = {mini_batches} must be at least 1")
        old = self._old_logprobs(samples, loss, mini_batches, replay)
        outcomes: list[OptimizerOutcome] = []
        runs: list[_Run] = []
        for part in _chunks(len(samples), mini_batches):
            # Both: the gradients in Megatron's buffers, and those that an unsharded optimizer hangs on the parameters.
            # If the latter stayed, backward would add the buffer to itself.
            self._forward.model.zero_grad_buffer()
            self._updater.optimizer.zero_grad()
            run = _Run(self._forward, samples[part], None if old is None else old[part], loss, replay)
            outcomes.append(self._updater.apply(run.loss, empty=run.empty))
            runs.append(run)
        return self._result(samples, outcomes, runs)

    def _result(self, samples: Sequence[Sample], outcomes: list[OptimizerOutcome], runs: "list[_Run]") -> StepResult:
        local = _mean_of_sums(merge(run.metrics for run in runs), len(runs))
        device = self._forward.device
        norms = [o.grad_norm for o in outcomes]
        return StepResult(
            metrics=values(unpack(all_reduce_sum(pack(local).to(device)).cpu(), local)),
            loss=sum(run.loss for run in runs) / len(runs),
            grad_norm=next((n for n in norms if not math.isfinite(n)), max(norms)),
            lr=outcomes[-1].lr,
            steps_taken=sum(not o.skipped for o in outcomes),
            steps_skipped=sum(o.skipped for o in outcomes),
            trained=[(s.group_id, s.sample_index) for s in samples],
            logprobs=[logprobs for run in runs for logprobs in run.logprobs],
        )

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


class _Run:
    """Forward and backward of one mini-batch.

    Leaves reduced gradients in the buffers, and what it saw in its fields.
    """

    def __init__(
        self,
        forward: Forward,
        samples: Sequence[Sample],
        old: Sequence[torch.Tensor] | None,
        loss: Loss,
        replay: bool,
    ) -> None:
        self._forward, self._samples, self._old, self._loss = forward, samples, old, loss
        device = forward.device
        lacking = torch.tensor([float(any(s.reference_logprobs is None for s in samples))], device=device)
        self._has_reference = not bool(all_reduce_max(lacking).item())
        self._counts = loss.counts(self._whole_batch(), global_trajectories(samples, device), GLOBAL)
        self.empty = self._counts.empty
        self._seen: dict[int, torch.Tensor] = {}
        parts = self._forward_backward(forward.micro_batches(samples, replay), replay)
        total = torch.stack([share for share, _ in parts]).sum()
        self.loss = float(all_reduce_sum(total).item())
        self.metrics = merge(metrics for _, metrics in parts)
        self.logprobs = [self._seen[i] for i in range(len(samples))]

    def _whole_batch(self) -> PolicyBatch:
        lengths = [s.response_token_ids.numel() for s in self._samples]
        zeros = response_column([torch.zeros(n) for n in lengths], self._forward.device)
        return self._policy_batch(list(range(len(self._samples))), zeros, None)

    def _forward_backward(self, micro_batches: list[MicroBatch], replay: bool) -> list[tuple[torch.Tensor, Metrics]]:
        model = self._forward.model
        model.train()
        self._scale = len(micro_batches) * data_parallel_size()
        with self._forward.replaying(replay):
            parts: list[tuple[torch.Tensor, Metrics]] = get_forward_backward_func()(
                forward_step_func=self._step,
                data_iterator=iter(micro_batches),
                model=[model],
                num_microbatches=len(micro_batches),
                seq_length=max(m.input_ids.size(1) for m in micro_batches),
                micro_batch_size=1,
                forward_only=False,
            )
        return parts

    def _step(self, data: Iterator[MicroBatch], model: Any) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
        micro = next(data)
        return self._forward.logits(micro), lambda logits: self._share(micro, logits)

    def _share(self, micro: MicroBatch, logits: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, Metrics]]:
        with nullcontext() if self._loss.needs_entropy_gradient else torch.no_grad():
            entropy = micro.response(token_entropy(logits, micro.temperatures))
        logprobs = micro.response(token_logprobs(logits, micro.targets, micro.temperatures))
        self._seen |= per_sample(micro, logprobs)
        chosen = torch.tensor(micro.rows, dtype=torch.int64, device=self._forward.device)
        batch = self._policy_batch(micro.rows, logprobs, entropy)
        output = self._loss.share(batch, self._counts.rows(chosen))
        # Megatron scales the returned loss in place, so it gets a tensor of its own.
        return output.loss * self._scale, (output.loss.detach().double().clone(), output.metrics)

    def _policy_batch(self, rows: list[int], logprobs: torch.Tensor, entropy: torch.Tensor | None) -> PolicyBatch:
        device = self._forward.device
        chosen = [self._samples[i] for i in rows]
        reference = [r for s in chosen if (r := s.reference_logprobs) is not None]
        return PolicyBatch(
            logprobs_BT=logprobs,
            advantages_BT=response_column([s.advantages for s in chosen], device),
            loss_mask_BT=response_column([s.loss_mask.bool() for s in chosen], device),
            old_logprobs_BT=None if self._old is None else response_column([self._old[i] for i in rows], device),
            rollout_logprobs_BT=response_column([s.rollout_logprobs for s in chosen], device),
            ref_logprobs_BT=response_column(reference, device) if self._has_reference else None,
            entropy_BT=entropy,
        )


def _mean_of_sums(metrics: Metrics, steps: int) -> Metrics:
    return {n: Metric(m.total / steps) if m.count is None else m for n, m in metrics.items()}


def _chunks(count: int, parts: int) -> list[slice]:
    """`parts` contiguous slices that cover `count` items, sizes within one of each other; some may be empty."""
    edges = [count * i // parts for i in range(parts + 1)]
    return [slice(a, b) for a, b in pairwise(edges)]
