"""One service's process: its start, its log, its end, and that nothing of it stays."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from vime_client.causes import cause_of_end
from vime_client.launcher.plan import SUPERVISOR_PID, ServicePlan

_POLL_S = 0.05
"""How often ends are looked for: a wait in a thread could not be cancelled, and SIGCHLD belongs to the loop's owner."""
REAP_S = 5.0
"""How long a killed process may take to be gone; one that is stuck in the kernel stays, and nobody waits for it."""
_EXEC_CHILD = str(Path(__file__).with_name("exec_child.py"))
_PR_SET_CHILD_SUBREAPER = 36


class ServiceProcess:
    """A running service, in a session and process group of its own."""

    def __init__(self, plan: ServicePlan, env: dict[str, str]) -> None:
        """Start it.

        Raises:
            OSError: the program or its log file cannot be opened.
        """
        argv = [part.replace(SUPERVISOR_PID, str(os.getpid())) for part in plan.argv]
        plan.log.parent.mkdir(parents=True, exist_ok=True)
        with plan.log.open("ab") as log:
            log.write(f"== {time.strftime('%H:%M:%S')} {plan.name} starts\n".encode())
            log.flush()
            self._log_from = log.tell()
            self._popen = subprocess.Popen(
                [sys.executable, "-I", "-S", _EXEC_CHILD, str(os.getpid()), *argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=env,
            )
        self._plan = plan

    @property
    def pid(self) -> int:
        """Process id, and id of its group."""
        return self._popen.pid

    async def wait(self) -> int:
        """Its exit code; negative for a signal."""
        # bounded by: whoever waits; this is the life of a service
        while (code := self._popen.poll()) is None:  # noqa: ASYNC110 - see _POLL_S
            await asyncio.sleep(_POLL_S)
        return code

    def terminate(self) -> None:
        """Ask it to end."""
        if self._popen.poll() is None:
            self._popen.terminate()

    def kill(self) -> None:
        """End it and its whole group by force."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def cause(self, code: int) -> str:
        """Why it ended with `code`, from what it wrote."""
        return cause_of_end(self._plan.log, code, self._log_from)


def adopt_orphans() -> None:
    """From now on, processes whose parents died become children of this one, so that `kill_orphans` finds them."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_orphans(known: Iterable[int]) -> list[int]:
    """Kill and reap children of this process that are none of the `known`; their ids."""
    keep = set(known)
    found = [pid for pid in _children(os.getpid()) if pid not in keep]
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for pid in found:
        _reap(pid)
    return found


def _reap(pid: int) -> None:
    """Take the dead child's exit code, so that no zombie stays; one that is stuck in the kernel is left for later."""
    for _ in range(20):
        try:
            if os.waitpid(pid, os.WNOHANG)[0]:
                return
        except ChildProcessError:
            return
        time.sleep(0.01)


def _children(parent: int) -> Iterator[int]:
    """Direct children, from /proc."""
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_bytes().rpartition(b")")[2].split()  # a name may be cut within a character
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == parent:
            yield int(entry.parent.name)
