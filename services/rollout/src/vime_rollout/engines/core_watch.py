"""Finds an engine core that lives and does nothing: stopped, or stuck in a step. vLLM itself notices only dead ones."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from vime_rollout.engine import EngineDied

T = TypeVar("T")
_LONGEST_GAP = 0.1


class CoreWatch:
    """Has one question before the core at all times. The core answers between two steps, so a long step delays it.

    Args:
        ask: a cheap question to the core.
        seconds: how long the answer may take; more than the longest step.
        abandoned_seconds: how long work whose caller has left may go on before the core must answer again.
    """

    def __init__(self, ask: Callable[[], Awaitable[object]], seconds: float, abandoned_seconds: float = 600.0) -> None:
        self._ask = ask
        self._seconds = seconds
        self._abandoned_seconds = abandoned_seconds
        self._question: asyncio.Task[object] | None = None
        self._since = 0.0
        self._checked = 0.0
        self._overdue = False
        self._work: dict[asyncio.Future[Any], float] = {}
        """Until when each piece of work that is not done excuses the core."""

    def check(self) -> None:
        """Look whether the question was answered, and ask the next. Never waits; call it every second or so.

        Of the time between two checks only a tenth of what an answer may take counts against the core: more has passed
        only where this process stood still, and whatever stopped it may have stopped the core with it.

        Raises:
            EngineDied: the answer is overdue, at two checks in a row: when this process was the one that stood still,
                the answer has come by the second.
        """
        now = time.monotonic()
        self._since += max(0.0, now - self._checked - self._seconds * _LONGEST_GAP)
        self._checked = now
        if self._question is None or self._question.done():
            if self._question is not None and not self._question.cancelled():
                self._question.exception()  # also a failure is an answer; one that is not looked at is logged
            self._question = asyncio.ensure_future(self._put())
            self._since, self._overdue = now, False
        elif any(now < until for until in self._work.values()):
            self._since, self._overdue = now, False
        elif now - self._since > self._seconds:
            if self._overdue:
                raise EngineDied(f"the engine core has answered nothing for {self._seconds:g} s")
            self._overdue = True

    async def working(self, call: Awaitable[T]) -> T:
        """Await work that the core does between two steps, such as a load, and whose caller has a bound of its own.

        The core is excused until it has answered. A caller that is cancelled or out of time does not stop the core: the
        call is kept then, for `abandoned_seconds`.
        """
        work = asyncio.ensure_future(call)
        self._work[work] = math.inf
        work.add_done_callback(self._worked)
        try:
            return await asyncio.shield(work)
        finally:
            if work in self._work:
                self._work[work] = time.monotonic() + self._abandoned_seconds

    def stop(self) -> None:
        """Ask no more, and wait for nothing more."""
        for future in (self._question, *self._work):
            if future is not None:
                future.cancel()

    def _worked(self, work: asyncio.Future[Any]) -> None:
        del self._work[work]
        self._since, self._overdue = time.monotonic(), False
        if not work.cancelled():
            work.exception()  # nobody may be there to see it

    async def _put(self) -> object:
        return await self._ask()
