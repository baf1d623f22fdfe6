"""A client cannot tell the router from an engine: the whole contract through it, and what happens when engines fail."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from opentelemetry import trace
from opentelemetry.trace import SpanKind
from vime_router_fake_engine import FakeEngine, Script, logprob_of, tokens_of, version

from vime.common.v1.trajectory_pb2 import FinishReason, TokenIds
from vime.rollout.v1 import generation_service_pb2 as pb
from vime_client.errors import RpcError, rpc_errors
from vime_router.breaker import BreakerState
from vime_service.errors import EngineFailed, FenceNotMet, Internal


async def read(call: Any) -> tuple[list[int], list[float], pb.GeneratedSample | None]:
    """All of a stream with one sample: ids, logprobs, end."""
    ids: list[int] = []
    logprobs: list[float] = []
    end = None
    async for piece in call:
        if piece.response_token_ids:
            assert piece.first_token == len(ids)
        ids += piece.response_token_ids
        logprobs += piece.rollout_logprobs
        if piece.HasField("end"):
            end = piece.end
    return ids, logprobs, end


async def test_every_call_of_the_contract_passes_through(harness: Any, ask: Any) -> None:
    await harness.join(FakeEngine("e0", served=version(1)))
    client = harness.client
    whole = await client.Generate(ask(tokens=6, seeds=(3, 4)), timeout=5)
    assert [list(sample.response_token_ids) for sample in whole.samples] == [tokens_of(3, 6), tokens_of(4, 6)]
    assert whole.engine_id == "e0"
    ids, logprobs, end = await read(client.GenerateStream(pb.GenerateStreamRequest(generate=ask(tokens=6)), timeout=5))
    assert ids == tokens_of(1, 6)
    assert logprobs == [logprob_of(token) for token in ids]
    assert end.finish_reason == FinishReason.FINISH_REASON_LENGTH
    score = await client.Score(pb.ScoreRequest(sequences=[TokenIds(ids=[5, 6, 7])]), timeout=5)
    assert list(score.scores[0].logprobs) == [logprob_of(6), logprob_of(7)]
    rendered = await client.Render(pb.RenderRequest(text="ab"), timeout=5)
    decoded = await client.Decode(pb.DecodeRequest(sequences=[TokenIds(ids=rendered.prompt_token_ids)]), timeout=5)
    assert decoded.texts == ["ab"]
    assert (await client.Abort(pb.AbortRequest(request_id="nobody"), timeout=5)).aborted == 0


async def test_a_call_goes_to_another_engine_when_the_first_is_unavailable(harness: Any, ask: Any) -> None:
    bad = FakeEngine("e0", served=version(1), script=Script(fail_at_token=0))
    good = FakeEngine("e1", served=version(1))
    await harness.join(bad, good)
    answer = await harness.client.Generate(ask(), timeout=5)
    assert answer.engine_id == "e1"
    assert bad.seen.requests == good.seen.requests


async def test_a_broken_stream_goes_on_elsewhere_without_a_lost_or_doubled_token(harness: Any, ask: Any) -> None:
    bad = FakeEngine("e0", served=version(4), script=Script(fail_at_token=8))
    good = FakeEngine("e1", served=version(5))
    await harness.join(bad, good)
    call = harness.client.GenerateStream(pb.GenerateStreamRequest(generate=ask(tokens=20)), timeout=5)
    ids, logprobs, end = await read(call)
    assert ids == tokens_of(1, 20)
    assert logprobs == [logprob_of(token) for token in ids]
    assert [(s.first_token, s.weight_version.step) for s in end.version_spans] == [(0, 4), (8, 5)]
    assert good.seen.requests == bad.seen.requests


async def test_tokens_that_the_client_brought_along_stay_in_front_when_its_stream_breaks_again(
    harness: Any, ask: Any
) -> None:
    bad = FakeEngine("e0", served=version(4), script=Script(fail_at_token=8))
    await harness.join(bad, FakeEngine("e1", served=version(5)))
    request = ask(tokens=12, resume_token_ids=tokens_of(1, 3))
    pieces = [p async for p in harness.client.GenerateStream(pb.GenerateStreamRequest(generate=request), timeout=5)]
    assert [token for piece in pieces for token in piece.response_token_ids] == tokens_of(1, 9, start=3)
    assert [(s.first_token, s.weight_version.step) for s in pieces[-1].end.version_spans] == [(3, 4), (7, 5)]


async def test_a_broken_stream_of_several_samples_is_an_error_once_tokens_were_delivered(
    harness: Any, ask: Any
) -> None:
    await harness.join(
        FakeEngine("e0", served=version(1), script=Script(fail_at_token=8)),
        FakeEngine("e1", served=version(1), script=Script(fail_at_token=8)),
    )
    request = pb.GenerateStreamRequest(generate=ask(tokens=20, seeds=(1, 2)))
    with pytest.raises(RpcError) as caught, rpc_errors():
        await read(harness.client.GenerateStream(request, timeout=5))
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_FAILED")
    assert "after a part of the answer was delivered" in caught.value.message


async def test_an_internal_error_of_an_engine_is_passed_on_and_not_repeated(harness: Any, ask: Any) -> None:
    engines = [
        FakeEngine(f"e{i}", served=version(1), script=Script(fail_at_token=0, fault=Internal("broken"))) for i in (0, 1)
    ]
    await harness.join(*engines)
    with pytest.raises(RpcError) as caught, rpc_errors():
        await harness.client.Generate(ask(), timeout=5)
    assert caught.value.code is grpc.StatusCode.INTERNAL
    assert sum(len(engine.seen.requests) for engine in engines) == 1


async def test_three_engines_are_asked_and_then_the_caller_is_told_how_many(make_router: Any, ask: Any) -> None:
    harness = await make_router(max_attempts=3)
    script = Script(fail_at_token=0, fault=EngineFailed("out of order"))
    await harness.join(*(FakeEngine(f"e{i}", served=version(1), script=script) for i in range(5)))
    with pytest.raises(RpcError, match=r"attempt 3 of 3.*out of order") as caught, rpc_errors():
        await harness.client.Generate(ask(), timeout=5)
    assert caught.value.metadata["attempts"] == "3"


async def test_a_killed_engine_hands_its_calls_to_the_others(harness: Any, ask: Any) -> None:
    slow = FakeEngine("e0", served=version(1), script=Script(chunk_seconds=0.05))
    await harness.join(slow)
    calls = [
        asyncio.ensure_future(
            read(harness.client.GenerateStream(pb.GenerateStreamRequest(generate=ask(tokens=40)), timeout=10))
        )
        for _ in range(3)
    ]
    whole = asyncio.ensure_future(harness.client.Generate(ask(tokens=40, seeds=(7,)), timeout=10))
    await asyncio.sleep(0.2)
    await harness.join(FakeEngine("e1", served=version(1)))
    await slow.kill()
    for call in calls:
        ids, _, end = await call
        assert ids == tokens_of(1, 40)
        assert end is not None
    assert (await whole).engine_id == "e1"
    assert len(harness.router.generation.running) == 0


async def test_a_frozen_engine_is_given_up_when_its_heartbeats_stop(make_router: Any, ask: Any) -> None:
    harness = await make_router(suspect_after_periods=2, dead_after_periods=4)
    frozen = FakeEngine("e0", served=version(1), script=Script(silent_seconds=60))
    await frozen.start()
    harness.stack.push_async_callback(frozen.kill)
    await frozen.beat(harness.channel)  # once, and never again
    call = asyncio.ensure_future(harness.client.Generate(ask(), timeout=10))
    await asyncio.sleep(0.15)
    await harness.join(FakeEngine("e1", served=version(1)))
    assert (await call).engine_id == "e1"
    assert frozen.seen.cancelled == 1


async def test_abort_reaches_the_engine_that_runs_the_request(harness: Any, ask: Any) -> None:
    engines = [FakeEngine(f"e{i}", served=version(1), script=Script(chunk_seconds=0.05)) for i in range(2)]
    await harness.join(*engines)
    request = ask(tokens=1000)
    call = asyncio.ensure_future(harness.client.Generate(request, timeout=10))
    await asyncio.sleep(0.2)
    assert (await harness.client.Abort(pb.AbortRequest(request_id=request.request_id), timeout=5)).aborted == 1
    sample = (await call).samples[0]
    assert sample.finish_reason == FinishReason.FINISH_REASON_ABORT
    count = len(sample.response_token_ids)
    assert 0 < count < 1000
    assert list(sample.response_token_ids) == tokens_of(1, count)


async def test_abort_ends_a_request_that_still_waits_for_an_engine(harness: Any, ask: Any) -> None:
    request = ask(seeds=(1, 2))
    call = asyncio.ensure_future(harness.client.Generate(request, timeout=10))
    await asyncio.sleep(0.05)
    assert (await harness.client.Abort(pb.AbortRequest(request_id=request.request_id), timeout=5)).aborted == 2
    response = await call
    assert [s.finish_reason for s in response.samples] == [FinishReason.FINISH_REASON_ABORT] * 2


@pytest.mark.parametrize("brought", [0, 3])
async def test_abort_while_a_broken_stream_waits_keeps_its_spans(harness: Any, ask: Any, brought: int) -> None:
    bad = FakeEngine("e0", served=version(4), script=Script(fail_at_token=8 + brought))
    other = FakeEngine("e1")  # alive, but serves nothing yet: the stream waits for it
    await harness.join(bad, other)
    request = ask(tokens=20, resume_token_ids=tokens_of(1, brought))
    call = harness.client.GenerateStream(pb.GenerateStreamRequest(generate=request), timeout=10)
    pieces: list[pb.GenerateStreamResponse] = []
    async for piece in call:
        pieces.append(piece)
        if sum(len(p.response_token_ids) for p in pieces) == 8:
            break
    while harness.router.forwarder.waiting == 0:
        await asyncio.sleep(0.01)
    assert (await harness.client.Abort(pb.AbortRequest(request_id=request.request_id), timeout=5)).aborted == 1
    pieces += [piece async for piece in call]
    assert pieces[-1].first_token == 8 + brought
    end = pieces[-1].end
    assert end.finish_reason == FinishReason.FINISH_REASON_ABORT
    assert [(s.first_token, s.weight_version.step) for s in end.version_spans] == [(brought, 4)]


async def test_abort_asks_all_engines_at_once(harness: Any, ask: Any) -> None:
    class SlowToAbort(FakeEngine):
        async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
            meeting.append(self.info.engine_id)
            while len(meeting) < 3:  # answers only once everybody was asked
                await asyncio.sleep(0.01)
            return await super().Abort(request, context)

    meeting: list[str] = []
    engines = [SlowToAbort(f"e{i}", served=version(1), script=Script(silent_seconds=60)) for i in range(3)]
    await harness.join(*engines)
    request = ask()
    calls = [asyncio.ensure_future(harness.client.Generate(request, timeout=60)) for _ in range(3)]
    while [engine.seen.running for engine in engines] != [1, 1, 1]:
        await asyncio.sleep(0.01)
    assert (await harness.client.Abort(pb.AbortRequest(request_id=request.request_id), timeout=4)).aborted == 3
    for call in calls:
        assert (await call).samples[0].finish_reason == FinishReason.FINISH_REASON_ABORT


async def test_an_abort_opens_no_link_to_a_life_that_has_ended(harness: Any, ask: Any) -> None:
    await harness.join(FakeEngine("e0", served=version(1)))
    await harness.client.Generate(ask(), timeout=5)
    entry, seat = harness.router.fleet.seat("e0")
    with harness.router.generation.running.ticket("r", 1) as ticket, ticket.at(seat):
        harness.router.links.end(entry.report, "test")  # its call has not noticed yet
        assert (await harness.client.Abort(pb.AbortRequest(request_id="r"), timeout=5)).aborted == 0
    assert harness.router.links.open_to(entry.report) is None


async def test_a_message_of_12_6_MB_passes_through(harness: Any, ask: Any) -> None:
    size = 16384 * 48 * 8 * 2
    assert size == 12_582_912
    await harness.join(FakeEngine("e0", served=version(1), script=Script(routes_bytes=size)))
    response = await harness.client.Generate(ask(return_routes=True), timeout=20)
    assert len(response.samples[0].routed_experts.segments[0].experts.inline) == size
    request = pb.GenerateStreamRequest(generate=ask(return_routes=True))
    _, _, end = await read(harness.client.GenerateStream(request, timeout=20))
    assert len(end.routed_experts.segments[0].experts.inline) == size


async def test_a_message_over_the_cap_is_refused_with_both_numbers_and_the_engine_stays_well(
    make_router: Any, ask: Any
) -> None:
    cap = 1 << 20
    harness = await make_router(engines={"max_message_bytes": cap})
    engine = FakeEngine("e0", served=version(1), script=Script(routes_bytes=2 * cap))
    await harness.join(engine)
    with pytest.raises(RpcError, match=r"larger than max \(2097\d+ vs. 1048576\)") as caught, rpc_errors():
        await harness.client.Generate(ask(return_routes=True), timeout=5)
    assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert len(engine.seen.requests) == 1
    assert (await harness.engines())["e0"].faults == 0


async def test_the_trace_of_the_client_goes_on_to_the_engine(harness: Any, ask: Any, spans: Any) -> None:
    await harness.join(FakeEngine("e0", served=version(1)))
    with trace.get_tracer("test").start_as_current_span("test") as root:
        await harness.client.Generate(ask(), timeout=5)
        await read(harness.client.GenerateStream(pb.GenerateStreamRequest(generate=ask()), timeout=5))
        trace_id = root.get_span_context().trace_id
    await asyncio.sleep(0.05)  # a client span ends in a callback of its call
    mine = [span for span in spans.get_finished_spans() if span.context.trace_id == trace_id]
    by_id = {span.context.span_id: span for span in mine}
    for method in ("Generate", "GenerateStream"):
        chain = [s for s in mine if s.name.endswith(f"/{method}") and s.kind is SpanKind.SERVER]
        engine = next(s for s in chain if by_id[by_id[s.parent.span_id].parent.span_id] in chain)
        hop = by_id[engine.parent.span_id]
        router = by_id[hop.parent.span_id]
        client = by_id[router.parent.span_id]
        assert [s.kind for s in (hop, router, client)] == [SpanKind.CLIENT, SpanKind.SERVER, SpanKind.CLIENT]
        assert by_id[client.parent.span_id].name == "test"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("refused", ["by the client's fault", "by the fence"])
async def test_an_answer_that_refuses_the_request_closes_a_half_open_breaker(
    make_router: Any, ask: Any, stream: bool, refused: str
) -> None:
    script = Script(fail_at_token=0, faults_left=1)
    harness = await make_router(breaker_failures=1, breaker_pause_s=0.05, queue_timeout_s=0.5)
    await harness.join(FakeEngine("e0", served=version(1), script=script))
    (seat,) = harness.router.fleet._seats.values()

    async def call() -> None:
        request = ask()
        if stream:
            await read(harness.client.GenerateStream(pb.GenerateStreamRequest(generate=request), timeout=5))
        else:
            await harness.client.Generate(request, timeout=5)

    with pytest.raises(RpcError), rpc_errors():
        await call()
    assert seat.breaker.state is BreakerState.OPEN
    if refused == "by the client's fault":
        script.reject = True
    else:
        script.fail_at_token, script.faults_left = 0, None
        script.fault = FenceNotMet("version 1 serves, 2 is wanted")
    with pytest.raises(RpcError), rpc_errors():
        await call()
    assert seat.breaker.state is BreakerState.CLOSED
