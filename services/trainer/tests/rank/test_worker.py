"""A rank fetches its groups from a buffer that may restart under it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace

import grpc
import pytest

from vime.buffer.v1.batch_service_pb2 import GetGroupsRequest, GetGroupsResponse
from vime.common.v1.trajectory_pb2 import TrajectoryGroup
from vime.trainer.v1 import rank_service_pb2 as pb
from vime_client.errors import RpcError
from vime_trainer.rank.groups import GroupError
from vime_trainer.rank.worker import RankWorker

GONE = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "gone")
DAMAGED = grpc.aio.AioRpcError(grpc.StatusCode.DATA_LOSS, grpc.aio.Metadata(), grpc.aio.Metadata(), "damaged")


class Buffer:
    """Streams one group a message; each failure of `failures` ends one stream after its first message."""

    def __init__(self, *failures: grpc.aio.AioRpcError) -> None:
        self.failures = list(failures)
        self.calls = 0

    async def GetGroups(self, request: GetGroupsRequest, timeout: float) -> AsyncIterator[GetGroupsResponse]:
        self.calls += 1
        for group_id in request.group_ids:
            yield GetGroupsResponse(groups=[TrajectoryGroup(group_id=group_id)])
            if self.failures:
                raise self.failures.pop(0)


async def fetched(buffer: Buffer, *group_ids: str) -> list[str]:
    worker = RankWorker.__new__(RankWorker)  # its constructor is for a launched process
    worker._buffer = buffer  # type: ignore[assignment]
    commands = SimpleNamespace(my_groups=lambda command: range(len(command.group_ids)))
    groups = await worker._groups(commands, pb.TrainCommand(group_ids=group_ids))  # type: ignore[arg-type]
    return [group.group_id for group in groups]


async def test_a_stream_that_breaks_in_the_middle_is_read_again_from_its_beginning():
    buffer = Buffer(GONE)
    assert await fetched(buffer, "a", "b") == ["a", "b"]
    assert buffer.calls == 2


async def test_a_damaged_group_is_not_asked_for_again():
    buffer = Buffer(DAMAGED)
    with pytest.raises(RpcError, match=r"buffer.GetGroups: damaged"):
        await fetched(buffer, "a", "b")
    assert buffer.calls == 1


async def test_groups_in_another_order_are_refused():
    class Shuffled(Buffer):
        async def GetGroups(self, request, timeout):
            yield GetGroupsResponse(groups=[TrajectoryGroup(group_id=g) for g in reversed(request.group_ids)])

    with pytest.raises(GroupError, match="another order"):
        await fetched(Shuffled(), "a", "b")
