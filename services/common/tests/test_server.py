"""A server's life in one process: health, reflection, size cap, cancellation, drain, and what it refuses to start."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from vime.common.v1 import server_info_service_pb2, server_info_service_pb2_grpc
from vime_client.channel import ChannelSettings, open_channel
from vime_client.errors import RpcError, rpc_errors
from vime_client.health import NotReady, wait_until_ready
from vime_service import ServerConfig, Service, StartupError, serving
from vime_service.telemetry import dist_version

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def _health(channel: Any, name: str) -> int:
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
    return int(answer.status)


async def test_a_service_is_live_before_it_is_ready(echo: Any) -> None:
    service = Service("echo", "vime-service", ServerConfig(grace_seconds=0.1))
    await service.open(echo.register)
    async with open_channel(service.address) as channel:
        assert [await _health(channel, name) for name in ("", "live")] == [SERVING, SERVING]
        assert [await _health(channel, name) for name in ("ready", echo.ECHO)] == [NOT_SERVING, NOT_SERVING]
        with pytest.raises(NotReady, match=r"echo was not \(ready\) within 0.3 s; last answer: NOT_SERVING"):
            await wait_until_ready(channel, "echo", 0.3)
        await service.set_ready(True)
        await wait_until_ready(channel, "echo", 5)
        assert await _health(channel, echo.ECHO) == SERVING
    assert await service.close()


async def test_reflection_and_server_info_name_what_is_served(service: Any, channel: Any, echo: Any) -> None:
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    answers = [answer async for answer in stub.ServerReflectionInfo(iter([asked]), timeout=5)]
    listed = {found.name for found in answers[0].list_services_response.service}
    assert {echo.ECHO, "grpc.health.v1.Health", "vime.common.v1.ServerInfoService"} <= listed

    service.components["vllm"] = "0.30.0"
    info = await server_info_service_pb2_grpc.ServerInfoServiceStub(channel).GetServerInfo(
        server_info_service_pb2.GetServerInfoRequest()
    )
    assert (info.service, info.service_version) == ("echo", dist_version("vime-service"))
    assert echo.ECHO in info.grpc_services
    assert dict(info.components) == {"vllm": "0.30.0"}


@pytest.mark.parametrize("method", ["Count", "Write"])
async def test_both_ways_to_write_a_stream_work(channel: Any, method: str) -> None:
    assert [m async for m in channel.unary_stream(f"/vime.test.Echo/{method}")(b"3")] == [b"0", b"1", b"2"]


async def test_a_message_of_a_long_sample_passes_and_one_above_the_cap_names_both_sizes(channel: Any) -> None:
    call = channel.unary_unary("/vime.test.Echo/Echo")
    routes = bytes(16384 * 48 * 8 * 2)  # tokens x layers x top-k x int16 = 12 582 912 bytes
    assert len(await call(routes)) == len(routes)
    with pytest.raises(RpcError) as caught, rpc_errors():
        await call(bytes(64 * 1024 * 1024 + 1))
    assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "67108865 vs. 67108864" in caught.value.message
    assert await call(b"still fine") == b"still fine"


async def test_cancelled_calls_end_at_once_and_leave_nothing_behind(service: Any, channel: Any, echo: Any) -> None:
    await channel.unary_unary("/vime.test.Echo/Echo")(b"warm")
    await asyncio.sleep(0.1)
    tasks_before = len(asyncio.all_tasks())
    ended_before, closed_before = echo.state["hang_ended"], echo.state["stream_closed"]
    for _ in range(20):
        calls = [asyncio.ensure_future(_hang(channel)) for _ in range(5)]
        stream = channel.unary_stream("/vime.test.Echo/Count")(b"1000000")
        await stream.read()
        await _until(lambda: service.in_flight == 6)
        for call in calls:
            call.cancel()
        stream.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await _until(lambda: service.in_flight == 0)
    assert echo.state["hang_ended"] - ended_before == 100
    assert echo.state["stream_closed"] - closed_before == 20
    await asyncio.sleep(0.1)
    assert len(asyncio.all_tasks()) <= tasks_before + 2


async def _until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not true():  # the number of calls has no event
            await asyncio.sleep(0.005)


async def _hang(channel: Any, timeout: float | None = None) -> Any:
    return await channel.unary_unary("/vime.test.Echo/Hang")(b"", timeout=timeout)


async def test_a_deadline_ends_the_handler_too(service: Any, channel: Any) -> None:
    with pytest.raises(RpcError) as caught, rpc_errors():
        await _hang(channel, timeout=0.2)
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    await asyncio.sleep(0.2)
    assert service.in_flight == 0


async def test_a_caller_without_a_deadline_gets_the_servers_bound(echo: Any, caplog: pytest.LogCaptureFixture) -> None:
    config = ServerConfig(max_call_seconds=0.2, grace_seconds=0.1)
    async with (
        serving("echo", "vime-service", config, echo.register) as service,
        grpc.aio.insecure_channel(service.address) as bare,  # no interceptor that would set a deadline
    ):
        for _ in range(3):
            with pytest.raises(RpcError) as caught, rpc_errors():
                await bare.unary_unary("/vime.test.Echo/Hang")(b"")
            assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE")
    assert [record.message for record in caplog.records].count("a caller set no deadline") == 1


async def test_stopping_refuses_new_calls_and_ends_old_ones_with_unavailable(echo: Any) -> None:
    service = Service("echo", "vime-service", ServerConfig(grace_seconds=0.3))
    await service.open(echo.register)
    async with open_channel(service.address, ChannelSettings(max_attempts=1)) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="ready"))
        assert (await watch.read()).status == NOT_SERVING
        hanging = asyncio.create_task(_hang(channel))
        await _until(lambda: service.in_flight == 2)
        began = time.monotonic()
        assert await service.close()
        assert time.monotonic() - began < 10.0
        with pytest.raises(RpcError) as caught, rpc_errors():
            await hanging
        assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        with pytest.raises(RpcError) as refused, rpc_errors():
            await _hang(channel, timeout=2)
        assert refused.value.code is grpc.StatusCode.UNAVAILABLE


async def test_clean_up_runs_in_reverse_order_and_one_failure_does_not_stop_the_rest(echo: Any) -> None:
    order: list[str] = []
    service = Service("echo", "vime-service", ServerConfig(grace_seconds=0.1, cleanup_seconds=0.5))

    def broken() -> None:
        raise OSError("disk is gone")

    async def first() -> None:
        order.append("opened first, closed last")

    service.on_cleanup(first)
    service.on_cleanup(broken)
    service.on_cleanup(lambda: order.append("opened last, closed first"))
    service.on_stopping(lambda: order.append("stopping"))
    await service.open(echo.register)
    assert not await service.close()
    assert order == ["stopping", "opened last, closed first", "opened first, closed last"]


async def test_a_busy_port_is_one_sentence_with_host_and_port(echo: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=f"echo cannot listen on 127.0.0.1:{port}: the port is in use"):
            async with serving("echo", "vime-service", ServerConfig(port=port), echo.register):
                pass


async def test_two_servers_never_share_one_port(echo: Any, service: Any) -> None:
    port = int(service.address.rpartition(":")[2])
    with pytest.raises(StartupError, match="the port is in use"):
        async with serving("echo", "vime-service", ServerConfig(port=port), echo.register):
            pass


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.org"])
def test_an_address_others_can_reach_is_refused_without_tls_and_grants(host: str) -> None:
    with pytest.raises(StartupError, match=r"refusing to listen on .*server\.tls and server\.grants are not set"):
        ServerConfig(host=host, port=4000).check_exposure()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_no_credentials(host: str) -> None:
    ServerConfig(host=host).check_exposure()


async def test_the_port_file_holds_the_real_address_while_the_server_answers(echo: Any, tmp_path: Path) -> None:
    file = tmp_path / "port"
    async with serving(
        "echo", "vime-service", ServerConfig(port_file=file, grace_seconds=0.1), echo.register
    ) as service:
        assert file.read_text() == service.address + "\n"
        assert not service.address.endswith(":0")
    assert not file.exists()


async def test_random_bytes_on_the_port_crash_nothing(service: Any, channel: Any) -> None:
    import random

    rng = random.Random(7)
    host, _, port = service.address.rpartition(":")
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    for attempt in range(60):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write((preface if attempt % 2 else b"") + rng.randbytes(rng.randrange(1, 4000)))
        writer.close()
        del reader
    assert await channel.unary_unary("/vime.test.Echo/Echo")(b"alive", timeout=5) == b"alive"
