"""A router and fake engines as processes of their own, for programs that kill and measure them."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc

from vime.router.v1.router_service_pb2 import EngineHealth, ListEnginesRequest, RoutedEngine
from vime.router.v1.router_service_pb2_grpc import RouterServiceStub
from vime_client.channel import ChannelSettings, open_channel

FAKE_ENGINE = Path(__file__).parents[1] / "services" / "router" / "tests" / "fake_engine.py"


def fake_engine() -> ModuleType:
    """The module of the fake engine, which lives beside the router's tests."""
    name = "vime_router_fake_engine"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, FAKE_ENGINE)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


class Program:
    """A process that says its address on its first line."""

    def __init__(self, *command: str) -> None:
        self._command = command
        self.address = ""
        self.process: asyncio.subprocess.Process | None = None

    async def start(self, *more: str) -> None:
        """Start it and read its address."""
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, *self._command, *more, stdout=asyncio.subprocess.PIPE
        )
        assert self.process.stdout is not None
        async with asyncio.timeout(60):
            line = await self.process.stdout.readline()
        self.address = line.decode().split()[-1]

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to it."""
        assert self.process is not None
        os.kill(self.process.pid, number)

    async def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()


class ProcessFleet:
    """A router process and engine processes."""

    def __init__(self, engine_arguments: tuple[str, ...], router_settings: tuple[str, ...]) -> None:
        sets = [part for setting in router_settings for part in ("--set", setting)]
        self.router = Program("-m", "vime_router", "--set", "log.level=ERROR", *sets)
        self.engines: dict[str, Program] = {}
        self._engine_arguments = engine_arguments
        self.channel: grpc.aio.Channel | None = None

    async def start_router(self) -> None:
        """Start the router, at its old address if it had one."""
        port = self.router.address.rpartition(":")[2] or "0"
        await self.router.start("--set", f"server.port={port}")

    async def start_engine(self, engine_id: str) -> None:
        """Start an engine, at its old address if it had one."""
        engine = self.engines.setdefault(
            engine_id, Program(str(FAKE_ENGINE), "--engine-id", engine_id, *self._engine_arguments)
        )
        where = ("--address", engine.address) if engine.address else ()
        await engine.start("--router", self.router.address, *where)

    async def listed(self) -> dict[str, RoutedEngine]:
        """The router's view, by engine_id."""
        assert self.channel is not None
        stub: Any = RouterServiceStub(self.channel)
        response = await stub.ListEngines(ListEnginesRequest(), timeout=5, wait_for_ready=True)
        return {engine.status.info.engine_id: engine for engine in response.engines}

    async def wait_alive(self, *engine_ids: str, seconds: float = 30.0) -> None:
        """Return when the router calls these engines alive."""
        async with asyncio.timeout(seconds):
            while True:
                listed = await self.listed()
                alive = {i for i, e in listed.items() if e.health == EngineHealth.ENGINE_HEALTH_ALIVE}
                if alive.issuperset(engine_ids):
                    return
                await asyncio.sleep(0.02)


@asynccontextmanager
async def process_fleet(
    engines: int, engine_arguments: tuple[str, ...] = (), router_settings: tuple[str, ...] = ()
) -> AsyncIterator[ProcessFleet]:
    """Start a router and `engines` engines, `e0` and on; all of them end with the block."""
    fleet = ProcessFleet(engine_arguments, router_settings)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(fleet.router.kill)
        await fleet.start_router()
        fleet.channel = open_channel(fleet.router.address, ChannelSettings(max_attempts=1))
        await stack.enter_async_context(fleet.channel)
        for number in range(engines):
            await fleet.start_engine(f"e{number}")
            stack.push_async_callback(fleet.engines[f"e{number}"].kill)
        await fleet.wait_alive(*fleet.engines)
        yield fleet
