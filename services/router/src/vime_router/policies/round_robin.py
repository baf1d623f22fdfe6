"""One after the other, whatever their load and whatever the session. For calls of equal length, and as a baseline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from vime_router.policies.base import Candidate, Choice
from vime_service.config import ConfigModel


class RoundRobinConfig(ConfigModel):
    """One after the other."""

    name: Literal["round_robin"] = "round_robin"
    """The policy."""


class RoundRobin:
    """Takes the engine after the last one taken, in the order of their ids; engines may come and go in between."""

    def __init__(self) -> None:
        self._last = ""

    def choose(self, candidates: Sequence[Candidate], session_id: str) -> Choice:
        """The next candidate; the session is not looked at."""
        ordered = sorted(candidates, key=lambda candidate: candidate.engine_id)
        chosen = next((c for c in ordered if c.engine_id > self._last), ordered[0])
        self._last = chosen.engine_id
        return Choice(chosen)
