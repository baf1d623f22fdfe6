"""What is refused before anything runs, and how the token budget is cut."""

from __future__ import annotations

from typing import Any

import pytest

from vime_rollout.engine import SamplingSettings
from vime_rollout.engines.fake import FakeEngine
from vime_rollout.requests import check_request
from vime_service.errors import BadRoutingTrace, InexactSampling, InvalidArgument, PromptTooLong

from .conftest import request_of

ENGINE = FakeEngine(max_model_len=64).description
DENSE = FakeEngine(layers=0).description


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "resumed", "budget"),
    [(10, 8, 0, 8), (60, 8, 0, 4), (63, 8, 0, 1), (10, 8, 3, 5), (58, 8, 3, 3)],
)
def test_the_budget_is_cut_to_the_room_the_context_has(prompt: int, max_tokens: int, resumed: int, budget: int) -> None:
    request = request_of("r", [1] * prompt, max_tokens=max_tokens, resume_token_ids=[2] * resumed)
    assert check_request(request, ENGINE).max_tokens == budget


@pytest.mark.parametrize(("prompt", "resumed"), [(64, 0), (65, 0), (60, 4)])
def test_a_prompt_that_leaves_no_room_is_refused_with_both_numbers(prompt: int, resumed: int) -> None:
    with pytest.raises(PromptTooLong) as caught:
        check_request(request_of("r", [1] * prompt, resume_token_ids=[2] * resumed), ENGINE)
    assert caught.value.metadata == {"prompt_tokens": str(prompt + resumed), "max_model_len": "64"}


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"top_p": 0.9}, "top_p"),
        ({"top_k": 5}, "top_k"),
        ({"extra": {"min_p": 0.1}}, "min_p"),
        ({"extra": {"repetition_penalty": 1.1}}, "repetition_penalty"),
        ({"extra": {"an_option_of_next_year": 1}}, "an_option_of_next_year"),
    ],
)
def test_settings_whose_logprobs_cannot_be_reproduced_are_refused_unless_allowed(
    sampling: dict[str, Any], field: str
) -> None:
    settings = SamplingSettings(8, **sampling)
    with pytest.raises(InexactSampling) as caught:
        check_request(request_of("r", [1], sampling=settings), ENGINE)
    assert caught.value.metadata["field"] == field
    allowed = request_of("r", [1], sampling=settings, require_exact_logprobs=False)
    assert check_request(allowed, ENGINE) == settings


def test_temperature_and_stops_are_exact() -> None:
    settings = SamplingSettings(8, temperature=0.7, stop=("x",), stop_token_ids=(3,), ignore_eos=True)
    assert check_request(request_of("r", [1], sampling=settings), ENGINE) == settings


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"request_id": ""}, "request_id is empty"),
        ({"prompt": []}, "prompt_token_ids is empty"),
        ({"prompt": [1, 260]}, "prompt_token_ids has id 260, the vocabulary has 260"),
        ({"prompt": [-1]}, "has id -1"),
        ({"resume_token_ids": [999]}, "resume_token_ids has id 999"),
        ({"resume_token_ids": [1], "seeds": [1, 2]}, "go with one seed, not 2"),
        ({"resume_token_ids": [1] * 8}, "8 tokens are resumed, max_tokens is 8"),
        ({"seeds": []}, "0 seeds, 1 to 1024"),
        ({"seeds": [1] * 1025}, "1025 seeds"),
        ({"seeds": [1 << 64]}, "seeds must be 0 to"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_k": -1}, "top_k is -1"),
        ({"stop": ("",)}, "stop has an empty string"),
        ({"stop_token_ids": (300,)}, "stop_token_ids has id 300"),
        ({"extra": {"n": 4}}, "extra_json sets 'n'"),
        ({"extra": {"logprobs": 4}}, "extra_json sets 'logprobs'"),
    ],
)
def test_a_wrong_field_is_refused_by_name_and_number(changed: dict[str, Any], message: str) -> None:
    options: dict[str, Any] = {"request_id": "r", "prompt": [1, 2], "seeds": [1]} | changed
    request = request_of(options.pop("request_id"), options.pop("prompt"), options.pop("seeds"), **options)
    with pytest.raises(InvalidArgument, match=message):
        check_request(request, ENGINE)


def test_routes_of_a_dense_model_are_an_error_and_not_an_absence() -> None:
    with pytest.raises(BadRoutingTrace, match="has 0 MoE layers"):
        check_request(request_of("r", [1], return_routes=True), DENSE)
