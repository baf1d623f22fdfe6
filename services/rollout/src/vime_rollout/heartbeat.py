"""Tell the router every second what this engine serves and carries, and notice when the engine has died."""

from __future__ import annotations

import asyncio
import contextlib

import grpc

from vime.router.v1 import router_service_pb2, router_service_pb2_grpc
from vime_client.channel import ChannelSettings, open_channel
from vime_client.logs import get_logger
from vime_rollout.convert import seconds_in
from vime_rollout.core import Core
from vime_rollout.engine import EngineDied
from vime_rollout.status import engine_status
from vime_service.bulk.wire import version_to_proto
from vime_service.errors import EngineFailed

_log = get_logger(__name__)


class Heartbeat:
    """Sends heartbeats until it is cancelled. A router that does not answer is asked again at the next beat."""

    def __init__(self, core: Core, address: str) -> None:
        self._core = core
        self._address = address
        self._now = asyncio.Event()
        self._silent = False
        self._beats = False
        self._said_draining = asyncio.Event()

    def beat_now(self) -> None:
        """Do not wait for the period: the state has changed."""
        self._now.set()

    async def say_draining(self) -> None:
        """Beat once more and wait until the router has heard it, for the time-out of a heartbeat at the most."""
        if not self._beats:  # no router, or not that far yet
            return
        self.beat_now()
        with contextlib.suppress(TimeoutError):  # a router that is gone hears nothing, and holds nobody up
            async with asyncio.timeout(self._core.config.router.timeout_seconds):
                await self._said_draining.wait()

    async def run(self) -> None:
        """Beat. Raises `EngineFailed` when the engine has died: the service must be started anew."""
        link = self._core.config.router
        period = link.period_seconds
        if not link.address:
            while True:
                await self._check_health()
                await asyncio.sleep(period)
        # One attempt a beat: a late heartbeat is worth less than the next one.
        channel = open_channel(link.address, ChannelSettings(max_attempts=1, tls=link.tls, token_file=link.token_file))
        try:
            stub = router_service_pb2_grpc.RouterServiceStub(channel)
            self._beats = True
            while True:
                await self._check_health()
                period = await self._beat(stub, period)
                await self._rest(period)
        finally:
            self._beats = False
            await channel.close()

    async def _beat(self, stub: router_service_pb2_grpc.RouterServiceAsyncStub, period: float) -> float:
        """One heartbeat; the time until the next."""
        draining = self._core.traffic.draining
        request = router_service_pb2.HeartbeatRequest(status=engine_status(self._core, self._address))
        if self._core.weights.highest is not None:
            request.highest_seen.CopyFrom(version_to_proto(self._core.weights.highest))
        try:
            answer = await stub.Heartbeat(request, timeout=self._core.config.router.timeout_seconds)
        except grpc.aio.AioRpcError as error:
            if not self._silent:
                _log.warning("the router does not take heartbeats", code=error.code().name, detail=error.details())
            self._silent = True
            return period
        finally:
            if draining:
                self._said_draining.set()
        if self._silent:
            _log.info("the router takes heartbeats again")
        self._silent = False
        return seconds_in(answer.period, period)

    async def _rest(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._now.wait()
        except TimeoutError:
            return
        self._now.clear()

    async def _check_health(self) -> None:
        try:
            await self._core.engine.check_health()
        except EngineDied as error:
            raise EngineFailed(f"the engine died: {error}", engine_id=self._core.config.engine_id) from error
