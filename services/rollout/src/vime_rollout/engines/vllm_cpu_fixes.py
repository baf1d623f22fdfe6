"""Three faults of vLLM's CPU build (seen in 0.28 to 0.32), put right in the worker. Imported there, and only there.

A. A weight *update* of a mixture of experts leaves the experts unpacked: the kernel goes on with the packed copy of the
   old weights, or reads unpacked ones as packed, and every answer is silently wrong. The packing is done again.
B. A request with a seed whose prompt is split by chunked prefill kills the engine ("CPU Generator does not use
   offset"): the runner rewinds the generators of requests that sampled nothing by a CUDA-only call. Their state is
   saved before sampling and put back instead.
C. A weight update of a model with tied embeddings leaves the head's packed copy as it was: the head goes on with the
   old weights. The reload packs only layers whose own parameters were loaded, and a tied head has none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

_MARK = "_vime_fixed"


def apply() -> None:
    """Put A and B right. Calling it again does nothing. Raises AttributeError where vLLM has changed too much."""
    _repack_experts_on_update()
    _rewind_cpu_generators()


def repack_tied_layers(layers: Iterable[torch.nn.Module]) -> None:
    """C: pack layers again whose weights changed through another layer's parameter."""
    for layer in layers:
        method = getattr(layer, "quant_method", None)
        if method is not None:
            method.process_weights_after_loading(layer)


def _repack_experts_on_update() -> None:
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod as Method

    original: Callable[..., Any] = Method._setup_kernel
    if hasattr(original, _MARK):
        return

    def _setup_kernel(self: Any, layer: Any, w13: Any, w2: Any) -> None:
        update = self.moe_kernel is not None
        original(self, layer, w13, w2)
        if update and self.unquantized_backend.name == "CPU":
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    setattr(_setup_kernel, _MARK, True)
    Method._setup_kernel = _setup_kernel


def _rewind_cpu_generators() -> None:
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner as Runner

    sample: Callable[..., Any] = Runner._sample
    book: Callable[..., Any] = Runner._bookkeeping_sync
    if hasattr(sample, _MARK):
        return

    def partial_prefills(runner: Any) -> list[int]:
        """Rows of the batch that have a generator, and whose sampled token will be thrown away."""
        batch = runner.input_batch
        discarded = np.nonzero(runner.discard_request_mask.np[: batch.num_reqs])[0]
        return [int(row) for row in discarded if int(row) in batch.generators]

    def _sample(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._vime_states = {row: self.input_batch.generators[row].get_state() for row in partial_prefills(self)}
        return sample(self, *args, **kwargs)

    def _bookkeeping_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        generators = self.input_batch.generators
        held = {row: generators.pop(row) for row in partial_prefills(self)}
        for row, generator in held.items():
            generator.set_state(self._vime_states[row])
        try:
            return book(self, *args, **kwargs)
        finally:
            generators.update(held)

    setattr(_sample, _MARK, True)
    Runner._sample, Runner._bookkeeping_sync = _sample, _bookkeeping_sync
