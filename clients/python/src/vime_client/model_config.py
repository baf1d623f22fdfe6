"""What a model's config.json says of it, read without Transformers: checks before a start must answer at once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def read_model(folder: Path) -> dict[str, Any]:
    """The model's config.json; empty for a name on a hub, and where it cannot be read, which those say who load it."""
    try:
        read = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}


def has_experts(model: Mapping[str, Any]) -> bool:
    """True for a mixture of experts."""
    return any(model.get(name) for name in _EXPERTS)


def longest_context(model: Mapping[str, Any]) -> int | None:
    """`max_position_embeddings`; None where the model does not say, or its positions are stretched beyond that."""
    limit, rope = model.get("max_position_embeddings"), model.get("rope_parameters")
    stretched = isinstance(rope, dict) and rope.get("rope_type", "default") != "default"
    return limit if isinstance(limit, int) and not stretched and not model.get("rope_scaling") else None
