"""Watching a load: every element of every parameter, whole, once, from the right tensor and of the right type."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from vime_rollout.engines.load_plan import LoadRecord, LoadWatcher, combine, problems

Tensors = dict[str, torch.Tensor]


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def watch(parameters: Tensors, tensors: Tensors, load: Callable[[str, torch.Tensor], object]) -> LoadRecord:
    watcher = LoadWatcher(parameters)
    with watcher:
        for name, tensor in watcher.feed(tensors.items()):
            load(name, tensor)
    return watcher.record()


def verdict(record: LoadRecord, tensors: Tensors) -> list[str]:
    return problems(record, {name: tensor.numel() for name, tensor in tensors.items()})


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_fused_parameter_is_whole_when_every_shard_was_written(device: str) -> None:
    fused = torch.empty(6, 4, device=device)
    tensors = {name: torch.ones(2, 4, device=device) for name in ("q", "k", "v")}
    at = {"q": 0, "k": 2, "v": 4}
    record = watch({"qkv": fused}, tensors, lambda n, t: fused[at[n] : at[n] + 2].copy_(t))
    assert record.written == ["qkv"]
    assert verdict(record, tensors) == []


def test_a_shard_that_never_came_is_counted_in_elements() -> None:
    fused, tensors = meta(6, 4), {"q": meta(2, 4), "v": meta(2, 4)}
    at = {"q": 0, "v": 4}
    record = watch({"qkv": fused}, tensors, lambda n, t: fused[at[n] : at[n] + 2].copy_(t))
    assert verdict(record, tensors) == ["parameter qkv is missing 8 of 24 elements"]


def test_an_element_written_twice_names_both_tensors() -> None:
    fused, tensors = meta(4, 4), {"a": meta(2, 4), "b": meta(3, 4)}
    at = {"a": 0, "b": 1}
    record = watch({"p": fused}, tensors, lambda n, t: fused[at[n] : at[n] + len(t)].copy_(t))
    assert verdict(record, tensors) == ["parameter p was written twice, by a and b"]


def test_columns_are_told_apart_from_rows() -> None:
    fused, tensors = meta(4, 6), {"left": meta(4, 2), "right": meta(4, 4)}
    record = watch(
        {"p": fused},
        tensors,
        lambda n, t: (fused[:, :2] if n == "left" else fused[:, 2:]).copy_(t),
    )
    assert verdict(record, tensors) == []
    record = watch(
        {"p": fused},
        tensors,
        lambda n, t: (fused[:, :2] if n == "left" else fused[:, 1:5]).copy_(t),
    )
    assert "parameter p was written twice, by left and right" in verdict(record, tensors)
    assert "parameter p is missing 4 of 24 elements" in verdict(record, tensors)


def test_a_tensor_that_nothing_reads_and_one_that_is_read_in_part_are_named() -> None:
    p, tensors = meta(2, 4), {"p": meta(3, 4), "extra": meta(5)}
    record = watch({"p": p}, tensors, lambda n, t: p.copy_(t[:2]) if n == "p" else None)
    assert verdict(record, tensors) == ["extra is read by no parameter", "p has 12 elements, the model read 8"]


def test_a_type_that_would_be_converted_is_named_with_both_types() -> None:
    bias, tensors = meta(8), {"gate.bias": meta(8, dtype=torch.bfloat16)}
    record = watch({"router.bias": bias}, tensors, lambda n, t: bias.copy_(t))
    assert verdict(record, tensors) == ["gate.bias is bfloat16, parameter router.bias is float32"]


def test_padding_that_a_loader_fills_itself_counts_as_written() -> None:
    embedding, tensors = meta(64, 4), {"embed": meta(50, 4)}

    def load(_: str, tensor: torch.Tensor) -> None:
        embedding[:50].copy_(tensor)
        embedding[50:].fill_(0)

    assert verdict(watch({"embed": embedding}, tensors, load), tensors) == []


def test_a_loader_that_transforms_its_tensor_or_writes_the_same_again_is_no_fault() -> None:
    p, tensors = meta(4, 2), {"w": meta(2, 4)}

    def load(_: str, tensor: torch.Tensor) -> None:
        p.copy_((tensor * 2).t().contiguous())
        p.copy_((tensor * 2).t().contiguous())

    assert verdict(watch({"p": p}, tensors, load), tensors) == []


def test_experts_of_one_stacked_parameter_must_all_come() -> None:
    stacked = meta(4, 6, 2)
    tensors = {f"e{e}.{part}": meta(3, 2) for e in range(4) for part in ("gate", "up") if (e, part) != (2, "up")}

    def load(name: str, tensor: torch.Tensor) -> None:
        start = 0 if name.endswith("gate") else 3
        stacked[int(name[1])].narrow(0, start, 3).copy_(tensor)

    assert verdict(watch({"w13": stacked}, tensors, load), tensors) == ["parameter w13 is missing 6 of 48 elements"]


def test_ranks_that_each_read_a_part_make_up_the_whole() -> None:
    whole = {"w": meta(4, 4)}
    records = []
    for rank in range(2):
        shard = meta(4, 2)
        piece = slice(2 * rank, 2 * rank + 2)
        records.append(watch({"w": shard}, dict(whole), lambda _, t, s=shard, p=piece: s.copy_(t[:, p])))
    assert problems(combine(records), {"w": 16}) == []
    assert problems(records[0], {"w": 16}) == ["w has 16 elements, the model read 8"]


def test_a_loader_that_fails_is_the_only_thing_reported() -> None:
    watcher = LoadWatcher({"p": meta(2)})
    assert problems(watcher.record("w: ValueError: no such module"), {"w": 2}) == ["w: ValueError: no such module"]
