"""A call's way to an engine: wait for one that may take it, send it, and send it elsewhere if that engine fails.

Elsewhere only when nothing of the answer has reached the caller, or when a stream can go on from what was received.
What the engine answers for other reasons (a bad request, a deadline) goes back as it is.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from vime_router.fences import FenceKind
from vime_router.fleet import Fleet, Life, Seat, Wanted
from vime_router.running import Ticket
from vime_service.deadlines import Deadline
from vime_service.errors import EngineFailed, FenceNotMet, NoEngine, ResourceExhausted
from vime_service.logging import get_logger

_log = get_logger(__name__)

ResponseT = TypeVar("ResponseT")
PieceT = TypeVar("PieceT")


class EngineFault(Exception):
    """The engine failed. `cause` is what the caller is told if nobody else can help."""

    def __init__(self, engine_id: str, cause: Exception, *, retryable: bool) -> None:
        super().__init__(f"engine {engine_id} failed: {cause}")
        self.engine_id = engine_id
        self.cause = cause
        self.retryable = retryable


class EngineSaid(Exception):
    """The engine's own words about the call, such as that a field is wrong: whatever it refuses, it is there."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class EngineRefused(Exception):
    """The engine is well but does not take the call, or does not end it: it is ahead of its last heartbeat."""

    def __init__(self, engine_id: str, cause: Exception) -> None:
        super().__init__(f"engine {engine_id} refused: {cause}")
        self.engine_id = engine_id
        self.cause = cause


class AbortedWhileWaiting(Exception):
    """The call was aborted while no engine ran it: before the first, or between one that failed and the next."""


class Relay(Protocol[PieceT]):
    """A stream that may be carried by several engines, one after the other."""

    @property
    def begun(self) -> bool:
        """True once a piece has been passed on."""
        ...

    @property
    def complete(self) -> bool:
        """True once every sample has ended."""
        ...

    @property
    def can_resume(self) -> bool:
        """True if another engine can go on from what was received."""
        ...

    @property
    def can_end(self) -> bool:
        """True if what was received may stand as it is, for an aborted call."""
        ...

    def open(self, seat: Seat, seconds: float) -> AbstractAsyncContextManager[AsyncIterator[PieceT]]:
        """Ask an engine for what is still missing."""
        ...

    def take(self, piece: PieceT) -> PieceT:
        """Note a piece and return it as the caller shall see it."""
        ...


@dataclass(slots=True)
class Journey:
    """What one call has been through: lives that failed it, and the seconds it may still spend in the queue."""

    patience_s: float
    failed: set[Life] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class ForwardLimits:
    """Bounds of one call's way: seconds in the queue, calls in the queue, engines asked."""

    queue_timeout_s: float
    max_waiting: int
    max_attempts: int


class Forwarder:
    """Sends calls to the fleet.

    Args:
        fleet: the engines.
        limits: how long and how often.
    """

    def __init__(self, fleet: Fleet, limits: ForwardLimits) -> None:
        self._fleet = fleet
        self._limits = limits
        self.waiting = 0

    async def call(
        self,
        wanted: Wanted,
        deadline: Deadline,
        ticket: Ticket,
        send: Callable[[Seat, float], Awaitable[ResponseT]],
    ) -> ResponseT:
        """Send a call whose answer comes whole; `send` gets the engine and the seconds it may take.

        Raises:
            AbortedWhileWaiting: it was aborted while it waited.
            FenceNotMet: no engine's weights passed the fence in time.
            NoEngine: no engine served in time.
            EngineFailed: the engines asked failed.
        """
        journey = Journey(self._limits.queue_timeout_s)
        while True:
            seat = await self._find(wanted, deadline, ticket, journey)
            try:
                with self._counted(seat, wanted, ticket):
                    return await send(seat, deadline.remaining)
            except EngineRefused:
                continue
            except EngineFault as fault:
                self._give_up_or_go_on(fault, seat, wanted, journey)

    async def stream(
        self, wanted: Wanted, deadline: Deadline, ticket: Ticket, relay: Relay[PieceT]
    ) -> AsyncGenerator[PieceT, None]:
        """Pass a stream on, over as many engines as it needs. Raises as `call`; close it (`aclosing`)."""
        journey = Journey(self._limits.queue_timeout_s)
        while True:
            seat = await self._find(wanted, deadline, ticket, journey)
            try:
                with self._counted(seat, wanted, ticket):
                    async with relay.open(seat, deadline.remaining) as pieces:
                        first = True
                        async for piece in pieces:
                            if first:
                                seat.breaker.answers()
                                first = False
                            yield relay.take(piece)
                    self._check_complete(seat, relay)
                return
            except (EngineRefused, EngineFault) as failure:
                if relay.complete:  # everything was delivered; only the goodbye is missing
                    return
                if ticket.aborted and relay.can_end:
                    raise AbortedWhileWaiting from failure
                if relay.begun and not relay.can_resume:
                    raise self._broken(failure) from failure
                if isinstance(failure, EngineFault):
                    self._give_up_or_go_on(failure, seat, wanted, journey)

    # -------------------------------------------------------------- waiting

    async def _find(self, wanted: Wanted, deadline: Deadline, ticket: Ticket, journey: Journey) -> Seat:
        while True:
            if ticket.aborted:
                raise AbortedWhileWaiting
            seat = self._fleet.pick(wanted, journey.failed)
            if seat is not None:
                return seat
            seconds = min(journey.patience_s, deadline.remaining)
            if seconds <= 0:
                raise self._nobody(wanted, journey)
            since = deadline.clock.now()
            with self._queue_place():
                await self._fleet.changed(seconds)
            journey.patience_s -= deadline.clock.now() - since

    @contextmanager
    def _queue_place(self) -> Iterator[None]:
        if self.waiting >= self._limits.max_waiting:
            raise ResourceExhausted(
                f"{self.waiting} calls wait for an engine already, the limit",
                kind="router queue",
                limit=self._limits.max_waiting,
                actual=self.waiting,
            )
        self.waiting += 1
        try:
            yield
        finally:
            self.waiting -= 1

    def _nobody(self, wanted: Wanted, journey: Journey) -> Exception:
        census = self._fleet.census(wanted)
        model = f"model {wanted.model_id!r}" if wanted.model_id else "the updatable model"
        if census.serving and wanted.weights and wanted.fence.kind is not FenceKind.ANY:
            versions = ", ".join(census.versions)
            return FenceNotMet(
                f"none of {census.known} engines of {model} passes the fence {wanted.fence}; "
                f"{census.serving} serve: {versions}",
                fence=wanted.fence,
                serving=versions,
                known=census.known,
            )
        tried = f"; {len(journey.failed)} failed this call" if journey.failed else ""
        return NoEngine(
            f"no engine of {model} can take the call: {census.known} known, {census.serving} serving{tried}",
            known=census.known,
            serving=census.serving,
            fence=wanted.fence,
        )

    # -------------------------------------------------------------- sending

    @contextmanager
    def _counted(self, seat: Seat, wanted: Wanted, ticket: Ticket) -> Iterator[None]:
        """Count the call on its engine, and let its end speak for or against the engine."""
        with ExitStack() as stack:
            stack.enter_context(seat.load.hold(wanted.samples))
            stack.enter_context(seat.breaker.call())
            stack.enter_context(ticket.at(seat))
            try:
                yield
            except EngineFault:
                seat.breaker.failed()
                raise
            except EngineRefused:
                seat.refused = True
                seat.breaker.answers()
                raise
            except EngineSaid as said:
                seat.breaker.answers()
                raise said.error from None
            seat.breaker.succeeded()

    def _check_complete(self, seat: Seat, relay: Relay[PieceT]) -> None:
        if not relay.complete:
            cause = EngineFailed(
                f"engine {seat.report.engine_id} ended a stream before its samples ended",
                engine_id=seat.report.engine_id,
            )
            raise EngineFault(seat.report.engine_id, cause, retryable=True)

    def _give_up_or_go_on(self, fault: EngineFault, seat: Seat, wanted: Wanted, journey: Journey) -> None:
        """Return if the call shall be tried on another engine, else raise what the caller is told."""
        journey.failed.add(seat.life)
        if not fault.retryable:
            raise fault.cause
        others = self._fleet.could_recover(wanted, journey.failed)
        if others and len(journey.failed) < self._limits.max_attempts:
            _log.warning("call goes to another engine", engine_id=fault.engine_id, cause=str(fault.cause))
            return
        raise EngineFailed(
            f"engine {fault.engine_id} failed, attempt {len(journey.failed)} of {self._limits.max_attempts}"
            f"{'' if others else ', and there is no other engine'}: {fault.cause}",
            engine_id=fault.engine_id,
            attempts=len(journey.failed),
        ) from fault

    @staticmethod
    def _broken(failure: EngineFault | EngineRefused) -> EngineFailed:
        return EngineFailed(
            f"engine {failure.engine_id} failed after a part of the answer was delivered: {failure.cause}",
            engine_id=failure.engine_id,
        )
