"""Samples are checked on the way in, with both numbers in the message."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from vime_trainer.engine.errors import RoutingTraceError, SampleError
from vime_trainer.engine.sample import Sample
from vime_trainer.engine.shape import ModelShape

Maker = Callable[..., Sample]


@pytest.mark.parametrize("field", ["rollout_logprobs", "loss_mask", "advantages", "old_logprobs", "reference_logprobs"])
@pytest.mark.parametrize("length", [4, 6])
def test_a_column_of_another_length_than_the_response_is_refused(sample_maker: Maker, field: str, length: int) -> None:
    with pytest.raises(SampleError, match=rf"g0/0: 5 response tokens but {field} has shape \({length},\)"):
        sample_maker(4, 5, **{field: torch.zeros(length)})


@pytest.mark.parametrize("value", [0.5, float("nan"), float("-inf"), float("inf")])
def test_what_is_not_the_logarithm_of_a_probability_is_refused_where_it_is_trained(
    sample_maker: Maker, value: float
) -> None:
    logprobs = torch.full((5,), -1.0)
    logprobs[3] = value
    with pytest.raises(SampleError, match=rf"rollout_logprobs\[3\] = {value}"):
        sample_maker(4, 5, rollout_logprobs=logprobs)
    sample_maker(4, 5, rollout_logprobs=logprobs, loss_mask=torch.tensor([1, 1, 1, 0, 1], dtype=torch.bool))


def test_a_logprob_that_rounding_put_a_hair_above_zero_is_taken(sample_maker: Maker) -> None:
    sample_maker(4, 5, rollout_logprobs=torch.full((5,), 1e-7))


@pytest.mark.parametrize("rows", [5, 7, 9])
def test_a_trace_that_is_not_one_row_per_consumed_token_is_refused(sample_maker: Maker, rows: int) -> None:
    with pytest.raises(RoutingTraceError, match=f"8 consumed tokens but {rows} routing rows"):
        sample_maker(4, 5, routed_experts=torch.zeros(rows, 2, 2, dtype=torch.uint8))


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf")])
def test_a_temperature_without_a_distribution_is_refused(sample_maker: Maker, temperature: float) -> None:
    with pytest.raises(SampleError, match=f"temperature {temperature}"):
        sample_maker(temperature=temperature)


def test_empty_prompts_and_empty_responses_are_refused(sample_maker: Maker) -> None:
    with pytest.raises(SampleError, match="prompt is empty"):
        sample_maker(prompt_token_ids=torch.zeros(0, dtype=torch.int64))
    with pytest.raises(SampleError, match="response is empty"):
        sample_maker(response_token_ids=torch.zeros(0, dtype=torch.int64))


def test_ids_length_and_a_missing_trace_are_checked_against_the_model(sample_maker: Maker, moe_dir: Path) -> None:
    shape = ModelShape.from_hf(moe_dir)
    sample_maker().check_against(shape, needs_trace=True)
    with pytest.raises(SampleError, match=r"48 leave the vocabulary of 48"):
        sample_maker(response_token_ids=torch.tensor([1, 2, 3, 4, 48])).check_against(shape, needs_trace=False)
    with pytest.raises(SampleError, match="65 tokens exceed the model's 64"):
        sample_maker(60, 6).check_against(shape, needs_trace=False)
    with pytest.raises(RoutingTraceError, match="0 of 8 routing rows"):
        sample_maker(routed_experts=None).check_against(shape, needs_trace=True)
