"""What a selector sees and answers. Pure: it reads no clock, no database and no counter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Candidate:
    """A prompt that was admitted and is not in any batch."""

    row: int
    admission: int
    stored: bool
    """False: queued or being generated."""
    staleness: int = 0
    """For the step in question; 0 while it is not stored."""
    evictions: int = 0


@dataclass(frozen=True, slots=True)
class Choice:
    """What to do now. `take` is a whole batch or empty; `evict` is done in any case."""

    take: tuple[Candidate, ...] = ()
    evict: tuple[Candidate, ...] = ()


class Selector(Protocol):
    """Chooses the groups of a batch."""

    @property
    def whole_table(self) -> bool:
        """True if it needs every candidate; False if the first `size` in admission order are enough."""
        ...

    def choose(self, candidates: Sequence[Candidate], size: int) -> Choice:
        """The batch of `size` groups out of candidates in admission order, or nothing yet."""
        ...
