"""The rank processes of one host, started and watched through torchrun's elastic API."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed.elastic.multiprocessing import PContext

_STOP_GRACE_S = 5
_STORE_S = 30.0


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

    async def wait_for_death(self, poll_s: float = 0.3) -> str:
        """Wait until a rank ends by itself; who, and of what. Elastic closes the others then."""
        while True:
            if self._context is not None and (cause := await asyncio.to_thread(self._poll)):
                return cause
            await asyncio.sleep(poll_s)  # elastic offers a poll, no wake-up

    def _poll(self) -> str | None:
        assert self._context is not None
        result = self._context.wait(timeout=0)
        if result is None:
            return None
        if not result.failures:
            return "all ranks ended with exit code 0 without being asked to"
        named = [
            f"rank {failure.local_rank} (pid {failure.pid}) {_cause(failure.exitcode)}{self._last_words(rank)}"
            for rank, failure in sorted(result.failures.items())
        ]
        return "; ".join(named)

    def _last_words(self, rank: int) -> str:
        """The last line that the rank wrote to stderr, which usually says why."""
        found = sorted(self._log_dir.glob(f"ranks-*/**/{rank}/stderr.log"), key=lambda p: p.stat().st_mtime)
        if not found:
            return ""
        lines = [line for line in found[-1].read_text(errors="replace").splitlines() if line.strip()]
        return f": {lines[-1][:300]}" if lines else ""

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
