"""Half-open connections, black holes, deadlines that are over: calls end in time, and nothing is left behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.faults.black_hole import BlackHole, Mode, black_hole
from tests.in_process import RUN, service
from tests.router_processes import fake_engine

from vime.buffer.v1.prompt_service_pb2 import FAILURE_CLASS_TIMEOUT
from vime.buffer.v1.table_service_pb2 import GetTableRequest, WatchTableRequest
from vime.buffer.v1.table_service_pb2_grpc import TableServiceStub
from vime.common.v1.trajectory_pb2 import SamplingParams, TrajectoryGroup
from vime.rollout.v1.generation_service_pb2 import GenerateRequest, ScoreRequest
from vime_client.buffer import BufferClient
from vime_client.channel import ChannelSettings, open_channel
from vime_client.errors import RpcError, rpc_errors
from vime_client.generation import GenerationClient
from vime_router.config import EngineChannelConfig, RouterSection
from vime_router.wiring import Router
from vime_service import ServerConfig, Service, serving
from vime_trainer.adapters import ledger as ledger_module
from vime_trainer.adapters import patience
from vime_trainer.adapters.ledger import GrpcLedger

SLACK = 8.0
"""How much later than its deadline a call may end on a busy machine: far less than any default deadline."""
SECONDS = 1.0
ONCE = ChannelSettings(max_attempts=1)
IN_TIME = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)


async def ends_in_time(call: Awaitable[Any], seconds: float = SECONDS) -> grpc.StatusCode:
    """Await a call that cannot succeed; how it ended."""
    began = time.monotonic()
    with pytest.raises(RpcError) as caught, rpc_errors():
        await call
    assert time.monotonic() - began < seconds + SLACK
    assert caught.value.code in IN_TIME
    return caught.value.code


async def until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait until something is true."""
    async with asyncio.timeout(seconds):
        while not true():
            await asyncio.sleep(0.01)


async def healthy(running: Service) -> None:
    """The service answers at once, and no call is left in it."""
    await until(lambda: running.in_flight == 0)
    async with open_channel(running.address, ONCE) as channel:
        request = health_pb2.HealthCheckRequest(service="ready")
        answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=2)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    assert running.failure is None


@pytest.fixture
async def buffer(tmp_path: Path) -> AsyncIterator[Service]:
    async with service("buffer", tmp_path) as running:
        yield running


@pytest.fixture
async def hole(buffer: Service) -> AsyncIterator[BlackHole]:
    async with black_hole(buffer.address) as proxy:
        yield proxy


# ------------------------------------------------------------------ a buffer behind a black hole


async def test_a_peer_that_accepts_and_says_nothing_costs_a_call_its_deadline_and_no_more(
    buffer: Service, hole: BlackHole
) -> None:
    hole.mode = Mode.SWALLOW
    async with open_channel(hole.address, ONCE) as channel:
        tables = TableServiceStub(channel)
        assert await ends_in_time(tables.GetTable(GetTableRequest(name="train"), timeout=SECONDS))
        assert hole.accepted
        hole.heal()
        answer = await tables.GetTable(GetTableRequest(name="train"), timeout=10, wait_for_ready=True)
    assert answer.table.config.name == "train"
    await healthy(buffer)


@pytest.mark.parametrize("mode", [Mode.SWALLOW, Mode.SWALLOW_ANSWERS])
async def test_every_call_of_a_worker_ends_in_time_on_a_connection_that_became_half_open(
    buffer: Service, hole: BlackHole, mode: Mode
) -> None:
    async with BufferClient(hole.address, ONCE) as client:
        assert "train" in await client.tables()
        tasks = len(asyncio.all_tasks())
        hole.mode = mode
        calls = [
            asyncio.wait_for(client.draw("w", 1, 60.0), SECONDS),
            client.keep_alive("w", ["l"], SECONDS),
            client.insert("l", TrajectoryGroup(group_id="g"), timeout_s=SECONDS),
            client.fail("l", FAILURE_CLASS_TIMEOUT, timeout_s=SECONDS),
        ]
        began = time.monotonic()
        ends = await asyncio.gather(*calls, return_exceptions=True)
        assert time.monotonic() - began < SECONDS + SLACK
        assert isinstance(ends[0], TimeoutError)
        assert all(isinstance(end, RpcError) and end.code in IN_TIME for end in ends[1:]), ends
        assert hole.swallowed
        await until(lambda: len(asyncio.all_tasks()) <= tasks)
        hole.heal()
        await until_answered(client)
    await healthy(buffer)


async def until_answered(client: BufferClient) -> None:
    """The same channel works again once the way is clear."""
    async with asyncio.timeout(10):
        while True:
            try:
                await client.tables()
                return
            except RpcError:
                await asyncio.sleep(0.05)


async def test_hundreds_of_calls_into_a_black_hole_leave_no_task_behind(buffer: Service, hole: BlackHole) -> None:
    async with open_channel(hole.address, ONCE) as channel:
        tables = TableServiceStub(channel)
        await tables.GetTable(GetTableRequest(name="train"), timeout=5)
        tasks = len(asyncio.all_tasks())
        hole.mode = Mode.SWALLOW_ANSWERS
        for _ in range(3):
            calls = [tables.GetTable(GetTableRequest(name="train"), timeout=0.3) for _ in range(100)]
            began = time.monotonic()
            ends = await asyncio.gather(*calls, return_exceptions=True)
            assert time.monotonic() - began < 0.3 + SLACK
            assert {end.code() for end in ends} <= set(IN_TIME)
        await until(lambda: len(asyncio.all_tasks()) <= tasks)
    await healthy(buffer)


async def test_a_server_gives_a_vanished_caller_up_at_the_deadline_it_named(buffer: Service, hole: BlackHole) -> None:
    async with open_channel(hole.address, ONCE) as channel:
        tables = TableServiceStub(channel)
        watches = [tables.WatchTable(WatchTableRequest(name="train"), timeout=SECONDS) for _ in range(10)]
        for watch in watches:
            await watch.read()
        assert buffer.in_flight == 10
        hole.mode = Mode.SWALLOW  # the server hears of no cancel and of no end
        began = time.monotonic()
        await until(lambda: buffer.in_flight == 0, SECONDS + SLACK)
        assert time.monotonic() - began < SECONDS + SLACK
    await healthy(buffer)


async def test_pings_end_a_long_call_on_a_half_open_connection(buffer: Service, hole: BlackHole) -> None:
    pinging = ChannelSettings(max_attempts=1, keepalive_s=0.5, keepalive_timeout_s=0.5)
    async with open_channel(hole.address, pinging) as channel:
        watch = TableServiceStub(channel).WatchTable(WatchTableRequest(name="train"), timeout=600)
        await watch.read()
        hole.mode = Mode.SWALLOW
        began = time.monotonic()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await watch.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert time.monotonic() - began < 1.0 + SLACK


async def test_a_trainer_gives_up_a_black_hole_after_its_patience_and_goes_on_where_it_was_once_healed(
    buffer: Service, hole: BlackHole, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "OUTAGE_S", 1.0)
    monkeypatch.setattr(ledger_module, "_CALL_S", 0.3)
    async with open_channel(hole.address, ONCE) as channel:
        ledger = GrpcLedger(channel)
        opened = await ledger.open_incarnation(RUN, 0, 0, "r")
        hole.mode = Mode.SWALLOW
        await ends_in_time(ledger.open_incarnation(RUN, 0, opened.incarnation, "r"), 1.3)
        hole.heal()
        monkeypatch.setattr(patience, "OUTAGE_S", 10.0)
        again = await ledger.open_incarnation(RUN, 0, opened.incarnation, "r")
    assert again.incarnation > opened.incarnation
    await healthy(buffer)


async def test_deadlines_that_are_over_before_they_begin_cost_nothing(buffer: Service) -> None:
    async with open_channel(buffer.address, ONCE) as channel:
        tables = TableServiceStub(channel)
        for seconds in (0.0, 0.0005, -1.0):
            calls = [tables.WatchTable(WatchTableRequest(name="train"), timeout=seconds).read() for _ in range(50)]
            ends = await asyncio.gather(*calls, return_exceptions=True)
            codes = {end.code() for end in ends if isinstance(end, grpc.aio.AioRpcError)}
            assert codes == {grpc.StatusCode.DEADLINE_EXCEEDED}
    await healthy(buffer)


# ------------------------------------------------------------------ engines and routers behind a black hole


@asynccontextmanager
async def fleet(*behind: str) -> AsyncIterator[tuple[Service, dict[str, Any], dict[str, BlackHole]]]:
    """A router with two engines; those named are reached through a proxy, while their heartbeats come straight."""
    module = fake_engine()
    section = RouterSection(heartbeat_period_s=0.2, policy="round_robin", engines=EngineChannelConfig(keepalive_s=0.5))
    holes: dict[str, BlackHole] = {}
    engines: dict[str, Any] = {}
    async with AsyncExitStack() as stack:
        config = ServerConfig(grace_seconds=0.1)
        running = await stack.enter_async_context(serving("router", "vime-router", config, Router(section).register))
        channel = await stack.enter_async_context(open_channel(running.address, ONCE))
        for engine_id in ("e0", "e1"):
            engine = engines[engine_id] = module.FakeEngine(engine_id, served=module.version(1))
            await engine.start()
            stack.push_async_callback(engine.kill)
            if engine_id in behind:
                holes[engine_id] = await stack.enter_async_context(black_hole(engine.info.address))
                engine.info.address = holes[engine_id].address
            await stack.enter_async_context(engine.beating(channel))
        yield running, engines, holes


def request(number: int = 0, **fields: Any) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=8)
    return GenerateRequest(request_id=f"r{number}", prompt_token_ids=[1, 2], seeds=[7], sampling=sampling, **fields)


async def test_every_call_of_a_worker_ends_in_time_when_the_router_is_a_black_hole() -> None:
    async with fleet() as (router, _, _), black_hole(router.address) as hole:
        async with GenerationClient(hole.address, ONCE) as client:
            assert await client.render("ab") == [97, 98]
            tasks = len(asyncio.all_tasks())
            hole.mode = Mode.SWALLOW_ANSWERS
            pieces = client.stream(request(), SECONDS)
            await asyncio.gather(
                ends_in_time(client.generate([1], SamplingParams(max_tokens=4), [1], timeout_s=SECONDS)),
                ends_in_time(client.render("ab", SECONDS)),
                ends_in_time(client.score(ScoreRequest(), SECONDS)),
                ends_in_time(anext(pieces)),
            )
            await until(lambda: len(asyncio.all_tasks()) <= tasks)
        await healthy(router)


async def test_an_engine_that_is_a_black_hole_costs_a_request_its_deadline_and_the_router_nothing() -> None:
    async with fleet("e0", "e1") as (router, engines, holes), GenerationClient(router.address, ONCE) as client:
        sampling = SamplingParams(max_tokens=4)
        for number in range(2):
            await client.generate([1], sampling, [number], timeout_s=5)
        tasks = len(asyncio.all_tasks())
        for hole in holes.values():
            hole.mode = Mode.SWALLOW
        calls = [ends_in_time(client.generate([1], sampling, [n], timeout_s=SECONDS)) for n in range(50)]
        await asyncio.gather(*calls)
        await until(lambda: len(asyncio.all_tasks()) <= tasks)
        await healthy(router)
        for hole in holes.values():
            hole.heal()
        async with asyncio.timeout(10):
            while True:
                try:
                    await client.generate([1], sampling, [1], timeout_s=2)
                    break
                except RpcError as error:
                    assert error.code in IN_TIME  # noqa: PT017  the next goes through
        assert engines["e0"].seen.running == engines["e1"].seen.running == 0


async def test_a_request_on_a_black_hole_goes_on_at_another_engine_once_pings_find_it() -> None:
    async with fleet("e0") as (router, engines, holes), GenerationClient(router.address, ONCE) as client:
        sampling = SamplingParams(max_tokens=4)
        for number in range(2):
            await client.generate([1], sampling, [number], timeout_s=5)
        holes["e0"].mode = Mode.SWALLOW
        calls = [client.generate([1], sampling, [n], timeout_s=40) for n in range(4)]
        answers = await asyncio.gather(*calls)
        assert {answer.engine_id for answer in answers} == {"e1"}
        assert holes["e0"].swallowed
        assert engines["e1"].seen.running == 0
        await healthy(router)


async def test_the_deadline_of_the_first_caller_travels_to_the_engine() -> None:
    async with fleet() as (router, engines, _), GenerationClient(router.address, ONCE) as client:
        for seconds in (2.0, 7.0):
            await client.generate([1], SamplingParams(max_tokens=1), [1], timeout_s=seconds)
            seen = [s for engine in engines.values() for s in engine.seen.deadlines]
            assert seconds - 0.5 < max(seen) <= seconds
