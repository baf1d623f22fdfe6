"""What the router tells about itself; each metric answers the question beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from vime_router.fleet import Fleet, Seat
from vime_router.forward import Forwarder
from vime_service.telemetry import Metrics

Reading = tuple[float, dict[str, str]]


def observe_router(metrics: Metrics, fleet: Fleet, forwarder: Forwarder) -> None:
    """Register the router's gauges."""

    def per_engine(read: Callable[[Seat], float]) -> Callable[[], Iterator[Reading]]:
        def readings() -> Iterator[Reading]:
            for entry, seat in fleet.seats():
                yield read(seat), {"engine_id": entry.report.engine_id}

        return readings

    def by_liveness() -> Iterator[Reading]:
        counts = Counter(fleet.directory.liveness(entry).value for entry, _ in fleet.seats())
        for name, count in counts.items():
            yield count, {"liveness": name}

    metrics.observe("vime.router.engines", "How many engines live?", by_liveness)
    metrics.observe(
        "vime.router.waiting", "How many calls wait for an engine?", lambda: iter([(float(forwarder.waiting), {})])
    )
    metrics.observe("vime.router.in_flight", "Is the load even?", per_engine(lambda seat: seat.load.calls))
    metrics.observe("vime.router.requests", "Who gets how much?", per_engine(lambda seat: seat.load.sent))
    metrics.observe("vime.router.faults", "Which engine fails?", per_engine(lambda seat: seat.breaker.faults))
    metrics.observe(
        "vime.router.sticky_hits", "Do sessions find their cache?", per_engine(lambda seat: seat.sticky_hits)
    )
    metrics.observe(
        "vime.router.load_unknown",
        "Which engine does not tell its load, so that own counts decide alone?",
        per_engine(lambda seat: float(seat.report.load is None)),
    )
