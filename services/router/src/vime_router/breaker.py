"""Stops sending to an engine that fails call after call, and tries it again after a pause.

Only faults of the engine count. What a client did wrong, cancelled or had no more time for says nothing about it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

from vime_service.clock import Clock


class BreakerState(Enum):
    """CLOSED: calls pass. OPEN: none do. HALF_OPEN: one in each pause, to see whether the engine is well again."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Breaker:
    """The breaker of one life of one engine.

    Args:
        clock: monotonic time.
        failures: faults in a row that open it.
        pause_s: seconds it stays open before one call is let through, and seconds of that call's silence after which
            one more is: a generation takes minutes, and a healthy engine must not wait for its end. Only an answer
            closes it: an engine whose network swallows everything is silent, too.
    """

    def __init__(self, clock: Clock, failures: int, pause_s: float) -> None:
        self._clock = clock
        self._limit = failures
        self._pause_s = pause_s
        self._in_a_row = 0
        self._opened_at: float | None = None
        self._probe_since: float | None = None
        self.faults = 0

    @property
    def state(self) -> BreakerState:
        """Where it stands now."""
        if self._opened_at is None:
            return BreakerState.CLOSED
        waited = self._clock.now() - self._opened_at
        return BreakerState.HALF_OPEN if waited >= self._pause_s else BreakerState.OPEN

    @property
    def lets_pass(self) -> bool:
        """True if a call may be sent now."""
        state = self.state
        if state is not BreakerState.HALF_OPEN:
            return state is BreakerState.CLOSED
        return self._probe_since is None or self._clock.now() - self._probe_since >= self._pause_s

    @contextmanager
    def call(self) -> Iterator[None]:
        """Around one call; in the half-open state it is a probe, and others wait for its answer or the next pause.

        Say `answers`, `succeeded` or `failed` inside. A call that ends early without any of these (a cancel, a client's
        mistake) leaves the state as it was.
        """
        probe = self.state is BreakerState.HALF_OPEN and self.lets_pass
        since = self._clock.now()
        if probe:
            self._probe_since = since
        try:
            yield
        finally:
            if probe and self._probe_since == since:
                self._probe_since = None

    def answers(self) -> None:
        """The engine gave the first piece of an answer: enough for a probe. Its next fault still opens it again."""
        if self.state is BreakerState.HALF_OPEN:
            self._close()

    def succeeded(self) -> None:
        """The engine answered."""
        self._in_a_row = 0
        self._close()

    def failed(self) -> None:
        """The engine failed."""
        self.faults += 1
        self._in_a_row += 1
        if self._in_a_row >= self._limit:
            self._opened_at = self._clock.now()
            self._probe_since = None

    def _close(self) -> None:
        self._opened_at = self._probe_since = None
