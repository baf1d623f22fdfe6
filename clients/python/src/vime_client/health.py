"""Wait for a service to be ready, with a bound and the reason it is not."""

from __future__ import annotations

import asyncio

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from vime_client.clock import Clock, MonotonicClock

_CLOCK = MonotonicClock()


class NotReady(TimeoutError):
    """The service was not ready in time; the message says what it answered last."""


async def wait_until_ready(
    channel: grpc.aio.Channel, name: str, seconds: float, *, service: str = "ready", clock: Clock = _CLOCK
) -> None:
    """Return once `grpc.health.v1` on `channel` says that `service` is SERVING.

    Args:
        channel: channel to the service.
        name: how the error calls the service, e.g. "buffer at 127.0.0.1:4000".
        seconds: bound of the wait.
        service: health entry: "ready" (it can work) or "live" (the process answers).

    Raises:
        NotReady: `seconds` passed.
    """
    end = clock.now() + seconds
    stub = health_pb2_grpc.HealthStub(channel)
    last = "nothing answered"
    while (left := end - clock.now()) > 0:
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=min(2.0, left))
        except grpc.aio.AioRpcError as error:
            last = f"{error.code().name}: {error.details()}"
        else:
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                return
            last = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
        # Polled, since a Watch would break with every restart of the service; five a second is cheap on loopback.
        await asyncio.sleep(0.2)
    raise NotReady(f"{name} was not ({service}) within {seconds:g} s; last answer: {last}")
