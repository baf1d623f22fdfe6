"""Let megatron-core run on CPU tensors over gloo. Does nothing where CUDA exists.

megatron-core assumes CUDA in a few places that have nothing to do with the mathematics. Each piece below says which
one. The patches are process-wide; a rank process hosts one engine and nothing else that could mind.
Written against megatron-core 0.16.1 and 0.19.2, without TransformerEngine and Apex.
"""

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

_CPU = torch.device("cpu")


def install() -> bool:
    """Install the shim once, before a model is built. Returns True when this process runs on the shim."""
    if torch.cuda.is_available():
        _name_missing_transformer_engine()
        return False
    if not getattr(torch, "_vime_cpu_shim", False):
        _disable_compilation()
        _patch_devices()
        _patch_streams()
        _patch_constructors()
        _patch_type_names()
        _patch_random_states()
        _patch_all_to_all_splits()
        torch._vime_cpu_shim = True  # type: ignore[attr-defined]
    _name_missing_transformer_engine()
    return True


class _Stream:
    """Stands for a CUDA stream or event: on CPU everything is already in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *args: object) -> None: ...
    def wait_stream(self, stream: object) -> None: ...
    def wait_event(self, event: object) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self, event: object = None) -> "_Stream":
        return _Stream()


def _constant(value: object = None) -> Callable[..., Any]:
    # A new function each time: torch._dynamo refuses one object under several names.
    return lambda *args, **kwargs: value


def _disable_compilation() -> None:
    """Megatron's `jit_fuser` is torch.compile: on CPU that is a run of the C++ compiler for every small function."""
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # functions decorated from now on
    torch._dynamo.config.disable = True  # functions decorated already


def _patch_devices() -> None:
    """Rotary embeddings, the optimizer and the schedules ask for the current CUDA device and pass it on as
    `device=`."""
    cuda: Any = torch.cuda
    cuda.current_device = _constant(_CPU)
    cuda.set_device = _constant()
    cuda.synchronize = _constant()
    cuda.empty_cache = _constant()
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *args, **kwargs: self


def _patch_streams() -> None:
    """The MoE token dispatcher and gradient overlap create streams and events even when there is nothing to overlap."""
    cuda: Any = torch.cuda
    cuda.Stream, cuda.Event = _Stream, _Stream
    cuda.current_stream = _constant(_Stream())
    cuda.default_stream = _constant(_Stream())
    cuda.stream = lambda stream=None: contextlib.nullcontext()


def _patch_constructors() -> None:
    """Schedules, gradient clipping and counters create tensors with `device="cuda"` spelled out."""

    def on_cpu(create: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = _CPU
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
            return create(*args, **kwargs)

        return wrapper

    # `with torch.device(...)` keeps a set of constructors, filled at first use. It must hold the real ones, or models
    # that are built under a device context (transformers does) silently get wrong buffers.
    torch.utils._device._device_constructors()
    for name in ("tensor", "zeros", "ones", "empty", "empty_like"):
        setattr(torch, name, on_cpu(getattr(torch, name)))


def _patch_type_names() -> None:
    """The optimizers sort parameters by `param.type() == "torch.cuda.FloatTensor"`. Only megatron's own calls are
    answered so."""
    tensor: Any = torch.Tensor
    real_type = tensor.type

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = real_type(self, *args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if isinstance(result, str) and caller.startswith("megatron."):
            return result.replace("torch.", "torch.cuda.", 1)
        return result

    tensor.type = type_


def _patch_random_states() -> None:
    """The tensor-parallel generator tracker saves and restores CUDA generator states; here it is given the CPU's."""
    from megatron.core.tensor_parallel import random as tracker

    cuda: Any = torch.cuda
    cuda.manual_seed = lambda seed: torch.manual_seed(seed)
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    tracker._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    tracker._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)


def _patch_all_to_all_splits() -> None:
    """megatron turns split sizes into lists only if they are CUDA tensors; gloo's all-to-all needs them as integers."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def to_host(value: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return value.numpy() if as_numpy and torch.is_tensor(value) else value

    moe_utils.maybe_move_tensor_to_cpu = token_dispatcher.maybe_move_tensor_to_cpu = to_host


def _name_missing_transformer_engine() -> None:
    """0.16.1 reads `te_general_gemm` whenever `moe_router_dtype` is set, also without TransformerEngine (NameError,
    GPUs too)."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
