"""Finds an engine core that lives and does nothing: stopped, or stuck in a step. vLLM itself notices only dead ones."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from vime_rollout.engine import EngineDied


class CoreWatch:
    """Has one question before the core at all times. The core answers between two steps, so a long step delays it.

    Args:
        ask: a cheap question to the core.
        seconds: how long the answer may take; more than the longest step.
    """

    def __init__(self, ask: Callable[[], Awaitable[object]], seconds: float) -> None:
        self._ask = ask
        self._seconds = seconds
        self._question: asyncio.Task[object] | None = None
        self._since = 0.0
        self._overdue = False
        self._busy = 0

    def check(self) -> None:
        """Look whether the question was answered, and ask the next. Never waits; call it every second or so.

        Raises:
            EngineDied: the answer is overdue, at two checks in a row: when this process was the one that stood still,
                the answer has come by the second.
        """
        now = time.monotonic()
        if self._question is None or self._question.done():
            if self._question is not None and not self._question.cancelled():
                self._question.exception()  # also a failure is an answer; one that is not looked at is logged
            self._question = asyncio.ensure_future(self._put())
            self._since, self._overdue = now, False
        elif self._busy:
            self._since, self._overdue = now, False
        elif now - self._since > self._seconds:
            if self._overdue:
                raise EngineDied(f"the engine core has answered nothing for {self._seconds:g} s")
            self._overdue = True

    @contextmanager
    def busy(self) -> Iterator[None]:
        """The block waits for work that the core does between two steps, such as a load, and that has its own bound."""
        self._busy += 1
        try:
            yield
        finally:
            self._busy -= 1
            self._since, self._overdue = time.monotonic(), False

    def stop(self) -> None:
        """Ask no more."""
        if self._question is not None:
            self._question.cancel()

    async def _put(self) -> object:
        return await self._ask()
