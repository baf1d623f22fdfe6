"""Cutting tensors into byte buckets and back: every bit kept, whatever the types and bucket size."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vime_service.bulk import BucketLayout, DigestMismatch, Manifest, ManifestError, VersionKey
from vime_service.bulk.buckets import pack, unpack, verify
from vime_service.bulk.dtypes import TORCH_DTYPES
from vime_service.bulk.manifest import byte_view

V1 = VersionKey("run", 1, 1)


def through_buckets(tensors: dict[str, torch.Tensor], layout: BucketLayout) -> tuple[Manifest, torch.Tensor]:
    """Pack into buckets and lay them end to end, as a receiver would."""
    manifest = Manifest.of(V1, tensors.items(), layout)
    plan = manifest.plan
    views = [byte_view(tensor) for tensor in tensors.values()]
    scratch = torch.full((plan.bucket_bytes,), 255, dtype=torch.uint8)
    staged = torch.full((plan.total_bytes,), 77, dtype=torch.uint8)
    for bucket in range(plan.num_buckets):
        low, high = plan.window(bucket)
        staged[low:high] = pack(plan, views, bucket, scratch)
    return manifest, staged


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (nbytes,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(shape)


@given(
    dtypes=st.lists(st.sampled_from(sorted(TORCH_DTYPES)), min_size=1, max_size=6),
    sizes=st.lists(st.integers(1, 40), min_size=6, max_size=6),
    bucket=st.integers(1, 97),
    alignment=st.sampled_from([1, 2, 16, 64]),
)
def test_every_bit_of_every_dtype_survives_any_cut(
    dtypes: list[str], sizes: list[int], bucket: int, alignment: int
) -> None:
    tensors = {f"t{i}": random_tensor((sizes[i],), TORCH_DTYPES[name], i) for i, name in enumerate(dtypes)}
    if alignment < 8:  # torch can only view a type at an address it divides
        tensors = {name: tensor.view(torch.uint8) for name, tensor in tensors.items()}
    manifest, staged = through_buckets(tensors, BucketLayout(bucket, alignment))
    verify(manifest, staged)
    back = unpack(manifest, staged)
    assert list(back) == list(tensors)
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(byte_view(back[name]), byte_view(tensor))


def test_an_fp32_router_bias_among_bf16_keeps_its_bits() -> None:
    bias = torch.tensor([5.001, 5.010, 5.020, 5.030])
    tensors = {
        "up": torch.randn(7, 3).to(torch.bfloat16),
        "gate.e_score_correction_bias": bias,
        "down": torch.randn(3, 7).to(torch.bfloat16),
    }
    manifest, staged = through_buckets(tensors, BucketLayout(bucket_bytes=13))
    back = unpack(manifest, staged)["gate.e_score_correction_bias"]
    assert back.dtype == torch.float32
    assert torch.equal(back, bias)
    assert not torch.equal(bias.to(torch.bfloat16).float(), bias)  # the cast that must not happen would show


def test_each_expert_keeps_its_own_constant_through_odd_cuts() -> None:
    tensors = {
        f"layers.{layer}.experts.{expert}.w": torch.full((5, 3), 100.0 * layer + expert, dtype=torch.bfloat16)
        for layer in range(3)
        for expert in range(8)
    }
    manifest, staged = through_buckets(tensors, BucketLayout(bucket_bytes=101))
    back = unpack(manifest, staged)
    for name, tensor in tensors.items():
        assert torch.equal(back[name], tensor), name


def test_scalars_and_non_contiguous_tensors_are_sent_by_value() -> None:
    tensors = {"scalar": torch.tensor(3.5), "transposed": torch.arange(6.0).view(2, 3).t()}
    manifest, staged = through_buckets(tensors, BucketLayout())
    back = unpack(manifest, staged)
    assert back["scalar"].shape == ()
    assert back["scalar"].item() == 3.5
    assert torch.equal(back["transposed"], tensors["transposed"])


def test_a_bucket_inside_one_tensor_is_sent_without_a_copy() -> None:
    tensor = torch.arange(100, dtype=torch.uint8)
    manifest = Manifest.of(V1, [("t", tensor)], BucketLayout(bucket_bytes=40))
    out = pack(manifest.plan, [tensor], 1, torch.empty(40, dtype=torch.uint8))
    assert out.data_ptr() == tensor[40:].data_ptr()


def test_padding_between_tensors_is_zero_and_not_old_memory() -> None:
    _, staged = through_buckets({"a": torch.ones(3, dtype=torch.uint8), "b": torch.ones(1)}, BucketLayout())
    assert staged[3:16].eq(0).all()


def test_one_flipped_bit_is_reported_with_the_name_of_its_tensor() -> None:
    tensors = {"first": torch.randn(9), "second": torch.randn(9)}
    manifest, staged = through_buckets(tensors, BucketLayout())
    staged[manifest.plan.offsets[1] + 4] ^= 1
    with pytest.raises(DigestMismatch, match="'second'"):
        verify(manifest, staged)


def test_staged_bytes_that_are_too_few_are_refused_with_both_numbers() -> None:
    manifest, staged = through_buckets({"a": torch.randn(8)}, BucketLayout())
    with pytest.raises(ManifestError, match="31 bytes staged, the manifest lays out 32"):
        unpack(manifest, staged[:-1])


@pytest.mark.parametrize("layout", [(0, 16), (1 << 40, 16), (64, 0), (64, 24)])
def test_a_senseless_layout_is_refused(layout: tuple[int, int]) -> None:
    with pytest.raises(ManifestError, match=r"alignment|bucket of"):
        BucketLayout(*layout)
