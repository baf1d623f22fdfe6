"""The leases a worker holds: kept alive together, and dropped at once when the buffer says that they are gone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from vime.buffer.v1 import prompt_service_pb2 as pb
from vime_client.buffer import BufferClient
from vime_client.errors import RpcError
from vime_client.logs import get_logger

_BEATS_PER_TTL = 3
_SHORTEST_BEAT_S = 0.05
_LONGEST_BEAT_S = 10.0
_log = get_logger(__name__)


class HeldLeases:
    """Open leases with the task that works on each."""

    def __init__(self, buffer: BufferClient, worker_id: str) -> None:
        self._buffer = buffer
        self._worker_id = worker_id
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ttls: dict[str, float] = {}
        self._lost: set[str] = set()
        self._changed = asyncio.Event()
        self._away = False

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[asyncio.Task[None]]:
        return iter(tuple(self._tasks.values()))

    def hold(self, lease: pb.PromptLease, task: asyncio.Task[None]) -> None:
        """Keep `lease` alive until `task` is done."""
        self._tasks[lease.lease_id] = task
        self._ttls[lease.lease_id] = lease.ttl.ToTimedelta().total_seconds()
        self._changed.set()
        task.add_done_callback(lambda _: self._let_go(lease.lease_id))

    def is_lost(self, lease_id: str) -> bool:
        """True if the buffer said that this lease is gone."""
        return lease_id in self._lost

    async def keep_alive(self) -> None:
        """Renew all leases, three times per time to live, until cancelled."""
        loop = asyncio.get_running_loop()
        beaten = loop.time()
        while True:
            self._changed.clear()
            if (left := beaten + self._period() - loop.time()) > 0:
                with contextlib.suppress(TimeoutError):  # the beat is due
                    async with asyncio.timeout(left):
                        await self._changed.wait()  # a lease with a shorter life may have come
                continue
            beaten = loop.time()
            if self._tasks:
                await self._beat()

    async def _beat(self) -> None:
        ids = list(self._tasks)
        try:
            answer = await self._buffer.keep_alive(self._worker_id, ids, timeout_s=max(1.0, self._period()))
        except RpcError as error:
            # The server decides when leases end; a buffer that restarts finds them in its ledger.
            if not self._away:
                _log.warning("leases cannot be kept alive now", leases=len(ids), cause=str(error))
            self._away = True
            return
        self._away = False
        ttl = answer.ttl.ToTimedelta().total_seconds()
        for lease_id in ids:
            if lease_id in self._ttls and ttl > 0:
                self._ttls[lease_id] = ttl
        for lease_id in answer.lost_lease_ids:
            task = self._tasks.get(lease_id)
            if task is not None:
                self._lost.add(lease_id)
                task.cancel()

    def _period(self) -> float:
        shortest = min(self._ttls.values(), default=_LONGEST_BEAT_S * _BEATS_PER_TTL)
        return min(max(shortest / _BEATS_PER_TTL, _SHORTEST_BEAT_S), _LONGEST_BEAT_S)

    def _let_go(self, lease_id: str) -> None:
        self._tasks.pop(lease_id, None)
        self._ttls.pop(lease_id, None)
        self._lost.discard(lease_id)
