"""The model's forward pass over micro-batches, with or without replay."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from megatron.core.distributed import DistributedDataParallel

from vime_trainer.engine import batch as batches
from vime_trainer.engine.batch import MicroBatch
from vime_trainer.engine.distributed import all_reduce_max
from vime_trainer.engine.logprobs import token_logprobs
from vime_trainer.engine.replay import RoutingReplay
from vime_trainer.engine.sample import Sample
from vime_trainer.engine.shape import ModelShape


class Forward:
    """One wrapped model with what is needed to run samples through it."""

    def __init__(
        self,
        model: DistributedDataParallel,
        shape: ModelShape,
        replay: RoutingReplay | None,
        device: torch.device,
        micro_batch_tokens: int,
    ) -> None:
        self.model, self.shape, self.device = model, shape, device
        self._replay, self._budget = replay, micro_batch_tokens

    def micro_batches(self, samples: Sequence[Sample], replay: bool) -> list[MicroBatch]:
        """This rank's micro-batches. Collective: ranks with fewer than others get empty ones at the end."""
        rows = batches.plan([s.consumed for s in samples], self._budget)
        wanted = int(all_reduce_max(torch.tensor([max(1, len(rows))], device=self.device)).item())
        rows += [[] for _ in range(wanted - len(rows))]
        return [batches.build(samples, r, self.shape, self.device, replay) for r in rows]

    def replaying(self, on: bool) -> AbstractContextManager[object]:
        """A replay session, or nothing."""
        return self._replay.session() if on and self._replay is not None else nullcontext()

    def output(self, micro: MicroBatch) -> torch.Tensor:
        """[batch, width, vocab] logits ([batch, width, 1] values of a critic); loads the micro-batch's routes first."""
        if micro.routes is not None and self._replay is not None:
            self._replay.load(micro.routes)
        positions = torch.arange(micro.input_ids.size(1), device=self.device).expand_as(micro.input_ids)
        output: torch.Tensor = self.model(micro.input_ids, positions, None)
        return output

    def score(self, samples: Sequence[Sample], replay: bool) -> list[torch.Tensor]:
        """Log-probabilities of this rank's response tokens: float32 [response] each, in order. No gradients."""
        return self.per_response(
            samples, replay, lambda micro, logits: token_logprobs(logits, micro.targets, micro.temperatures)
        )

    def per_response(
        self, samples: Sequence[Sample], replay: bool, read: Callable[[MicroBatch, torch.Tensor], torch.Tensor]
    ) -> list[torch.Tensor]:
        """A forward pass without gradients. `read` turns the model's output into [batch, width] numbers; those at the
        positions that predict the response come back, float32 [response] per sample, in order."""
        out: dict[int, torch.Tensor] = {}
        self.model.eval()
        with torch.no_grad(), self.replaying(replay):
            for micro in self.micro_batches(samples, replay):
                out |= per_sample(micro, micro.response(read(micro, self.output(micro))))
        return [out[i] for i in range(len(samples))]


def per_sample(micro: MicroBatch, response_BT: torch.Tensor) -> dict[int, torch.Tensor]:
    """Cut padded rows to each sample's own response: caller's index -> float32 [response] on the host."""
    lengths = zip(micro.rows, micro.response_lengths, strict=True)
    return {i: response_BT[b, :n].detach().float().cpu().clone() for b, (i, n) in enumerate(lengths)}
