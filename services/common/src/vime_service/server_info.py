"""GetServerInfo: what is running, for all four services."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vime.common.v1 import server_info_service_pb2, server_info_service_pb2_grpc
from vime_client.telemetry import dist_version

SERVICE_NAME: str = server_info_service_pb2.DESCRIPTOR.services_by_name["ServerInfoService"].full_name


class ServerInfoServicer(server_info_service_pb2_grpc.ServerInfoServiceServicer):
    """Answers with the versions of the service, its contracts and its engines."""

    def __init__(
        self, service: str, dist: str, grpc_services: Callable[[], Sequence[str]], components: Mapping[str, str]
    ) -> None:
        self._service = service
        self._dist = dist
        self._grpc_services = grpc_services
        self._components = components

    async def GetServerInfo(self, request: Any, context: Any) -> server_info_service_pb2.GetServerInfoResponse:
        """See the contract."""
        return server_info_service_pb2.GetServerInfoResponse(
            service=self._service,
            service_version=dist_version(self._dist),
            protos_version=dist_version("vime-protos"),
            grpc_services=sorted(self._grpc_services()),
            components=dict(self._components),
        )
