"""The buffer's worker side: draw prompts, put groups in, and never hold a lease that is not kept alive.

async with BufferClient("127.0.0.1:50051") as buffer:
    for leased in await buffer.lease_prompts(worker_id="w0", max_prompts=8, wait_s=5):
        async with leased:                  # kept alive; given back if the block raises
            group = await make_group(leased.lease)
            await leased.insert(group)
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import uuid
from collections.abc import Mapping, Sequence
from types import TracebackType

import grpc
from google.protobuf.duration_pb2 import Duration

from vime.buffer.v1 import prompt_service_pb2 as pb
from vime.buffer.v1 import prompt_service_pb2_grpc, table_service_pb2, table_service_pb2_grpc
from vime.common.v1 import trajectory_pb2
from vime_client.channel import ChannelSettings, open_channel
from vime_client.errors import LeaseLost, RpcError, rpc_errors
from vime_client.logs import get_logger
from vime_client.one_line import one_line, told

CALL_SECONDS = 30.0
"""Deadline of calls that answer at once."""
_log = get_logger(__name__)


class BufferClient:
    """Thin, typed calls of vime.buffer.v1. Every call has a deadline and raises `RpcError`."""

    def __init__(self, address: str, settings: ChannelSettings | None = None) -> None:
        self.address = address
        self._channel = open_channel(address, settings)
        self._prompts = prompt_service_pb2_grpc.PromptServiceStub(self._channel)
        self._tables = table_service_pb2_grpc.TableServiceStub(self._channel)

    async def __aenter__(self) -> BufferClient:
        """Use as a context manager to close the channel at the end."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the channel."""
        await self.close()

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()

    async def draw(
        self, worker_id: str, max_prompts: int, wait_s: float, tables: Sequence[str] = (), request_id: str = ""
    ) -> pb.LeasePromptsResponse:
        """Lease up to `max_prompts` prompts; waits up to `wait_s` seconds for admission, then says what blocks it.

        Args:
            request_id: name of the request. A call that was not answered, made again under the same name, gets the
                leases that it was granted then. Unset: a new name, which only the channel's repeats share.
        """
        request = pb.LeasePromptsRequest(
            worker_id=worker_id,
            max_prompts=max_prompts,
            wait=_duration(wait_s),
            tables=tables,
            request_id=request_id or new_request_id(),
        )
        with rpc_errors("buffer.LeasePrompts"):
            return await self._prompts.LeasePrompts(request, timeout=wait_s + CALL_SECONDS)

    async def lease_prompts(
        self, worker_id: str, max_prompts: int, wait_s: float, tables: Sequence[str] = ()
    ) -> list[LeasedPrompt]:
        """As `draw`, each lease as a context manager; empty if nothing was admitted within `wait_s` seconds."""
        answer = await self.draw(worker_id, max_prompts, wait_s, tables)
        return [LeasedPrompt(self, worker_id, lease) for lease in answer.leases]

    async def keep_alive(self, worker_id: str, lease_ids: Sequence[str], timeout_s: float) -> pb.KeepAliveResponse:
        """Extend leases; the answer lists those that are gone."""
        with rpc_errors("buffer.KeepAlive"):
            return await self._prompts.KeepAlive(
                pb.KeepAliveRequest(worker_id=worker_id, lease_ids=lease_ids), timeout=timeout_s
            )

    async def insert(
        self,
        lease_id: str,
        group: trajectory_pb2.TrajectoryGroup,
        drop_reason: str = "",
        timeout_s: float = CALL_SECONDS,
    ) -> pb.InsertGroupResponse:
        """Store a finished group, or with `drop_reason` count it as dropped. Idempotent.

        A reason is a count's name: what a filter says in other letters or at length is made one (`drop_word`).

        Raises:
            LeaseLost: a later attempt took over, or the lease expired.
        """
        request = pb.InsertGroupRequest(lease_id=lease_id, group=group, drop_reason=drop_word(drop_reason))
        with rpc_errors("buffer.InsertGroup"):
            return await self._prompts.InsertGroup(request, timeout=timeout_s)

    async def fail(
        self, lease_id: str, failure: pb.FailureClass.ValueType, detail: str = "", timeout_s: float = CALL_SECONDS
    ) -> pb.FailPromptResponse:
        """Give a lease back with the class of its failure; `detail` becomes one valid line."""
        request = pb.FailPromptRequest(lease_id=lease_id, failure=failure, detail=one_line(detail))
        with rpc_errors("buffer.FailPrompt"):
            return await self._prompts.FailPrompt(request, timeout=timeout_s)

    async def tables(self) -> Mapping[str, table_service_pb2.TableInfo]:
        """Settings and counts of all tables by name, page by page: a page is filled by bytes as well as by number."""
        found: dict[str, table_service_pb2.TableInfo] = {}
        request = table_service_pb2.ListTablesRequest(page_size=1000)
        while True:
            with rpc_errors("buffer.ListTables"):
                answer = await self._tables.ListTables(request, timeout=CALL_SECONDS)
            found.update({table.config.name: table for table in answer.tables})
            if not answer.next_page_token or answer.next_page_token == request.page_token:
                return found
            request.page_token = answer.next_page_token

    async def quarantined(self, table: str = "train") -> list[table_service_pb2.QuarantinedGroup]:
        """Groups that training could not use, the newest first, without payloads."""
        groups: list[table_service_pb2.QuarantinedGroup] = []
        request = table_service_pb2.ListQuarantinedRequest(table=table)
        while True:
            with rpc_errors("buffer.ListQuarantined"):
                page = await self._tables.ListQuarantined(request, timeout=CALL_SECONDS)
            groups += page.groups
            if not page.next_page_token:
                return groups
            request.page_token = page.next_page_token

    async def quarantined_group(self, group_id: str, attempt: int) -> trajectory_pb2.TrajectoryGroup:
        """One of them as it was inserted."""
        request = table_service_pb2.GetQuarantinedRequest(group_id=group_id, attempt=attempt)
        with rpc_errors("buffer.GetQuarantined"):
            return (await self._tables.GetQuarantined(request, timeout=CALL_SECONDS)).group


class LeasedPrompt:
    """A lease as a context manager: kept alive inside the block; given back if the block ends without `insert`."""

    def __init__(self, buffer: BufferClient, worker_id: str, lease: pb.PromptLease) -> None:
        self.lease = lease
        self.lost = False
        """True once the buffer said that the lease is gone: drop the work."""
        self._buffer = buffer
        self._worker_id = worker_id
        self._settled = False
        self._keeper: asyncio.Task[None] | None = None

    async def __aenter__(self) -> LeasedPrompt:
        """Start keeping the lease alive."""
        self._keeper = asyncio.get_running_loop().create_task(self._keep())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Stop keeping it alive, and give it back unless it was inserted or lost.

        What the block raised comes out, whatever the buffer says; a lease that could not be given back expires.
        """
        if self._keeper is not None:
            self._keeper.cancel()  # not awaited: a cancel of the block's own task would look like the keeper's
        if self._settled or self.lost:
            return
        stopping = kind is not None and issubclass(kind, asyncio.CancelledError)
        failure = pb.FAILURE_CLASS_SHUTDOWN if stopping else pb.FAILURE_CLASS_USER_CODE
        try:
            await self.fail(failure, "" if error is None else told(error))
        except RpcError as refused:
            if error is None:
                raise
            _log.warning("a lease could not be given back", group_id=self.lease.group_id, cause=str(refused))

    async def insert(self, group: trajectory_pb2.TrajectoryGroup, drop_reason: str = "") -> None:
        """Store the group, or drop it with a filter's reason.

        Raises:
            LeaseLost: the lease is gone; the group is not stored.
        """
        await self._buffer.insert(self.lease.lease_id, group, drop_reason)
        self._settled = True

    async def fail(self, failure: pb.FailureClass.ValueType, detail: str = "") -> None:
        """Give the lease back with the class of its failure."""
        with contextlib.suppress(LeaseLost):
            await self._buffer.fail(self.lease.lease_id, failure, detail)
        self._settled = True

    async def _keep(self) -> None:
        ttl = max(0.3, self.lease.ttl.ToTimedelta().total_seconds())
        while not self.lost:
            await asyncio.sleep(ttl / 3)
            try:
                answer = await self._buffer.keep_alive(self._worker_id, [self.lease.lease_id], ttl / 3)
            except RpcError as error:  # the next beat tries again; the server decides when the lease ends
                _log.warning("a lease could not be kept alive", group_id=self.lease.group_id, cause=str(error))
                continue
            self.lost = self.lease.lease_id in answer.lost_lease_ids


def new_request_id() -> str:
    """A name for a request that no other has."""
    return uuid.uuid4().hex


def drop_word(reason: str) -> str:
    """A filter's reason as the contract has it: a word of at most 64 of a-z, 0-9 and _, not `deleted`; "" stays ""."""
    word = re.sub("[^a-z0-9_]+", "_", reason.lower())[:64]
    return "filter_deleted" if word == "deleted" else word


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(int(seconds * 1e9))
    return duration


def is_gone(error: RpcError) -> bool:
    """True if the error says that a lease is over for this worker: superseded, expired or unknown."""
    return isinstance(error, LeaseLost) or error.code is grpc.StatusCode.NOT_FOUND


def was_inserted(error: RpcError) -> bool:
    """True if the error of a `fail` says that its group is there: only the answer to the insert was lost."""
    return error.code is grpc.StatusCode.FAILED_PRECONDITION
