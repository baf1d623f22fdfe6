"""Cut tensors of mixed types into byte buckets, and view received bytes as tensors again. No value is converted."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

import torch

from vime_service.bulk.dtypes import torch_dtype
from vime_service.bulk.errors import DigestMismatch, ManifestError
from vime_service.bulk.layout import StreamPlan
from vime_service.bulk.manifest import Manifest, TensorMeta, digest_of


def pack(plan: StreamPlan, views: Sequence[torch.Tensor], bucket: int, out: torch.Tensor) -> torch.Tensor:
    """The bytes of one bucket, as a flat uint8 tensor.

    Args:
        plan: the layout.
        views: one flat uint8 host tensor per planned tensor, in order.
        bucket: which bucket.
        out: uint8 scratch of at least `bucket_bytes`.

    Returns:
        A view of the source when the bucket lies inside one tensor (nothing is copied), else the filled part of `out`.
    """
    start, end = plan.window(bucket)
    pieces = list(_pieces(plan, start, end))
    if len(pieces) == 1:
        index, low, high = pieces[0]
        if high - low == end - start:
            offset = plan.offsets[index]
            return views[index][low - offset : high - offset]
    filled = out[: end - start]
    filled.zero_()
    for index, low, high in pieces:
        offset = plan.offsets[index]
        filled[low - start : high - start] = views[index][low - offset : high - offset]
    return filled


def unpack(manifest: Manifest, staged: torch.Tensor) -> dict[str, torch.Tensor]:
    """View staged bytes (flat uint8, the whole stream) as the manifest's tensors, in its order, without a copy."""
    if staged.dtype != torch.uint8 or staged.numel() < manifest.plan.total_bytes:
        raise ManifestError(f"{staged.numel()} bytes staged, the manifest lays out {manifest.plan.total_bytes}")
    return {
        meta.name: staged[offset : offset + meta.nbytes].view(torch_dtype(meta.dtype)).view(meta.shape)
        for meta, offset in zip(manifest.tensors, manifest.plan.offsets, strict=True)
    }


def verify(manifest: Manifest, staged: torch.Tensor) -> None:
    """Check every staged tensor's digest; `DigestMismatch` names the first that is wrong."""
    for meta, offset in zip(manifest.tensors, manifest.plan.offsets, strict=True):
        verify_one(meta, staged[offset : offset + meta.nbytes])


def verify_one(meta: TensorMeta, view: torch.Tensor) -> None:
    """Check one tensor's bytes (flat uint8 host tensor) against its digest."""
    actual = digest_of(view)
    if actual != meta.digest:
        raise DigestMismatch(meta.name, meta.digest.hex(), actual.hex())


def _pieces(plan: StreamPlan, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """(tensor index, first byte, end) of each tensor part inside [start, end) of the stream."""
    index = max(0, bisect_right(plan.offsets, start) - 1)
    while index < len(plan.offsets) and plan.offsets[index] < end:
        low = max(start, plan.offsets[index])
        high = min(end, plan.offsets[index] + plan.sizes[index])
        if low < high:
            yield index, low, high
        index += 1
