"""Manifests: limits before allocation, one digest over everything, and errors that name the tensor."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from vime_service.bulk import BucketLayout, Manifest, ManifestError, ManifestLimits, TensorMeta, VersionKey

V1 = VersionKey("run", 1, 7)


def example() -> Manifest:
    return Manifest.of(V1, [("a", torch.ones(2, 3)), ("b", torch.zeros(5, dtype=torch.bfloat16))])


def test_a_claimed_tensor_of_2_to_the_40_elements_is_refused_with_its_size() -> None:
    meta = TensorMeta("huge", "float32", (1 << 20, 1 << 20), 4 << 40, bytes(16))
    with pytest.raises(ManifestError, match=r"'huge': 4398046511104 bytes, the limit is 68719476736"):
        Manifest(V1, (meta,))


def test_many_tensors_that_each_pass_are_refused_when_their_sum_is_over_the_limit() -> None:
    metas = tuple(TensorMeta(f"t{i}", "uint8", (1000,), 1000, bytes(16)) for i in range(11))
    with pytest.raises(ManifestError, match=r"11080 bytes in all, the limit is 10000"):
        Manifest(V1, metas, limits=ManifestLimits(max_total_bytes=10_000))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nbytes": 23}, "23 bytes claimed, float32 .2, 3. has 24"),
        ({"shape": (2, -3)}, "every dimension must be positive"),
        ({"shape": (1,) * 9}, "9 dimensions, the limit is 8"),
        ({"dtype": "complex64"}, "unknown dtype 'complex64'"),
        ({"name": ""}, "0 bytes, allowed 1 to 512"),
        ({"name": "n" * 600}, "600 bytes, allowed 1 to 512"),
        ({"digest": b"short"}, "digest of 5 bytes, expected 16"),
    ],
)
def test_a_contradictory_tensor_is_refused_by_name_and_number(change: dict[str, object], message: str) -> None:
    meta = dataclasses.replace(example().tensors[0], **change)
    with pytest.raises(ManifestError, match=message):
        Manifest(V1, (meta,))


def test_a_name_given_twice_and_an_empty_manifest_are_refused() -> None:
    meta = example().tensors[0]
    with pytest.raises(ManifestError, match="'a' is named twice"):
        Manifest(V1, (meta, meta))
    with pytest.raises(ManifestError, match="names no tensor"):
        Manifest(V1, ())


def test_the_digest_is_of_what_the_version_is_and_not_of_how_it_travels() -> None:
    base = example()
    first = base.tensors[0]
    others = [
        dataclasses.replace(base, version=VersionKey("run", 1, 8)),
        dataclasses.replace(base, version=VersionKey("run", 2, 7)),
        dataclasses.replace(base, version=VersionKey("other", 1, 7)),
        dataclasses.replace(base, tensors=base.tensors[::-1]),
        dataclasses.replace(base, tensors=base.tensors[:1]),
        dataclasses.replace(base, tensors=(dataclasses.replace(first, name="c"), base.tensors[1])),
        dataclasses.replace(base, tensors=(dataclasses.replace(first, shape=(3, 2)), base.tensors[1])),
        dataclasses.replace(base, tensors=(dataclasses.replace(first, dtype="int32"), base.tensors[1])),
        dataclasses.replace(base, tensors=(dataclasses.replace(first, digest=b"\1" * 16), base.tensors[1])),
    ]
    digests = {manifest.digest for manifest in [base, *others]}
    assert len(digests) == 1 + len(others)
    assert example().digest == base.digest
    assert dataclasses.replace(base, layout=BucketLayout(bucket_bytes=1024)).digest == base.digest


def test_comparison_names_missing_extra_misshaped_and_wrong_dtype() -> None:
    expected = {"a": ("float32", (3, 2)), "b": ("float32", (5,)), "c": ("float32", (1,))}
    diff = example().compare(expected)
    assert diff.missing == ("c",)
    assert diff.misshaped == (("a", (3, 2), (2, 3)),)
    assert diff.wrong_dtype == (("b", "float32", "bfloat16"),)
    text = diff.describe()
    assert "missing: c" in text
    assert "a is [2, 3], expected [3, 2]" in text
    assert "b is bfloat16, expected float32" in text
    assert example().compare({"a": ("float32", (2, 3))}).extra == ("b",)
    assert not example().compare({"a": ("float32", (2, 3)), "b": ("bfloat16", (5,))})


def test_the_json_form_comes_back_equal_and_an_altered_one_is_refused() -> None:
    data = json.loads(json.dumps(example().to_dict()))
    assert Manifest.from_dict(data).digest == example().digest
    data["version"][2] = 8
    with pytest.raises(ManifestError, match="the file says"):
        Manifest.from_dict(data)
    del data["tensors"]
    with pytest.raises(ManifestError, match="not a manifest"):
        Manifest.from_dict(data)


def test_versions_of_a_run_are_ordered_by_incarnation_then_step() -> None:
    assert VersionKey("r", 1, 9) < VersionKey("r", 2, 0) < VersionKey("r", 2, 1)
