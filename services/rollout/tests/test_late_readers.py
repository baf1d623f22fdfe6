"""What a reader that comes late sees of weight updates that happened meanwhile: the right versions, or a failure."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from vime_rollout.engine import PauseMode
from vime_rollout.engines.fake import make_weights
from vime_rollout.generation import Piece
from vime_rollout.traffic import VersionSpan
from vime_rollout.weights import Fence, FenceKind
from vime_service.errors import EngineFailed, FenceNotMet, LoadFailed

from .conftest import Stack, request_of, version
from .test_generation import PROMPT, slow, until_running
from .test_updates import canary_for

A, B, C = make_weights(0), make_weights(1), make_weights(2)


@pytest.fixture(autouse=True)
def _pieces_of_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that few tokens fill what is kept for a reader, and the sample itself has to wait for him."""
    monkeypatch.setattr("vime_rollout.generation.PIECE_TOKENS", 1)


async def until_stalled(stack: Stack, request_id: str) -> None:
    """Wait until the engine makes no more tokens, for which its reader is not the reason."""
    seen = -1
    while (now := stack.engine.progress()[request_id]) != seen:
        seen = now
        await asyncio.sleep(0.1)


async def test_a_sample_that_ended_before_an_update_keeps_its_version_however_late_it_is_read(
    fake_stack: Stack,
) -> None:
    await fake_stack.publish(1, A)
    options = {"max_tokens": 300, "return_routes": True}
    (whole,) = await fake_stack.generate("whole", PROMPT, **options)
    stream = fake_stack.generation.stream(request_of("r", PROMPT, **options), 10)
    pieces: list[Piece] = [await anext(stream)]
    await until_stalled(fake_stack, "r/0")
    assert fake_stack.engine.progress()["r/0"] == 300
    assert fake_stack.engine.load_snapshot().running == 0
    await fake_stack.publish(2, B)
    await fake_stack.publish(3, C)
    pieces += [piece async for piece in stream]
    assert [token for piece in pieces for token in piece.token_ids] == list(whole.token_ids)
    assert {span.version for piece in pieces for span in piece.spans} == {version(1)}
    end = pieces[-1].end
    assert end is not None
    assert end.spans == (VersionSpan(0, version(1)),)
    (segment,) = end.routes
    assert segment.version == version(1)
    assert np.array_equal(segment.experts, whole.end.routes[0].experts)


async def test_a_sample_that_ran_on_wrong_weights_fails_even_after_a_good_version(fake_stack: Stack) -> None:
    await fake_stack.publish(1, A)
    slow(fake_stack)
    stream = fake_stack.generation.stream(request_of("r", PROMPT, max_tokens=480), 10)
    await anext(stream)
    await until_running(fake_stack, "r/0", 150)  # the reader is behind
    with pytest.raises(LoadFailed, match="of the canary"):
        await fake_stack.publish(2, B, await canary_for(C))
    await fake_stack.publish(3, C, await canary_for(C))
    seen: list[Piece] = []

    async def read() -> None:
        async for piece in stream:
            seen.append(piece)

    with pytest.raises(EngineFailed, match="weights are unknown"):
        await read()
    assert {span.version for piece in seen for span in piece.spans} == {version(1)}
    await fake_stack.generate("s", PROMPT)


async def test_a_score_that_an_update_ended_is_no_fault_of_the_engine(fake_stack: Stack) -> None:
    await fake_stack.publish(1, A)
    slow(fake_stack, 0.2)
    fence = Fence(FenceKind.EXACTLY, version(1))
    scoring = asyncio.create_task(fake_stack.generation.score(PROMPT, False, fence, 10))
    await asyncio.sleep(0.05)
    slow(fake_stack, 0.0)
    await fake_stack.publish(2, B)
    with pytest.raises(FenceNotMet, match="run/1/2 do not pass the fence exactly run/1/1"):
        await scoring


async def test_a_score_that_a_pause_ended_is_done_again(fake_stack: Stack) -> None:
    await fake_stack.publish(1, A)
    slow(fake_stack, 0.2)
    scoring = asyncio.create_task(fake_stack.generation.score(PROMPT, False, Fence(), 10))
    await asyncio.sleep(0.05)
    slow(fake_stack, 0.0)
    await fake_stack.engine.pause(PauseMode.ABORT)
    await fake_stack.engine.resume()
    score, scored_by = await scoring
    assert scored_by == version(1)
    assert score.logprobs.shape == (19,)
