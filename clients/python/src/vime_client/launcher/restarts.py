"""When a died service is started again, and when that is enough. Arithmetic only."""

from __future__ import annotations

from dataclasses import dataclass, field

_LONGEST_BACKOFF_S = 15.0


@dataclass
class Restarts:
    """The deaths of one service.

    `limit` deaths within `window_s` seconds are enough; 0 means that the first is.
    """

    limit: int
    window_s: float
    backoff_s: float
    total: int = 0
    _recent: list[float] = field(default_factory=list)

    def died(self, now: float) -> float | None:
        """Note a death at `now` (monotonic seconds): the wait before the next start, or None if that was enough."""
        self.total += 1
        self._recent = [then for then in self._recent if now - then < self.window_s]
        self._recent.append(now)
        if len(self._recent) >= max(1, self.limit):
            return None
        return float(min(self.backoff_s * 2 ** (len(self._recent) - 1), _LONGEST_BACKOFF_S))
