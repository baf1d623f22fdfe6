"""One training batch: forward, loss, backward and optimizer steps, the same numbers for every split.

Denominators are those of the global mini-batch, computed before the first micro-batch; each micro-batch adds its share.
Megatron divides a micro-batch's loss by their number and averages gradients over the data-parallel ranks: both are
undone.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func

from vime_trainer.algorithms.metrics import Metrics, merge, pack, unpack, values
from vime_trainer.algorithms.ranks import Reduce
from vime_trainer.algorithms.reducers import Denominators, denominators
from vime_trainer.engine import batch as batches
from vime_trainer.engine.batch import MicroBatch
from vime_trainer.engine.distributed import all_reduce_max, all_reduce_sum, data_parallel_size
from vime_trainer.engine.logprobs import token_entropy, token_logprobs
from vime_trainer.engine.optimizer import Updater
from vime_trainer.engine.replay import RoutingReplay
from vime_trainer.engine.sample import Sample
from vime_trainer.engine.shape import ModelShape
from vime_trainer.engine.trajectories import global_trajectories

GLOBAL = Reduce(sum=all_reduce_sum, max=all_reduce_max)


@dataclass(frozen=True)
class LossBatch:
    """What a loss sees of one micro-batch: B samples, right-padded to T response tokens. Padding is masked.

    Logprobs are natural logarithms at the sampling temperature. `counts` are the denominators of the global mini-batch.
    """

    logprobs_BT: torch.Tensor
    """Current policy, with gradient."""
    entropy_BT: torch.Tensor
    """Entropy in nats; with gradient only if the loss asks for it."""
    old_logprobs_BT: torch.Tensor
    """The trainer's own at the start of the batch, no gradient."""
    rollout_logprobs_BT: torch.Tensor
    """The engine's, as sampled."""
    reference_logprobs_BT: torch.Tensor | None
    """The reference policy's; None when any sample lacks them."""
    advantages_BT: torch.Tensor
    mask_BT: torch.Tensor
    """bool: trained tokens."""
    counts: Denominators


Loss = Callable[[LossBatch], tuple[torch.Tensor, Metrics]]
"""This micro-batch's share of the global loss (a scalar; shares add up) and metrics that add."""


@dataclass(frozen=True)
class StepResult:
    """What one call trained, on every rank the same except for `trained` and `logprobs` (this rank's samples)."""

    metrics: dict[str, float | None]
    """Loss metrics over the global batch, by the loss's names."""
    loss: float
    """Mean over the optimizer steps of the global loss."""
    grad_norm: float
    """Largest norm before clipping among the optimizer steps; NaN or infinite if a step was skipped for it."""
    lr: float
    """Learning rate of the last optimizer step."""
    steps_taken: int
    """Optimizer steps that changed the weights."""
    steps_skipped: int
    """Optimizer steps left out because loss or gradients were not finite."""
    trained: list[tuple[str, int]] = field(default_factory=list)
    """(group_id, sample_index) of this rank's samples that went through the loss: all of them."""
    logprobs: list[torch.Tensor] = field(default_factory=list)
    """This rank's samples in order: float32 [response], the policy's as it was when each sample's mini-batch came
    up."""

    @property
    def skipped(self) -> bool:
        """True when nothing was changed: no weight, no moment, no schedule."""
        return self.steps_taken == 0


class Trainer:
    """Runs training batches and forward-only scoring on one wrapped model."""

    def __init__(
        self,
        model: DistributedDataParallel,
        shape: ModelShape,
        updater: Updater,
        replay: RoutingReplay | None,
        device: torch.device,
        micro_batch_tokens: int,
    ) -> None:
        self._model, self._shape, self._updater, self._replay = model, shape, updater, replay
        self._device, self._budget = device, micro_batch_tokens
        settings = model.config
        settings.finalize_model_grads_func = finalize_model_grads
        settings.grad_scale_func = updater.optimizer.scale_loss
        settings.no_sync_func = model.no_sync

    def train(
        self, samples: Sequence[Sample], loss: Loss, *, mini_batches: int, replay: bool, entropy_grad: bool
    ) -> StepResult:
        """Train on this rank's `samples` in `mini_batches` optimizer steps. Every rank calls it, also one without
        samples."""
        if mini_batches < 1:
            raise ValueError(f"mini_batches = {mini_batches} must be at least 1")
        old = self._old_logprobs(samples, mini_batches, replay)
        outcomes, logprobs, metrics, losses = [], [], [], []
        for part in _chunks(len(samples), mini_batches):
            run = _Run(self, samples[part], None if old is None else old[part], loss, replay, entropy_grad)
            outcomes.append(self._updater.apply(run.loss, empty=run.empty))
            logprobs += run.logprobs
            metrics.append(run.metrics)
            losses.append(run.loss)
        merged = merge(metrics)
        norms = [o.grad_norm for o in outcomes]
        return StepResult(
            metrics=values(unpack(all_reduce_sum(pack(merged).to(self._device)).cpu(), merged)),
            loss=sum(losses) / len(losses),
            grad_norm=next((n for n in norms if not math.isfinite(n)), max(norms)),
            lr=outcomes[-1].lr,
            steps_taken=sum(not o.skipped for o in outcomes),
            steps_skipped=sum(o.skipped for o in outcomes),
            trained=[(s.group_id, s.sample_index) for s in samples],
            logprobs=logprobs,
        )

    def score(self, samples: Sequence[Sample], *, replay: bool) -> list[torch.Tensor]:
        """Log-probabilities of this rank's response tokens, float32 [response] each, in order. Forward only."""
        out: dict[int, torch.Tensor] = {}
        self._model.eval()
        with torch.no_grad(), self.replaying(replay):
            for micro in self.micro_batches(samples, replay):
                self.load_routes(micro)
                logprobs = micro.response(token_logprobs(self.logits(micro), micro.targets, micro.temperatures))
                out |= per_sample(micro, logprobs)
        return [out[i] for i in range(len(samples))]

    def _old_logprobs(self, samples: Sequence[Sample], mini_batches: int, replay: bool) -> list[torch.Tensor] | None:
        """What the samples bring, else a scoring pass; None when the first (and only) pass gives them anyway."""
        given = [s.old_logprobs for s in samples if s.old_logprobs is not None]
        missing = torch.tensor([float(len(given) != len(samples))], device=self._device)
        if not bool(all_reduce_max(missing).item()):
            return given
        return None if mini_batches == 1 else self.score(samples, replay=replay)

    def micro_batches(self, samples: Sequence[Sample], replay: bool) -> list[MicroBatch]:
        """This rank's micro-batches; ranks with fewer than others get empty ones at the end."""
        rows = batches.plan([s.consumed for s in samples], self._budget)
        wanted = int(all_reduce_max(torch.tensor([len(rows), 1], device=self._device)).max().item())
        rows += [[] for _ in range(wanted - len(rows))]
        return [batches.build(samples, r, self._shape, self._device, replay) for r in rows]

    def logits(self, micro: MicroBatch) -> torch.Tensor:
        """[batch, width, vocab]."""
        positions = torch.arange(micro.input_ids.size(1), device=self._device).expand_as(micro.input_ids)
        logits: torch.Tensor = self._model(micro.input_ids, positions, None)
        return logits

    def replaying(self, on: bool) -> AbstractContextManager[object]:
        """A replay session, or nothing."""
        return self._replay.session() if on and self._replay is not None else nullcontext()

    def load_routes(self, micro: MicroBatch) -> None:
        """Hand the micro-batch's routes to the routers, if it is to be replayed."""
        if micro.routes is not None and self._replay is not None:
            self._replay.load(micro.routes)

    @property
    def model(self) -> DistributedDataParallel:
        """The wrapped model."""
        return self._model

    @property
    def device(self) -> torch.device:
        """Where it lives."""
        return self._device


class _Run:
    """Forward and backward of one mini-batch. Leaves reduced gradients in the buffers, and what it saw in its
    fields."""

    def __init__(
        self,
        trainer: Trainer,
        samples: Sequence[Sample],
        old: Sequence[torch.Tensor] | None,
        loss: Loss,
        replay: bool,
        entropy_grad: bool,
    ) -> None:
        self._trainer, self._samples, self._old, self._loss = trainer, samples, old, loss
        self._entropy_grad = entropy_grad
        device = trainer.device
        masks = batches.response_column([s.loss_mask.bool() for s in samples], device)
        self._counts = denominators(masks, global_trajectories(samples, device), GLOBAL)
        lacking = [s for s in samples if s.reference_logprobs is None]
        self.empty = self._counts.empty
        self._has_reference = not bool(all_reduce_max(torch.tensor([float(len(lacking))], device=device)).item())
        self._seen: dict[int, torch.Tensor] = {}
        micro_batches = trainer.micro_batches(samples, replay)
        self._scale = len(micro_batches) * data_parallel_size()
        parts = self._forward_backward(micro_batches, replay)
        total = torch.stack([part[0] for part in parts]).sum().to(device)
        self.loss = float(all_reduce_sum(total).item())
        self.metrics = merge(part[1] for part in parts)
        self.logprobs = [self._seen[i] for i in range(len(samples))]

    def _forward_backward(self, micro_batches: list[MicroBatch], replay: bool) -> list[tuple[torch.Tensor, Metrics]]:
        model = self._trainer.model
        model.train()
        model.zero_grad_buffer()
        with self._trainer.replaying(replay):
            parts: list[tuple[torch.Tensor, Metrics]] = get_forward_backward_func()(
                forward_step_func=self._forward,
                data_iterator=iter(micro_batches),
                model=[model],
                num_microbatches=len(micro_batches),
                seq_length=max(m.input_ids.size(1) for m in micro_batches),
                micro_batch_size=1,
                forward_only=False,
            )
        return parts

    def _forward(self, data: Iterator[MicroBatch], model: Any) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
        micro = next(data)
        self._trainer.load_routes(micro)
        logits = self._trainer.logits(micro)
        return logits, lambda out: self._share(micro, out)

    def _share(self, micro: MicroBatch, logits: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, Metrics]]:
        logprobs = micro.response(token_logprobs(logits, micro.targets, micro.temperatures))
        with nullcontext() if self._entropy_grad else torch.no_grad():
            entropy = micro.response(token_entropy(logits, micro.temperatures))
        self._seen |= per_sample(micro, logprobs.detach())
        share, metrics = self._loss(self._loss_batch(micro, logprobs, entropy))
        # A fresh tensor: Megatron scales the returned loss in place.
        return share * self._scale, (share.detach().double().clone(), metrics)

    def _loss_batch(self, micro: MicroBatch, logprobs: torch.Tensor, entropy: torch.Tensor) -> LossBatch:
        device = self._trainer.device
        chosen = [self._samples[i] for i in micro.rows]
        old = (
            logprobs.detach()
            if self._old is None
            else batches.response_column([self._old[i] for i in micro.rows], device)
        )
        reference = None
        if self._has_reference:
            reference = batches.response_column([r for s in chosen if (r := s.reference_logprobs) is not None], device)
        mask = batches.response_column([s.loss_mask.bool() for s in chosen], device).bool()
        return LossBatch(
            logprobs_BT=logprobs,
            entropy_BT=entropy,
            old_logprobs_BT=old,
            rollout_logprobs_BT=batches.response_column([s.rollout_logprobs for s in chosen], device),
            reference_logprobs_BT=reference,
            advantages_BT=batches.response_column([s.advantages for s in chosen], device),
            mask_BT=mask,
            counts=self._counts.rows(torch.tensor(micro.rows, dtype=torch.int64, device=device)),
        )


def per_sample(micro: MicroBatch, response_BT: torch.Tensor) -> dict[int, torch.Tensor]:
    """Cut padded rows to each sample's own response: caller's index -> float32 [response] on the host."""
    lengths = zip(micro.rows, micro.response_lengths, strict=True)
    return {i: response_BT[b, :n].float().cpu().clone() for b, (i, n) in enumerate(lengths)}


def _chunks(count: int, parts: int) -> list[slice]:
    """`parts` contiguous slices that cover `count` items, sizes within one of each other; some may be empty."""
    edges = [count * i // parts for i in range(parts + 1)]
    return [slice(a, b) for a, b in pairwise(edges)]
