"""K07, K21, K22: who gets traffic while engines die, return, fall behind, refuse and fail."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from vime_router_fake_engine import FakeEngine, Script, version

from vime.common.v1.engine_pb2 import EngineState
from vime.common.v1.weight_version_pb2 import Fence
from vime.rollout.v1 import generation_service_pb2 as pb
from vime.router.v1 import router_service_pb2 as router_pb
from vime_client.errors import RpcError, rpc_errors
from vime_service.errors import EngineFailed

ALIVE = router_pb.EngineHealth.ENGINE_HEALTH_ALIVE
BROKEN = router_pb.EngineHealth.ENGINE_HEALTH_BROKEN
DEAD = router_pb.EngineHealth.ENGINE_HEALTH_DEAD
PERIOD = 0.1


async def until(true: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait until `true()`."""
    since = time.monotonic()
    while not true():
        assert time.monotonic() - since < seconds, f"did not come true within {seconds} s"
        await asyncio.sleep(0.01)


async def answers(harness: Any, ask: Any, count: int, **fields: Any) -> Counter[str]:
    """Ask `count` times, one after the other; who answered how often."""
    found: Counter[str] = Counter()
    for _ in range(count):
        found[(await harness.client.Generate(ask(**fields), timeout=5)).engine_id] += 1
    return found


# ------------------------------------------------------------------ K07


async def test_k07_a_restarted_engine_gets_nothing_before_it_serves_a_published_version(harness: Any, ask: Any) -> None:
    engines = [FakeEngine(f"e{i}", served=version(5)) for i in range(2)]
    await harness.join(*engines)
    seen: list[int] = []
    stop = asyncio.Event()

    async def load() -> None:
        while not stop.is_set():
            response = await harness.client.Generate(ask(), timeout=5)
            seen.append(response.samples[0].version_spans[0].weight_version.step)

    workers = [asyncio.create_task(load()) for _ in range(4)]
    await asyncio.sleep(0.2)
    await engines[0].kill()
    reborn = FakeEngine("e0")  # its weights are those it was started from: no published version
    await harness.join(reborn, address=engines[0].info.address)
    await asyncio.sleep(10 * PERIOD)  # the weight push is late
    status = (await harness.engines())["e0"].status
    assert status.info.boot_id == reborn.info.boot_id
    assert status.state == EngineState.ENGINE_STATE_EMPTY
    assert reborn.seen.answered == 0  # one may have come before its first heartbeat, to the address it took over
    reborn.serve_version(version(5))
    await asyncio.sleep(2 * PERIOD)
    assert reborn.seen.answered > 0
    stop.set()
    await asyncio.gather(*workers)
    assert set(seen) == {5}


@pytest.mark.parametrize("state", ["EMPTY", "DIRTY", "DRAINING", "PAUSED", "UNSPECIFIED"])
async def test_only_engines_that_serve_get_calls_that_need_weights(harness: Any, ask: Any, state: str) -> None:
    other = FakeEngine("e0", served=version(1))
    other.state = EngineState.Value(f"ENGINE_STATE_{state}")
    await harness.join(other, FakeEngine("e1", served=version(1)))
    assert await answers(harness, ask, 4) == {"e1": 4}


async def test_an_engine_that_stages_the_next_weights_goes_on_serving_the_old(make_router: Any, ask: Any) -> None:
    harness = await make_router(queue_timeout_s=0.3)
    engine = FakeEngine("e0")
    engine.state = EngineState.ENGINE_STATE_STAGING
    await harness.join(engine)
    with pytest.raises(RpcError, match="1 known, 0 serving"), rpc_errors():
        await harness.client.Generate(ask(), timeout=5)
    engine.served = version(1)
    await engine.beat(harness.channel)
    engine.state = EngineState.ENGINE_STATE_SERVING  # what the fake itself goes by
    assert await answers(harness, ask, 2) == {"e0": 2}


async def test_weights_that_no_run_published_pass_no_fence_but_any(make_router: Any, ask: Any) -> None:
    harness = await make_router(queue_timeout_s=0.3)
    engine = FakeEngine("e0", served=version(1))
    await harness.join(engine)
    engine.served = None  # an engine told to serve what it was started with
    await engine.beat(harness.channel)
    with pytest.raises(RpcError) as caught, rpc_errors():
        await harness.client.Generate(ask(fence=Fence(at_least=version(0))), timeout=5)
    assert caught.value.reason == "FENCE_NOT_MET"
    assert engine.seen.requests == []
    assert await answers(harness, ask, 1) == {"e0": 1}


async def test_the_tokenizer_answers_before_any_weights_are_published(harness: Any) -> None:
    await harness.join(FakeEngine("e0"))
    response = await harness.client.Render(pb.RenderRequest(text="a"), timeout=5)
    assert list(response.prompt_token_ids) == [ord("a")]


# ------------------------------------------------------------------ waiting for a fence


async def test_a_call_waits_until_an_engine_passes_its_fence(harness: Any, ask: Any) -> None:
    engine = FakeEngine("e0", served=version(1))
    await harness.join(engine)
    call = asyncio.ensure_future(harness.client.Generate(ask(fence=Fence(at_least=version(2))), timeout=5))
    await asyncio.sleep(0.2)
    assert engine.seen.requests == []
    engine.serve_version(version(2))
    response = await call
    assert response.samples[0].version_spans[0].weight_version.step == 2


async def test_a_weight_update_of_all_engines_is_no_error_for_anybody(harness: Any, ask: Any) -> None:
    engines = [FakeEngine(f"e{i}", served=version(1)) for i in range(3)]
    await harness.join(*engines)
    stop = asyncio.Event()

    async def load() -> int:
        done = 0
        while not stop.is_set():
            await harness.client.Generate(ask(), timeout=5)
            done += 1
        return done

    workers = [asyncio.create_task(load()) for _ in range(8)]
    for step in range(2, 8):
        for engine in engines:  # all at once; the router hears of it a heartbeat later
            engine.state = EngineState.ENGINE_STATE_PAUSED
        await asyncio.sleep(0.1)
        for engine in engines:
            engine.serve_version(version(step))
        await asyncio.sleep(0.1)
    stop.set()
    assert min(await asyncio.gather(*workers)) > 0
    assert [engine.faults for engine in (await harness.engines()).values()] == [0, 0, 0]


async def test_an_engine_that_is_ahead_of_its_heartbeat_refuses_and_the_call_waits(harness: Any, ask: Any) -> None:
    engine = FakeEngine("e0", served=version(1))
    await harness.join(engine)
    engine.served = version(2)  # committed just now; the router still believes in 1
    call = asyncio.ensure_future(harness.client.Generate(ask(fence=Fence(exactly=version(1))), timeout=5))
    await asyncio.sleep(0.3)
    engine.served = version(1)
    assert (await call).engine_id == "e0"
    assert (await harness.engines())["e0"].faults == 0
    assert len(engine.seen.requests) <= 8  # once per heartbeat, not in a loop


async def test_a_fence_that_nobody_passes_in_time_is_told_with_what_is_served(make_router: Any, ask: Any) -> None:
    harness = await make_router(queue_timeout_s=0.3)
    await harness.join(FakeEngine("e0", served=version(3)), FakeEngine("e1", served=version(4)))
    with pytest.raises(RpcError) as caught, rpc_errors():
        await harness.client.Generate(ask(fence=Fence(at_least=version(9))), timeout=5)
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "FENCE_NOT_MET")
    assert "none of 2 engines of the updatable model passes the fence at_least run/1/9" in caught.value.message
    assert caught.value.metadata["serving"] == "run/1/3, run/1/4"


async def test_the_callers_deadline_bounds_the_wait_and_still_brings_the_reason(harness: Any, ask: Any) -> None:
    with pytest.raises(RpcError) as caught, rpc_errors():
        await harness.client.Score(pb.ScoreRequest(), timeout=1.5)
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_ENGINE")


async def test_k25_a_full_queue_says_its_bound(make_router: Any, ask: Any) -> None:
    harness = await make_router(max_waiting=2)
    waiting = [asyncio.ensure_future(harness.client.Generate(ask(), timeout=5)) for _ in range(2)]
    await asyncio.sleep(0.1)
    with pytest.raises(RpcError) as caught, rpc_errors():
        await harness.client.Generate(ask(), timeout=5)
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "FULL")
    assert caught.value.metadata["limit"] == "2"
    await harness.join(FakeEngine("e0", served=version(1)))
    assert [(await call).engine_id for call in waiting] == ["e0", "e0"]


async def test_calls_go_to_the_engines_of_the_model_they_name(harness: Any, ask: Any) -> None:
    await harness.join(
        FakeEngine("policy", served=version(1)),
        FakeEngine("teacher", served=version(0), model_id="big", updatable=False),
    )
    assert await answers(harness, ask, 3) == {"policy": 3}
    assert await answers(harness, ask, 3, model_id="big") == {"teacher": 3}


# ------------------------------------------------------------------ K21


async def test_k21_a_dead_engine_costs_at_most_three_calls_a_retry_and_comes_back_within_a_period(
    harness: Any, ask: Any
) -> None:
    engines = [FakeEngine(f"e{i}", served=version(1)) for i in range(3)]
    await harness.join(*engines)
    assert await answers(harness, ask, 6) == {"e0": 2, "e1": 2, "e2": 2}
    await engines[0].kill()
    assert set(await answers(harness, ask, 20)) == {"e1", "e2"}
    dead = (await harness.engines())["e0"]
    assert dead.faults <= 3
    assert dead.health != ALIVE
    reborn = FakeEngine("e0", served=version(1))
    await harness.join(reborn, address=engines[0].info.address)
    await asyncio.sleep(PERIOD)
    assert await answers(harness, ask, 9) == {"e0": 3, "e1": 3, "e2": 3}


async def test_an_engine_that_is_slow_to_take_a_connection_has_not_failed(harness: Any, ask: Any) -> None:
    engine = FakeEngine("e0", served=version(1))
    await engine.start()
    harness.stack.push_async_callback(engine.kill)
    host, port = engine.info.address.split(":")

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
        writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.5)  # a busy process: the kernel accepts, nobody speaks HTTP/2 yet
        upstream_reader, upstream_writer = await asyncio.open_connection(host, int(port))
        await asyncio.gather(pipe(reader, upstream_writer), pipe(upstream_reader, writer))

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as front:
        engine.info.address = f"127.0.0.1:{front.sockets[0].getsockname()[1]}"
        async with engine.beating(harness.channel):
            assert await answers(harness, ask, 1) == {"e0": 1}
            assert (await harness.engines())["e0"].faults == 0
            harness.router.links.end(harness.router.fleet.seat("e0")[0].report, "test")
            await asyncio.sleep(0.1)


async def test_k21_with_one_engine_loaded_new_calls_go_to_the_others_until_counts_level(harness: Any, ask: Any) -> None:
    engines = [FakeEngine(f"e{i}", served=version(1), script=Script(silent_seconds=60)) for i in range(3)]
    await harness.join(engines[0])
    calls = [asyncio.ensure_future(harness.client.Generate(ask(), timeout=60)) for _ in range(10)]
    await asyncio.sleep(0.1)
    await harness.join(*engines[1:])
    for expected in ((10, 5, 5), (10, 10, 10), (11, 11, 11)):
        more = sum(expected) - sum(engine.seen.running for engine in engines)
        calls += [asyncio.ensure_future(harness.client.Generate(ask(), timeout=60)) for _ in range(more)]
        await until(lambda expected=expected: sum(engine.seen.running for engine in engines) == sum(expected))
        assert tuple(engine.seen.running for engine in engines) == expected
    for call in calls:
        call.cancel()


async def test_k21_an_engine_that_tells_no_load_is_named_and_balanced_by_own_counts(
    harness: Any, ask: Any, caplog: pytest.LogCaptureFixture
) -> None:
    from vime_router.metrics import observe_router
    from vime_service.telemetry import Metrics

    engines = [FakeEngine(f"e{i}", served=version(1), script=Script(silent_seconds=60)) for i in range(2)]
    engines[0].tells_load = False
    await harness.join(*engines)
    metrics = Metrics("router")
    observe_router(metrics, harness.router.fleet, harness.router.forwarder)
    calls = [asyncio.ensure_future(harness.client.Generate(ask(), timeout=60)) for _ in range(10)]
    await asyncio.sleep(3 * PERIOD)
    assert [engine.seen.running for engine in engines] == [5, 5]
    told = [record for record in caplog.records if "tells no load" in record.getMessage()]
    assert [record.fields["engine_id"] for record in told] == ["e0"]
    snapshot = metrics.snapshot()
    assert snapshot["vime.router.load_unknown{engine_id=e0}"] == 1
    assert snapshot["vime.router.load_unknown{engine_id=e1}"] == 0
    assert snapshot["vime.router.in_flight{engine_id=e0}"] == 5
    for call in calls:
        call.cancel()


async def test_load_that_others_put_on_an_engine_counts(harness: Any, ask: Any) -> None:
    busy, idle = FakeEngine("e0", served=version(1)), FakeEngine("e1", served=version(1))
    busy.foreign_load = 50
    await harness.join(busy, idle)
    assert await answers(harness, ask, 10) == {"e1": 10}


async def test_sessions_follow_their_engine_and_are_counted(harness: Any, ask: Any) -> None:
    await harness.join(*(FakeEngine(f"e{i}", served=version(1)) for i in range(3)))
    for session in ("a", "b", "c"):
        assert len(await answers(harness, ask, 5, session_id=session)) == 1
    assert sum(engine.sticky_hits for engine in (await harness.engines()).values()) == 12


# ------------------------------------------------------------------ K22


async def test_k22_bad_requests_and_cancels_leave_the_breaker_closed_and_unavailable_opens_it(
    harness: Any, ask: Any
) -> None:
    engine = FakeEngine("e0", served=version(1))
    await harness.join(engine)
    engine.script.reject = True
    for _ in range(20):
        with pytest.raises(RpcError) as caught, rpc_errors():
            await harness.client.Generate(ask(), timeout=5)
        assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert len(engine.seen.requests) == 20
    engine.script.reject, engine.script.silent_seconds = False, 60
    calls = [harness.client.Generate(ask(), timeout=60) for _ in range(20)]
    await asyncio.sleep(0.2)
    for call in calls:
        call.cancel()
    engine.script.silent_seconds = 0
    assert await answers(harness, ask, 5) == {"e0": 5}
    state = (await harness.engines())["e0"]
    assert (state.health, state.faults) == (ALIVE, 0)
    engine.script.fail_at_token, engine.script.fault = 0, EngineFailed("down")
    reasons = []
    for _ in range(5):
        with pytest.raises(RpcError) as caught, rpc_errors():
            await harness.client.Generate(ask(), timeout=0.5)
        reasons.append(caught.value.reason)
    state = (await harness.engines())["e0"]
    assert (state.health, state.faults) == (BROKEN, 3)
    assert reasons[:3] == ["ENGINE_FAILED"] * 3


async def test_k22_a_bad_request_is_not_tried_on_other_engines(harness: Any, ask: Any) -> None:
    engines = [FakeEngine(f"e{i}", served=version(1), script=Script(reject=True)) for i in range(3)]
    await harness.join(*engines)
    with pytest.raises(RpcError), rpc_errors():
        await harness.client.Generate(ask(), timeout=5)
    assert sum(len(engine.seen.requests) for engine in engines) == 1


async def test_an_open_breaker_lets_one_call_try_after_the_pause(make_router: Any, ask: Any) -> None:
    harness = await make_router(breaker_failures=1, breaker_pause_s=0.4)
    engine = FakeEngine("e0", served=version(1), script=Script(fail_at_token=0, faults_left=1))
    await harness.join(engine)
    with pytest.raises(RpcError), rpc_errors():
        await harness.client.Generate(ask(), timeout=5)
    assert (await harness.engines())["e0"].health == BROKEN
    assert await answers(harness, ask, 3) == {"e0": 3}  # the first waits out the pause
    assert (await harness.engines())["e0"].health == ALIVE


async def test_a_probe_that_takes_long_does_not_keep_the_engine_closed(make_router: Any, ask: Any) -> None:
    harness = await make_router(breaker_failures=1, breaker_pause_s=0.4, queue_timeout_s=30.0)
    engine = FakeEngine("e0", served=version(1), script=Script(fail_at_token=0, faults_left=1))
    await harness.join(engine)
    with pytest.raises(RpcError), rpc_errors():
        await harness.client.Generate(ask(), timeout=5)
    engine.script.silent_seconds = 60
    probe = asyncio.ensure_future(harness.client.Generate(ask(), timeout=60))
    await until(lambda: engine.seen.running == 1)
    engine.script.silent_seconds = 2.0
    calls = [asyncio.ensure_future(harness.client.Generate(ask(), timeout=30)) for _ in range(8)]
    await until(lambda: engine.seen.running == 3)  # one more in each pause
    assert (await harness.engines())["e0"].health == BROKEN
    assert [call.done() for call in calls] == [False] * 8
    assert {(await call).engine_id for call in calls} == {"e0"}  # the first answer opened the way
    assert (await harness.engines())["e0"].health == ALIVE
    assert not probe.done()
    probe.cancel()


async def test_an_engine_that_swallows_all_calls_gets_one_in_each_pause(make_router: Any, ask: Any) -> None:
    harness = await make_router(breaker_failures=1, breaker_pause_s=0.4, queue_timeout_s=30.0)
    engine = FakeEngine("e0", served=version(1), script=Script(fail_at_token=0, faults_left=1))
    await harness.join(engine)
    with pytest.raises(RpcError), rpc_errors():
        await harness.client.Generate(ask(), timeout=5)
    engine.script.silent_seconds = 60
    began = time.monotonic()
    calls = [asyncio.ensure_future(harness.client.Generate(ask(), timeout=60)) for _ in range(20)]
    await until(lambda: engine.seen.running == 3)
    await asyncio.sleep(0.1)
    assert engine.seen.running <= (time.monotonic() - began) / 0.4 + 1
    for call in calls:
        call.cancel()


async def test_the_first_piece_of_a_stream_is_enough_for_a_probe(make_router: Any, ask: Any) -> None:
    harness = await make_router(breaker_failures=1, breaker_pause_s=2.0, queue_timeout_s=30.0)
    engine = FakeEngine("e0", served=version(1), script=Script(fail_at_token=0, faults_left=1))
    await harness.join(engine)
    with pytest.raises(RpcError), rpc_errors():
        await harness.client.Generate(ask(), timeout=5)
    engine.script.chunk_seconds = 0.1
    stream = harness.client.GenerateStream(pb.GenerateStreamRequest(generate=ask(tokens=1000)), timeout=60)
    await anext(aiter(stream))
    assert (await harness.engines())["e0"].health == ALIVE
    stream.cancel()


async def test_a_drained_engine_finishes_what_it_has_and_gets_nothing_new(harness: Any, ask: Any) -> None:
    engine = FakeEngine("e0", served=version(1), script=Script(silent_seconds=0.3))
    await harness.join(engine)
    call = asyncio.ensure_future(harness.client.Generate(ask(), timeout=5))
    await asyncio.sleep(0.1)
    await harness.join(FakeEngine("e1", served=version(1)))
    drained = await harness.directory.DrainEngine(router_pb.DrainEngineRequest(engine_id="e0", drain=True), timeout=5)
    assert drained.engine.draining
    assert drained.engine.in_flight == 1
    assert await answers(harness, ask, 4) == {"e1": 4}
    assert (await call).engine_id == "e0"
    await harness.directory.DrainEngine(router_pb.DrainEngineRequest(engine_id="e0", drain=False), timeout=5)
    assert set(await answers(harness, ask, 4)) == {"e0", "e1"}
    with pytest.raises(RpcError, match="no engine 'nobody' is known"), rpc_errors():
        await harness.directory.DrainEngine(router_pb.DrainEngineRequest(engine_id="nobody"), timeout=5)
