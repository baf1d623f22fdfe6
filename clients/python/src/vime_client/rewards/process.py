"""One reward process as its parent sees it: start, one conversation at a time, and an end that is certain."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vime_client.logs import get_logger

_LENGTH = struct.Struct(">I")
_REAP_SECONDS = 5.0
_log = get_logger(__name__)


class ProcessDied(Exception):
    """The process ended in the middle of a conversation; `exit_code` is negative for signals."""

    def __init__(self, exit_code: int | None) -> None:
        super().__init__(f"the reward process ended {_exit_text(exit_code)}")
        self.exit_code = exit_code


class RewardProcess:
    """A child in a process group of its own, so that what it starts ends with it."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self.loaded: dict[str, Mapping[str, Any]] = {}
        """Functions that it has loaded, with their signatures."""

    @property
    def pid(self) -> int:
        """Process id; also the id of its process group."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """False once it is known to have ended."""
        return self._process.returncode is None

    @classmethod
    async def start(cls, folder: Path) -> RewardProcess:
        """Start a child that finds modules in `folder`.

        Raises:
            OSError: the system refuses another process.
        """
        ours, theirs = socket.socketpair()
        end: socket.socket | asyncio.StreamWriter = ours
        try:
            # Before the child is there: a cancel at this line must leave nobody behind.
            reader, writer = await asyncio.open_connection(sock=ours)
            end = (
                writer  # it is what the event loop knows the socket by: closing only that would leave its number taken
            )
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "vime_client.rewards.child", str(theirs.fileno()), str(os.getpid())),
                str(folder),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sys.stderr,  # what a reward prints is for the log, never for a program that reads our output
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env=_environment(),
            )
        except (OSError, asyncio.CancelledError):
            end.close()
            raise
        finally:
            theirs.close()
        return cls(process, reader, writer)

    async def send(self, message: Mapping[str, Any]) -> None:
        """Send one job.

        Raises:
            ProcessDied: it is gone.
        """
        body = json.dumps(message).encode()
        try:
            self._writer.write(_LENGTH.pack(len(body)) + body)
            # bounded by: the time of the conversation, which the pool sets
            await self._writer.drain()
        except ConnectionError as error:
            raise ProcessDied(await self._exit_code()) from error

    async def receive(self) -> dict[str, Any]:
        """The next answer.

        Raises:
            ProcessDied: it ended before the answer was whole.
        """
        try:
            # bounded by: the time of the conversation, which the pool sets
            size = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))[0]
            # bounded by: as above
            answer: dict[str, Any] = json.loads(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise ProcessDied(await self._exit_code()) from error
        return answer

    async def kill(self) -> None:
        """End the process and its group by force, and reap it: no zombie stays."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._writer.close()
        try:
            await asyncio.wait_for(self._process.wait(), _REAP_SECONDS)
        except TimeoutError:  # stuck in the kernel, such as on a dead network disk: nothing can end it
            _log.warning("a killed reward process is still there", pid=self.pid, seconds=_REAP_SECONDS)

    async def _exit_code(self) -> int | None:
        try:
            return await asyncio.wait_for(self._process.wait(), 1.0)
        except TimeoutError:
            return None


def _environment() -> dict[str, str]:
    """Ours, but for what keeps the current folder from services: programs that a reward starts may need it."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    return {**kept, "PYTHONUNBUFFERED": "1"}


def _exit_text(exit_code: int | None) -> str:
    if exit_code is None:
        return "its conversation but not itself"
    if exit_code < 0:
        try:
            return f"by {signal.Signals(-exit_code).name}"
        except ValueError:
            return f"by signal {-exit_code}"
    return f"with exit code {exit_code}"
