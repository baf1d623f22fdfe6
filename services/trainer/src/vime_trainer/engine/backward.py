"""Forward and backward of one mini-batch: the same numbers for every split into micro-batches and ranks.

Denominators are those of the global mini-batch, computed before the first micro-batch; each micro-batch adds its share.
Megatron divides a micro-batch's loss by their number and averages gradients over the data-parallel ranks: both are
undone here. Policy and critic train through this very function.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func

from vime_trainer.algorithms.losses import LossOutput
from vime_trainer.algorithms.metrics import Metric, Metrics, merge, pack, unpack, values
from vime_trainer.engine.batch import MicroBatch
from vime_trainer.engine.distributed import all_reduce_sum, data_parallel_size
from vime_trainer.engine.forward import Forward
from vime_trainer.engine.optimizer import OptimizerOutcome, Updater
from vime_trainer.engine.sample import Sample

Share = Callable[[MicroBatch, torch.Tensor], LossOutput]
"""(micro-batch, the model's output [batch, width, ...]) -> its share of the mini-batch's loss."""


@dataclass(frozen=True)
class Accumulated:
    """What one mini-batch left beside its gradients."""

    loss: float
    """Of the global mini-batch."""
    metrics: Metrics
    """This rank's share."""


@dataclass(frozen=True)
class Updates:
    """A series of optimizer steps; the same on every rank but for `trained`."""

    metrics: dict[str, float | None]
    """The loss's metrics over the global batch, by its names.

    A metric that is a sum is the mean over the mini-batches that have a token to train on.
    """
    loss: float
    """Global loss, mean over the same mini-batches; 0 if there is none. Not finite if a step was skipped for it."""
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
    trained: list[tuple[str, int]]
    """(group_id, sample_index) of each of this rank's samples that changed the weights: it has a token to train on, and
    a step on it was taken."""

    @property
    def skipped(self) -> bool:
        """True when nothing was changed: no weight, no moment, no schedule."""
        return self.steps_taken == 0


def connect(forward: Forward, updater: Updater) -> None:
    """Tell Megatron's schedule how this model's gradients are scaled and reduced. Once per model."""
    settings = forward.model.config
    settings.finalize_model_grads_func = finalize_model_grads
    settings.grad_scale_func = updater.optimizer.scale_loss
    settings.no_sync_func = forward.model.no_sync


def accumulate(
    forward: Forward, updater: Updater, samples: Sequence[Sample], share: Share, *, replay: bool
) -> Accumulated:
    """Run this rank's `samples` forward and backward; reduced gradients are left in the model's buffers.

    Every rank calls it, also without samples. `share` is called once per micro-batch.
    """
    # Both: the gradients in Megatron's buffers, and those that an unsharded optimizer hangs on the parameters. If the
    # latter stayed, backward would add the buffer to itself.
    forward.model.zero_grad_buffer()
    updater.optimizer.zero_grad()
    micro_batches = forward.micro_batches(samples, replay)
    scale = len(micro_batches) * data_parallel_size()

    def step(data: Iterator[MicroBatch], _: Any) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
        micro = next(data)

        def loss(output: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, Metrics]]:
            part = share(micro, output)
            # Megatron scales the returned loss in place, so it gets a tensor of its own.
            return part.loss * scale, (part.loss.detach().double().clone(), part.metrics)

        return forward.output(micro), loss

    forward.model.train()
    with forward.replaying(replay):
        parts: list[tuple[torch.Tensor, Metrics]] = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(micro_batches),
            model=[forward.model],
            num_microbatches=len(micro_batches),
            seq_length=max(m.input_ids.size(1) for m in micro_batches),
            micro_batch_size=1,
            forward_only=False,
        )
    total = torch.stack([loss for loss, _ in parts]).sum()
    return Accumulated(float(all_reduce_sum(total).item()), merge(metrics for _, metrics in parts))


def train_in_parts(
    samples: Sequence[Sample],
    parts: Sequence[list[int]],
    train: Callable[[list[int]], tuple[Accumulated, OptimizerOutcome]],
    device: torch.device,
) -> Updates:
    """One optimizer step after the other, on the samples at each part's positions; what came of them. Collective."""
    done = [train(part) for part in parts]
    count = max(1, sum(not outcome.empty for _, outcome in done))
    local = {
        name: Metric(m.total / count) if m.count is None else m
        for name, m in merge(mini.metrics for mini, _ in done).items()
    }
    norms = [outcome.grad_norm for _, outcome in done]
    taken = {i for part, (_, outcome) in zip(parts, done, strict=True) for i in part if not outcome.skipped}
    return Updates(
        metrics=values(unpack(all_reduce_sum(pack(local).to(device)).cpu(), local)),
        loss=sum(mini.loss for mini, _ in done) / count,
        grad_norm=next((n for n in norms if not math.isfinite(n)), max(norms)),
        lr=done[-1][1].lr,
        steps_taken=sum(not outcome.skipped for _, outcome in done),
        steps_skipped=sum(outcome.skipped for _, outcome in done),
        trained=[(s.group_id, s.sample_index) for i, s in enumerate(samples) if i in taken and bool(s.loss_mask.any())],
    )
