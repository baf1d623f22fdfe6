"""Typed failures of bulk transfer. Each names the thing that failed and the numbers that decided it."""

from __future__ import annotations


class BulkError(Exception):
    """Base of every error raised by `vime_service.bulk`."""


class ManifestError(BulkError):
    """A manifest contradicts itself or a limit. Raised before anything is allocated for it."""


class StagingError(BulkError):
    """The memory or file that should hold the received bytes cannot be had."""


class DigestMismatch(BulkError):
    """The bytes received for one tensor are not the bytes the manifest promised."""

    def __init__(self, name: str, expected: str, actual: str) -> None:
        super().__init__(f"tensor {name!r}: digest {actual} received, {expected} promised")
        self.name = name
        self.expected = expected
        self.actual = actual


class TransportError(BulkError):
    """A collective step failed or ran past its deadline. The group is unusable and must be re-formed.

    Attributes:
        generation: number of the group that broke.
        rank: rank of this process in it (0 sends).
        seconds: how long this process had waited in the failed step.
    """

    def __init__(self, step: str, generation: int, rank: int, seconds: float, reason: str) -> None:
        super().__init__(f"{step} failed in generation {generation} at rank {rank} after {seconds:.2f} s: {reason}")
        self.step = step
        self.generation = generation
        self.rank = rank
        self.seconds = seconds
        self.reason = reason
