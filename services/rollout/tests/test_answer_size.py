"""An answer that could not pass the message cap is refused before anything is generated."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from vime_rollout import convert
from vime_rollout.answer_size import check_generation_fits, check_scores_fit, route_bytes
from vime_rollout.engine import FinishReason
from vime_rollout.engines.fake import FakeEngine
from vime_rollout.generation import GeneratedSample, RoutingSegment, SampleEnd
from vime_rollout.traffic import VersionSpan
from vime_service.errors import InvalidArgument

from .conftest import request_of, version

LARGE = replace(
    FakeEngine().description,
    moe_layer_ids=tuple(range(58)),
    num_experts=512,
    experts_per_token=8,
    max_model_len=32768,
)
LIMIT = 64 << 20
PROMPT = [1] * 1000


def test_a_request_whose_largest_answer_cannot_pass_is_refused_with_both_numbers() -> None:
    assert route_bytes(LARGE) == 58 * 8 * 2
    request = request_of("r", PROMPT, [1, 2, 3], max_tokens=30000, return_routes=True)
    with pytest.raises(InvalidArgument) as caught:
        check_generation_fits(request, LARGE, LIMIT, stream=False)
    assert caught.value.metadata["limit"] == str(LIMIT)
    needed = int(caught.value.metadata["needed"])
    assert 3 * 31000 * 928 < needed < 3 * 31000 * 928 * 1.02
    assert str(needed) in str(caught.value)
    assert "928 bytes of routes a token" in str(caught.value)
    check_generation_fits(request, LARGE, LIMIT, stream=True)  # one sample a message
    check_generation_fits(request_of("r", PROMPT, [1, 2, 3], max_tokens=30000), LARGE, LIMIT, stream=False)
    check_generation_fits(
        request_of("r", PROMPT, [1, 2], max_tokens=30000, return_routes=True), LARGE, LIMIT, stream=False
    )


def test_a_budget_beyond_the_context_counts_as_far_as_the_context_goes() -> None:
    request = request_of("r", PROMPT, [1, 2], max_tokens=10**9, return_routes=True)
    check_generation_fits(request, LARGE, LIMIT, stream=False)


def test_scores_count_together() -> None:
    check_scores_fit([30000] * 2, True, LARGE, LIMIT)
    check_scores_fit([30000] * 100, False, LARGE, LIMIT)
    with pytest.raises(InvalidArgument, match="3 sequences of 90000 tokens"):
        check_scores_fit([30000] * 3, True, LARGE, LIMIT)


@pytest.mark.parametrize("tokens", [1, 100, 5000])
def test_no_message_is_larger_than_what_was_counted(tokens: int) -> None:
    rows = np.full((len(PROMPT) + tokens - 1, 58, 8), 511, dtype=np.uint16)
    segment = RoutingSegment(0, rows, version(1), False)
    end = SampleEnd(FinishReason.LENGTH, "", (VersionSpan(0, version(1)),), (segment,), 0, 1.5)
    sample = GeneratedSample(0, [2**32 - 1] * tokens, [-0.5] * tokens, "", end)
    size = convert.sample_out(sample, LARGE).ByteSize()
    request = request_of("r", PROMPT, [1], max_tokens=tokens, return_routes=True)
    with pytest.raises(InvalidArgument) as caught:
        check_generation_fits(request, LARGE, 1, stream=False)
    assert size <= int(caught.value.metadata["needed"]) <= size * 1.03 + 2048
