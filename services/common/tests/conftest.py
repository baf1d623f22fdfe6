"""Fixtures of the chassis's tests: a running echo service, and a channel to it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from vime_client.channel import ChannelSettings, open_channel
from vime_service import ServerConfig, serving

ECHO_PROGRAM = Path(__file__).with_name("echo_service.py")


def _load_echo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("vime_service_tests_echo", ECHO_PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def echo() -> ModuleType:
    return _load_echo()


@pytest.fixture
def echo_program() -> Path:
    return ECHO_PROGRAM


@pytest.fixture
async def service(echo: Any) -> AsyncIterator[Any]:
    async with serving("echo", "vime-service", ServerConfig(grace_seconds=0.3), echo.register) as running:
        yield running


@pytest.fixture
async def channel(service: Any) -> AsyncIterator[Any]:
    async with open_channel(service.address, ChannelSettings(max_attempts=1)) as opened:
        yield opened


@pytest.fixture(scope="session")
def _span_exporter() -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    provider = trace.get_tracer_provider()
    if not isinstance(provider, TracerProvider):  # OpenTelemetry lets a process choose its default once
        provider = TracerProvider()
        trace.set_tracer_provider(provider)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return exporter


@pytest.fixture
def spans(_span_exporter: InMemorySpanExporter) -> InMemorySpanExporter:
    _span_exporter.clear()
    return _span_exporter
