"""Manifests and versions between their contracts (vime.bulk.v1, vime.common.v1) and their domain types. No policy."""

from __future__ import annotations

from vime.bulk.v1 import manifest_pb2
from vime.common.v1 import tensor_pb2, weight_version_pb2
from vime_service.bulk.dtypes import TORCH_DTYPES, item_bytes
from vime_service.bulk.errors import ManifestError
from vime_service.bulk.layout import BucketLayout
from vime_service.bulk.manifest import DIGEST_BYTES, Manifest, ManifestLimits, TensorMeta, VersionKey

WIRE_ALIGNMENT = 16
_TO_WIRE = {name: tensor_pb2.Dtype.Value(f"DTYPE_{name.upper()}") for name in TORCH_DTYPES}
_FROM_WIRE: dict[int, str] = {value: name for name, value in _TO_WIRE.items()}


def version_to_proto(version: VersionKey) -> weight_version_pb2.WeightVersion:
    """Domain to contract."""
    return weight_version_pb2.WeightVersion(run_id=version.run_id, incarnation=version.incarnation, step=version.step)


def version_from_proto(version: weight_version_pb2.WeightVersion) -> VersionKey:
    """Contract to domain; `ManifestError` when the run or incarnation is unset."""
    if not version.run_id or version.incarnation < 1:
        raise ManifestError(f"weight version without run_id or incarnation: {version.run_id!r}/{version.incarnation}")
    return VersionKey(version.run_id, version.incarnation, version.step)


def dtype_to_proto(name: str) -> tensor_pb2.Dtype.ValueType:
    """Domain to contract; `ManifestError` for a type that may not cross."""
    if name not in _TO_WIRE:
        raise ManifestError(f"unknown dtype {name!r}; known: {sorted(_TO_WIRE)}")
    return _TO_WIRE[name]


def dtype_from_proto(value: int) -> str:
    """Contract to domain; `ManifestError` for a number that names no type."""
    if value not in _FROM_WIRE:
        raise ManifestError(f"dtype number {value} is not known; known: {sorted(_FROM_WIRE)}")
    return _FROM_WIRE[value]


def manifest_to_proto(manifest: Manifest) -> manifest_pb2.Manifest:
    """Domain to contract; `ManifestError` for an alignment that the contract does not have."""
    if manifest.layout.alignment != WIRE_ALIGNMENT:
        raise ManifestError(f"alignment {manifest.layout.alignment}, the contract has {WIRE_ALIGNMENT}")
    return manifest_pb2.Manifest(
        weight_version=version_to_proto(manifest.version),
        tensors=[
            manifest_pb2.TensorMeta(name=t.name, dtype=dtype_to_proto(t.dtype), shape=t.shape, digest=t.digest.hex())
            for t in manifest.tensors
        ],
        digest_algorithm=manifest.digest_algorithm,
        digest=manifest.digest.hex(),
        bucket_bytes=manifest.layout.bucket_bytes,
        total_bytes=sum(t.nbytes for t in manifest.tensors),
    )


def manifest_from_proto(message: manifest_pb2.Manifest, limits: ManifestLimits | None = None) -> Manifest:
    """Contract to domain, checked against `limits` before anything is allocated.

    Raises:
        ManifestError: a limit is passed, or the sums and digests of the message disagree with its parts.
    """
    limits = limits or ManifestLimits()
    if len(message.tensors) > limits.max_tensors:
        raise ManifestError(f"{len(message.tensors)} tensors, the limit is {limits.max_tensors}")
    manifest = Manifest(
        version_from_proto(message.weight_version),
        tuple(_tensor_from_proto(tensor, limits) for tensor in message.tensors),
        BucketLayout(message.bucket_bytes, WIRE_ALIGNMENT),
        message.digest_algorithm,
        limits,
    )
    total = sum(t.nbytes for t in manifest.tensors)
    if message.total_bytes != total:
        raise ManifestError(f"{message.total_bytes} bytes in all claimed, the tensors have {total}")
    if message.digest != manifest.digest.hex():
        raise ManifestError(f"manifest digest {message.digest!r} claimed, its parts give {manifest.digest.hex()}")
    return manifest


def _tensor_from_proto(tensor: manifest_pb2.TensorMeta, limits: ManifestLimits) -> TensorMeta:
    if len(tensor.shape) > limits.max_dims:
        raise ManifestError(f"tensor {tensor.name[:64]!r}: {len(tensor.shape)} dimensions, allowed {limits.max_dims}")
    dtype = dtype_from_proto(tensor.dtype)
    nbytes = item_bytes(dtype)
    for size in tensor.shape:
        nbytes *= size
    try:
        digest = bytes.fromhex(tensor.digest) if len(tensor.digest) == 2 * DIGEST_BYTES else b""
    except ValueError:
        digest = b""
    if not digest:
        raise ManifestError(f"tensor {tensor.name[:64]!r}: {tensor.digest[:64]!r} is not {DIGEST_BYTES} hex bytes")
    return TensorMeta(tensor.name, dtype, tuple(tensor.shape), nbytes, digest)
