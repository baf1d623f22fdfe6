"""K20: a cancel and a deadline reach the engine, and nothing stays behind."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from vime_router_fake_engine import FakeEngine, Script, version

from vime.rollout.v1 import generation_service_pb2 as pb
from vime_client.errors import RpcError, rpc_errors

SOON = 10.0
"""Seconds: far less than the engines' minutes, far more than a busy machine needs."""
SILENT = Script(silent_seconds=60)
SLOW = Script(chunk=1, chunk_seconds=0.2)


async def until(true: Callable[[], bool], seconds: float) -> float:
    """Wait until `true()`; how long it took."""
    since = time.monotonic()
    while not true():
        assert time.monotonic() - since < seconds, f"did not come true within {seconds} s"
        await asyncio.sleep(0.01)
    return time.monotonic() - since


async def read_all(call: Any) -> int:
    return len([piece async for piece in call])


def start(harness: Any, request: pb.GenerateRequest, streaming: bool, timeout: float = 120.0) -> Any:
    """Begin a call; gives its task."""
    if streaming:
        call = harness.client.GenerateStream(pb.GenerateStreamRequest(generate=request), timeout=timeout)
        return asyncio.ensure_future(read_all(call))
    call = harness.client.Generate(request, timeout=timeout)

    async def whole() -> Any:
        return await call

    return asyncio.ensure_future(whole())


@pytest.mark.parametrize("script", [SILENT, SLOW], ids=["silent", "slow"])
@pytest.mark.parametrize("streaming", [True, False], ids=["stream", "whole"])
async def test_k20_a_cancel_reaches_the_engine(harness: Any, ask: Any, script: Script, streaming: bool) -> None:
    engine = FakeEngine("e0", served=version(1), script=script)
    await harness.join(engine)
    task = start(harness, ask(tokens=1000), streaming)
    await asyncio.sleep(1.0)
    assert engine.seen.running == 1
    task.cancel()
    await until(lambda: engine.seen.cancelled == 1, SOON)
    assert engine.seen.running == 0
    assert (await harness.engines())["e0"].in_flight == 0


@pytest.mark.parametrize("streaming", [True, False], ids=["stream", "whole"])
async def test_k20_a_deadline_ends_the_call_on_the_engine_too(harness: Any, ask: Any, streaming: bool) -> None:
    engine = FakeEngine("e0", served=version(1), script=SILENT)
    await harness.join(engine)
    since = time.monotonic()
    with pytest.raises(RpcError) as caught, rpc_errors():
        await start(harness, ask(), streaming, timeout=2.0)
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert 1.8 < time.monotonic() - since < 12.0
    await until(lambda: engine.seen.cancelled == 1, SOON)
    assert 0 < engine.seen.deadlines[0] <= 2.0
    assert (await harness.engines())["e0"].faults == 0


async def test_two_hundred_cancels_leave_nothing_behind(harness: Any, ask: Any) -> None:
    silent = FakeEngine("e0", served=version(1), script=SILENT)
    slow = FakeEngine("e1", served=version(1), script=SLOW)
    await harness.join(silent, slow)
    for streaming in (True, False):  # connections and their helpers exist before the count
        await cancel_some(harness, ask, 4, streaming)
    await until(lambda: silent.seen.running + slow.seen.running == 0, 1.0)
    baseline, cancelled = len(asyncio.all_tasks()), silent.seen.cancelled + slow.seen.cancelled
    for _ in range(5):
        await cancel_some(harness, ask, 20, streaming=True)
        await cancel_some(harness, ask, 20, streaming=False)
    await until(lambda: silent.seen.running + slow.seen.running == 0, 1.0)
    assert silent.seen.cancelled + slow.seen.cancelled - cancelled == 200
    gc.collect()
    await until(lambda: abs(len(asyncio.all_tasks()) - baseline) <= 2, 1.0)
    assert len(harness.router.generation.running) == 0
    assert harness.router.forwarder.waiting == 0
    engines = await harness.engines()
    assert [engine.in_flight for engine in engines.values()] == [0, 0]
    assert [engine.faults for engine in engines.values()] == [0, 0]


async def cancel_some(harness: Any, ask: Any, count: int, streaming: bool) -> None:
    tasks = [start(harness, ask(tokens=1000), streaming) for _ in range(count)]
    await until(lambda: len(harness.router.generation.running) == count, 5.0)
    await asyncio.sleep(0.05)
    for task in tasks:
        task.cancel()
    await until(lambda: len(harness.router.generation.running) == 0, 1.0)


async def test_a_cancel_while_waiting_for_an_engine_frees_the_place_in_the_queue(harness: Any, ask: Any) -> None:
    task = start(harness, ask(), streaming=False)
    await until(lambda: harness.router.forwarder.waiting == 1, 1.0)
    task.cancel()
    await until(lambda: harness.router.forwarder.waiting == 0, 1.0)
