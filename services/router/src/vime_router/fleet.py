"""The engines as the router uses them: directory, own counts and breakers brought together, and who may take a call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field

from vime_router.breaker import Breaker
from vime_router.directory import Directory, EngineState, Entry, Liveness, Report
from vime_router.fences import Fence
from vime_router.load import LoadBook
from vime_router.policies import Candidate, Policy
from vime_service.logging import get_logger

_log = get_logger(__name__)

Life = tuple[str, str]
"""engine_id and boot_id: one life of one engine."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a call needs of an engine.

    Attributes:
        model_id: the model; "" means the updatable one.
        fence: the weights it may run on.
        session_id: calls of one session go to one engine while its load allows; "" for none.
        samples: how much it adds to an engine's load.
        weights: False for calls that need a tokenizer only: those any live engine can answer.
    """

    model_id: str = ""
    fence: Fence = field(default_factory=Fence)
    session_id: str = ""
    samples: int = 1
    weights: bool = True

    def is_model_of(self, report: Report) -> bool:
        """True if the engine holds the model that is asked for."""
        return report.model_id == self.model_id if self.model_id else report.updatable

    def is_served_by(self, report: Report) -> bool:
        """True if the engine's state and weights allow the call."""
        if not self.weights:
            return report.state not in (EngineState.UNSPECIFIED, EngineState.DRAINING)
        return report.serves and self.fence.passes(report.version)


@dataclass(slots=True)
class Seat:
    """What the router knows of one life of one engine, beside its heartbeats.

    Attributes:
        refused: it turned a call away since its last heartbeat; until the next one it is not asked again.
        sticky_hits: calls that followed their session here.
    """

    report: Report
    load: LoadBook
    breaker: Breaker
    refused: bool = False
    sticky_hits: int = 0

    @property
    def life(self) -> Life:
        """Names this life of this engine."""
        return self.report.key


@dataclass(frozen=True, slots=True)
class Census:
    """How many engines of a model there are, how many of them serve, and which versions."""

    known: int
    serving: int
    versions: tuple[str, ...]


class Fleet:
    """All engines and the policy among them.

    Args:
        directory: who is there.
        policy: which of the possible engines gets a call.
        new_breaker: makes the breaker of a new life.
        on_ended: told of every life that ended or died: calls that run there must not wait for it.
    """

    def __init__(
        self,
        directory: Directory,
        policy: Policy,
        new_breaker: Callable[[], Breaker],
        on_ended: Callable[[Report, str], None],
    ) -> None:
        self.directory = directory
        self._policy = policy
        self._new_breaker = new_breaker
        self._on_ended = on_ended
        self._seats: dict[Life, Seat] = {}
        self._changed = asyncio.Event()

    # -------------------------------------------------------------- what is known

    def hear(self, report: Report) -> None:
        """Take in a heartbeat.

        Raises:
            AlreadyExists: see `Directory.hear`.
        """
        heard = self.directory.hear(report)
        for ended in heard.ended:
            self._seats.pop(ended.key, None)
            self._end(ended, "it was replaced by a restarted engine")
        seat = self._seats.get(report.key)
        before = None if seat is None else (seat.report.state, seat.report.version, seat.refused)
        if seat is None:
            seat = self._seats[report.key] = Seat(report, LoadBook(), self._new_breaker())
            _log.info(
                f"engine {heard.change.value}",
                engine_id=report.engine_id,
                boot_id=report.boot_id,
                address=report.address,
                state=report.state.name,
            )
            if report.load is None:
                _log.warning("engine tells no load, own counts decide", engine_id=report.engine_id)
        seat.report = report
        seat.refused = False
        seat.load.hear(report.load)
        if before != (report.state, report.version, False):
            self.wake()

    def sweep(self) -> None:
        """Let time take effect: declare engines dead, drop what was forgotten, let those who wait look again."""
        dead = self.directory.sweep()
        for report in dead:
            self._end(report, "its heartbeats stopped")
        known = {entry.report.key for entry in self.directory.entries()}
        for life in [life for life in self._seats if life not in known]:
            del self._seats[life]
        self.wake()  # a breaker may let pass again, or an engine be pardoned: nothing else would tell

    def wake(self) -> None:
        """Let everybody who waits look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self, seconds: float) -> None:
        """Return after the next change, or after `seconds`."""
        changed = self._changed
        try:
            async with asyncio.timeout(seconds):
                await changed.wait()
        except TimeoutError:
            return

    def seats(self) -> Iterator[tuple[Entry, Seat]]:
        """All known engines, by engine_id."""
        for entry in self.directory.entries():
            yield entry, self._seats[entry.report.key]

    def seat(self, engine_id: str) -> tuple[Entry, Seat]:
        """One engine.

        Raises:
            NotFound: it is not known.
        """
        entry = self.directory.entry(engine_id)
        return entry, self._seats[entry.report.key]

    # -------------------------------------------------------------- who may take a call

    def pick(self, wanted: Wanted, avoid: Container[Life] = ()) -> Seat | None:
        """The engine for a call, or None if none may take it now. Count the call there before the next await."""
        untried = [(entry, seat) for entry, seat in self.seats() if seat.life not in avoid]
        possible = [seat for entry, seat in untried if self._may_take(entry, seat, wanted)]
        if not wanted.weights:
            possible = [seat for seat in possible if seat.report.serves] or possible
        if not possible:
            return None
        candidates = [
            Candidate(seat.report.engine_id, seat.report.boot_id, seat.load.total, seat.load.kv_cache_usage)
            for seat in possible
        ]
        choice = self._policy.choose(candidates, wanted.session_id)
        seat = self._seats[choice.candidate.engine_id, choice.candidate.boot_id]
        seat.sticky_hits += choice.sticky
        return seat

    def could_recover(self, wanted: Wanted, avoid: Container[Life]) -> bool:
        """True if an engine of the model lives that was not tried yet: worth waiting for."""
        return any(
            seat.life not in avoid and not entry.draining and wanted.is_model_of(seat.report)
            for entry, seat in self.seats()
            if self.directory.liveness(entry) is not Liveness.DEAD
        )

    def census(self, wanted: Wanted) -> Census:
        """What there is of the model, for the error of a call that found nobody."""
        known = [(entry, seat) for entry, seat in self.seats() if wanted.is_model_of(seat.report)]
        serving = [seat for entry, seat in known if self._is_well(entry, seat) and seat.report.serves]
        return Census(len(known), len(serving), tuple(sorted({str(seat.report.version) for seat in serving})))

    def _may_take(self, entry: Entry, seat: Seat, wanted: Wanted) -> bool:
        return (
            wanted.is_model_of(seat.report)
            and wanted.is_served_by(seat.report)
            and not seat.refused
            and self._is_well(entry, seat)
        )

    def _is_well(self, entry: Entry, seat: Seat) -> bool:
        alive = self.directory.liveness(entry) is Liveness.ALIVE
        return alive and not entry.draining and seat.breaker.lets_pass

    def _end(self, report: Report, why: str) -> None:
        _log.warning("engine gone", engine_id=report.engine_id, boot_id=report.boot_id, why=why)
        self._on_ended(report, why)
