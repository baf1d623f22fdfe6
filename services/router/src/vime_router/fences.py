"""Weight versions, and which of them pass the fence of a call. The engine enforces the fence finally."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class Version:
    """One set of weights. Versions of different runs are never compared."""

    run_id: str
    incarnation: int
    step: int

    def __str__(self) -> str:
        return f"{self.run_id}/{self.incarnation}/{self.step}"

    def is_at_least(self, other: Version) -> bool:
        """True for the same version or a newer one of the same run.

        A later incarnation at an earlier step is not newer: its trainer went back behind `other`. An earlier
        incarnation is never newer, whatever its step: those weights were lost.
        """
        return self.run_id == other.run_id and self.incarnation >= other.incarnation and self.step >= other.step


class FenceKind(Enum):
    """How a fence compares."""

    ANY = "any"
    AT_LEAST = "at_least"
    EXACTLY = "exactly"


@dataclass(frozen=True, slots=True)
class Fence:
    """The weights a call may run on."""

    kind: FenceKind = FenceKind.ANY
    version: Version | None = None

    def passes(self, served: Version | None) -> bool:
        """True if weights of version `served` (None: an engine that serves no published version) may be used."""
        if self.kind is FenceKind.ANY:
            return True
        if served is None or self.version is None:
            return False
        if self.kind is FenceKind.EXACTLY:
            return served == self.version
        return served.is_at_least(self.version)

    def __str__(self) -> str:
        return self.kind.value if self.version is None else f"{self.kind.value} {self.version}"
