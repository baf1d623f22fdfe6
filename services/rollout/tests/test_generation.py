"""Samples, pieces, spans, routes, fences and aborts, over the fake engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch

from vime_rollout.engine import EngineEnd, FinishReason, PauseMode
from vime_rollout.engines.fake import EOS, FakeEngine, make_weights
from vime_rollout.generation import PIECE_TOKENS, Piece, cut_routes, spans_of
from vime_rollout.response_text import ResponseText
from vime_rollout.traffic import VersionSpan
from vime_rollout.weights import Fence, FenceKind
from vime_service.errors import (
    AlreadyExists,
    Draining,
    EngineFailed,
    FenceNotMet,
    InvalidArgument,
    PromptTooLong,
    Unavailable,
)

from .conftest import Stack, request_of, version

PROMPT = list(range(20))
A, B = make_weights(0), make_weights(1)


def slow(stack: Stack, seconds: float = 0.002) -> None:
    assert isinstance(stack.engine, FakeEngine)
    stack.engine.step_seconds = seconds


async def until_running(stack: Stack, request_id: str, tokens: int = 5) -> None:
    async with asyncio.timeout(10):
        while stack.engine.progress().get(request_id, 0) < tokens:
            await asyncio.sleep(0.001)


async def test_samples_come_in_the_order_of_their_seeds_and_equal_seeds_are_equal(fake_stack: Stack) -> None:
    await fake_stack.publish(1, A)
    samples = await fake_stack.generate("r", PROMPT, [5, 6, 5, 7])
    assert [sample.sample_index for sample in samples] == [0, 1, 2, 3]
    assert list(samples[0].token_ids) == list(samples[2].token_ids)
    assert list(samples[0].token_ids) != list(samples[1].token_ids)
    assert all(sample.end.spans == (VersionSpan(0, version(1)),) for sample in samples)


async def test_pieces_put_together_are_the_whole_sample(fake_stack: Stack) -> None:
    await fake_stack.publish(1, A)
    options = {"max_tokens": 200, "return_text": True, "return_routes": True}
    whole = await fake_stack.generate("r", PROMPT, [1, 2], **options)
    pieces = [piece async for piece in fake_stack.generation.stream(request_of("s", PROMPT, [1, 2], **options), 10)]
    for sample in whole:
        own = [piece for piece in pieces if piece.sample_index == sample.sample_index]
        assert [piece.first_token for piece in own] == list(
            np.cumsum([0] + [len(piece.token_ids) for piece in own[:-1]])
        )
        assert [t for piece in own for t in piece.token_ids] == list(sample.token_ids)
        assert [t for piece in own for t in piece.logprobs] == list(sample.logprobs)
        assert "".join(piece.text for piece in own) == sample.text
        assert [piece.end is not None for piece in own] == [False] * (len(own) - 1) + [True]
        assert own[-1].end is not None
        assert np.array_equal(own[-1].end.routes[0].experts, sample.end.routes[0].experts)


async def test_a_fast_stream_comes_in_pieces_of_32_and_a_slow_one_every_50_ms(
    fake_stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fake_stack.publish(1, A)
    with monkeypatch.context() as patch:
        patch.setattr("vime_rollout.generation.PIECE_SECONDS", 10.0)
        pieces = [p async for p in fake_stack.generation.stream(request_of("f", PROMPT, max_tokens=100), 10)]
    assert [len(piece.token_ids) for piece in pieces] == [PIECE_TOKENS] * 3 + [4]
    slow(fake_stack, 0.02)
    pieces = [p async for p in fake_stack.generation.stream(request_of("s", PROMPT, max_tokens=12), 10)]
    assert 2 <= len(pieces[0].token_ids) <= 4


async def test_the_text_leaves_out_the_terminating_id_and_is_cut_at_a_stop_string(fake_stack: Stack) -> None:
    await fake_stack.publish(1, A)
    (free,) = await fake_stack.generate("r", PROMPT, [3], max_tokens=60, return_text=True)
    whole = range(len(free.text) - 1)
    at = next(i for i in whole if i >= 5 and "\ufffd" not in free.text[i : i + 2])
    stop = free.text[at : at + 2]
    assert len(stop) == 2  # two characters that are no replacement for broken ones
    (cut,) = await fake_stack.generate("s", PROMPT, [3], max_tokens=60, return_text=True, stop=(stop,))
    assert cut.end.matched_stop == stop
    assert cut.text == free.text[: free.text.index(stop)]
    assert list(cut.token_ids) == list(free.token_ids[: len(cut.token_ids)])
    assert len(cut.token_ids) > 0
    table = A["table.weight"].clone()
    table[:, EOS] += 6
    await fake_stack.publish(2, {**A, "table.weight": table})
    (ended,) = await fake_stack.generate("t", PROMPT, [3], max_tokens=60, return_text=True, ignore_eos=False)
    assert ended.token_ids[-1] == EOS
    assert "<|eos|>" not in ended.text
    assert ended.end.finish_reason is FinishReason.STOP


async def test_text_is_decoded_by_the_tokenizers_own_thread(fake_stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    await fake_stack.publish(1, A)
    threads: set[str] = set()
    decode = fake_stack.engine.tokenizer.decode

    def watched(token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        threads.add(threading.current_thread().name)
        return decode(token_ids, skip_special_tokens)

    monkeypatch.setattr(fake_stack.engine.tokenizer, "decode", watched)
    options = {"max_tokens": 100, "return_text": True, "resume_token_ids": [65, 66]}
    assert [piece async for piece in fake_stack.generation.stream(request_of("r", PROMPT, **options), 10)]
    assert threads == {"tokenizer_0"}


async def test_one_trace_covers_prompt_and_response_but_the_last_token(fake_stack: Stack) -> None:
    await fake_stack.publish(1, A)
    (sample,) = await fake_stack.generate("r", PROMPT, return_routes=True)
    (segment,) = sample.end.routes
    assert (segment.first_token, segment.version, segment.prefilled) == (0, version(1), False)
    assert len(segment.experts) == 20 + 8 - 1
    assert not (await fake_stack.generate("s", PROMPT))[0].end.routes


async def test_a_resumed_sample_continues_after_its_tokens_with_routes_from_the_prefill(fake_stack: Stack) -> None:
    await fake_stack.publish(1, A)
    (whole,) = await fake_stack.generate("r", PROMPT, [1], max_tokens=12, return_routes=True)
    given = list(whole.token_ids[:4])
    options = {"max_tokens": 12, "return_routes": True, "resume_token_ids": given}
    (sample,) = await fake_stack.generate("s", PROMPT, [1], **options)
    assert len(sample.token_ids) == 8
    assert sample.end.spans == (VersionSpan(4, version(1)),)
    prefilled, generated = sample.end.routes
    assert (prefilled.first_token, len(prefilled.experts), prefilled.prefilled) == (0, 24, True)
    assert (generated.first_token, len(generated.experts), generated.prefilled) == (24, 7, False)
    assert np.array_equal(prefilled.experts, whole.end.routes[0].experts[:24])
    pieces: list[Piece] = [p async for p in fake_stack.generation.stream(request_of("t", PROMPT, [1], **options), 10)]
    assert pieces[0].first_token == 4
    assert pieces[0].spans == (VersionSpan(4, version(1)),)


def test_a_piece_names_the_versions_of_its_own_tokens() -> None:
    spans = [VersionSpan(0, version(1)), VersionSpan(40, version(2)), VersionSpan(50, version(3))]
    assert spans_of(spans, 0, 32) == (VersionSpan(0, version(1)),)
    assert spans_of(spans, 32, 64) == (VersionSpan(32, version(1)), *spans[1:])
    assert spans_of(spans, 50, 64) == (VersionSpan(50, version(3)),)
    assert spans_of(spans, 64, 64) == ()


async def test_a_resumed_sample_does_not_draw_the_same_random_numbers_again(fake_stack: Stack) -> None:
    flat = {**A, "table.weight": A["table.weight"] * 0}
    await fake_stack.publish(1, flat)
    (whole,) = await fake_stack.generate("r", PROMPT, [1], max_tokens=20)
    (rest,) = await fake_stack.generate("s", PROMPT, [1], max_tokens=20, resume_token_ids=list(whole.token_ids[:5]))
    assert list(rest.token_ids[:5]) != list(whole.token_ids[:5])


def spelling(text: str) -> dict[str, torch.Tensor]:
    """Weights that write one text, byte by byte, and end: no byte may come twice."""
    ids = [1, *text.encode(), EOS]
    table = torch.zeros_like(A["table.weight"])
    for token, after in pairwise(ids):
        table[token, after] = 100.0
    return {**A, "table.weight": table}


@pytest.mark.parametrize(
    ("stop", "tokens", "text"), [("zzz", 13, "😀b中文c"), ("文c!!", 13, "😀b中文c"), ("b中", 8, "😀")]
)
@pytest.mark.parametrize("cut", range(1, 8))
@pytest.mark.parametrize("aborted", [False, True])
async def test_text_and_stop_strings_are_those_of_the_whole_response_wherever_it_moved_to_another_engine(
    fake_stack: Stack, stop: str, tokens: int, text: str, cut: int, aborted: bool
) -> None:
    await fake_stack.publish(1, spelling("😀b中文c"))
    options = {"max_tokens": 20, "return_text": True, "stop": (stop,), "ignore_eos": False}
    (whole,) = await fake_stack.generate("w", [1], **options)
    assert (len(whole.token_ids), whole.text) == (tokens, text)
    end = EngineEnd(FinishReason.ABORT, None, None, 0) if aborted else None
    given = ResponseText(fake_stack.engine.tokenizer, [], [stop]).grow(whole.token_ids[:cut], end)
    (rest,) = await fake_stack.generate("r", [1], resume_token_ids=list(whole.token_ids[:cut]), **options)
    assert [*whole.token_ids[:cut], *rest.token_ids] == list(whole.token_ids)
    assert given + rest.text == text
    assert rest.end.matched_stop == whole.end.matched_stop


def test_routes_are_cut_where_the_versions_change() -> None:
    rows = np.arange(14, dtype=np.uint8).reshape(14, 1, 1)  # 10 prompt tokens, 5 of response
    spans = [VersionSpan(0, version(1)), VersionSpan(2, version(2)), VersionSpan(4, version(3))]
    cuts = [(s.first_token, s.experts[:, 0, 0].tolist(), s.version) for s in cut_routes(rows, 10, 0, spans)]
    assert cuts == [
        (0, list(range(11)), version(1)),  # the token that version 2 sampled first was consumed by it
        (11, [11, 12], version(2)),
        (13, [13], version(3)),
    ]


@pytest.mark.parametrize("mode", ["pieces", "whole"])
async def test_an_aborted_call_returns_what_it_has(fake_stack: Stack, mode: str) -> None:
    await fake_stack.publish(1, A)
    slow(fake_stack)
    request = request_of("r", PROMPT, [1, 2, 3], max_tokens=400)

    async def run() -> list[FinishReason]:
        if mode == "whole":
            return [sample.end.finish_reason for sample in await fake_stack.generation.generate(request, 10)]
        return [p.end.finish_reason async for p in fake_stack.generation.stream(request, 10) if p.end]

    running = asyncio.create_task(run())
    await until_running(fake_stack, "r/2")
    assert await fake_stack.generation.abort("r") == 3
    assert await asyncio.wait_for(running, 5) == [FinishReason.ABORT] * 3
    assert await fake_stack.generation.abort("r") == 0
    assert not fake_stack.traffic.running


async def test_abort_names_one_request_and_not_its_namesakes(fake_stack: Stack) -> None:
    await fake_stack.publish(1, A)
    slow(fake_stack)
    calls = [asyncio.create_task(fake_stack.generate(i, PROMPT, max_tokens=60)) for i in ("r", "r/0", "rr")]
    await asyncio.gather(*(until_running(fake_stack, f"{i}/0") for i in ("r", "r/0", "rr")))
    assert await fake_stack.generation.abort("r") == 1
    reasons = [(await call)[0].end.finish_reason for call in calls]
    assert reasons == [FinishReason.ABORT, FinishReason.LENGTH, FinishReason.LENGTH]


async def test_a_cancelled_call_leaves_nothing_running(fake_stack: Stack) -> None:
    await fake_stack.publish(1, A)
    slow(fake_stack)
    call = asyncio.create_task(fake_stack.generate("r", PROMPT, [1, 2], max_tokens=400))
    await until_running(fake_stack, "r/1")
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert not fake_stack.engine.progress()
    assert not fake_stack.traffic.running


async def test_a_request_id_that_runs_already_is_refused(fake_stack: Stack) -> None:
    await fake_stack.publish(1, A)
    slow(fake_stack)
    call = asyncio.create_task(fake_stack.generate("r", PROMPT, max_tokens=50))
    await until_running(fake_stack, "r/0", 1)
    with pytest.raises(AlreadyExists, match="'r/0' is running already"):
        await fake_stack.generate("r", PROMPT)
    await call
    await fake_stack.generate("r", PROMPT)


async def test_without_weights_nobody_is_served(fake_stack: Stack) -> None:
    with pytest.raises(Unavailable, match="no weights are published yet"):
        await fake_stack.generate("r", PROMPT)


async def test_a_fence_that_is_not_met_is_refused_at_once(fake_stack: Stack) -> None:
    await fake_stack.publish(3, A)
    for kind, step in ((FenceKind.AT_LEAST, 4), (FenceKind.EXACTLY, 2)):
        with pytest.raises(FenceNotMet, match="weights of version run/1/3 do not pass"):
            await fake_stack.generate("r", PROMPT, fence=Fence(kind, version(step)))
        with pytest.raises(FenceNotMet):
            await fake_stack.generation.score(PROMPT, False, Fence(kind, version(step)), 1)
    await fake_stack.generate("r", PROMPT, fence=Fence(FenceKind.AT_LEAST, version(2)))
    await fake_stack.generate("r", PROMPT, fence=Fence(FenceKind.EXACTLY, version(3)))


async def test_calls_wait_at_a_closed_gate_and_give_up_in_time(fake_stack: Stack) -> None:
    await fake_stack.publish(1, A)
    await fake_stack.traffic.close("somebody")
    with pytest.raises(Unavailable, match="paused by somebody"):
        await fake_stack.generation.generate(request_of("r", PROMPT), 0.05)
    waiting = asyncio.create_task(fake_stack.generate("r", PROMPT))
    await asyncio.sleep(0.02)
    assert not waiting.done()
    await fake_stack.traffic.open("somebody")
    assert len((await waiting)[0].token_ids) == 8


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_waits_behind_a_pause_can_be_aborted(fake_stack: Stack, stream: bool) -> None:
    await fake_stack.publish(1, A)
    await fake_stack.traffic.close("a pause")

    async def run(request_id: str) -> list[EngineEnd]:
        request = request_of(request_id, PROMPT, [1, 2], resume_token_ids=[])
        if not stream:
            return [sample.end for sample in await fake_stack.generation.generate(request, 10)]
        return [piece.end async for piece in fake_stack.generation.stream(request, 10) if piece.end]

    calls = [asyncio.create_task(run(name)) for name in ("r", "other")]
    await asyncio.sleep(0)
    assert await fake_stack.generation.abort("r") == 2
    assert await fake_stack.generation.abort("r") == 0
    assert [end.finish_reason for end in await calls[0]] == [FinishReason.ABORT] * 2
    await fake_stack.traffic.open("a pause")
    assert [end.finish_reason for end in await calls[1]] == [FinishReason.LENGTH] * 2


async def test_a_draining_engine_refuses_new_calls_and_those_that_wait(fake_stack: Stack) -> None:
    await fake_stack.publish(1, A)
    await fake_stack.traffic.close("somebody")
    waiting = asyncio.create_task(fake_stack.generate("r", PROMPT))
    await asyncio.sleep(0.02)
    await fake_stack.traffic.drain()
    with pytest.raises(Draining):
        await waiting
    with pytest.raises(Draining):
        await fake_stack.generate("s", PROMPT)


async def test_a_dead_engine_fails_its_calls_and_says_why(fake_stack: Stack) -> None:
    await fake_stack.publish(1, A)
    slow(fake_stack)
    call = asyncio.create_task(fake_stack.generate("r", PROMPT, [1, 2], max_tokens=400))
    await until_running(fake_stack, "r/1")
    assert isinstance(fake_stack.engine, FakeEngine)
    await fake_stack.engine.die("killed")
    with pytest.raises(EngineFailed, match="killed"):
        await asyncio.wait_for(call, 5)


async def test_a_score_has_one_number_less_than_ids_and_names_its_version(fake_stack: Stack) -> None:
    await fake_stack.publish(1, A)
    score, scored_by = await fake_stack.generation.score(PROMPT, True, Fence(), 1)
    assert score.logprobs.shape == (19,)
    assert score.routes is not None
    assert score.routes.shape == (19, 2, 2)
    assert scored_by == version(1)
    with pytest.raises(InvalidArgument, match="a sequence of 1 id"):
        await fake_stack.generation.score([1], False, Fence(), 1)
    with pytest.raises(PromptTooLong, match="at most 512 can be scored"):
        await fake_stack.generation.score([1] * 513, False, Fence(), 1)


async def test_a_score_that_an_update_interrupts_is_done_again_on_the_new_weights(fake_stack: Stack) -> None:
    await fake_stack.publish(1, A)
    await fake_stack.engine.pause(PauseMode.KEEP)
    scoring = asyncio.create_task(fake_stack.generation.score(PROMPT, False, Fence(), 10))
    await asyncio.sleep(0.02)
    await fake_stack.publish(2, B)
    score, scored_by = await scoring
    assert scored_by == version(2)
    again, _ = await fake_stack.generation.score(PROMPT, False, Fence(), 1)
    assert np.array_equal(score.logprobs, again.logprobs)
