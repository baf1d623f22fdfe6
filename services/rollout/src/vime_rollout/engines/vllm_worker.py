"""What runs inside vLLM's worker processes: model facts, the trial load, and the real one.

Named in `worker_extension_cls`: vLLM imports this module in each worker and mixes the class into its own. Results are
plain data. Nothing here ever comes from the wire: the arguments are a manifest that the service has checked, and a path
that the service made.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from vime_rollout.engines import vllm_cpu_fixes
from vime_rollout.engines.load_plan import LoadRecord, LoadWatcher
from vime_rollout.engines.orphan_watch import watch_service
from vime_service.bulk import BulkError, Manifest
from vime_service.bulk.buckets import unpack, verify
from vime_service.bulk.dtypes import torch_dtype
from vime_service.bulk.staging import map_file

watch_service()


def _is_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


if _is_cpu():
    vllm_cpu_fixes.apply()

TensorSpec = tuple[str, str, tuple[int, ...]]
"""Name, dtype, shape."""


class WorkerExtension:
    """Methods added to vLLM's worker. `self` is that worker."""

    model_runner: Any
    vllm_config: Any
    model_config: Any

    def vime_facts(self) -> dict[str, Any]:
        """Which layers are mixtures of experts, and the element type of the weights."""
        from vllm.model_executor.layers.fused_moe.layer import MoERunner

        model = self.model_runner.model
        layers = sorted({int(module.layer_id) for module in model.modules() if isinstance(module, MoERunner)})
        return {"moe_layer_ids": layers, "dtype": str(self.model_config.dtype).removeprefix("torch.")}

    def vime_try(self, tensors: Sequence[TensorSpec]) -> dict[str, Any]:
        """Load tensors of the given types and shapes into a twin of the model that has no memory; what was written."""
        twin = self._vime_twin()
        watcher = LoadWatcher(dict(twin.named_parameters()))
        specs = ((name, torch.empty(shape, dtype=torch_dtype(dtype), device="meta")) for name, dtype, shape in tensors)
        return asdict(self._vime_watched(twin, watcher, specs))

    def vime_load(self, manifest: Mapping[str, Any], path: str) -> dict[str, Any]:
        """Load a staged version in place.

        Returns:
            `refused`: why nothing was changed, or empty; `failed`: why the weights are unknown, or empty;
            `record`: what was written; `seconds`.
        """
        started = time.monotonic()
        try:
            checked = Manifest.from_dict(manifest)
            staged = map_file(Path(path), checked.plan.total_bytes)
            verify(checked, staged)
        except (BulkError, OSError) as error:
            return {"refused": str(error), "failed": "", "record": asdict(LoadRecord()), "seconds": 0.0}
        record, failed = LoadRecord(), ""
        try:
            record = self._vime_reload(unpack(checked, staged).items())
        except Exception as error:  # noqa: BLE001  it must cross to the service as data, whatever it is
            failed = f"{type(error).__name__}: {error}"
        seconds = time.monotonic() - started
        return {"refused": "", "failed": failed or record.error, "record": asdict(record), "seconds": seconds}

    def vime_free_bytes(self) -> int:
        """Free device memory; 0 on CPU."""
        return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0

    def _vime_reload(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> LoadRecord:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        model = self.model_runner.model
        tied = tied_parameters(model)
        with torch.no_grad(), set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)
            # It gives each layer parameters of its own: one that is tied is then loaded through its first owner alone.
            watcher = LoadWatcher({name: p for name, p in model.named_parameters() if name not in tied})
            try:
                record = self._vime_watched(model, watcher, tensors)
            finally:  # also after a failure: a later load must find whole layers
                finalize_layerwise_reload(model, self.model_config)
                if _is_cpu():
                    vllm_cpu_fixes.repack_tied_layers(tied.values())
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return record

    def _vime_watched(
        self, model: Any, watcher: LoadWatcher, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> LoadRecord:
        error = ""
        try:
            with watcher:
                model.load_weights(watcher.feed(tensors))
        except Exception as failure:  # noqa: BLE001  model loaders raise anything; the tensor must be named
            error = f"{watcher.current}: {type(failure).__name__}: {failure}"
        return watcher.record(error)

    def _vime_twin(self) -> Any:
        """The model again, on the meta device. Its layers are registered in copies of vLLM's global lists."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.utils import initialize_model
        from vllm.utils.torch_utils import set_default_torch_dtype

        config = copy.copy(self.vllm_config)
        config.compilation_config = copy.copy(config.compilation_config)
        for name, value in vars(config.compilation_config).items():
            if isinstance(value, dict | list | set):
                setattr(config.compilation_config, name, copy.copy(value))
        config.compilation_config.static_forward_context = {}
        config.compilation_config.static_all_moe_layers = []
        with set_current_vllm_config(config), set_default_torch_dtype(self.model_config.dtype), _meta():
            return initialize_model(config, model_config=self.model_config)


def tied_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Names of parameters that are another's under a second name, such as a tied head's, with the layer that has it."""
    seen: set[int] = set()
    tied: dict[str, torch.nn.Module] = {}
    for prefix, layer in model.named_modules():
        for name, parameter in layer.named_parameters(prefix, recurse=False):
            if id(parameter) in seen:
                tied[name] = layer
            seen.add(id(parameter))
    return tied


@contextmanager
def _meta() -> Iterator[None]:
    with torch.device("meta"):
        yield
