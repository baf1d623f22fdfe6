"""A session stays with its engine, whose prefix cache knows it, unless that engine is clearly busier than another.

It trades balance for cached prefixes, by at most `load_margin` samples. Sessions are remembered in a bounded table;
losing it (a restart) costs cache hits, never correctness.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from vime_router.policies.base import Candidate, Choice
from vime_service.config import ConfigModel


class StickyLeastLoadedConfig(ConfigModel):
    """Sessions stay while the load allows; everything else goes to the least loaded."""

    name: Literal["sticky_least_loaded"] = "sticky_least_loaded"
    """The policy."""
    load_margin: int = Field(default=16, ge=0)
    """A session leaves its engine when that has more than this many samples above the least loaded one."""
    kv_budget: float = Field(default=0.9, gt=0, le=1)
    """An engine whose KV cache is used beyond this share gets nothing while another is within it."""
    max_sessions: int = Field(default=65536, ge=1)
    """Sessions remembered; the longest unused is forgotten first."""


class StickyLeastLoaded:
    """Least loaded, with session affinity. Equal loads take turns."""

    def __init__(self, config: StickyLeastLoadedConfig | None = None) -> None:
        self._config = config or StickyLeastLoadedConfig()
        self._sessions: OrderedDict[str, tuple[str, str]] = OrderedDict()
        self._turns: OrderedDict[str, None] = OrderedDict()

    def choose(self, candidates: Sequence[Candidate], session_id: str) -> Choice:
        """The session's engine if its load and KV cache allow, else the least loaded."""
        within = [c for c in candidates if c.kv_cache_usage <= self._config.kv_budget] or list(candidates)
        least = min(candidate.load for candidate in within)
        home = self._sessions.get(session_id) if session_id else None
        for candidate in within:
            if (candidate.engine_id, candidate.boot_id) == home and candidate.load <= least + self._config.load_margin:
                return self._took(candidate, session_id, sticky=True)
        equals = {candidate.engine_id: candidate for candidate in within if candidate.load == least}
        return self._took(self._whose_turn(equals), session_id, sticky=False)

    def _whose_turn(self, equals: dict[str, Candidate]) -> Candidate:
        """The one among equals that was taken longest ago; a newcomer comes first, once."""
        waited = [engine_id for engine_id in self._turns if engine_id in equals]
        newcomers = sorted(engine_id for engine_id in equals if engine_id not in self._turns)
        return equals[(newcomers + waited)[0]]

    def _took(self, candidate: Candidate, session_id: str, *, sticky: bool) -> Choice:
        self._turns[candidate.engine_id] = None
        self._turns.move_to_end(candidate.engine_id)
        if len(self._turns) > self._config.max_sessions:
            self._turns.popitem(last=False)
        if session_id:
            self._sessions[session_id] = (candidate.engine_id, candidate.boot_id)
            self._sessions.move_to_end(session_id)
            if len(self._sessions) > self._config.max_sessions:
                self._sessions.popitem(last=False)
        return Choice(candidate, sticky)
