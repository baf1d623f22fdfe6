"""Fixtures of the router's tests: a router over fake engines, and what a client needs to call it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from vime.common.v1.trajectory_pb2 import SamplingParams
from vime.rollout.v1.generation_service_pb2 import GenerateRequest
from vime.rollout.v1.generation_service_pb2_grpc import GenerationServiceStub
from vime.router.v1.router_service_pb2 import ListEnginesRequest, RoutedEngine
from vime.router.v1.router_service_pb2_grpc import RouterServiceStub
from vime_client.channel import ChannelSettings, open_channel
from vime_router.config import RouterSection
from vime_router.wiring import Router
from vime_service import ServerConfig, serving

_FAKE = "vime_router_fake_engine"
if _FAKE not in sys.modules:  # pytest's importlib mode puts no folder on sys.path; the name is unique among all tests
    spec = importlib.util.spec_from_file_location(_FAKE, Path(__file__).with_name("fake_engine.py"))
    assert spec is not None
    assert spec.loader is not None
    sys.modules[_FAKE] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[_FAKE])

PERIOD = 0.1


@dataclass
class Harness:
    """A running router with its engines."""

    router: Router
    address: str
    channel: grpc.aio.Channel
    stack: AsyncExitStack

    @property
    def client(self) -> Any:
        """Stub of GenerationService at the router."""
        return GenerationServiceStub(self.channel)

    @property
    def directory(self) -> Any:
        """Stub of RouterService."""
        return RouterServiceStub(self.channel)

    async def join(self, *engines: Any, address: str = "127.0.0.1:0") -> None:
        """Start engines and their heartbeats."""
        for engine in engines:
            await engine.start(address)
            self.stack.push_async_callback(engine.kill)
            await self.stack.enter_async_context(engine.beating(self.channel))

    async def engines(self) -> dict[str, RoutedEngine]:
        """What ListEngines tells, by engine_id."""
        response = await self.directory.ListEngines(ListEnginesRequest(), timeout=5)
        return {engine.status.info.engine_id: engine for engine in response.engines}


@pytest.fixture
async def make_router() -> AsyncIterator[Callable[..., Any]]:
    """Start a router with these settings; the period is short, so that silence means something soon."""
    async with AsyncExitStack() as stack:

        async def make(**settings: Any) -> Harness:
            router = Router(RouterSection(**{"heartbeat_period_s": PERIOD, "queue_timeout_s": 3.0, **settings}))
            service = await stack.enter_async_context(
                serving("router", "vime-router", ServerConfig(grace_seconds=0.2), router.register)
            )
            channel = open_channel(service.address, ChannelSettings(max_attempts=1))
            await stack.enter_async_context(channel)
            engines = await stack.enter_async_context(AsyncExitStack())
            return Harness(router, service.address, channel, engines)

        yield make


@pytest.fixture
async def harness(make_router: Any) -> Harness:
    """A router with defaults and no engine yet."""
    made: Harness = await make_router()
    return made


@pytest.fixture
def spans() -> InMemorySpanExporter:
    """All spans that end in this process from now on."""
    exporter = InMemorySpanExporter()
    provider = trace.get_tracer_provider()
    if not isinstance(provider, TracerProvider):  # OpenTelemetry lets a process choose its default once
        provider = TracerProvider()
        trace.set_tracer_provider(provider)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return exporter


@pytest.fixture
def ask() -> Callable[..., GenerateRequest]:
    """Make a request of `tokens` tokens for `seeds`."""
    count = 0

    def make(tokens: int = 8, seeds: tuple[int, ...] = (1,), **fields: Any) -> GenerateRequest:
        nonlocal count
        count += 1
        return GenerateRequest(
            **{"request_id": f"r{count}", "prompt_token_ids": [1, 2, 3], **fields},
            seeds=seeds,
            sampling=SamplingParams(max_tokens=tokens),
        )

    return make
