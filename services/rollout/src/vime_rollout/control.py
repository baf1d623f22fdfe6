"""Pauses with an owner and an end, and giving device memory away and back."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

from vime_client.logs import get_logger
from vime_rollout.engine import Engine, MemoryPart, PauseMode
from vime_rollout.traffic import Traffic
from vime_rollout.updates import Updater
from vime_rollout.weights import WeightState
from vime_service.bulk.manifest import VersionKey
from vime_service.errors import EngineFailed

_log = get_logger(__name__)
_HOLDER = "a pause"
_YIELD_SECONDS = 120.0
"""When a YieldDevice whose owner vanished before the engine slept is given up, or a ReturnDevice before its update."""


@dataclass(slots=True)
class _Held:
    """Why generation stands still, and what lifts it when its owner has vanished."""

    mode: PauseMode
    asleep: bool = False
    returned: bool = False
    """Its device was taken back for an update, whose end is the end of this, too."""
    expiry: asyncio.Task[None] | None = None


class Control:
    """Pause, resume, sleep and wake, one at a time and never during a load."""

    def __init__(self, engine: Engine, weights: WeightState, traffic: Traffic, updater: Updater) -> None:
        self._engine = engine
        self._weights = weights
        self._traffic = traffic
        self._updater = updater
        self._held: _Held | None = None
        self.note = ""
        updater.on_over = self._update_over

    @property
    def paused(self) -> bool:
        """Whether generation stands still for somebody."""
        return self._held is not None

    async def pause(self, caller: VersionKey, mode: PauseMode, expires_after_s: float) -> int:
        """Stand still until `resume`, at most `expires_after_s`; how many samples were ended. Again: renews the time.

        Raises:
            FleetOwned, StaleIncarnation: see `WeightState.check_caller`.
            EngineFailed: the engine failed.
        """
        self._weights.check_caller(caller)
        async with self._updater.exclusive():
            return await self._stand_still(mode, caller, expires_after_s)

    async def resume(self, caller: VersionKey) -> None:
        """Go on. No error if nothing stands still; memory that was given away is taken back first."""
        self._weights.check_caller(caller)
        async with self._updater.exclusive():
            await self._go_on()

    async def give_device(self, caller: VersionKey) -> int:
        """End what runs, give device memory away; the bytes freed. Ends with `take_device` only."""
        self._weights.check_caller(caller)
        async with self._updater.exclusive():
            await self._stand_still(PauseMode.ABORT, caller, _YIELD_SECONDS)
            assert self._held is not None
            if self._held.asleep:
                return 0
            self._cancel_expiry()
            # Before it sleeps: a caller that is gone by then must find it asleep, not half awake.
            self._held.asleep = self._updater.asleep = True
            try:
                if self._updater.kv_asleep:
                    await self._engine.wake(MemoryPart.KV)
                    self._updater.kv_asleep = False
                return await self._engine.sleep()
            except Exception as error:  # vLLM's core says what failed in exceptions of any kind
                # Whether it sleeps is not known: it is woken before it goes on, now or by the next Resume.
                with contextlib.suppress(EngineFailed):  # the error below says what came first
                    await self._go_on()
                raise EngineFailed(f"device memory was not given away: {error}", cause=error) from error

    async def take_device(self, caller: VersionKey) -> None:
        """Take device memory back and go on. No error if it was not given away.

        With an update under way only the weights are woken: old and new KV would need room beside what is loaded. The
        update's commit wakes KV, and its end, whatever it is, goes on.
        """
        self._weights.check_caller(caller)
        async with self._updater.exclusive():
            held = self._held
            if held is None or not held.asleep or self._weights.update is None:
                await self._go_on()
                return
            try:
                await self._engine.wake(MemoryPart.WEIGHTS)
            except Exception as error:  # of any kind, as above
                raise EngineFailed(f"the weights did not wake: {error}", cause=error) from error
            held.returned = self._updater.kv_asleep = True
            held.asleep = self._updater.asleep = self._updater.keep_paused = False
            held.expiry = asyncio.create_task(self._expire(_YIELD_SECONDS, caller), name="pause-expiry")

    async def close(self) -> None:
        """Forget the pause; nothing goes on."""
        self._cancel_expiry()

    async def _stand_still(self, mode: PauseMode, caller: VersionKey, expires_after_s: float) -> int:
        self._cancel_expiry()
        if self._held is None:
            self._held = _Held(mode)
        self._held.returned = False
        self._updater.keep_paused = True
        if not self._held.asleep:
            # Before anything is waited for: a caller that is gone by then will not lift the pause.
            self._held.expiry = asyncio.create_task(self._expire(expires_after_s, caller), name="pause-expiry")
        await self._traffic.close(_HOLDER)
        if self._held.asleep:
            return 0
        running = [i for i, sample in self._traffic.running.items() if not sample.ended]
        try:
            await self._engine.pause(mode)
        except Exception as error:  # of any kind, as above
            await self._go_on()
            raise EngineFailed(f"the engine did not pause: {error}", cause=error) from error
        self.note = ""
        return len(running) if mode is PauseMode.ABORT else 0

    async def _update_over(self) -> None:
        if self._held is not None and self._held.returned:
            with contextlib.suppress(EngineFailed):  # once more at its expiry
                await self._go_on()

    async def _go_on(self) -> None:
        """Wake and resume. Until both are done it still counts as paused, or asleep: the next call does the rest."""
        held = self._held
        try:
            if held is not None and held.asleep:
                await self._engine.wake()
            elif self._updater.kv_asleep:
                await self._engine.wake(MemoryPart.KV)
                self._updater.kv_asleep = False
            if held is not None:
                await self._engine.resume()
        except Exception as error:  # of any kind, as above
            raise EngineFailed(f"the engine did not go on: {error}", cause=error) from error
        await self._traffic.open(_HOLDER)
        self._cancel_expiry()
        self._held = None
        self._updater.keep_paused = self._updater.asleep = False

    async def _expire(self, seconds: float, caller: VersionKey) -> None:
        while True:
            await asyncio.sleep(seconds)
            async with self._updater.exclusive():
                with contextlib.suppress(EngineFailed):  # once more later; the health watch tells of a dead engine
                    await self._go_on()
                    self.note = f"a pause by {caller} was lifted after {seconds:g} s without a Resume"
                    _log.warning("pause lifted", owner=str(caller), after_s=seconds)
                    return

    def _cancel_expiry(self) -> None:
        if self._held is None or self._held.expiry is None:
            return
        if self._held.expiry is not asyncio.current_task():
            self._held.expiry.cancel()
        self._held.expiry = None
