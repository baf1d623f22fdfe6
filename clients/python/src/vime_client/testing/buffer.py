"""A buffer in memory: what a worker can see of one. No admission rule, no disk."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc

from vime.buffer.v1 import prompt_service_pb2 as pb
from vime.buffer.v1 import prompt_service_pb2_grpc, table_service_pb2, table_service_pb2_grpc
from vime.common.v1 import trajectory_pb2, weight_version_pb2
from vime_client.testing.server import refuse

_Context = grpc.aio.ServicerContext[Any, Any]


@dataclass
class _Entry:
    """One prompt and where it stands."""

    prompt: trajectory_pb2.Prompt
    table: str
    attempt: int = 0
    lease_id: str = ""
    expires: float = 0.0
    inserted: bytes | None = None


class FakeBuffer(prompt_service_pb2_grpc.PromptServiceServicer, table_service_pb2_grpc.TableServiceServicer):
    """Prompts out, groups in. Public attributes are for assertions.

    Attributes:
        groups: groups inserted, in order of arrival.
        dropped: (group_id, reason) of groups that a filter dropped.
        failures: (group_id, failure class, detail) of leases given back.
        given_up: group ids whose last attempt failed.
    """

    def __init__(
        self,
        records: Iterable[Mapping[str, Any]] = (),
        *,
        table: str = "train",
        samples_per_prompt: int = 4,
        max_tokens: int = 8,
        ttl_s: float = 5.0,
        max_attempts: int = 3,
        fence: weight_version_pb2.Fence | None = None,
    ) -> None:
        self.groups: list[trajectory_pb2.TrajectoryGroup] = []
        self.dropped: list[tuple[str, str]] = []
        self.failures: list[tuple[str, int, str]] = []
        self.given_up: list[str] = []
        self.keep_alives = 0
        self._samples = samples_per_prompt
        self._sampling = trajectory_pb2.SamplingParams(max_tokens=max_tokens)
        self._ttl_s = ttl_s
        self._max_attempts = max_attempts
        self._fence = fence
        self._entries: dict[str, _Entry] = {}
        self._queue: deque[str] = deque()
        self._leases: dict[str, str] = {}
        self._changed = asyncio.Event()
        for record in records:
            self.add(record, table)

    def add(self, record: Mapping[str, Any], table: str = "train") -> str:
        """Queue a prompt; its text is `record["prompt"]`. Gives its group id."""
        index = len(self._entries)
        prompt = trajectory_pb2.Prompt(
            prompt_id=f"fake:0:{index}",
            text=str(record["prompt"]),
            record_json=json.dumps(record),
            source="fake",
            index=index,
        )
        group_id = f"{table}-{index}"
        self._entries[group_id] = _Entry(prompt, table)
        # Eval rounds come first, as in the real one.
        (self._queue.appendleft if table.startswith("eval/") else self._queue.append)(group_id)
        self._changed.set()
        return group_id

    def expire(self, group_id: str) -> None:
        """End the lease of a group now; its prompt is queued again with the next attempt."""
        entry = self._entries[group_id]
        self._leases.pop(entry.lease_id, None)
        self._requeue(group_id)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register at a server."""
        prompt_service_pb2_grpc.add_PromptServiceServicer_to_server(self, server)
        table_service_pb2_grpc.add_TableServiceServicer_to_server(self, server)

    async def settled(self, groups: int, timeout_s: float = 10.0) -> None:
        """Wait until that many groups are inserted, dropped or given up."""
        async with asyncio.timeout(timeout_s):
            while len(self.groups) + len(self.dropped) + len(self.given_up) < groups:
                self._changed.clear()
                await self._changed.wait()

    async def LeasePrompts(self, request: pb.LeasePromptsRequest, context: _Context) -> pb.LeasePromptsResponse:
        """Lease what is queued, or wait for it."""
        loop = asyncio.get_running_loop()
        until = loop.time() + request.wait.ToTimedelta().total_seconds()
        while not self._queue and loop.time() < until:
            self._changed.clear()
            try:
                async with asyncio.timeout(min(0.05, until - loop.time())):
                    await self._changed.wait()
            except TimeoutError:
                self._expire_late(loop.time())
        if not self._queue:
            return pb.LeasePromptsResponse(blocked_by=pb.BLOCK_REASON_ADMISSION)
        count = min(request.max_prompts, len(self._queue))
        return pb.LeasePromptsResponse(leases=[self._lease(self._queue.popleft(), loop.time()) for _ in range(count)])

    async def KeepAlive(self, request: pb.KeepAliveRequest, context: _Context) -> pb.KeepAliveResponse:
        """Extend leases."""
        self.keep_alives += 1
        now = asyncio.get_running_loop().time()
        self._expire_late(now)
        answer = pb.KeepAliveResponse()
        answer.ttl.FromNanoseconds(int(self._ttl_s * 1e9))
        for lease_id in request.lease_ids:
            if lease_id in self._leases:
                self._entries[self._leases[lease_id]].expires = now + self._ttl_s
            else:
                answer.lost_lease_ids.append(lease_id)
        return answer

    async def InsertGroup(self, request: pb.InsertGroupRequest, context: _Context) -> pb.InsertGroupResponse:
        """Store or drop a group once."""
        group = request.group
        entry = self._entries.get(group.group_id)
        if entry is None:
            await refuse(context, grpc.StatusCode.NOT_FOUND, f"no group {group.group_id}", "NOT_FOUND")
        body = group.SerializeToString(deterministic=True)
        if entry.inserted is not None and group.attempt == entry.attempt:
            if entry.inserted == body:
                return pb.InsertGroupResponse(already_present=True)
            message = f"group {group.group_id} is there with other bytes"
            await refuse(context, grpc.StatusCode.ALREADY_EXISTS, message, "ALREADY_EXISTS")
        if self._leases.get(request.lease_id) != group.group_id or group.attempt != entry.attempt:
            message = f"attempt {group.attempt} of {group.group_id} is over, {entry.attempt} is current"
            await refuse(context, grpc.StatusCode.ABORTED, message, "LEASE_LOST")
        entry.inserted = body
        del self._leases[request.lease_id]
        if request.drop_reason:
            self.dropped.append((group.group_id, request.drop_reason))
        else:
            self.groups.append(group)
        self._changed.set()
        return pb.InsertGroupResponse()

    async def FailPrompt(self, request: pb.FailPromptRequest, context: _Context) -> pb.FailPromptResponse:
        """Take a lease back."""
        if any(entry.inserted and entry.lease_id == request.lease_id for entry in self._entries.values()):
            message = f"the group of lease {request.lease_id} was inserted"
            await refuse(context, grpc.StatusCode.FAILED_PRECONDITION, message, "FAILED_PRECONDITION")
        group_id = self._leases.pop(request.lease_id, None)
        if group_id is None:
            await refuse(context, grpc.StatusCode.ABORTED, f"lease {request.lease_id} is gone", "LEASE_LOST")
        self.failures.append((group_id, request.failure, request.detail))
        last = request.failure == pb.FAILURE_CLASS_INVALID
        return pb.FailPromptResponse(given_up=self._requeue(group_id, last=last))

    async def ListTables(
        self, request: table_service_pb2.ListTablesRequest, context: _Context
    ) -> table_service_pb2.ListTablesResponse:
        """Counts of each table."""
        names = dict.fromkeys(entry.table for entry in self._entries.values())
        tables = []
        for name in names:
            info = table_service_pb2.TableInfo(config=table_service_pb2.TableConfig(name=name))
            info.counts.groups_inserted = sum(1 for group in self.groups if group.table == name)
            info.counts.prompts_open = sum(1 for g in self._leases.values() if self._entries[g].table == name)
            tables.append(info)
        return table_service_pb2.ListTablesResponse(tables=tables)

    def _lease(self, group_id: str, now: float) -> pb.PromptLease:
        entry = self._entries[group_id]
        entry.lease_id = f"{group_id}.{entry.attempt}"
        entry.expires = now + self._ttl_s
        self._leases[entry.lease_id] = group_id
        lease = pb.PromptLease(
            lease_id=entry.lease_id,
            table=entry.table,
            prompt=entry.prompt,
            group_id=group_id,
            attempt=entry.attempt,
            fence=self._fence,
            sampling=self._sampling,
            num_samples=self._samples,
            seeds=[entry.prompt.index * 1000 + i for i in range(self._samples)],
        )
        lease.ttl.FromNanoseconds(int(self._ttl_s * 1e9))
        return lease

    def _requeue(self, group_id: str, *, last: bool = False) -> bool:
        """Next attempt, or the end; True if given up."""
        entry = self._entries[group_id]
        entry.attempt += 1
        over = last or entry.attempt >= self._max_attempts
        if over:
            self.given_up.append(group_id)
        else:
            self._queue.append(group_id)
        self._changed.set()
        return over

    def _expire_late(self, now: float) -> None:
        for lease_id, group_id in list(self._leases.items()):
            if self._entries[group_id].expires < now:
                del self._leases[lease_id]
                self._requeue(group_id)
