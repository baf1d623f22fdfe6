"""How vLLM is set up: environment, arguments, and what a model's files say about it."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

from vime_rollout.config import VllmConfig
from vime_rollout.engine import EngineError
from vime_rollout.engine_limits import installed_for
from vime_rollout.engines import orphan_watch

_WORKER = "vime_rollout.engines.vllm_worker.WorkerExtension"
_CPU_BLOCK = 32
_TOP_K_NAMES = ("num_experts_per_tok", "moe_topk", "num_experts_per_token", "moe_top_k", "top_k_experts")
_SAFETENSORS_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "I64": "int64",
    "I32": "int32",
    "U8": "uint8",
    "BOOL": "bool",
}

Expected = dict[str, tuple[str, tuple[int, ...]]]


def prepare_environment(config: VllmConfig, staging_dir: Path | None = None) -> None:
    """Set what vLLM and its children read from the environment; before vLLM is imported."""
    wanted = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if Path(config.model).is_dir():
        wanted["HF_HUB_OFFLINE"] = "1"
    if _is_cpu(config):
        gib = -(-config.kv_cache_tokens // (1 << 20)) or 1
        wanted |= {
            "OMP_NUM_THREADS": str(config.cpu_threads),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # "auto" pins every engine to core 0
            # Not what it says: the engine core is a process of its own all the same. On CPU it lets the worker live in
            # that process, which saves a process and its memory.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if config.tensor_parallel_size > 1 else "0",
            "VLLM_CPU_KVCACHE_SPACE": str(gib),  # whole GiB, only a ceiling: num_gpu_blocks_override decides
        }
        if _eager(config):
            wanted["TORCHDYNAMO_DISABLE"] = "1"  # else the first request compiles the sampler for many seconds
    for name, value in wanted.items():
        os.environ.setdefault(name, value)
    os.environ.update(config.env)
    os.environ[orphan_watch.SERVICE_PID] = str(os.getpid())
    os.environ[orphan_watch.STAGING_DIR] = str(staging_dir or "")


def engine_arguments(config: VllmConfig) -> Any:
    """vLLM's AsyncEngineArgs for these settings.

    Raises:
        EngineError: routes are wanted of a model that has none.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs

    options: dict[str, Any] = {
        "model": config.model,
        "dtype": config.dtype,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "tensor_parallel_size": config.tensor_parallel_size,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "enforce_eager": _eager(config),
        "load_format": config.load_format,
        "enable_sleep_mode": config.enable_sleep_mode,
        "seed": config.seed,
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": -1,  # all of one place, for the last id of a sequence that fills the context
        "worker_extension_cls": _WORKER,
    }
    if _is_cpu(config):
        del options["gpu_memory_utilization"]
        options["block_size"] = _CPU_BLOCK
        options["num_gpu_blocks_override"] = max(4, config.kv_cache_tokens // _CPU_BLOCK)
        if config.tensor_parallel_size == 1:
            options["distributed_executor_backend"] = "uni"
    options |= config.args
    arguments = AsyncEngineArgs(**options)
    if "enable_return_routed_experts" not in config.args:
        experts = arguments.create_model_config().get_num_experts()
        if config.return_routes and not experts:
            raise EngineError("vllm.return_routes is on, and the model has no experts")
        arguments.enable_return_routed_experts = bool(experts) if config.return_routes is None else config.return_routes
    return arguments


def experts_per_token(model_config: Any) -> int:
    """Top-k of the model's routers; 0 for a dense model."""
    text_config = model_config.hf_text_config
    return next((int(getattr(text_config, n)) for n in _TOP_K_NAMES if getattr(text_config, n, None)), 0)


def eos_ids(model_config: Any, tokenizer: Any) -> tuple[int, ...]:
    """Every id that ends a response: of the model's config, its generation config and its tokenizer."""
    found: set[int] = set()
    named = [getattr(model_config.hf_text_config, "eos_token_id", None), getattr(tokenizer, "eos_token_id", None)]
    named.append((model_config.try_get_generation_config() or {}).get("eos_token_id"))
    for value in named:
        found.update([value] if isinstance(value, int) else value or [])
    return tuple(sorted(found))


def checkpoint_tensors(model: Path) -> Expected:
    """Name -> (dtype, shape) of every tensor in a directory's safetensors files, from their headers alone."""
    found: Expected = {}
    for path in sorted(model.glob("*.safetensors")) if model.is_dir() else []:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        for name, entry in header.items():
            if name != "__metadata__":
                found[name] = (_SAFETENSORS_DTYPES.get(entry["dtype"], entry["dtype"]), tuple(entry["shape"]))
    return found


def _is_cpu(config: VllmConfig) -> bool:
    return (installed_for() if config.device == "auto" else config.device) == "cpu"


def _eager(config: VllmConfig) -> bool:
    return _is_cpu(config) if config.enforce_eager is None else config.enforce_eager
