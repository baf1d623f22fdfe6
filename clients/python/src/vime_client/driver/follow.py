"""Follows a run to its end: the trainer's events, the launcher's state, and the wish to stop."""

from __future__ import annotations

import asyncio
from pathlib import Path

from vime_client.channel import ChannelSettings
from vime_client.driver.display import Display
from vime_client.driver.failures import Failures
from vime_client.driver.progress import Progress
from vime_client.errors import RpcError
from vime_client.launcher.client import is_running, start_supervisor, why_died
from vime_client.launcher.state import ENDED, RunState, read_state
from vime_client.trainer import TrainerClient

_POLL_S = 0.2
_WATCH_AGAIN_S = 0.5
_LAUNCHER_RESTARTS = 3


class LauncherDied(Exception):
    """The launcher was killed more often than it is started again."""


async def follow(
    run_dir: Path, trainer: str, progress: Progress, display: Display, stop: asyncio.Event
) -> RunState | None:
    """Show the run until it ends, or until `stop` is set: then None.

    Raises:
        LauncherDied: the launcher died several times.
    """
    watching = asyncio.create_task(_watch(run_dir, trainer, progress, display))
    try:
        return await _until_end(run_dir, progress, display, stop)
    finally:
        # Events that came just before the end are still on their way.
        await asyncio.wait({watching}, timeout=1.0)
        watching.cancel()


async def _until_end(run_dir: Path, progress: Progress, display: Display, stop: asyncio.Event) -> RunState | None:
    deaths: dict[str, int] = {}
    launcher_deaths = 0
    failures, step = Failures(run_dir), progress.step
    while not stop.is_set():
        state = read_state(run_dir)
        if state is not None:
            progress.state = state
            _tell_deaths(state, deaths, display)
            if progress.step != step:
                step = progress.step
                failures.forget()
            progress.trouble = failures.look()
            display.refresh()
            if state.phase in ENDED:
                return state
        if not is_running(run_dir) and (state is None or state.phase not in ENDED):
            launcher_deaths += 1
            if launcher_deaths > _LAUNCHER_RESTARTS:
                log = run_dir / "logs" / "launcher.log"
                raise LauncherDied(f"the launcher died {launcher_deaths} times: {why_died(log)} (log: {log})")
            display.event("the launcher died and its services with it; it is started again")
            await start_supervisor(run_dir)
            deaths.clear()
        try:
            async with asyncio.timeout(_POLL_S):
                await stop.wait()
        except TimeoutError:
            continue
    return None


def _tell_deaths(state: RunState, told: dict[str, int], display: Display) -> None:
    for name, service in state.services.items():
        if service.deaths > told.get(name, 0):
            display.event(f"{name} died ({service.last_end}): {service.cause}; restart {service.deaths}")
        told[name] = service.deaths


async def _watch(run_dir: Path, address: str, progress: Progress, display: Display) -> None:
    """The trainer's events, also over its restarts. A new trainer process numbers them anew."""
    async with TrainerClient(address, ChannelSettings(max_attempts=1, untraced_methods=("*",))) as trainer:
        seen, pid = 0, 0
        while True:
            state = read_state(run_dir)
            now = state.services["trainer"].pid if state and "trainer" in state.services else pid
            if now != pid:
                seen, pid = 0, now
            try:
                async for event in trainer.watch(seen):
                    seen = event.sequence
                    if line := progress.take(event):
                        display.event(line)
                    display.refresh()
            except RpcError:
                pass  # away or restarting: the launcher deals with it, and its state is shown
            await asyncio.sleep(_WATCH_AGAIN_S)
