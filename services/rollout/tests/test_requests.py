"""What is refused before anything runs, and how the token budget is cut."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from vime_rollout.engine import SamplingSettings
from vime_rollout.engines.fake import FakeEngine
from vime_rollout.requests import check_request
from vime_rollout.sampling_options import OPTIONS
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
        ({"extra": {"logprobs": 4}}, "extra_json sets 'logprobs', allowed are: skip_special_tokens, "),
        ({"extra": {"extra_args": {}}}, "extra_json sets 'extra_args'"),
        ({"extra": {"output_text_buffer_length": 1e12}}, "extra_json sets 'output_text_buffer_length'"),
        ({"extra": {"_all_stop_token_ids": [1]}}, "extra_json sets '_all_stop_token_ids'"),
        ({"extra": {"structured_outputs": {"json_object": True}}}, "extra_json sets 'structured_outputs'"),
        ({"extra": {"spaces_between_special_tokens": "x"}}, "extra_json sets 'spaces_between_special_tokens'"),
        ({"extra": {"include_stop_str_in_output": "yes"}}, "include_stop_str_in_output = 'yes', it must be true or f"),
        ({"extra": {"skip_special_tokens": 5}}, "skip_special_tokens = 5, it must be true or false"),
        ({"extra": {"min_p": True}}, "min_p = True, it must be a number from 0 to 1"),
        ({"extra": {"min_p": "0.1"}}, "min_p = '0.1'"),
        ({"extra": {"presence_penalty": 2.1}}, "presence_penalty = 2.1, it must be a number from -2 to 2"),
        ({"extra": {"frequency_penalty": float("nan")}}, "frequency_penalty = nan"),
        ({"extra": {"repetition_penalty": 0}}, "repetition_penalty = 0, it must be a number above 0, up to 10"),
        ({"extra": {"min_tokens": 9}}, "min_tokens = 9, it must be a whole number from 0 to max_tokens"),
        ({"extra": {"min_tokens": 1.0}}, r"min_tokens = 1\.0"),
        ({"extra": {"logit_bias": {"a": 1}}}, "logit_bias = {'a': 1} has 'a', and the vocabulary 260 ids"),
        ({"extra": {"logit_bias": {"260": 1}}}, "logit_bias = {'260': 1} has 260, and the vocabulary"),
        ({"extra": {"logit_bias": {"1": "x"}}}, "logit_bias = {'1': 'x'}, it must be an object of at most 1024"),
        ({"extra": {"logit_bias": [1]}}, r"logit_bias = \[1\], it must be an object"),
        ({"extra": {"allowed_token_ids": []}}, r"allowed_token_ids = \[\], it must be a list of token ids"),
        ({"extra": {"allowed_token_ids": [-1]}}, "allowed_token_ids = .* has -1"),
        ({"extra": {"bad_words": ["\ud83d"]}}, "bad_words = "),
        ({"extra": {"bad_words": [""]}}, "bad_words = "),
        ({"extra": {"bad_words": ["\n"]}}, "bad_words = .* not blank"),
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


def test_an_option_that_is_allowed_reaches_the_engine_in_its_own_type() -> None:
    extra = {"logit_bias": {"7": -1, "259": 2.5}, "min_p": 0, "min_tokens": 6, "bad_words": ["a b"]}
    request = request_of("r", [1], extra=extra, require_exact_logprobs=False, resume_token_ids=[1, 2])
    read = check_request(request, ENGINE).extra
    assert read == {"logit_bias": {7: -1.0, 259: 2.5}, "min_p": 0.0, "min_tokens": 4, "bad_words": ["a b"]}
    assert {type(key) for key in read["logit_bias"]} == {int}


def test_the_options_of_the_docs_are_those_of_the_code() -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (yes|no) \|$", readme, re.MULTILINE)
    assert rows == [(name, option.says, "yes" if option.exact else "no") for name, option in OPTIONS.items()]
