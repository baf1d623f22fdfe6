"""Keeps one service running: starts it, notices its end or its silence, starts it again, and says when it is enough."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from vime_client.causes import exit_text
from vime_client.clock import Clock
from vime_client.launcher.patience import Patience
from vime_client.launcher.plan import RunPlan, ServicePlan
from vime_client.launcher.probes import FileProbe, Probe
from vime_client.launcher.process import REAP_S, ServiceProcess
from vime_client.launcher.restarts import Restarts
from vime_client.launcher.state import ServiceState
from vime_client.logs import get_logger

EXIT_CONFIG = 2
"""What our programs end with when their settings or data are wrong: starting again cannot help."""
_PROBE_S = 2.0
_REAP_S = 5.0
_log = get_logger(__name__)

Question = Callable[[], Awaitable[bool]]


class GaveUp(Exception):
    """A service cannot be kept running; the message names it and its reason."""

    def __init__(self, service: str, message: str) -> None:
        super().__init__(message)
        self.service = service


class Keeper:
    """One service over all its processes."""

    def __init__(self, service: ServicePlan, plan: RunPlan, env: dict[str, str], clock: Clock) -> None:
        limits = plan.limits
        self.service = service
        self.state = ServiceState(state="waiting")
        self.changed: Callable[[], None] = lambda: None
        self._env = env
        self._clock = clock
        self._hang_s = limits.hang_timeout_s
        self._start_s = limits.ready_timeout_s
        self._restarts = Restarts(limits.restart_limit, limits.restart_window_s, limits.restart_backoff_s)
        self._process: ServiceProcess | None = None
        self._probe: Probe | None = None
        self._stopping = False

    @property
    def pid(self) -> int:
        """Process id; 0 if no process runs."""
        return self._process.pid if self._process else 0

    async def keep(self) -> None:
        """Run until `stop`.

        Raises:
            GaveUp: it died too often, or cannot work.
        """
        self._probe = Probe(self.service.address) if self.service.address else None
        try:
            while not self._is_stopping():
                process = self._start()
                code = await self._until_end(process)
                self._set(pid=0, state="stopped", ready=False, last_end=exit_text(code))
                if not self._is_stopping():
                    await self._after_death(code, await asyncio.to_thread(process.cause, code))
        finally:
            if self._probe is not None:
                await self._probe.close()

    async def stop(self, seconds: float) -> None:
        """Ask it to end, and after `seconds` make it."""
        self._stopping = True
        process = self._process
        if process is None:
            return
        process.terminate()
        try:
            async with asyncio.timeout(seconds):
                await process.wait()
        except TimeoutError:
            _log.warning(f"{self.service.name} does not end by itself and is killed", seconds=round(seconds, 1))
        process.kill()  # its group too: what it started must not outlive it
        try:
            async with asyncio.timeout(REAP_S):
                await process.wait()
        except TimeoutError:  # stuck in the kernel, such as on a dead network disk: nothing can end it
            _log.error(f"{self.service.name} was killed and is still there", pid=process.pid, seconds=REAP_S)
        self._process = None
        self._set(pid=0, state="stopped", ready=False)

    def set_ready(self) -> None:
        """Note that it can do its work."""
        if not self.state.ready and self._process is not None:
            self._set(ready=True)

    def _is_stopping(self) -> bool:
        return self._stopping

    def _start(self) -> ServiceProcess:
        try:
            process = ServiceProcess(self.service, self._env)
        except OSError as error:
            raise GaveUp(self.service.name, f'service "{self.service.name}" cannot be started: {error}') from error
        self._process = process
        self._set(pid=process.pid, state="running", ready=False)
        return process

    async def _until_end(self, process: ServiceProcess) -> int:
        watch = asyncio.create_task(self._watch_for_silence(process))
        try:
            # unbounded: a service may live for ever; one that gives no sign of it is killed by the watch
            return await process.wait()
        finally:
            watch.cancel()
            process.kill()  # what it started must not outlive it
            if not self._stopping:
                self._process = None

    async def _watch_for_silence(self, process: ServiceProcess) -> None:
        """Kill a process that gives no sign for `hang_timeout_s`, such as one that is stopped.

        Before it is ready it may be silent for longer, also from its start on, as long as it does something: importing
        an engine can hold the interpreter for minutes.
        """
        alive, ready = self._questions()
        heard, starts = self._clock.now(), Patience(max(self._hang_s, self._start_s), self._clock)
        while True:
            await self._clock.sleep(min(_PROBE_S, self._hang_s / 4))
            if await alive():
                heard, starts = self._clock.now(), Patience(starts.idle_s, self._clock)
                if not self.state.ready and await ready():
                    self.set_ready()
            elif self._clock.now() - heard > self._hang_s if self.state.ready else starts.is_over([process.pid]):
                seconds = round(self._clock.now() - heard, 1)
                _log.error(f"{self.service.name} gives no sign of life and is killed", seconds=seconds)
                process.kill()
                return

    def _questions(self) -> tuple[Question, Question]:
        """Whether the process shows that it lives, and whether it can do its work."""
        seconds = min(5.0, self._hang_s)
        if (probe := self._probe) is not None:
            return lambda: probe.is_alive(seconds), lambda: probe.is_ready(seconds)
        file = FileProbe(self.service.sign_of_life) if self.service.sign_of_life else None

        async def touched() -> bool:
            return file.changed() if file else True

        async def yes() -> bool:
            return True

        return touched, yes

    async def _after_death(self, code: int, cause: str) -> None:
        """Wait for the next start, or give up."""
        name = self.service.name
        backoff = self._restarts.died(self._clock.now())
        self._set(deaths=self._restarts.total, state="waiting", cause=cause)
        _log.warning(f"{name} died", end=exit_text(code), deaths=self._restarts.total, cause=cause)
        if code == EXIT_CONFIG:
            self._set(state="gave_up")
            raise GaveUp(name, f'service "{name}" refuses its settings or data: {cause}')
        if backoff is None:
            self._set(state="gave_up")
            times = f"{self._restarts.total} time{'s' if self._restarts.total > 1 else ''}"
            raise GaveUp(name, f'service "{name}" died {times}, the last time with {exit_text(code)}: {cause}')
        await self._clock.sleep(backoff)

    def _set(self, **changes: object) -> None:
        self.state = self.state.model_copy(update=changes)
        self.changed()
