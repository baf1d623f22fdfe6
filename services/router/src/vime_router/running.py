"""The calls that can be aborted: who runs under which request_id, and where."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vime_router.fleet import Seat


class Ticket:
    """One call on its way.

    Attributes:
        samples: samples it asked for.
        seat: the engine that runs it now; None while it waits.
        aborted: somebody asked to end it.
    """

    def __init__(self, samples: int = 1) -> None:
        self.samples = samples
        self.seat: Seat | None = None
        self.aborted = False

    @contextmanager
    def at(self, seat: Seat) -> Iterator[None]:
        """It runs on `seat` inside the block."""
        self.seat = seat
        try:
            yield
        finally:
            self.seat = None


class Running:
    """All calls on their way, by request_id."""

    def __init__(self) -> None:
        self._tickets: dict[str, list[Ticket]] = {}

    def __len__(self) -> int:
        return sum(len(tickets) for tickets in self._tickets.values())

    @contextmanager
    def ticket(self, request_id: str, samples: int) -> Iterator[Ticket]:
        """A ticket for the time of the block. A request_id used twice is the engine's to refuse."""
        ticket = Ticket(samples)
        self._tickets.setdefault(request_id, []).append(ticket)
        try:
            yield ticket
        finally:
            tickets = self._tickets[request_id]
            tickets.remove(ticket)
            if not tickets:
                del self._tickets[request_id]

    def abort(self, request_id: str) -> list[Ticket]:
        """Mark the calls of this id as aborted and return them; an unknown id is no error."""
        tickets = list(self._tickets.get(request_id, ()))
        for ticket in tickets:
            ticket.aborted = True
        return tickets
