"""One GenerateStream over one engine after the other: what to ask the next one, and what the caller gets to see."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

from vime.common.v1.trajectory_pb2 import FinishReason
from vime.rollout.v1.generation_service_pb2 import (
    GeneratedSample,
    GenerateRequest,
    GenerateStreamRequest,
    GenerateStreamResponse,
)
from vime_router.convert import duration_of, span_message, span_of
from vime_router.engine_links import EngineLinks
from vime_router.fleet import Seat
from vime_router.forward import EngineFault
from vime_router.progress import BrokenOrder, StreamProgress
from vime_service.clock import Clock
from vime_service.errors import Internal


class StreamRelay:
    """See `vime_router.forward.Relay`.

    Args:
        request: what the caller asked for.
        links: the engines' channels.
        clock: monotonic time.
    """

    def __init__(self, request: GenerateRequest, links: EngineLinks, clock: Clock) -> None:
        self._request = request
        self._links = links
        self._clock = clock
        self._progress = StreamProgress(len(request.seeds), len(request.resume_token_ids))
        self._started_at = clock.now()
        self._attempt_at = self._started_at
        self._resumed_from: int | None = None
        self._engine_id = ""

    @property
    def begun(self) -> bool:
        """True once a piece has been passed on."""
        return self._progress.begun

    @property
    def complete(self) -> bool:
        """True once every sample has ended."""
        return self._progress.complete

    @property
    def can_resume(self) -> bool:
        """True if another engine can go on."""
        return self._progress.can_resume

    @property
    def can_end(self) -> bool:
        """True if what was received may stand as it is."""
        return self._progress.can_end

    def aborted(self) -> Iterator[GenerateStreamResponse]:
        """The ends of all samples that no engine will end: what was delivered keeps the versions that generated it."""
        seconds = self._clock.now() - self._started_at
        for index, sample in self._progress.unended:
            end = GeneratedSample(
                sample_index=index,
                finish_reason=FinishReason.FINISH_REASON_ABORT,
                version_spans=[span_message(span) for span in sample.spans],
                generation_time=duration_of(seconds),
            )
            yield GenerateStreamResponse(sample_index=index, first_token=sample.length, end=end)

    @asynccontextmanager
    async def open(self, seat: Seat, seconds: float) -> AsyncIterator[AsyncIterator[GenerateStreamResponse]]:
        """Ask an engine for what is still missing."""
        request = self._request
        self._attempt_at = self._clock.now()
        self._engine_id = seat.report.engine_id
        if self.begun:
            request = GenerateRequest()
            request.CopyFrom(self._request)
            request.resume_token_ids.extend(self._progress.received)
            self._resumed_from = len(request.resume_token_ids)
        message = GenerateStreamRequest(generate=request)
        async with self._links.to(seat.report).stream("GenerateStream", message, seconds) as pieces:
            yield pieces

    def take(self, piece: GenerateStreamResponse) -> GenerateStreamResponse:
        """Note a piece; the last one of a resumed sample gets the spans and the time of the whole.

        Raises:
            EngineFault: it is not the next piece of its sample.
        """
        ended = piece.HasField("end")
        spans = [span_of(span) for span in piece.version_spans]
        try:
            self._progress.take(piece.sample_index, piece.first_token, piece.response_token_ids, spans, ended=ended)
        except BrokenOrder as error:
            cause = Internal(f"engine {self._engine_id} sent {error}", engine_id=self._engine_id)
            raise EngineFault(self._engine_id, cause, retryable=False) from None
        if ended and self._resumed_from is not None:
            whole = self._progress.spans_with([span_of(span) for span in piece.end.version_spans], self._resumed_from)
            del piece.end.version_spans[:]
            piece.end.version_spans.extend(span_message(span) for span in whole)
            earlier = self._attempt_at - self._started_at
            piece.end.generation_time.CopyFrom(
                duration_of(earlier + piece.end.generation_time.ToTimedelta().total_seconds())
            )
        return piece
