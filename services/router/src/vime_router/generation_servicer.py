"""GenerationService as an engine serves it, by way of the fleet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from vime.common.v1.trajectory_pb2 import FinishReason
from vime.rollout.v1 import generation_service_pb2 as pb
from vime.rollout.v1.generation_service_pb2_grpc import GenerationServiceServicer
from vime_router.convert import fence_of
from vime_router.engine_links import EngineLink, EngineLinks
from vime_router.fleet import Fleet, Seat, Wanted
from vime_router.forward import AbortedWhileWaiting, EngineFault, EngineRefused, EngineSaid, Forwarder
from vime_router.running import Running, Ticket
from vime_router.stream_relay import StreamRelay
from vime_service.clock import Clock
from vime_service.deadlines import Deadline, remaining

_HOP_RESERVE_S = 0.02
_ABORT_SECONDS = 5.0


class GenerationRouter(GenerationServiceServicer):
    """See the contract; a client cannot tell the router from an engine."""

    def __init__(self, fleet: Fleet, forwarder: Forwarder, links: EngineLinks, clock: Clock) -> None:
        self._fleet = fleet
        self._forwarder = forwarder
        self._links = links
        self._clock = clock
        self.running = Running()

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> pb.GenerateResponse:
        """See the contract."""
        wanted = _wanted(request)
        with self.running.ticket(request.request_id, wanted.samples) as ticket:
            try:
                response: pb.GenerateResponse = await self._send("Generate", request, wanted, context, ticket)
                return response
            except AbortedWhileWaiting:
                return pb.GenerateResponse(samples=_aborted(request))

    async def GenerateStream(
        self, request: pb.GenerateStreamRequest, context: Any
    ) -> AsyncIterator[pb.GenerateStreamResponse]:
        """See the contract."""
        generate = request.generate
        wanted = _wanted(generate)
        relay = StreamRelay(generate, self._links, self._clock)
        with self.running.ticket(generate.request_id, wanted.samples) as ticket:
            try:
                async with aclosing(self._forwarder.stream(wanted, self._deadline(context), ticket, relay)) as pieces:
                    async for piece in pieces:
                        yield piece
            except AbortedWhileWaiting:
                for end in relay.aborted():
                    yield end

    async def Score(self, request: pb.ScoreRequest, context: Any) -> pb.ScoreResponse:
        """See the contract."""
        wanted = Wanted(request.model_id, fence_of(request.fence), samples=max(1, len(request.sequences)))
        response: pb.ScoreResponse = await self._send("Score", request, wanted, context, Ticket())
        return response

    async def Render(self, request: pb.RenderRequest, context: Any) -> pb.RenderResponse:
        """See the contract."""
        response: pb.RenderResponse = await self._send("Render", request, _tokenizer(request), context, Ticket())
        return response

    async def Decode(self, request: pb.DecodeRequest, context: Any) -> pb.DecodeResponse:
        """See the contract."""
        response: pb.DecodeResponse = await self._send("Decode", request, _tokenizer(request), context, Ticket())
        return response

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        """See the contract. A call that waits for an engine ends here; one that runs, on its engine."""
        tickets = self.running.abort(request.request_id)
        aborted = sum(ticket.samples for ticket in tickets if ticket.seat is None)
        self._fleet.wake()
        seconds = min(_ABORT_SECONDS, self._deadline(context).remaining)
        links = [self._links.open_to(ticket.seat.report) for ticket in tickets if ticket.seat is not None]
        counts = await asyncio.gather(*(self._abort_at(link, request, seconds) for link in links if link is not None))
        return pb.AbortResponse(aborted=aborted + sum(counts))

    @staticmethod
    async def _abort_at(link: EngineLink, request: pb.AbortRequest, seconds: float) -> int:
        try:
            return int((await link.unary("Abort", request, seconds)).aborted)
        except (EngineFault, EngineRefused):
            return 0  # its call fails with the engine, and is not repeated
        except EngineSaid as said:
            raise said.error from None

    async def _send(self, method: str, request: Any, wanted: Wanted, context: Any, ticket: Ticket) -> Any:
        async def send(seat: Seat, seconds: float) -> Any:
            return await self._links.to(seat.report).unary(method, request, seconds)

        return await self._forwarder.call(wanted, self._deadline(context), ticket, send)

    def _deadline(self, context: Any) -> Deadline:
        return Deadline.after(remaining(context, reserve=_HOP_RESERVE_S), self._clock)


def _wanted(request: pb.GenerateRequest) -> Wanted:
    return Wanted(
        model_id=request.model_id,
        fence=fence_of(request.fence),
        # Unset means the request_id, which never comes twice: nothing to remember.
        session_id=request.session_id,
        samples=max(1, len(request.seeds)),
    )


def _tokenizer(request: pb.RenderRequest | pb.DecodeRequest) -> Wanted:
    return Wanted(model_id=request.model_id, weights=False)


def _aborted(request: pb.GenerateRequest) -> list[pb.GeneratedSample]:
    """Samples that no engine ever saw."""
    return [
        pb.GeneratedSample(sample_index=index, finish_reason=FinishReason.FINISH_REASON_ABORT)
        for index in range(len(request.seeds))
    ]
