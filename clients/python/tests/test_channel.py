"""Calls of a channel: each has a deadline, is retried only where that helps, and survives what peers may send."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import status_pb2
from hypothesis import given
from hypothesis import strategies as st

from vime_client.addresses import is_loopback, join_address, split_address
from vime_client.channel import ChannelError, ChannelSettings, open_channel
from vime_client.errors import RpcError, rpc_errors
from vime_client.retry import whole_step

Handler = Callable[[bytes, Any], Awaitable[bytes]]


@asynccontextmanager
async def _server(handler: Handler) -> AsyncIterator[str]:
    server = grpc.aio.server()
    methods = {"Call": grpc.unary_unary_rpc_method_handler(handler)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("vime.test.Peer", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def _call(address: str, settings: ChannelSettings | None = None, **kwargs: Any) -> bytes:
    async with open_channel(address, settings) as channel:
        with rpc_errors("peer.Call"):
            answer: bytes = await channel.unary_unary("/vime.test.Peer/Call")(b"x", **kwargs)
    return answer


async def test_every_call_carries_a_deadline_the_methods_own_first() -> None:
    async def tell(request: bytes, context: Any) -> bytes:
        return str(context.time_remaining()).encode()

    async with _server(tell) as address:
        settings = ChannelSettings(timeout_s=20.0)
        assert 19 < float(await _call(address, settings)) <= 20.1
        by_method = ChannelSettings(method_timeouts_s={"/vime.test.Peer/C*": 5.0})
        assert 4 < float(await _call(address, by_method)) <= 5.1
        assert 1 < float(await _call(address, by_method, timeout=2.0)) <= 2.1


@pytest.mark.parametrize(("settings", "asked"), [({}, 5), ({"max_attempts": 2}, 2), ({"max_attempts": 1}, 1)])
async def test_unavailable_is_retried_up_to_the_bound(settings: dict[str, Any], asked: int) -> None:
    calls = 0

    async def refuse(request: bytes, context: Any) -> bytes:
        nonlocal calls
        calls += 1
        await context.abort(grpc.StatusCode.UNAVAILABLE, "restarting")
        return b""

    async with _server(refuse) as address:
        with pytest.raises(RpcError, match=r"peer\.Call: restarting \[UNAVAILABLE\]"):
            await _call(address, ChannelSettings(initial_backoff_s=0.01, **settings))
    assert calls == asked


async def test_a_refusal_is_never_retried() -> None:
    calls = 0

    async def refuse(request: bytes, context: Any) -> bytes:
        nonlocal calls
        calls += 1
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        return b""

    async with _server(refuse) as address:
        with pytest.raises(RpcError):
            await _call(address)
    assert calls == 1


@pytest.mark.parametrize(
    "details",
    [
        b"\xff\xff not a status",
        status_pb2.Status(code=5, details=[any_pb2.Any(type_url="type.googleapis.com/of.Tomorrow", value=b"\x01")]),
        status_pb2.Status(
            code=5, details=[any_pb2.Any(type_url="type.googleapis.com/google.rpc.ErrorInfo", value=b"\xff")]
        ),
    ],
)
async def test_details_that_cannot_be_read_do_not_hide_the_error(details: Any) -> None:
    raw = details if isinstance(details, bytes) else details.SerializeToString()

    async def refuse(request: bytes, context: Any) -> bytes:
        await context.abort(grpc.StatusCode.NOT_FOUND, "no table eval", (("grpc-status-details-bin", raw),))
        return b""

    async with _server(refuse) as address:
        with pytest.raises(RpcError) as caught:
            await _call(address)
    assert (caught.value.code, caught.value.message) == (grpc.StatusCode.NOT_FOUND, "no table eval")
    assert (caught.value.reason, dict(caught.value.metadata)) == ("", {})


async def test_a_service_that_comes_back_is_found_within_the_longest_backoff() -> None:
    async def answer(request: bytes, context: Any) -> bytes:
        return b"back"

    async with _server(answer) as address:
        pass  # known and gone
    port = int(address.rpartition(":")[2])
    async with open_channel(address, ChannelSettings(max_attempts=1, max_backoff_s=0.3)) as channel:
        call = channel.unary_unary("/vime.test.Peer/Call")
        for _ in range(5):
            with pytest.raises(grpc.aio.AioRpcError):
                await call(b"", timeout=2)
        server = grpc.aio.server()
        methods = {"Call": grpc.unary_unary_rpc_method_handler(answer)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("vime.test.Peer", methods),))
        assert server.add_insecure_port(f"127.0.0.1:{port}") == port
        await server.start()
        await asyncio.sleep(0.7)
        assert await call(b"", timeout=2) == b"back"
        await server.stop(0)


async def test_a_whole_step_waits_as_long_as_the_server_asked_and_ends_with_the_last_error() -> None:
    loop = asyncio.get_running_loop()
    began, tried = loop.time(), 0
    full = RpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", reason="FULL", retry_after=0.3)

    async def step() -> None:
        nonlocal tried
        async for attempt in whole_step("insert", attempts=3, initial_wait_s=0.01):
            with attempt:
                tried += 1
                raise full

    with pytest.raises(RpcError) as caught:
        await step()
    assert caught.value is full
    assert tried == 3
    assert loop.time() - began >= 0.6


async def test_a_step_that_cannot_succeed_is_not_repeated() -> None:
    tried = 0

    async def step() -> None:
        nonlocal tried
        async for attempt in whole_step("insert"):
            with attempt:
                tried += 1
                raise RpcError(grpc.StatusCode.ABORTED, "over", reason="STALE_INCARNATION")

    with pytest.raises(RpcError):
        await step()
    assert tried == 1


@pytest.mark.parametrize("address", ["localhost", "host:", ":80", "host:http", "host:70000", ""])
async def test_an_address_without_host_and_port_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="must have the form host:port"):
        open_channel(address)


@given(st.ip_addresses(), st.integers(0, 65535))
def test_addresses_split_and_join_back(ip: Any, port: int) -> None:
    assert split_address(join_address(str(ip), port)) == (str(ip), port)
    assert is_loopback(str(ip)) == ip.is_loopback


async def test_a_token_variable_that_is_unset_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VIME_TEST_TOKEN", raising=False)
    with pytest.raises(ChannelError, match="environment variable VIME_TEST_TOKEN"):
        open_channel("127.0.0.1:1", ChannelSettings(token_env="VIME_TEST_TOKEN"))
