"""The trainer as its service sees it: ranks, the loop, and who may drive. One loop or one mode lease at a time."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from vime_service.errors import FailedPrecondition, ModeHeld
from vime_trainer.loop.events import EventLog, State, Status
from vime_trainer.loop.loop import LoopFailed, TrainingLoop
from vime_trainer.loop.ports import RankDied, Ranks

logger = logging.getLogger(__name__)

_BACKOFF_S = 1.0
_MAX_BACKOFF_S = 20.0
_SAY_S = 3.0


@dataclass
class _Mode:
    lease_id: str
    holder: str
    ttl_s: float
    expires: float
    calls: int = 0
    """Calls of the holder that run now: the lease does not run out under them."""


class Trainer:
    """Starts, watches and stops the loop; opens the next incarnation when ranks die."""

    def __init__(
        self,
        ranks: Ranks,
        events: EventLog,
        make_loop: Callable[[], TrainingLoop],
        initial: Status,
        started_marker: Path,
        max_restarts: int,
        expected_failures: tuple[type[Exception], ...],
    ) -> None:
        self._ranks, self._events, self._make_loop = ranks, events, make_loop
        self._idle_status = initial
        self._marker = started_marker
        self._max_restarts = max_restarts
        self._expected: tuple[type[Exception], ...] = (*expected_failures, LoopFailed)
        self._loop: TrainingLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self._mode: _Mode | None = None

    @property
    def status(self) -> Status:
        """Where it stands."""
        return self._idle_status if self._loop is None else self._loop.status

    @property
    def was_started(self) -> bool:
        """True if the loop was started in an earlier life of this process and not ended: it goes on by itself."""
        return self._marker.exists()

    async def warm_up(self) -> None:
        """Start the ranks ahead of the loop, while the engines load. A failure is left for the loop, which says it."""
        try:
            await self._ranks.start()
        except RankDied as error:
            logger.warning("the ranks did not start ahead of the loop: %s", error)

    async def start(self) -> Status:
        """Start the loop; nothing if it runs. Raises ModeHeld; FailedPrecondition while a stop is under way."""
        mode = self._live_mode()
        if mode is not None:
            raise ModeHeld(f"{mode.holder} drives single steps", mode="single steps", holder=mode.holder)
        if self._task is None or self._task.done():
            self._marker.parent.mkdir(parents=True, exist_ok=True)
            self._marker.touch()
            self._stopping.clear()
            self._events.reopen()
            self._task = asyncio.create_task(self._run(), name="training-loop")
        elif self._stopping.is_set():
            raise FailedPrecondition(
                "the loop ends after the step in hand; start it again then", state="stopping", wanted="ended"
            )
        return self.status

    async def stop(self, now: bool) -> Status:
        """End the loop after the step in hand, or at once."""
        self._stopping.set()
        self._marker.unlink(missing_ok=True)
        if self._loop is not None:
            self._loop.stop()
        if self._task is not None and now:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            if not self.status.state.ended:
                await self._set(State.FINISHED, "", stopped=True)
            await self._events.close()
        return self.status

    async def save_checkpoint(self) -> tuple[int, str]:
        """Step and path of a checkpoint after the step in hand. Raises FailedPrecondition if no loop runs to it."""
        if self._loop is None or self.status.state.ended:
            raise FailedPrecondition(
                "no loop runs: a checkpoint belongs to one of its steps", state=self.status.state.name, wanted="RUNNING"
            )
        return await self._loop.save_soon()

    async def close(self) -> None:
        """The service ends: the loop stops where it is, and is resumed by the next process."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._events.close()
        await self._ranks.stop()

    async def _run(self) -> None:
        """Incarnation after incarnation until the last step, a stop or a failure."""
        try:
            await self._incarnations()
            if not self.status.state.ended:  # stopped between two incarnations
                await self._set(State.FINISHED, "", stopped=True)
            self._marker.unlink(missing_ok=True)
        except self._expected as error:
            logger.error("the run failed: %s", error)
            await self._set(State.FAILED, str(error))
        except Exception:
            logger.exception("the training loop failed")
            await self._set(State.FAILED, "an unexpected failure; the log has its stack")
            raise
        finally:
            if self.status.state.ended:
                await self._events.close()

    async def _incarnations(self) -> None:
        restarts = 0
        while not self._stopping.is_set():
            began = time.monotonic()
            try:
                await self._set(State.STARTING, "", "starting the ranks")
                await self._start_ranks()
                if self._stopping.is_set():
                    return
                self._loop = self._make_loop()
                await self._loop.run()
                return
            except RankDied as error:
                restarts += 1
                if restarts > self._max_restarts:
                    raise LoopFailed(f"{error}; restarted {self._max_restarts} times already") from error
                wait = min(_BACKOFF_S * 2 ** (restarts - 1), _MAX_BACKOFF_S)
                await self._set(State.RECOVERING, str(error), f"restart {restarts} in {wait:.0f} s")
                logger.error("%s after %.0f s; restart %d in %.0f s", error, time.monotonic() - began, restarts, wait)
                await asyncio.sleep(wait)  # back-off: whatever killed a rank may still be there

    async def _start_ranks(self) -> None:
        """Start the ranks, and say now and then what that waits for."""
        starting = asyncio.create_task(self._ranks.start())
        try:
            while not (await asyncio.wait({starting}, timeout=_SAY_S))[0]:
                await self._set(State.STARTING, "", f"starting the ranks: {self._ranks.starting or 'their processes'}")
            starting.result()
        finally:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)

    async def _set(self, state: State, detail: str, activity: str = "", stopped: bool = False) -> None:
        self._idle_status = replace(self.status, state=state, detail=detail, activity=activity, stopped=stopped)
        self._loop = None
        await self._events.add(self._idle_status)

    # ------------------------------------------------------------------ single steps

    async def acquire_mode(self, holder: str, ttl_s: float) -> str:
        """The mode lease for single steps. Raises ModeHeld while the loop runs or another holds it."""
        if self._task is not None and not self._task.done():
            raise ModeHeld("the training loop runs; stop it first", mode="loop", holder="training loop")
        mode = self._live_mode()
        if mode is not None:
            raise ModeHeld(f"{mode.holder} drives single steps", mode="single steps", holder=mode.holder)
        granted = self._mode = _Mode(secrets.token_urlsafe(12), holder, ttl_s, time.monotonic() + ttl_s, 1)
        try:
            await self._ranks.start()
            await self._ranks.load(None)
        except BaseException:
            self._mode = None
            raise
        granted.calls, granted.expires = 0, time.monotonic() + ttl_s
        return granted.lease_id

    @contextmanager
    def driving(self, lease_id: str) -> Iterator[None]:
        """A call of the holder. The lease is renewed, lasts as long as the call, and is renewed again at its end."""
        mode = self._renewed(lease_id)
        mode.calls += 1
        try:
            yield
        finally:
            mode.calls -= 1
            mode.expires = time.monotonic() + mode.ttl_s

    def _renewed(self, lease_id: str) -> _Mode:
        """Renew the mode lease. Raises FailedPrecondition if it is not the current one."""
        mode = self._live_mode()
        if mode is None or not secrets.compare_digest(mode.lease_id, lease_id):
            raise FailedPrecondition(
                "the mode lease is unknown or over; AcquireMode gives one", state="no mode lease", wanted="mode lease"
            )
        mode.expires = time.monotonic() + mode.ttl_s
        return mode

    def release_mode(self, lease_id: str) -> None:
        """Give the mode lease back."""
        self._renewed(lease_id)
        self._mode = None

    def _live_mode(self) -> _Mode | None:
        if self._mode is not None and not self._mode.calls and time.monotonic() > self._mode.expires:
            logger.warning("the mode lease of %s ran out", self._mode.holder)
            self._mode = None
        return self._mode
