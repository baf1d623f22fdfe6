"""What every policy is given and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Candidate:
    """An engine that may take the call.

    Attributes:
        engine_id: the engine.
        boot_id: which of its lives: a restarted engine has no cached prefixes.
        load: samples running or waiting there.
        kv_cache_usage: share of its KV cache in use, 0 to 1.
    """

    engine_id: str
    boot_id: str
    load: int
    kv_cache_usage: float = 0.0


@dataclass(frozen=True, slots=True)
class Choice:
    """The candidate chosen, and whether the call followed its session there."""

    candidate: Candidate
    sticky: bool = False


class Policy(Protocol):
    """Chooses. Never waits, never fails: there is always at least one candidate."""

    def choose(self, candidates: Sequence[Candidate], session_id: str) -> Choice:
        """The candidate for a call of this session ("" for a call of no session)."""
        ...
