"""Serve fakes on a free port of loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import NoReturn, Protocol

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio


class Fake(Protocol):
    """Something that can be served."""

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register its servicers."""
        ...


@asynccontextmanager
async def serving(*fakes: Fake, port: int = 0) -> AsyncIterator[str]:
    """Serve `fakes` together; gives the address `127.0.0.1:port`."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    health = health_aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    for service in ("", "live", "ready"):
        await health.set(service, health_pb2.HealthCheckResponse.SERVING)
    for fake in fakes:
        fake.add_to(server)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield f"127.0.0.1:{bound}"
    finally:
        await server.stop(grace=0)


async def refuse(
    context: grpc.aio.ServicerContext[object, object],
    code: grpc.StatusCode,
    message: str,
    reason: str,
    metadata: Mapping[str, str] | None = None,
) -> NoReturn:
    """End a call as the services do: status, message, and ErrorInfo with the reason."""
    packed = any_pb2.Any()
    packed.Pack(error_details_pb2.ErrorInfo(reason=reason, domain="fake.vime", metadata=dict(metadata or {})))
    status = status_pb2.Status(code=code.value[0], message=message, details=[packed])
    await context.abort(code, message, (("grpc-status-details-bin", status.SerializeToString()),))
    raise AssertionError("abort returned")
