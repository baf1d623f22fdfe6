"""For throughput: whatever is ready is trained, and a slow prompt does not hold up a batch.

What it trades away: batches depend on arrival times, and a group can grow too old while others overtake it. Such a
group is evicted and its prompt queued again; after `max_evictions` training waits for that prompt, so none starves.
"""

from __future__ import annotations

from collections.abc import Sequence

from vime_buffer.selectors.interface import Candidate, Choice


class ReadyFirst:
    """Stored candidates in admission order, those that were evicted too often before all others."""

    whole_table = True

    def __init__(self, max_staleness: int, max_evictions: int) -> None:
        self._max_staleness = max_staleness
        self._max_evictions = max_evictions

    def choose(self, candidates: Sequence[Candidate], size: int) -> Choice:
        """See `Selector.choose`."""
        old = tuple(c for c in candidates if c.stored and c.staleness > self._max_staleness)
        if old:
            return Choice(evict=old)  # the caller asks again with the evicted ones queued
        owed = [c for c in candidates if c.evictions >= self._max_evictions][:size]
        if not all(c.stored for c in owed):
            return Choice()
        taken = {c.row for c in owed}
        others = [c for c in candidates if c.stored and c.row not in taken]
        batch = owed + others[: size - len(owed)]
        return Choice(take=tuple(batch)) if len(batch) == size else Choice()
