"""The default: groups are trained in the order in which their prompts were admitted.

A batch then depends on no arrival time, no prompt starves, and with the admission rule staleness stays within its
bound without eviction. The price: one slow prompt holds up its batch.
"""

from __future__ import annotations

from collections.abc import Sequence

from vime_buffer.selectors.interface import Candidate, Choice


class AdmissionOrder:
    """The first `size` candidates, once all of them are stored."""

    whole_table = False

    def __init__(self, max_staleness: int) -> None:
        self._max_staleness = max_staleness

    def choose(self, candidates: Sequence[Candidate], size: int) -> Choice:
        """See `Selector.choose`.

        The admission rule makes too old groups impossible in one table; where steps went to another table meanwhile
        they are evicted all the same, since nothing older than `max_staleness` may ever be trained.
        """
        first = candidates[:size]
        old = tuple(c for c in first if c.stored and c.staleness > self._max_staleness)
        if old or len(first) < size or not all(c.stored for c in first):
            return Choice(evict=old)
        return Choice(take=tuple(first))
