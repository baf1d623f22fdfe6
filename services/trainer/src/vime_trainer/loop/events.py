"""What happened in the loop, kept so that a watcher that lost its stream can ask again."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import Enum

from vime_trainer.loop.versions import Version


class State(Enum):
    """State of the trainer; names are those of the contract's TrainerState."""

    STARTING = "starting"
    IDLE = "idle"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    RECOVERING = "recovering"
    INCOMPLETE = "incomplete"

    @property
    def ended(self) -> bool:
        """The loop is over."""
        return self in (State.FINISHED, State.INCOMPLETE, State.FAILED)


@dataclass(frozen=True)
class Status:
    """Where the trainer stands."""

    state: State
    run_id: str
    num_steps: int
    incarnation: int = 0
    train_step: int = 0
    published: Version | None = None
    activity: str = ""
    detail: str = ""
    checkpoint_step: int | None = None
    skipped_steps: int = 0
    stopped: bool = False
    """Finished because somebody said so, before the last step."""
    model_path: str = ""
    """HF folder of the trained model, once it is written."""


@dataclass(frozen=True)
class StepEvent:
    """A completed step."""

    train_step: int
    metrics: dict[str, float]
    group_ids: list[str]
    skipped: bool
    published: Version | None


@dataclass(frozen=True)
class EvalEvent:
    """A completed eval round."""

    table: str
    step: int
    metrics: dict[str, float]


Event = StepEvent | EvalEvent | Status


def _first_sequence() -> int:
    """Milliseconds since 1970: above every sequence of an earlier process of this host, and exact in a double."""
    return time.time_ns() // 1_000_000


@dataclass
class EventLog:
    """The last `limit` events, numbered one by one, and a wake-up for those who wait for the next."""

    limit: int = 10_000
    _events: deque[tuple[int, Event]] = field(default_factory=deque)
    _sequence: int = field(default_factory=_first_sequence)
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _closed: bool = False

    async def add(self, event: Event) -> None:
        """Append an event and wake the watchers."""
        async with self._changed:
            self._sequence += 1
            self._events.append((self._sequence, event))
            while len(self._events) > self.limit:
                self._events.popleft()
            self._changed.notify_all()

    async def close(self) -> None:
        """End all watches once they have seen everything."""
        async with self._changed:
            self._closed = True
            self._changed.notify_all()

    def reopen(self) -> None:
        """A loop starts again: watches last until the next close."""
        self._closed = False

    async def watch(self, after: int) -> AsyncIterator[tuple[int, Event]]:
        """Events with a sequence above `after`, past ones first; ends when the log is closed.

        A sequence of an earlier life of the trainer is below all of this one's, so everything is new to its watcher;
        one that this process never gave (the clock was set back) starts from the first, too.
        """
        seen = after if after <= self._sequence else 0
        while True:
            async with self._changed:
                # Not by `_sequence`: that of a log without events is above every `seen`, and this would never wait.
                while not self._closed and not (self._events and self._events[-1][0] > seen):
                    # bounded by: the watcher's own deadline; closing the log wakes it, too
                    await self._changed.wait()
                fresh = [(number, event) for number, event in self._events if number > seen]
                closed = self._closed
            for number, event in fresh:
                seen = number
                yield number, event
            if closed and not fresh:
                return
