"""How long a handler may still take. Every call has a bound: the caller's deadline, or the server's own."""

from __future__ import annotations

import contextvars
from dataclasses import dataclass
from typing import Protocol

from vime_client.clock import Clock, MonotonicClock

_CLOCK = MonotonicClock()
_server_bound: contextvars.ContextVar[Deadline | None] = contextvars.ContextVar("vime_server_bound", default=None)


class HasDeadline(Protocol):
    """The part of gRPC's servicer context that tells the time."""

    def time_remaining(self) -> float | None:
        """Seconds until the caller gives up, or None if it never does."""
        ...


@dataclass(frozen=True)
class Deadline:
    """A moment on a clock, for domain code that must stop waiting then."""

    at: float
    clock: Clock

    @classmethod
    def after(cls, seconds: float, clock: Clock = _CLOCK) -> Deadline:
        """The moment `seconds` from now."""
        return cls(clock.now() + seconds, clock)

    @property
    def remaining(self) -> float:
        """Seconds left, never below 0."""
        return max(0.0, self.at - self.clock.now())

    @property
    def expired(self) -> bool:
        """True once nothing is left."""
        return self.remaining <= 0.0


def remaining(context: HasDeadline, *, reserve: float = 0.0) -> float:
    """Seconds this handler may still take, less `reserve` for sending the answer; never below 0.

    A hop further on gets `timeout=remaining(context)`, so that no one works longer than the first caller waits. A long
    poll waits for `patience`.
    """
    left = context.time_remaining()
    bound = _server_bound.get()
    limits = [seconds for seconds in (left, bound.remaining if bound else None) if seconds is not None]
    if not limits:
        raise RuntimeError("this call has no deadline: its server does not run vime_service's interceptor")
    return max(0.0, min(limits) - reserve)


def patience(context: HasDeadline) -> float:
    """Seconds a long poll may wait before it answers empty: four fifths of what is left, all but 2 s at the most, so
    that a busy machine still brings the answer back before the deadline.
    """
    left = remaining(context)
    return left - min(left / 5, 2.0)
