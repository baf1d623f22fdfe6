"""Traces become router-order indices, or a refusal that names what does not fit."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from vime_trainer.engine.errors import RoutingTraceError
from vime_trainer.engine.replay import align, check_trace, sentinel, tokens_per_expert
from vime_trainer.engine.sample import Sample
from vime_trainer.engine.shape import ModelShape


@pytest.fixture
def shape(moe_dir: Path) -> ModelShape:
    return ModelShape.from_hf(moe_dir)


def trace(rows: int, seed: int = 0) -> torch.Tensor:
    scores = torch.rand(rows, 2, 8, generator=torch.Generator().manual_seed(seed))
    return scores.topk(2, -1).indices.to(torch.uint8)


def test_k09_rows_are_sequence_first_because_the_router_is(shape: ModelShape) -> None:
    a, b = trace(2, 1), trace(5, 2)
    layers = align([a, b], [2, 5], 5, shape)
    assert [tuple(rows.shape) for rows in layers] == [(10, 2), (10, 2)]
    for layer, rows in enumerate(layers):
        assert rows.dtype == torch.int64
        for position in range(5):
            if position < 2:
                assert rows[position * 2].tolist() == a[position, layer].tolist()
            assert rows[position * 2 + 1].tolist() == b[position, layer].tolist()


def test_k09_padding_is_spread_over_all_experts_and_not_counted(shape: ModelShape) -> None:
    rows = sentinel(16, shape)
    assert torch.bincount(rows.flatten(), minlength=8).tolist() == [4] * 8
    assert (rows[:, 0] != rows[:, 1]).all()
    counts = tokens_per_expert([trace(2, 1), trace(5, 2)], shape)
    assert counts.shape == (2, 8)
    assert counts.sum(1).tolist() == [7 * 2, 7 * 2]


def test_a_micro_batch_without_samples_gets_one_row_of_padding(shape: ModelShape) -> None:
    assert [tuple(rows.shape) for rows in align([], [], 1, shape)] == [(1, 2), (1, 2)]


@pytest.mark.parametrize("rows", [4, 6, 0])
def test_more_or_fewer_rows_than_consumed_tokens_are_refused(shape: ModelShape, rows: int) -> None:
    with pytest.raises(RoutingTraceError, match=rf"\({rows}, 2, 2\), expected \(5, 2, 2\)"):
        align([trace(rows)], [5], 5, shape)


def test_layers_and_top_k_must_be_the_models(shape: ModelShape) -> None:
    with pytest.raises(RoutingTraceError, match=r"\(5, 3, 2\), expected \(5, 2, 2\).*\(0, 2\)"):
        check_trace("s", torch.zeros(5, 3, 2, dtype=torch.uint8), 5, shape)
    with pytest.raises(RoutingTraceError, match=r"\(5, 2, 1\), expected"):
        check_trace("s", torch.zeros(5, 2, 1, dtype=torch.uint8), 5, shape)


def test_an_expert_out_of_range_is_named_with_its_place(shape: ModelShape) -> None:
    bad = trace(5)
    bad[3, 1] = torch.tensor([0, 8])
    with pytest.raises(RoutingTraceError, match="expert 8 at row 3, MoE layer 1; the model has 8 experts"):
        check_trace("s", bad, 5, shape)


def test_an_expert_that_repeats_within_the_top_k_is_named_with_its_place(shape: ModelShape) -> None:
    bad = trace(5)
    bad[4, 0] = torch.tensor([6, 6])
    with pytest.raises(RoutingTraceError, match=r"\[6, 6\] at row 4, MoE layer 0 repeat"):
        check_trace("s", bad, 5, shape)


def test_wide_ids_are_read_as_unsigned(shape: ModelShape) -> None:
    many = shape.model_copy(update={"num_experts": 70_000})
    wide = torch.zeros(1, 2, 2, dtype=torch.uint16)
    wide[0, 0, 1] = 65_535
    wide[0, 1, 1] = 1
    assert align([wide], [1], 1, many)[0].tolist() == [[0, 65_535]]
    with pytest.raises(RoutingTraceError, match=r"torch\.int32"):
        check_trace("s", wide.to(torch.int32), 1, many)


def test_a_sample_of_the_trainer_carries_one_row_per_consumed_token(sample_maker: Callable[..., Sample]) -> None:
    sample = sample_maker(4, 3)
    assert sample.routed_experts is not None
    assert sample.routed_experts.shape[0] == 6 == sample.consumed
