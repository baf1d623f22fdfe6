"""When each open lease ends, by the buffer's own monotonic clock. Only in memory: a restart gives all of them anew."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class _Times:
    granted: float
    ends: float
    outlived: bool = False
    """Its longest time ends it: no keep-alive can put that off."""


class LeaseTimes:
    """Ends of open leases."""

    def __init__(self) -> None:
        self._leases: dict[str, _Times] = {}
        self._next_end = math.inf  # no lease ends before; spares a look at all of them

    def begin(self, lease_id: str, now: float, ttl: float) -> None:
        """A lease was granted."""
        self._leases[lease_id] = _Times(now, now + ttl)
        self._next_end = min(self._next_end, now + ttl)

    def extend(self, lease_id: str, now: float, ttl: float, longest: float) -> float:
        """Keep a lease alive, up to `longest` after it was granted; the seconds that it has from now on."""
        times = self._leases[lease_id]
        latest = times.granted + longest
        times.outlived = latest <= now + ttl
        times.ends = max(now, min(now + ttl, latest))
        self._next_end = min(self._next_end, times.ends)
        return times.ends - now

    def age(self, lease_id: str, now: float) -> float:
        """Seconds since it was granted, those left out in which nobody could be heard."""
        return now - self._leases[lease_id].granted

    def outlived(self, lease_id: str) -> bool:
        """True if a lease that is due was kept alive to the end of its longest time."""
        return self._leases[lease_id].outlived

    def end(self, lease_id: str) -> None:
        """Forget a lease."""
        self._leases.pop(lease_id, None)

    def due(self, now: float) -> list[str]:
        """Leases whose time is over."""
        if now < self._next_end:
            return []
        self._next_end = min((times.ends for times in self._leases.values() if times.ends > now), default=math.inf)
        return [lease_id for lease_id, times in self._leases.items() if times.ends <= now]

    def pardon(self, seconds: float) -> None:
        """Move every end: for so long the buffer itself could hear nobody."""
        for times in self._leases.values():
            times.granted += seconds
            times.ends += seconds
        self._next_end += seconds

    def restore(self, open_leases: Iterable[tuple[str, float]], now: float) -> None:
        """Know exactly these leases (id and time to live); those that were not known begin now."""
        known, self._leases = self._leases, {}
        for lease_id, ttl in open_leases:
            if lease_id in known:
                self._leases[lease_id] = known[lease_id]
            else:
                self.begin(lease_id, now, ttl)
        self._next_end = min((times.ends for times in self._leases.values()), default=math.inf)
