"""Manifests through their contract: the same manifest comes out, or an error that names what was altered."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from vime.bulk.v1 import manifest_pb2
from vime_service.bulk import BucketLayout, Manifest, ManifestError, VersionKey
from vime_service.bulk.dtypes import TORCH_DTYPES
from vime_service.bulk.wire import manifest_from_proto, manifest_to_proto


def example() -> Manifest:
    tensors = [(name, torch.zeros(2, 3, dtype=dtype)) for name, dtype in TORCH_DTYPES.items()]
    return Manifest.of(VersionKey("run", 1, 7), [*tensors, ("scalar", torch.tensor(2.0))], BucketLayout(4096))


def test_a_manifest_of_every_dtype_comes_back_the_same() -> None:
    wire = manifest_to_proto(example()).SerializeToString()
    assert manifest_from_proto(manifest_pb2.Manifest.FromString(wire)) == example()


ALTERATIONS: list[tuple[Callable[[manifest_pb2.Manifest], object], str]] = [
    (lambda m: m.tensors[0].shape.append(7), "bytes in all claimed"),
    (lambda m: m.tensors[0].shape.extend([1 << 40]), "the limit is"),
    (lambda m: m.tensors[0].shape.extend([1] * 7), "9 dimensions, allowed 8"),
    (lambda m: setattr(m.tensors[0], "digest", "0" * 32), "its parts give"),
    (lambda m: setattr(m.tensors[0], "digest", "zz" * 16), "is not 16 hex bytes"),
    (lambda m: setattr(m.tensors[0], "digest", ""), "is not 16 hex bytes"),
    (lambda m: setattr(m.tensors[0], "dtype", 0), "dtype number 0 is not known"),
    (lambda m: setattr(m.tensors[1], "name", m.tensors[0].name), "named twice"),
    (lambda m: setattr(m.weight_version, "step", 8), "its parts give"),
    (lambda m: m.ClearField("weight_version"), "without run_id or incarnation"),
    (lambda m: setattr(m, "digest_algorithm", "md5"), "'md5' is not known"),
    (lambda m: setattr(m, "bucket_bytes", 0), "bucket of 0 bytes"),
    (lambda m: setattr(m, "total_bytes", 1), "1 bytes in all claimed"),
    (lambda m: m.ClearField("tensors"), "names no tensor"),
]


@pytest.mark.parametrize(("alter", "message"), ALTERATIONS)
def test_an_altered_manifest_is_refused(alter: Callable[[manifest_pb2.Manifest], object], message: str) -> None:
    wire = manifest_to_proto(example())
    alter(wire)
    with pytest.raises(ManifestError, match=message):
        manifest_from_proto(wire)
