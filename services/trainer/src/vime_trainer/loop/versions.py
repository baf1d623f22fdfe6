"""Weight versions as the loop knows them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Version:
    """A weight version. Ordered by incarnation, then step; only versions of one run are compared."""

    run_id: str
    incarnation: int
    step: int

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.step}"
