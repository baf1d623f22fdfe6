"""Commands to all ranks, one after the other, and their results.

Ranks call in (they may live on other hosts): each asks for what comes after the last command it did, and reports by
sequence, so a repeated ask or report changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from vime_service.errors import FailedPrecondition, InvalidArgument, PermissionDenied

Command = TypeVar("Command")
Result = TypeVar("Result")


@dataclass
class _Running(Generic[Command, Result]):
    sequence: int
    command: Command
    results: dict[int, Result] = field(default_factory=dict)


class Mailbox(Generic[Command, Result]):
    """One launch of `world_size` ranks. `launch_id` is its secret: a rank of an earlier launch is refused."""

    def __init__(self, world_size: int, launch_id: str) -> None:
        self._world_size, self._launch_id = world_size, launch_id
        self._attached: dict[int, str] = {}
        self._sequence = 0
        self._running: _Running[Command, Result] | None = None
        self._failure: Exception | None = None
        self._changed = asyncio.Condition()

    @property
    def world_size(self) -> int:
        """Ranks in the world."""
        return self._world_size

    @property
    def used(self) -> bool:
        """True once a command was given or the launch is over: its ranks are not fresh."""
        return self._sequence > 0 or self._failure is not None

    async def attach(self, launch_id: str, rank: int, who: str) -> None:
        """A rank is up. Raises for another launch's rank or a rank outside the world."""
        self._check(launch_id, rank)
        async with self._changed:
            self._attached[rank] = who
            self._changed.notify_all()

    @property
    def missing(self) -> list[int]:
        """Ranks that are not up yet."""
        return sorted(set(range(self._world_size)) - set(self._attached))

    async def wait_attached(self, timeout_s: float) -> None:
        """Until every rank is up. Raises TimeoutError, or what `fail` was given."""
        async with asyncio.timeout(timeout_s), self._changed:
            await self._changed.wait_for(lambda: self._failure or len(self._attached) == self._world_size)
        if self._failure:
            raise self._failure

    async def next(self, launch_id: str, rank: int, after: int, wait_s: float) -> tuple[int, Command] | None:
        """The command after `after`, or None if there is none within `wait_s`."""
        self._check(launch_id, rank)
        try:
            async with asyncio.timeout(wait_s), self._changed:
                await self._changed.wait_for(lambda: self._running is not None and self._running.sequence > after)
                assert self._running is not None
                return self._running.sequence, self._running.command
        except TimeoutError:
            return None

    async def report(self, launch_id: str, rank: int, sequence: int, result: Result) -> None:
        """The result of a command; a second report of the same is ignored."""
        self._check(launch_id, rank)
        async with self._changed:
            if self._running is None or sequence != self._running.sequence:
                if sequence <= self._sequence:
                    return
                raise FailedPrecondition(
                    f"rank {rank} reports command {sequence}, the last given is {self._sequence}",
                    rank=rank,
                    sequence=sequence,
                    last=self._sequence,
                )
            self._running.results.setdefault(rank, result)
            self._changed.notify_all()

    async def run(
        self,
        command: Command,
        timeout_s: float,
        failed: Callable[[Result], bool] = lambda _: False,
        peers_s: float = 0.0,
    ) -> dict[int, Result]:
        """Give `command` to every rank and wait for all results. After the first that `failed` the others have
        `peers_s` left: one that is silent then waits in a collective for the rank that left it, and is not in what is
        returned.

        Raises TimeoutError naming the ranks that did not answer, or what `fail` was given.
        """
        async with self._changed:
            if self._failure:
                raise self._failure
            if self._running is not None:
                raise RuntimeError(f"command {self._running.sequence} is still running")
            self._sequence += 1
            running = self._running = _Running(self._sequence, command)
            self._changed.notify_all()

        def ended() -> bool:
            return self._failure is not None or len(running.results) == self._world_size

        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(
                    lambda: ended() or any(failed(result) for result in running.results.values())
                )
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(peers_s):
                        await self._changed.wait_for(ended)
        except TimeoutError:
            silent = sorted(set(range(self._world_size)) - set(running.results))
            raise TimeoutError(f"ranks {silent} did not finish {type(command).__name__} in {timeout_s:.0f} s") from None
        finally:
            self._running = None
        if self._failure:
            raise self._failure
        return dict(sorted(running.results.items()))

    async def fail(self, failure: Exception) -> None:
        """The launch is over: everyone who waits gets `failure`."""
        async with self._changed:
            self._failure = self._failure or failure
            self._changed.notify_all()

    def _check(self, launch_id: str, rank: int) -> None:
        if not hmac.compare_digest(launch_id.encode(), self._launch_id.encode()):
            raise PermissionDenied(f"rank {rank} belongs to another launch", method="RankService")
        if not 0 <= rank < self._world_size:
            raise InvalidArgument(f"rank {rank} is outside the world of {self._world_size}", field="rank", value=rank)
