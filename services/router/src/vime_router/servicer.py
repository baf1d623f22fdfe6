"""RouterService: the directory to the outside."""

from __future__ import annotations

from typing import Any

from vime.common.v1.engine_pb2 import EngineStatus
from vime.router.v1 import router_service_pb2 as pb
from vime.router.v1.router_service_pb2_grpc import RouterServiceServicer
from vime_router.convert import duration_of, report_of, routed_engine, version_of
from vime_router.directory import Entry
from vime_router.fleet import Fleet, Seat
from vime_service.answer_size import check_whole, page_within
from vime_service.errors import InvalidArgument
from vime_service.server_config import MAX_MESSAGE_BYTES

_PAGE_SIZE = 100


class RouterServicer(RouterServiceServicer):
    """See the contract.

    Args:
        fleet: the engines.
        period_s: how often an engine shall send a heartbeat.
        message_bytes: cap of one message.
    """

    def __init__(self, fleet: Fleet, period_s: float, message_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._fleet = fleet
        self._period_s = period_s
        self._message_bytes = message_bytes

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Any) -> pb.HeartbeatResponse:
        """See the contract."""
        self._fleet.hear(report_of(request))
        return pb.HeartbeatResponse(period=duration_of(self._period_s))

    async def ListMembers(self, request: pb.ListMembersRequest, context: Any) -> pb.ListMembersResponse:
        """See the contract."""
        caller = version_of(request.caller_version)
        if not caller.run_id or not caller.incarnation:
            raise InvalidArgument(
                f"caller_version must name a run and an incarnation of at least 1, it is {caller}",
                field="caller_version",
            )
        directory = self._fleet.directory
        directory.admit_caller(caller)
        self._fleet.sweep()  # members and generation of one moment, and calls of whoever is dead end now
        members = [EngineStatus.FromString(entry.report.status) for entry in directory.members()]
        answer = pb.ListMembersResponse(members=members, generation=directory.generation)
        check_whole(f"{len(members)} members", answer, self._message_bytes)  # one left out would get no weights
        return answer

    async def ListEngines(self, request: pb.ListEnginesRequest, context: Any) -> pb.ListEnginesResponse:
        """See the contract. The page token is the last engine_id of the page before."""
        rest = [(e, s) for e, s in self._fleet.seats() if e.report.engine_id > request.page_token]

        async def page(size: int) -> pb.ListEnginesResponse:
            return pb.ListEnginesResponse(
                engines=[self._routed(entry, seat) for entry, seat in rest[:size]],
                next_page_token=rest[size - 1][0].report.engine_id if len(rest) > size else "",
            )

        return await page_within(self._message_bytes, request.page_size or _PAGE_SIZE, page)

    async def DrainEngine(self, request: pb.DrainEngineRequest, context: Any) -> pb.DrainEngineResponse:
        """See the contract."""
        self._fleet.directory.set_draining(request.engine_id, request.drain)
        self._fleet.wake()
        entry, seat = self._fleet.seat(request.engine_id)
        return pb.DrainEngineResponse(engine=self._routed(entry, seat))

    def _routed(self, entry: Entry, seat: Seat) -> pb.RoutedEngine:
        directory = self._fleet.directory
        return routed_engine(entry, seat, directory.liveness(entry), directory.age(entry))
