"""How a driver deals with a supervisor: start it, see how it is, stop it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from vime_client.causes import cause_in, exit_text, last_lines
from vime_client.clock import MonotonicClock
from vime_client.launcher.patience import Patience
from vime_client.launcher.process import REAP_S
from vime_client.launcher.state import RunState, is_held, read_state, state_path

_START_S = 20.0
_POLL_S = 0.1
_FULL_BYTES = 2**20


class LauncherError(Exception):
    """The supervisor does not start or does not stop."""


async def start_supervisor(run_dir: Path) -> None:
    """Start a supervisor that outlives this process, and wait until it has taken over.

    Raises:
        LauncherError: it ended at once or takes too long, with what it said; nothing of it stays.
    """
    state_path(run_dir).unlink(missing_ok=True)
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    log = run_dir / "logs" / "launcher.log"
    with log.open("ab") as out:
        out.write(f"== {time.strftime('%H:%M:%S')} the launcher starts\n".encode())
        out.flush()  # on a full disk it is here that the system says so: who starts could write it nowhere
        start = out.tell()
        process = subprocess.Popen(  # noqa: ASYNC220 - returns at once, and asyncio's would be killed with its loop
            [sys.executable, "-P", "-m", "vime_client.launcher", str(run_dir)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C in the terminal is for the driver, which then stops us in order
        )
    patience = Patience(_START_S, MonotonicClock())
    while read_state(run_dir) is None:
        code = process.poll()
        if code is not None or patience.is_over([process.pid]):
            end_text = patience.why() if code is None else exit_text(code)
            process.kill()  # one that is only slow would start the run with nobody driving it
            await _gone(run_dir, process.pid, REAP_S)
            raise LauncherError(f"the launcher did not start ({end_text}): {why_died(log, start)} (log: {log})")
        await asyncio.sleep(_POLL_S)


def why_died(log: Path, start: int = 0) -> str:
    """Why a launcher ended, from its log; or what kept it from writing one."""
    if log.parent.is_dir() and shutil.disk_usage(log.parent).free < _FULL_BYTES:
        return f"no space is left on the disk of {log.parent}"
    return cause_in(last_lines(log, 1000, start))


def is_running(run_dir: Path) -> bool:
    """True if the run has a living supervisor."""
    return is_held(run_dir, "supervisor")


async def stop_supervisor(run_dir: Path, seconds: float) -> None:
    """Ask the supervisor to stop everything and wait for its end; by force after `seconds`.

    Raises:
        LauncherError: it is still there.
    """
    state = read_state(run_dir)
    if state is None or not is_running(run_dir):
        return
    _signal(state, signal.SIGTERM)
    if await _gone(run_dir, state.pid, seconds):
        return
    _signal(state, signal.SIGKILL)  # its services die with it
    if not await _gone(run_dir, state.pid, 10.0):
        raise LauncherError(f"the launcher (process {state.pid}) does not end")


def _signal(state: RunState, signum: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(state.pid, signum)


async def _gone(run_dir: Path, pid: int, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while is_running(run_dir) or _exists(pid):
        if time.monotonic() > end:
            return False
        await asyncio.sleep(_POLL_S)
    return True


def _exists(pid: int) -> bool:
    with contextlib.suppress(ChildProcessError):  # it is another driver's child
        os.waitpid(pid, os.WNOHANG)
    try:
        os.kill(pid, 0)
        return not _is_zombie(pid)
    except ProcessLookupError:
        return False


def _is_zombie(pid: int) -> bool:
    """True for a process that ended and whose parent, a driver that still lives, has not looked yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
