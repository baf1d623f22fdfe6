"""Refusals that name the field and the number."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def require(holds: bool, owner: object, field: str, reason: str) -> None:
    """Raise `ValueError` "Owner.field=value: reason" unless `holds`.

    `owner` is the settings object; its field is read for the message, so the two cannot disagree.
    """
    if not holds:
        value: Any = getattr(owner, field)
        raise ValueError(f"{type(owner).__name__}.{field}={value!r}: {reason}")


def same_shape(expected: Tensor, **tensors: Tensor | None) -> None:
    """Raise `ValueError` naming the first tensor whose shape differs from `expected`; `None` is skipped."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape != expected.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {tuple(expected.shape)}")


def choice(name: str, kind: str, known: dict[str, Any]) -> Any:
    """`known[name]`, or a `ValueError` that lists what there is."""
    if name not in known:
        raise ValueError(f"unknown {kind} {name!r}; known: {', '.join(sorted(known))}")
    return known[name]
