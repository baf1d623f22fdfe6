"""A point in time on this process's monotonic clock: every wait of a transfer takes one."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Deadline:
    """Ends at `end` seconds of `time.monotonic()`. It never crosses a process: only durations do."""

    end: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """The deadline `seconds` (finite, >= 0) from now."""
        if not 0 <= seconds < float("inf"):
            raise ValueError(f"a deadline needs a finite duration >= 0, not {seconds!r} s")
        return cls(time.monotonic() + seconds)

    def remaining(self) -> float:
        """Seconds left, 0 when it has passed."""
        return max(0.0, self.end - time.monotonic())

    def passed(self) -> bool:
        """Whether no time is left."""
        return self.remaining() == 0.0

    def at_most(self, seconds: float) -> Deadline:
        """The earlier of this deadline and `seconds` from now: one step of a longer wait."""
        return min(self, Deadline.after(seconds), key=lambda deadline: deadline.end)
