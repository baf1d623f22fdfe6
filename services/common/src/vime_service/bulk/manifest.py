"""What one weight version consists of: every tensor with its type, shape and digest, and how the bytes are laid out.

A manifest is checked against limits before anything is allocated for it, and has one digest over all of it:
a weight version names one manifest digest for ever.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

import torch
import xxhash

from vime_service.bulk.dtypes import dtype_name, item_bytes
from vime_service.bulk.errors import ManifestError
from vime_service.bulk.layout import BucketLayout, StreamPlan

DIGEST_ALGORITHM = "xxh3_128"
DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True, order=True)
class VersionKey:
    """A weight version. Ordered by (incarnation, step); only versions of one run may be compared."""

    run_id: str
    incarnation: int
    step: int

    def __str__(self) -> str:
        return f"{self.run_id}/{self.incarnation}/{self.step}"


@dataclass(frozen=True, slots=True)
class ManifestLimits:
    """Upper bounds that a manifest from the wire must respect before memory is reserved for it."""

    max_tensors: int = 1_000_000
    max_dims: int = 8
    max_name_bytes: int = 512
    max_tensor_bytes: int = 64 << 30
    max_total_bytes: int = 4 << 40


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """One tensor: its bytes on the wire are its elements in row-major order, little-endian, `nbytes` of them.

    `digest` is the xxh3_128 of those bytes (16 bytes, big-endian canonical form).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    digest: bytes

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> TensorMeta:
        """Describe a tensor. Hashes its bytes, so a tensor on a device is copied to the host once."""
        view = byte_view(tensor)
        return cls(name, dtype_name(tensor.dtype), tuple(tensor.shape), view.numel(), digest_of(view))


@dataclass(frozen=True)
class Manifest:
    """The tensors of `version` in wire order, and the layout of the byte stream that carries them.

    Raises `ManifestError` when built from contradictory or over-limit parts; a manifest that exists is sound.
    """

    version: VersionKey
    tensors: tuple[TensorMeta, ...]
    layout: BucketLayout = field(default_factory=BucketLayout)
    digest_algorithm: str = DIGEST_ALGORITHM
    limits: ManifestLimits = field(default_factory=ManifestLimits, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.digest_algorithm != DIGEST_ALGORITHM:
            raise ManifestError(f"digest algorithm {self.digest_algorithm!r} is not known; {DIGEST_ALGORITHM!r} is")
        if not self.tensors:
            raise ManifestError(f"the manifest of {self.version} names no tensor")
        if len(self.tensors) > self.limits.max_tensors:
            raise ManifestError(f"{len(self.tensors)} tensors, the limit is {self.limits.max_tensors}")
        seen: set[str] = set()
        for tensor in self.tensors:
            _check_tensor(tensor, self.limits)
            if tensor.name in seen:
                raise ManifestError(f"tensor {tensor.name!r} is named twice")
            seen.add(tensor.name)
        total = self.plan.total_bytes
        if total > self.limits.max_total_bytes:
            raise ManifestError(f"{total} bytes in all, the limit is {self.limits.max_total_bytes}")

    @classmethod
    def of(
        cls, version: VersionKey, tensors: Iterable[tuple[str, torch.Tensor]], layout: BucketLayout | None = None
    ) -> Manifest:
        """Describe named tensors, in the order given."""
        metas = tuple(TensorMeta.of(name, tensor) for name, tensor in tensors)
        return cls(version, metas, layout or BucketLayout())

    @cached_property
    def plan(self) -> StreamPlan:
        """Where each tensor lies in the byte stream, and how the stream is cut into buckets."""
        return StreamPlan.of([tensor.nbytes for tensor in self.tensors], self.layout)

    @cached_property
    def digest(self) -> bytes:
        """xxh3_128 over a canonical encoding of version, names, types, shapes and digests (16 bytes).

        The layout is left out: it says how the bytes travel, not what the version is.
        """
        hasher = xxhash.xxh3_128()
        parts: list[str | int | bytes] = [self.digest_algorithm, self.version.run_id]
        parts += [self.version.incarnation, self.version.step]
        for tensor in self.tensors:
            parts += [tensor.name, tensor.dtype, len(tensor.shape), *tensor.shape, tensor.nbytes, tensor.digest]
        for part in parts:
            raw = part if isinstance(part, bytes) else str(part).encode()
            hasher.update(len(raw).to_bytes(8, "big") + raw)  # length first: no two field lists encode alike
        return bytes(hasher.digest())

    def compare(self, expected: Mapping[str, tuple[str, tuple[int, ...]]]) -> ManifestDiff:
        """Compare with what a model expects: tensor name -> (dtype, shape)."""
        got = {tensor.name: tensor for tensor in self.tensors}
        both = [(tensor, *expected[name]) for name, tensor in got.items() if name in expected]
        return ManifestDiff(
            missing=tuple(name for name in expected if name not in got),
            extra=tuple(name for name in got if name not in expected),
            misshaped=tuple((t.name, shape, t.shape) for t, _, shape in both if t.shape != shape),
            wrong_dtype=tuple((t.name, dtype, t.dtype) for t, dtype, _ in both if t.dtype != dtype),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-able form, for a file beside the staged bytes."""
        return {
            "version": [self.version.run_id, self.version.incarnation, self.version.step],
            "bucket_bytes": self.layout.bucket_bytes,
            "alignment": self.layout.alignment,
            "digest_algorithm": self.digest_algorithm,
            "tensors": [[t.name, t.dtype, list(t.shape), t.nbytes, t.digest.hex()] for t in self.tensors],
            "digest": self.digest.hex(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Rebuild from `to_dict`'s form; `ManifestError` when it was altered."""
        try:
            run_id, incarnation, step = data["version"]
            manifest = cls(
                VersionKey(str(run_id), int(incarnation), int(step)),
                tuple(
                    TensorMeta(str(n), str(d), tuple(int(k) for k in s), int(b), bytes.fromhex(h))
                    for n, d, s, b, h in data["tensors"]
                ),
                BucketLayout(int(data["bucket_bytes"]), int(data["alignment"])),
                str(data["digest_algorithm"]),
            )
            promised = str(data["digest"])
        except (KeyError, TypeError, ValueError) as error:
            raise ManifestError(f"not a manifest: {error!r}") from error
        if manifest.digest.hex() != promised:
            raise ManifestError(f"manifest digest {manifest.digest.hex()}, the file says {promised}")
        return manifest


@dataclass(frozen=True, slots=True)
class ManifestDiff:
    """How a manifest differs from what a model expects. Tuples are (name, expected, actual)."""

    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    misshaped: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()
    wrong_dtype: tuple[tuple[str, str, str], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.missing or self.extra or self.misshaped or self.wrong_dtype)

    def describe(self, at_most: int = 8) -> str:
        """One sentence that names the offenders, at most `at_most` of each kind, and counts the rest."""
        shapes = [f"{n} is {list(got)}, expected {list(want)}" for n, want, got in self.misshaped]
        dtypes = [f"{n} is {got}, expected {want}" for n, want, got in self.wrong_dtype]
        kinds = {"missing": self.missing, "not expected": self.extra, "misshaped": shapes, "wrong dtype": dtypes}
        return "; ".join(f"{kind}: {named(items, at_most)}" for kind, items in kinds.items() if items)


def named(items: Sequence[str], at_most: int = 8) -> str:
    """Join names, at most `at_most`, and count the rest."""
    rest = len(items) - at_most
    return ", ".join(items[:at_most]) + (f" and {rest} more" if rest > 0 else "")


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes on the host as a flat uint8 tensor: a view when it is contiguous there, else a copy."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8)


def digest_of(view: torch.Tensor) -> bytes:
    """xxh3_128 of a flat uint8 host tensor."""
    return bytes(xxhash.xxh3_128_digest(view.numpy().data))


def _check_tensor(tensor: TensorMeta, limits: ManifestLimits) -> None:
    name_bytes = len(tensor.name.encode())
    if not 0 < name_bytes <= limits.max_name_bytes:
        raise ManifestError(
            f"tensor name {tensor.name[:64]!r}: {name_bytes} bytes, allowed 1 to {limits.max_name_bytes}"
        )
    if len(tensor.shape) > limits.max_dims:
        raise ManifestError(f"tensor {tensor.name!r}: {len(tensor.shape)} dimensions, the limit is {limits.max_dims}")
    if any(size <= 0 for size in tensor.shape):
        raise ManifestError(f"tensor {tensor.name!r}: every dimension must be positive, shape is {list(tensor.shape)}")
    nbytes = math.prod(tensor.shape) * item_bytes(tensor.dtype)
    if nbytes > limits.max_tensor_bytes:
        raise ManifestError(f"tensor {tensor.name!r}: {nbytes} bytes, the limit is {limits.max_tensor_bytes}")
    if tensor.nbytes != nbytes:
        raise ManifestError(
            f"tensor {tensor.name!r}: {tensor.nbytes} bytes claimed, {tensor.dtype} {list(tensor.shape)} has {nbytes}"
        )
    if len(tensor.digest) != DIGEST_BYTES:
        raise ManifestError(f"tensor {tensor.name!r}: digest of {len(tensor.digest)} bytes, expected {DIGEST_BYTES}")
