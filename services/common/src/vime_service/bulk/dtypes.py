"""The tensor element types that may cross a process, by the name that the contracts use."""

from __future__ import annotations

import torch

from vime_service.bulk.errors import ManifestError

TORCH_DTYPES: dict[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "int64": torch.int64,
    "int32": torch.int32,
    "uint16": torch.uint16,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """The wire name of a torch dtype; `ManifestError` when the type may not cross."""
    if dtype not in _NAMES:
        raise ManifestError(f"dtype {dtype} cannot cross a process; one of {sorted(TORCH_DTYPES)} can")
    return _NAMES[dtype]


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a wire name; `ManifestError` when the name is unknown."""
    if name not in TORCH_DTYPES:
        raise ManifestError(f"unknown dtype {name!r}; known: {sorted(TORCH_DTYPES)}")
    return TORCH_DTYPES[name]


def item_bytes(name: str) -> int:
    """Bytes of one element of the named dtype."""
    return torch_dtype(name).itemsize
