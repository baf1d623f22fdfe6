"""The trainer's RPCs: what is wrong is refused before a rank hears of it."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest

from vime.common.v1.trajectory_pb2 import Sample, TrajectoryGroup
from vime.trainer.v1 import trainer_service_pb2 as pb
from vime_service.errors import InvalidArgument
from vime_trainer.servicers import _LOGPROB_BYTES, _SCORE_FRAME, TrainerServicer


@pytest.mark.parametrize("rate", [math.nan, math.inf, -1e-3, 1e300])
async def test_a_learning_rate_that_would_ruin_the_weights_is_refused(rate: float) -> None:
    nothing: Any = cast(Any, None)  # neither trainer nor ranks are asked
    request = pb.TrainStepRequest(mode_lease_id="m", groups=[TrajectoryGroup()], learning_rate=rate)
    with pytest.raises(
        InvalidArgument, match=rf"learning_rate {rate:g} is not in \[0, 1\]".replace("+", r"\+")
    ) as caught:
        await TrainerServicer(nothing, nothing, nothing, nothing).TrainStep(request, nothing)
    assert caught.value.metadata["field"] == "learning_rate"


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf])
async def test_scoring_at_a_temperature_without_a_distribution_is_refused(temperature: float) -> None:
    nothing: Any = cast(Any, None)
    request = pb.ScoreSamplesRequest(samples=[Sample(response_token_ids=[1])], temperature=temperature)
    with pytest.raises(InvalidArgument, match=r"temperature .* gives no distribution"):
        await TrainerServicer(nothing, nothing, nothing, nothing).ScoreSamples(request, nothing)


async def test_scores_that_no_message_carries_are_refused_before_a_rank_works() -> None:
    nothing: Any = cast(Any, None)
    request = pb.ScoreSamplesRequest(samples=[Sample(response_token_ids=[1] * 1000)] * 3)
    assert request.ByteSize() < 4096  # ids of a byte come back as logprobs of four
    with pytest.raises(InvalidArgument, match=r"12064 bytes \(3 samples of 3000 response tokens\).* at most 12063"):
        await TrainerServicer(nothing, nothing, nothing, 12063).ScoreSamples(request, nothing)


@pytest.mark.parametrize("tokens", [0, 1, 5000])
def test_no_answer_of_scores_is_larger_than_what_is_counted(tokens: int) -> None:
    answer = pb.ScoreSamplesResponse(scores=[pb.SampleLogprobs(logprobs=[-0.5] * tokens)] * 3)
    assert answer.ByteSize() <= 3 * tokens * _LOGPROB_BYTES + 4 * _SCORE_FRAME
