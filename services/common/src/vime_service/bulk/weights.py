"""Send one weight version to every member of a group, and receive it into staging memory with every digest checked."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from vime_service.bulk.buckets import pack, unpack, verify_one
from vime_service.bulk.deadline import Deadline
from vime_service.bulk.errors import DigestMismatch, ManifestError
from vime_service.bulk.manifest import Manifest, byte_view
from vime_service.bulk.staging import Staging
from vime_service.bulk.transport import Transport

log = logging.getLogger(__name__)

BUCKET_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class TransferStats:
    """What one transfer moved: bytes of the stream, wall-clock seconds, buckets."""

    nbytes: int
    seconds: float
    buckets: int


class WeightSender:
    """Rank 0 of a transfer. May send the same version again after the group was re-formed."""

    def __init__(
        self,
        transport: Transport,
        manifest: Manifest,
        tensors: Mapping[str, torch.Tensor],
        bucket_timeout_s: float = BUCKET_TIMEOUT_S,
    ) -> None:
        """Hold the tensors of a version.

        Args:
            transport: the sender's end; the caller forms its groups.
            manifest: describes exactly `tensors` (see `Manifest.of`).
            tensors: the values, unchanged until the last `send` has returned.
            bucket_timeout_s: a bucket that takes longer than this breaks the group.

        Raises:
            ManifestError: `tensors` are not what the manifest describes, by name, type or size.
        """
        absent = [meta.name for meta in manifest.tensors if meta.name not in tensors]
        if absent or len(tensors) != len(manifest.tensors):
            raise ManifestError(f"{len(tensors)} tensors for a manifest of {len(manifest.tensors)}; absent: {absent}")
        self._transport = transport
        self._manifest = manifest
        self._bucket_timeout_s = bucket_timeout_s
        self._views = [byte_view(tensors[meta.name]) for meta in manifest.tensors]
        for meta, view in zip(manifest.tensors, self._views, strict=True):
            if view.numel() != meta.nbytes:
                raise ManifestError(f"tensor {meta.name!r} has {view.numel()} bytes, its manifest says {meta.nbytes}")

    def send(self, deadline: Deadline) -> TransferStats:
        """Broadcast every bucket. The next bucket is packed while the last is on the wire.

        Raises:
            TransportError: a member died or was too slow; re-form the group and send again.
        """
        started = time.monotonic()
        plan = self._manifest.plan
        scratch = [torch.empty(min(plan.bucket_bytes, plan.total_bytes), dtype=torch.uint8) for _ in range(2)]
        # bounded by: packing, which copies memory and waits for nobody
        with ThreadPoolExecutor(1, "pack") as packer:

            def packed(bucket: int) -> Future[torch.Tensor]:
                return packer.submit(pack, plan, self._views, bucket, scratch[bucket % 2])

            coming = packed(0)
            for bucket in range(plan.num_buckets):
                # bounded by: packing, as above
                ready = coming.result()
                if bucket + 1 < plan.num_buckets:
                    coming = packed(bucket + 1)
                self._transport.broadcast(ready, deadline.at_most(self._bucket_timeout_s))
        return TransferStats(plan.total_bytes, time.monotonic() - started, plan.num_buckets)


class WeightReceiver:
    """A member that is not rank 0. Fills staging memory; nothing it does touches weights that are being served."""

    def __init__(
        self,
        transport: Transport,
        manifest: Manifest,
        staging: Staging,
        bucket_timeout_s: float = BUCKET_TIMEOUT_S,
    ) -> None:
        """Prepare to receive.

        Args:
            transport: this member's end; the caller forms its groups.
            manifest: what will come, as checked against the own model.
            staging: at least `manifest.plan.total_bytes` bytes.
            bucket_timeout_s: a bucket that takes longer than this breaks the group.
        """
        if staging.buffer.numel() < manifest.plan.total_bytes:
            raise ManifestError(f"staging of {staging.buffer.numel()} bytes, {manifest.plan.total_bytes} will come")
        self._transport = transport
        self._manifest = manifest
        self._staging = staging
        self._bucket_timeout_s = bucket_timeout_s
        self.stats: TransferStats | None = None

    def receive(self, deadline: Deadline) -> dict[str, torch.Tensor]:
        """Receive every bucket; check each tensor's digest in staging as soon as its last byte is there.

        Returns:
            Views of the staging memory, in the manifest's order; valid until the staging is closed.

        Raises:
            TransportError: the group broke. What is staged so far is worthless.
            DigestMismatch: bytes arrived wrong; names the first such tensor. All buckets were still taken, so that
                the other members of the group do not fail with this one.
        """
        started = time.monotonic()
        plan, staged = self._manifest.plan, self._staging.buffer
        waiting = list(zip(self._manifest.tensors, plan.offsets, strict=True))[::-1]
        failure: DigestMismatch | None = None
        for bucket in range(plan.num_buckets):
            low, high = plan.window(bucket)
            self._transport.broadcast(staged[low:high], deadline.at_most(self._bucket_timeout_s))
            while failure is None and waiting and waiting[-1][1] + waiting[-1][0].nbytes <= high:
                meta, offset = waiting.pop()
                try:
                    verify_one(meta, staged[offset : offset + meta.nbytes])
                except DigestMismatch as error:
                    failure = error
        self.stats = TransferStats(plan.total_bytes, time.monotonic() - started, plan.num_buckets)
        if failure is not None:
            raise failure
        return unpack(self._manifest, staged)
