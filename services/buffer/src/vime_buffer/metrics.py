"""The buffer's metrics: both laws, term by term, read from the ledger when somebody looks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Protocol

from vime_buffer.views import TableView

Labels = dict[str, str]
_SHARED_S = 0.5
"""Age up to which a look serves the next gauge; collections are seconds apart."""


class Observer(Protocol):
    """The part of the chassis's Metrics that is used here."""

    def observe(self, name: str, question: str, read: Callable[[], Iterable[tuple[float, Labels]]]) -> None:
        """Register a gauge."""
        ...


class _OneLook:
    """The gauges of one collection are read one after the other: they share a look, and so show one moment."""

    def __init__(self, look: Callable[[], list[TableView]], now: Callable[[], float]) -> None:
        self._look, self._now = look, now
        self._views: list[TableView] = []
        self._looked_at = float("-inf")

    def __call__(self) -> list[TableView]:
        if self._now() - self._looked_at > _SHARED_S:
            self._views = self._look()
            self._looked_at = self._now()
        return self._views


def register_metrics(
    metrics: Observer, look: Callable[[], list[TableView]], now: Callable[[], float] = time.monotonic
) -> None:
    """Register the gauges; `look` sees every table."""
    read = _OneLook(look, now)

    def groups() -> Iterable[tuple[float, Labels]]:
        for view in read():
            counts, table = view.counts, view.settings.name
            for state in ("inserted", "stored", "leased", "consumed", "retired"):
                yield float(getattr(counts, state)), {"table": table, "state": state}
            for kind, reasons in (("dropped", counts.dropped), ("evicted", counts.evicted)):
                for reason, n in reasons.items():
                    yield float(n), {"table": table, "state": kind, "reason": reason}

    def prompts() -> Iterable[tuple[float, Labels]]:
        for view in read():
            counts, table = view.counts, view.settings.name
            terms = {
                "drawn": counts.drawn,
                "open": counts.open,
                "inserted": counts.prompts_inserted,
                "requeued": counts.requeued,
            }
            for state, n in terms.items():
                yield float(n), {"table": table, "state": state}
            for reason, n in counts.given_up.items():
                yield float(n), {"table": table, "state": "given_up", "reason": reason}

    def broken() -> Iterable[tuple[float, Labels]]:
        for view in read():
            yield float(len(view.counts.broken_laws())), {"table": view.settings.name}

    def slots() -> Iterable[tuple[float, Labels]]:
        for view in read():
            yield float(view.counts.free_slots), {"table": view.settings.name}

    def payloads() -> Iterable[tuple[float, Labels]]:
        for view in read():
            yield float(view.counts.payload_bytes), {"table": view.settings.name}

    metrics.observe("vime.buffer.groups", "Where is every group that was ever inserted?", groups)
    metrics.observe("vime.buffer.prompts", "How did every attempt that was ever drawn end?", prompts)
    metrics.observe("vime.buffer.broken_laws", "Is anything lost or doubled? Must be 0.", broken)
    metrics.observe("vime.buffer.free_slots", "Does rollout wait for training?", slots)
    metrics.observe("vime.buffer.payload_bytes", "How full is the disk with groups that may still be needed?", payloads)
