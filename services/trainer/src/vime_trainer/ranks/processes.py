"""The rank processes of one host, started and watched through torchrun's elastic API."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vime_client.causes import cause_of_end

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed.elastic.multiprocessing import PContext
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

_STOP_GRACE_S = 5
_STORE_S = 30.0


@dataclass(frozen=True)
class Death:
    """A rank that ended by itself; None: nobody can tell which was the first."""

    rank: int | None
    cause: str
    """One sentence that names it."""


class RankProcesses:
    """`world_size` processes `python -m vime_trainer.rank`. Blocking calls run in threads."""

    def __init__(self, config_file: Path, world_size: int, log_dir: Path) -> None:
        self._config_file, self._world_size, self._log_dir = config_file, world_size, log_dir
        self._context: PContext | None = None
        self._store: TCPStore | None = None

    async def start(self, launch: int, environment: Mapping[str, str]) -> None:
        """Start them. `launch` numbers the log folders of successive starts."""
        await asyncio.to_thread(self._start, launch, dict(environment))

    def _start(self, launch: int, environment: dict[str, str]) -> None:
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std, start_processes

        from vime_service.bulk.deadline import Deadline
        from vime_service.bulk.gloo import open_store

        # It warns that signals are not forwarded from a thread; ranks watch their parent instead (rank/__main__.py).
        logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.ERROR)
        folder = self._log_dir / f"ranks-{launch}"
        folder.mkdir(parents=True, exist_ok=True)
        # Hosted here: a port that was only looked up could be another program's by the time a rank opens its store.
        self._store = open_store("127.0.0.1", 0, Deadline.after(_STORE_S), host=True)
        shared = environment | {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "WORLD_SIZE": str(self._world_size),
            "LOCAL_WORLD_SIZE": str(self._world_size),
            "PYTHONUNBUFFERED": "1",
            # torch deprecates what megatron-core calls at every step; a dead rank's last line must say why it died.
            "PYTHONWARNINGS": "ignore::FutureWarning",
            "VIME_PARENT_PID": str(os.getpid()),
        }
        if sys.platform == "linux" and "GLOO_SOCKET_IFNAME" not in os.environ:
            shared["GLOO_SOCKET_IFNAME"] = "lo"  # ranks of one host need none of its other interfaces
        ranks = range(self._world_size)
        self._context = start_processes(
            name="trainer-rank",
            entrypoint=sys.executable,
            args={r: ("-P", "-m", "vime_trainer.rank", "--config", str(self._config_file)) for r in ranks},
            envs={r: shared | {"RANK": str(r), "LOCAL_RANK": str(r)} for r in ranks},
            logs_specs=DefaultLogsSpecs(log_dir=str(folder), redirects=Std.ALL),
        )

    @property
    def pids(self) -> dict[int, int]:
        """Process id by rank; empty before the start."""
        return {} if self._context is None else dict(self._context.pids())

    def cpu_seconds(self, rank: int) -> float:
        """Processor time that the rank has used: it grows while it imports or loads. 0 where that cannot be told."""
        try:
            fields = Path(f"/proc/{self.pids[rank]}/stat").read_text().rpartition(")")[2].split()
        except (KeyError, OSError):  # not started, gone, or no Linux
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def wait_for_death(self, poll_s: float = 0.3) -> Death:
        """Wait until a rank ends by itself; who, and of what. Elastic closes the others then."""
        while True:
            if self._context is not None and (death := await asyncio.to_thread(self._poll)):
                return death
            await asyncio.sleep(poll_s)  # elastic offers a poll, no wake-up

    def _poll(self) -> Death | None:
        assert self._context is not None
        result = self._context.wait(timeout=0)
        if result is None:
            return None
        if not result.failures:
            return Death(None, "all ranks ended with exit code 0 without being asked to")
        # Those that elastic closed since another had died are not the cause.
        failures = sorted(result.failures.items(), key=lambda item: (item[1].exitcode == -signal.SIGTERM, item[0]))
        rank, first = failures[0]
        return Death(rank, f"rank {rank} (pid {first.pid}) {_cause(first.exitcode)}{self._last_words(rank, first)}")

    def _last_words(self, rank: int, failure: ProcessFailure) -> str:
        """The error that the rank wrote to stderr, and where all of it is. One that was killed said nothing of it."""
        found = sorted(self._log_dir.glob(f"ranks-*/**/{rank}/stderr.log"), key=lambda p: p.stat().st_mtime)
        if not found or failure.exitcode in (-signal.SIGKILL, -signal.SIGTERM):
            return ""
        return f": {cause_of_end(found[-1], failure.exitcode)[:300]} (log: {found[-1]})"

    async def stop(self) -> None:
        """End them: SIGTERM, after a grace SIGKILL. Safe to call twice."""
        context, self._context = self._context, None
        if context is not None:
            await asyncio.to_thread(context.close, signal.SIGTERM, _STOP_GRACE_S)
        self._store = None


def _cause(exit_code: int) -> str:
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        return f"was killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was killed by signal {-exit_code}"
