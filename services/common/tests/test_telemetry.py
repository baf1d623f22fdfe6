"""The caller's span is the parent of the handler's span, streams included, and spans tell nothing of the request."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from opentelemetry import trace
from opentelemetry.trace import SpanKind, StatusCode

from vime_client.errors import RpcError, rpc_errors


def _pair(spans: Any, name: str) -> tuple[Any, Any]:
    finished = [span for span in spans.get_finished_spans() if span.name == name]
    (client,) = [span for span in finished if span.kind is SpanKind.CLIENT]
    (server,) = [span for span in finished if span.kind is SpanKind.SERVER]
    return client, server


async def _settle() -> None:
    import asyncio

    await asyncio.sleep(0.05)  # spans end in done callbacks


async def test_caller_call_and_handler_are_one_trace(channel: Any, spans: Any) -> None:
    with trace.get_tracer("test").start_as_current_span("step") as step:
        await channel.unary_unary("/vime.test.Echo/Echo")(b"a prompt")
    await _settle()
    client, server = _pair(spans, "vime.test.Echo/Echo")
    assert client.parent.span_id == step.get_span_context().span_id
    assert server.parent.span_id == client.context.span_id
    assert {span.context.trace_id for span in (client, server)} == {step.get_span_context().trace_id}
    assert dict(server.attributes) == {
        "rpc.system": "grpc", "rpc.service": "vime.test.Echo", "rpc.method": "Echo", "rpc.grpc.status_code": 0,
    }  # fmt: skip
    assert client.attributes["rpc.grpc.status_code"] == 0


async def test_a_stream_is_one_span_on_each_side(channel: Any, spans: Any) -> None:
    assert len([m async for m in channel.unary_stream("/vime.test.Echo/Count")(b"5")]) == 5
    await _settle()
    client, server = _pair(spans, "vime.test.Echo/Count")
    assert server.parent.span_id == client.context.span_id


@pytest.mark.parametrize(("request_", "code", "ours"), [(b"full", 8, False), (b"bug", 13, True)])
async def test_a_failed_call_shows_its_code_and_only_our_faults_are_errors(
    channel: Any, spans: Any, request_: bytes, code: int, ours: bool
) -> None:
    with pytest.raises(RpcError), rpc_errors():
        await channel.unary_unary("/vime.test.Echo/Echo")(request_)
    await _settle()
    client, server = _pair(spans, "vime.test.Echo/Echo")
    assert server.attributes["rpc.grpc.status_code"] == client.attributes["rpc.grpc.status_code"] == code
    assert (server.status.status_code is StatusCode.ERROR) is ours
    assert client.status.status_code is StatusCode.ERROR
    assert "4711" not in server.to_json()
    assert not server.events


async def test_a_cancelled_stream_says_so(channel: Any, spans: Any) -> None:
    stream = channel.unary_stream("/vime.test.Echo/Count")(b"1000000")
    await stream.read()
    stream.cancel()
    await _settle()
    client, server = _pair(spans, "vime.test.Echo/Count")
    cancelled = grpc.StatusCode.CANCELLED.value[0]
    assert server.attributes["rpc.grpc.status_code"] == client.attributes["rpc.grpc.status_code"] == cancelled
    assert server.status.status_code is client.status.status_code is StatusCode.ERROR


async def test_a_poll_without_a_result_leaves_no_span(channel: Any, spans: Any, echo: Any) -> None:
    def answer(raw: bytes) -> Any:
        return raw or echo.Blocked()

    poll = channel.unary_unary("/vime.test.Echo/Poll", response_deserializer=answer)
    for request in (b"", b"", b"a lease", b""):
        await poll(request)
    await _settle()
    assert len(spans.get_finished_spans()) == 2  # the client's and the server's of the one that found something


async def test_calls_refused_one_after_the_other_are_one_event(channel: Any, spans: Any) -> None:
    echo = channel.unary_unary("/vime.test.Echo/Echo")
    for _ in range(5):
        with pytest.raises(RpcError), rpc_errors():
            await echo(b"not ready")
    await echo(b"a prompt")
    await echo(b"another")
    await _settle()
    for kind in (SpanKind.CLIENT, SpanKind.SERVER):
        found = [span for span in spans.get_finished_spans() if span.kind is kind]
        codes = [span.attributes["rpc.grpc.status_code"] for span in found]
        assert codes == [grpc.StatusCode.UNAVAILABLE.value[0], 0, 0]
        assert [[dict(event.attributes) for event in span.events] for span in found] == [[], [{"calls": 5}], []]


async def test_health_checks_make_no_spans(channel: Any, spans: Any) -> None:
    from vime_client.health import wait_until_ready

    await wait_until_ready(channel, "echo", 5)
    await _settle()
    assert not spans.get_finished_spans()
