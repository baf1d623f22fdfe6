"""A digest of everything in the settings that decides the training's numbers."""

from __future__ import annotations

import hashlib
import json

from vime_trainer.config import TrainerSettings

# What may change between two incarnations without making recorded batches a lost lineage.
_FREE = {"run_dir", "buffer_address", "router_address", "credentials", "steps", "lease_wait_s"}
_FREE |= {"metrics", "faults", "checkpoint", "eval_tables"}
_DECIDES_IN_PUBLISH = {"interval"}


def recipe_digest(settings: TrainerSettings) -> str:
    """Hexadecimal SHA-256 over the settings, without addresses, bounds and reports."""
    kept = {name: value for name, value in settings.model_dump(mode="json").items() if name not in _FREE}
    kept["publish"] = {name: value for name, value in kept["publish"].items() if name in _DECIDES_IN_PUBLISH}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()
