"""Orders in which stored groups go to training. One file, one idea; the file's name is the setting's value."""

from __future__ import annotations

from vime_buffer.selectors.admission_order import AdmissionOrder
from vime_buffer.selectors.interface import Candidate, Choice, Selector
from vime_buffer.selectors.ready_first import ReadyFirst

__all__ = ["AdmissionOrder", "Candidate", "Choice", "ReadyFirst", "Selector", "make_selector"]


def make_selector(name: str, max_staleness: int, max_evictions: int) -> Selector:
    """The selector called `name` in a table's settings."""
    if name == "ready_first":
        return ReadyFirst(max_staleness, max_evictions)
    return AdmissionOrder(max_staleness)
