"""Waiting for the ledger to change: every commit wakes every poll, and each looks again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from vime_service.errors import Draining

T = TypeVar("T")


class Changes:
    """Wakes polls of one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._next = asyncio.Event()
        self._stopped = False

    @property
    def stopped(self) -> bool:
        """True once nothing may wait any more."""
        return self._stopped

    def announce(self) -> None:
        """Something changed."""
        self._next.set()
        self._next = asyncio.Event()

    def announce_from_thread(self) -> None:
        """The same from another thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.announce)

    def stop(self) -> None:
        """End every poll: its caller is told that the service drains."""
        self._stopped = True
        self.announce()

    def ticket(self) -> asyncio.Event:
        """Set at the next change; to be taken before the look that it follows, so that no change is missed."""
        return self._next

    async def wait(self, ticket: asyncio.Event, seconds: float) -> bool:
        """Wait for the change; False if none came in time."""
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                await ticket.wait()
        except TimeoutError:
            return False
        return True

    async def poll(self, attempt: Callable[[], Awaitable[tuple[T, bool]]], seconds: float) -> T:
        """Call `attempt` now and after every change, until it says that its answer is final or time is over.

        Raises:
            Draining: the service began to stop meanwhile.
        """
        ends = self._loop.time() + seconds
        while True:
            changed = self.ticket()
            answer, final = await attempt()
            left = ends - self._loop.time()
            if final or left <= 0:
                return answer
            if self._stopped:
                raise Draining("the buffer is shutting down")
            if not await self.wait(changed, left):
                answer, _ = await attempt()  # the reason as it is now
                return answer
