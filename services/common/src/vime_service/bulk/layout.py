"""The byte stream of a transfer: tensors at aligned offsets, cut into buckets of equal size.

Both ends compute the same plan from the manifest alone, so nothing about order or offsets is ever inferred from
local memory. A tensor may straddle buckets. Bytes between tensors are zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vime_service.bulk.errors import ManifestError

MAX_BUCKET_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """Bucket size and alignment of tensor offsets, both in bytes; the alignment is a power of two."""

    bucket_bytes: int = 64 << 20
    alignment: int = 16

    def __post_init__(self) -> None:
        if not 0 < self.alignment <= 4096 or self.alignment & (self.alignment - 1):
            raise ManifestError(f"alignment {self.alignment} is not a power of two up to 4096")
        if not 0 < self.bucket_bytes <= MAX_BUCKET_BYTES:
            raise ManifestError(f"bucket of {self.bucket_bytes} bytes, allowed 1 to {MAX_BUCKET_BYTES}")


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """Offsets (bytes from the start of the stream) of each tensor, and the buckets as windows of the stream."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    total_bytes: int
    bucket_bytes: int

    @classmethod
    def of(cls, sizes: Sequence[int], layout: BucketLayout) -> StreamPlan:
        """Lay out tensors of the given byte sizes, in order."""
        offsets, end = [], 0
        for size in sizes:
            start = -(-end // layout.alignment) * layout.alignment
            offsets.append(start)
            end = start + size
        return cls(tuple(offsets), tuple(sizes), end, layout.bucket_bytes)

    @property
    def num_buckets(self) -> int:
        """How many buckets carry the stream; only the last may be shorter than `bucket_bytes`."""
        return -(-self.total_bytes // self.bucket_bytes)

    def window(self, bucket: int) -> tuple[int, int]:
        """First byte and end of one bucket in the stream."""
        if not 0 <= bucket < self.num_buckets:
            raise IndexError(f"bucket {bucket} of {self.num_buckets}")
        start = bucket * self.bucket_bytes
        return start, min(start + self.bucket_bytes, self.total_bytes)
