"""Questions to the services of a run: are you ready, are you alive, where does training stand."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from vime.common.v1 import server_info_service_pb2, server_info_service_pb2_grpc
from vime.router.v1 import router_service_pb2, router_service_pb2_grpc
from vime_client.channel import ChannelSettings, open_channel
from vime_client.errors import RpcError, rpc_errors

_SERVING = health_pb2.HealthCheckResponse.SERVING
_ONCE = ChannelSettings(max_attempts=1, untraced_methods=("*",))


class Probe:
    """Asks one service. Channels are kept: a new one for each question would be a new connection each time."""

    def __init__(self, address: str) -> None:
        self._channel = open_channel(address, _ONCE)
        self._health = health_pb2_grpc.HealthStub(self._channel)
        self._info = server_info_service_pb2_grpc.ServerInfoServiceStub(self._channel)
        self._router = router_service_pb2_grpc.RouterServiceStub(self._channel)

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()

    async def is_ready(self, timeout_s: float) -> bool:
        """True if it says that it can do its work."""
        return await self._check("ready", timeout_s)

    async def is_alive(self, timeout_s: float) -> bool:
        """True if it answers at all, whatever it says."""
        try:
            await self._health.Check(health_pb2.HealthCheckRequest(service="live"), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            return error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
        return True

    async def engines(self, timeout_s: float) -> int:
        """Engines that the router has heard of and that are not dead."""
        request = router_service_pb2.ListEnginesRequest(page_size=1000)
        try:
            answer = await self._router.ListEngines(request, timeout=timeout_s)
        except grpc.aio.AioRpcError:
            return 0
        dead = router_service_pb2.ENGINE_HEALTH_DEAD
        return sum(1 for engine in answer.engines if engine.health != dead)

    async def components(self, timeout_s: float) -> dict[str, str]:
        """Name and version of the service, its protos and its engines.

        Raises:
            RpcError: it does not answer.
        """
        with rpc_errors("GetServerInfo"):
            info = await self._info.GetServerInfo(server_info_service_pb2.GetServerInfoRequest(), timeout=timeout_s)
        return {
            f"vime-{info.service}": info.service_version,
            "vime-protos": info.protos_version,
            **dict(info.components),
        }

    async def _check(self, service: str, timeout_s: float) -> bool:
        try:
            answer = await self._health.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.aio.AioRpcError:
            return False
        return bool(answer.status == _SERVING)


class FileProbe:
    """A service without a server shows that it lives by touching a file. Times are this file's own, only compared."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._last = self._stamp()

    def changed(self) -> bool:
        """True if it was touched since the last question."""
        before, self._last = self._last, self._stamp()
        return before != self._last

    def _stamp(self) -> int:
        try:
            return os.stat(self._file).st_mtime_ns
        except FileNotFoundError:
            return 0


async def all_components(probes: Mapping[str, Probe]) -> dict[str, str]:
    """Versions of everything that answers."""
    found: dict[str, str] = {}
    answers = await asyncio.gather(*(probe.components(5.0) for probe in probes.values()), return_exceptions=True)
    for answer in answers:
        if isinstance(answer, RpcError):
            continue  # a service that is being restarted has no versions now
        if isinstance(answer, BaseException):
            raise answer
        found.update(answer)
    return found
