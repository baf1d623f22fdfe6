"""Keeps the services of a run running until training ends, and leaves nothing behind.

It outlives its driver: a driver that dies may join again, and a run without a driver goes on to its end. It is told to
stop by SIGTERM. If it is killed itself, the kernel kills its services (`exec_child`).
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from vime_client.clock import Clock, MonotonicClock
from vime_client.errors import RpcError
from vime_client.launcher.finish import final_report, record_counts, record_versions
from vime_client.launcher.keeper import GaveUp, Keeper
from vime_client.launcher.loop_watch import LoopEnd, watch_loop
from vime_client.launcher.patience import Patience
from vime_client.launcher.plan import RunPlan, service_env
from vime_client.launcher.probes import Probe
from vime_client.launcher.process import adopt_orphans, kill_orphans
from vime_client.launcher.state import ENDED, Phase, RunState, ServiceState, is_held, write_state
from vime_client.logs import get_logger

_TICK_S = 0.25
_SAY_S = 5
"""How often waiting is told anew."""
_DRIVER_S = 60.0
"""How long the end of a run waits for its driver to look at it."""
_log = get_logger(__name__)


class NotReady(Exception):
    """The services did not become ready in time; the message says which and what they lack."""


class Supervisor:
    """One run's services."""

    def __init__(self, plan: RunPlan, run_dir: Path, clock: Clock | None = None) -> None:
        self._plan = plan
        self._run_dir = run_dir
        self._clock = clock or MonotonicClock()
        env = service_env(plan)
        self._keepers = {s.name: Keeper(s, plan, env, self._clock) for s in plan.services}
        self._probes: dict[str, Probe] = {}
        self._state = RunState(pid=os.getpid(), phase="starting", started=time.time())

    async def run(self, stop: asyncio.Event) -> int:
        """Run to the end of training, or until `stop`; the exit code."""
        adopt_orphans()
        for keeper in self._keepers.values():
            keeper.changed = self._write
        self._probes = {s.name: Probe(s.address) for s in self._plan.services if s.address}
        kept = [asyncio.create_task(keeper.keep()) for keeper in self._keepers.values()]
        main = asyncio.create_task(self._main())
        sweep = asyncio.create_task(self._sweep())
        # unbounded: this and the next are the life of the run, which its end, a failure or a signal ends
        stopped = asyncio.create_task(stop.wait())
        try:
            # unbounded: as above
            await asyncio.wait({*kept, main, stopped}, return_when=asyncio.FIRST_COMPLETED)
            await self._conclude(main, kept)
            if not stop.is_set():
                sweep.cancel()  # the report's process belongs to no service, and must live to its end
                await self.hand_over(stop)
        finally:
            for task in (main, stopped, sweep):
                task.cancel()
            await self._stop_all()
            for task in kept:  # those that wait for the next start
                task.cancel()
            await asyncio.gather(main, stopped, sweep, *kept, return_exceptions=True)
            kill_orphans([])
            for probe in self._probes.values():
                await probe.close()
        self._write()
        return 0 if self._state.phase == "finished" else 1

    async def _main(self) -> LoopEnd:
        """Ready, then training, to its end."""
        await self._until_ready()
        self._phase("running", activity="")
        await record_versions(self._run_dir, self._probes)
        return await watch_loop(self._plan, self._say, self._clock)

    async def _until_ready(self) -> None:
        patience = Patience(self._plan.limits.ready_timeout_s, self._clock)
        while missing := await self._missing():
            waited, idle = (int(s) // _SAY_S * _SAY_S for s in (patience.waited_s, patience.seen_idle_s))
            still = f", nothing done for {idle} s" if idle > _SAY_S else ""
            self._say(f"waits for {', '.join(missing)} ({waited} s{still})")
            if patience.is_over(k.pid for k in self._keepers.values() if k.pid and not k.state.ready):
                limit = f"{patience.why()} (launcher.ready_timeout_s = {patience.idle_s:g})"
                raise NotReady(f"the run does not become ready: it waits for {', '.join(missing)}, and {limit}")
            await self._clock.sleep(_TICK_S)

    async def _missing(self) -> list[str]:
        names = list(self._probes)
        answers = await asyncio.gather(*(self._probes[name].is_ready(2.0) for name in names))
        missing = []
        for name, ready in zip(names, answers, strict=True):
            # A rollout service is ready once its model is loaded, and then it registers: the router's count tells more.
            if ready:
                self._keepers[name].set_ready()
            elif not name.startswith("rollout-"):
                missing.append(name)
        if not missing and self._plan.engines and self._plan.router:
            engines = await self._probes["router"].engines(2.0)
            if engines < self._plan.engines:
                missing.append(f"engines ({engines} of {self._plan.engines} registered)")
        return missing

    async def _conclude(self, main: asyncio.Task[LoopEnd], kept: list[asyncio.Task[None]]) -> None:
        """Why it ended: training's own end, a service that cannot run, or somebody's wish."""
        for task in kept:
            if task.done() and (error := task.exception()) is not None:
                if not isinstance(error, GaveUp):
                    raise error
                self._failed(str(error), error.service)
                return
        if not main.done():
            self._phase("stopped", reason="stopped on request")
            return
        failure = main.exception()
        if isinstance(failure, (NotReady, RpcError)):
            self._failed(str(failure))
        elif failure is not None:
            raise failure
        else:
            end = main.result()
            await record_counts(self._run_dir, self._plan.buffer)
            if end.phase == "failed":
                self._failed(end.reason, "trainer")
            else:
                self._phase(end.phase, reason=end.reason)

    def _failed(self, reason: str, service: str = "") -> None:
        """The run failed because of `service`; or of another one that died before it, and has not come back since."""
        blamed = self._keepers.get(service)
        if blamed is None or blamed.state.deaths == 0:
            for keeper in self._keepers.values():
                if keeper.state.deaths and not keeper.state.ready:
                    end = f"{keeper.state.last_end}: {keeper.state.cause}"
                    reason += f'; service "{keeper.service.name}" died before it ({end})'
                    blamed = keeper
                    break
        name, log = (blamed.service.name, str(blamed.service.log)) if blamed else (service, "")
        self._phase("failed", reason=reason, failed_service=name, log=log)

    async def hand_over(self, stop: asyncio.Event) -> None:
        """A driver reads the end, stops us and writes the report; without one that answers it is written here."""
        if is_held(self._run_dir, "driver"):
            try:
                async with asyncio.timeout(_DRIVER_S):
                    await stop.wait()
                return
            except TimeoutError:
                _log.warning("the driver does not answer, the run ends without it", seconds=_DRIVER_S)
        await final_report(self._run_dir)

    async def _stop_all(self) -> None:
        """In order, so that nobody calls what is gone already: workers, trainer, engines, router, buffer."""
        end = self._clock.now() + self._plan.limits.stop_timeout_s
        stages = sorted({keeper.service.stop_stage for keeper in self._keepers.values()})
        for position, stage in enumerate(stages):
            keepers = [k for k in self._keepers.values() if k.service.stop_stage == stage]
            left = max(0.5, end - self._clock.now())
            # Half of the rest, so that one that does not end leaves time for those after it.
            seconds = left if position == len(stages) - 1 else left / 2
            await asyncio.gather(*(keeper.stop(seconds) for keeper in keepers))

    async def _sweep(self) -> None:
        """Kill what outlived its service in a session of its own."""
        while True:
            await asyncio.sleep(1.0)
            kill_orphans([keeper.pid for keeper in self._keepers.values()])

    def _say(self, activity: str) -> None:
        if activity != self._state.activity:
            self._phase(self._state.phase, activity=activity)

    def _phase(self, phase: Phase, **changes: str) -> None:
        ended = time.time() if phase in ENDED else 0.0
        self._state = self._state.model_copy(update={"phase": phase, "ended": ended, **changes})
        if ended:
            say = _log.error if phase in ("failed", "incomplete") else _log.info
            say(f"run {phase}", reason=self._state.reason)
        self._write()

    def _write(self) -> None:
        services: dict[str, ServiceState] = {name: keeper.state for name, keeper in self._keepers.items()}
        self._state = self._state.model_copy(update={"services": services})
        write_state(self._run_dir, self._state)
