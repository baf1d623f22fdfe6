"""Requests per second through the router against straight to an engine, and how evenly the router spreads them.

`make bench NAME=router`. The engines are fakes that answer at once, so that nothing but the hop is measured; router,
engines and client are processes of their own on one machine. Both ways are measured in turns within one run, so that a
busy machine slows both. A real engine takes seconds for a request: there the hop is lost in the noise.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import statistics
import time
from importlib.metadata import version
from typing import Any

import grpc
from tests.router_processes import process_fleet

from vime.common.v1.trajectory_pb2 import SamplingParams
from vime.rollout.v1.generation_service_pb2 import GenerateRequest
from vime.rollout.v1.generation_service_pb2_grpc import GenerationServiceStub
from vime_client.channel import ChannelSettings, open_channel

ENGINES, ROUNDS, REQUESTS, CONCURRENCY = 3, 5, 400, 32
PROMPT, TOKENS = 256, 64


def request(number: int) -> GenerateRequest:
    """A request as a worker sends it."""
    return GenerateRequest(
        request_id=f"r{number}",
        prompt_token_ids=range(PROMPT),
        seeds=[number],
        sampling=SamplingParams(max_tokens=TOKENS),
    )


async def requests_per_second(stub: Any, first: int) -> float:
    """`REQUESTS` calls, `CONCURRENCY` at a time."""
    numbers = iter(range(first, first + REQUESTS))

    async def work() -> None:
        for number in numbers:
            await stub.Generate(request(number), timeout=30)

    start = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(CONCURRENCY)))
    return REQUESTS / (time.perf_counter() - start)


async def milliseconds(stub: Any, first: int, count: int = 100) -> float:
    """Median time of one call while nothing else runs."""
    times = []
    for number in range(first, first + count):
        start = time.perf_counter()
        await stub.Generate(request(number), timeout=30)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1000


async def measure() -> dict[str, object]:
    """All figures."""
    async with process_fleet(ENGINES, ("--chunk", str(TOKENS))) as fleet:
        assert fleet.channel is not None
        through: Any = GenerationServiceStub(fleet.channel)
        async with open_channel(fleet.engines["e0"].address, ChannelSettings(max_attempts=1)) as channel:
            direct: Any = GenerationServiceStub(channel)
            await asyncio.gather(requests_per_second(through, 0), requests_per_second(direct, 0))  # warm-up
            before = await fleet.listed()
            pairs = [
                (await requests_per_second(through, n * REQUESTS), await requests_per_second(direct, n * REQUESTS))
                for n in range(1, ROUNDS + 1)
            ]
            after = await fleet.listed()
            alone = (await milliseconds(through, 10**6), await milliseconds(direct, 10**6))
    sent = [after[engine_id].requests - before[engine_id].requests for engine_id in after]
    ours, baseline = (statistics.median(values) for values in zip(*pairs, strict=True))
    return {
        "name": "router",
        "ours": round(ours, 1),
        "baseline": round(baseline, 1),
        "ratio": round(ours / baseline, 3),
        "unit": "requests/s",
        "spread": round((max(sent) - min(sent)) / statistics.mean(sent), 3),
        "requests_per_engine": sent,
        "alone_ms": {"through": round(alone[0], 2), "direct": round(alone[1], 2)},
        "engines": ENGINES,
        "concurrency": CONCURRENCY,
        "cores": os.cpu_count(),
        "versions": {
            "vime-router": version("vime-router"),
            "grpcio": grpc.__version__,
            "python": platform.python_version(),
        },
    }


def run() -> dict[str, object]:
    """Measure."""
    return asyncio.run(measure())


if __name__ == "__main__":
    print(json.dumps(run()))
