"""K24, K40: whatever comes in, the router answers others in time, runs nothing of it and stays whole."""

from __future__ import annotations

import asyncio
import os
import pickle
import random
import time
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from vime_router_fake_engine import FakeEngine, Script, version

from vime.common.v1.engine_pb2 import EngineInfo, EngineState, EngineStatus
from vime.rollout.v1 import generation_service_pb2
from vime.router.v1 import router_service_pb2

METHODS = [
    f"/{service.full_name}/{method.name}"
    for module, name in ((router_service_pb2, "RouterService"), (generation_service_pb2, "GenerationService"))
    for service in [module.DESCRIPTOR.services_by_name[name]]
    for method in service.methods
]


class Bomb:
    """Leaves a marker when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch {self.marker}",)


async def test_random_bytes_and_pickles_to_every_method_crash_and_run_nothing(
    harness: Any, ask: Any, tmp_path: Path
) -> None:
    await harness.join(FakeEngine("e0", served=version(1)))
    chance, marker = random.Random(0), tmp_path / "marker"
    payloads = [pickle.dumps(Bomb(marker)), *(chance.randbytes(size) for size in (1, 7, 100, 4000))]
    assert len(METHODS) == 10
    for method in METHODS:
        for payload in payloads:
            call = harness.channel.unary_unary(method)(payload, timeout=0.3)
            try:
                await call
            except grpc.aio.AioRpcError as error:
                assert error.code() is not grpc.StatusCode.OK  # noqa: PT017  the few bytes that parse may succeed
    assert not marker.exists()
    assert (await harness.client.Generate(ask(), timeout=5)).engine_id == "e0"


async def test_a_heartbeat_full_of_odd_values_is_an_engine_like_any_other(harness: Any) -> None:
    bomb = pickle.dumps(Bomb(Path("/nonexistent/marker"))).decode("latin-1")
    info = EngineInfo(engine_id=bomb, boot_id="\0", address="127.0.0.1:1", model_id="../../etc", updatable=True)
    status = EngineStatus(info=info, state=EngineState.ENGINE_STATE_EMPTY)
    status.load.kv_cache_usage = float("nan")
    await harness.directory.Heartbeat(router_service_pb2.HeartbeatRequest(status=status), timeout=5)
    status.state = 99  # of a newer engine
    await harness.directory.Heartbeat(router_service_pb2.HeartbeatRequest(status=status), timeout=5)
    assert (await harness.engines())[bomb].status.info.model_id == "../../etc"


async def test_health_answers_at_once_while_calls_run_and_wait(make_router: Any, ask: Any) -> None:
    harness = await make_router(queue_timeout_s=60.0)  # on a busy machine, calls wait for longer than they would here
    await harness.join(FakeEngine("e0", served=version(1), script=Script(silent_seconds=60)))
    calls = [asyncio.ensure_future(harness.client.Generate(ask(), timeout=60)) for _ in range(50)]
    calls += [asyncio.ensure_future(harness.client.Generate(ask(model_id="none"), timeout=60)) for _ in range(50)]
    health = health_pb2_grpc.HealthStub(harness.channel)
    async with asyncio.timeout(30):
        while harness.router.forwarder.waiting < 50:
            await asyncio.sleep(0.01)
    times = []
    for _ in range(20):
        since = time.monotonic()
        await health.Check(health_pb2.HealthCheckRequest(service="ready"), timeout=5)
        times.append(time.monotonic() - since)
        await asyncio.sleep(0.01)
    assert sorted(times)[len(times) // 2] < 1.0  # the waiting calls take a minute
    assert harness.router.forwarder.waiting == 50
    for call in calls:
        call.cancel()
