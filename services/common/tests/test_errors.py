"""A domain error reaches the caller with its code, reason, facts and waiting time; anything else reaches the log."""

from __future__ import annotations

import asyncio
import base64
import logging
from typing import Any
from urllib.parse import quote

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from vime.common.v1 import error_reason_pb2
from vime_client.errors import RpcError, StaleIncarnation, rpc_errors
from vime_service import errors
from vime_service.error_mapping import status_of
from vime_service.errors import VimeError


def _all_classes(base: type[VimeError] = VimeError) -> list[type[VimeError]]:
    return [base, *(found for sub in base.__subclasses__() for found in _all_classes(sub))]


async def _fail(channel: Any, request: bytes) -> RpcError:
    with pytest.raises(RpcError) as caught, rpc_errors("echo.Echo"):
        await channel.unary_unary("/vime.test.Echo/Echo")(request)
    return caught.value


def test_every_error_class_has_a_reason_of_the_contract_and_a_code_of_grpc() -> None:
    known = {name.removeprefix("ERROR_REASON_") for name in error_reason_pb2.ErrorReason.keys()}  # noqa: SIM118
    ours = [cls for cls in _all_classes() if cls.__module__ == errors.__name__]
    assert {cls.reason for cls in ours} <= known
    assert {cls.code for cls in ours} <= {code.name for code in grpc.StatusCode}
    assert known - {cls.reason for cls in ours} == set()  # each reason can be raised


async def test_code_reason_facts_and_waiting_time_survive_the_wire(channel: Any) -> None:
    error = await _fail(channel, b"full")
    assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (error.reason, error.domain) == ("FULL", "echo.vime")
    assert error.message == "table train holds 12 of 12 groups"
    assert error.metadata == {"kind": "table", "limit": "12", "actual": "12"}
    assert error.retry_after == 2.5
    assert error.transient


async def test_a_reason_with_a_class_of_its_own_is_raised_as_that_class(channel: Any) -> None:
    error = await _fail(channel, b"stale")
    assert type(error) is StaleIncarnation
    assert error.retry_after is None
    assert not error.transient


async def test_an_rpc_of_a_later_version_says_why_it_is_missing(channel: Any) -> None:
    error = await _fail(channel, b"later")
    assert (error.code, error.reason) == (grpc.StatusCode.UNIMPLEMENTED, "NOT_IMPLEMENTED")
    assert error.metadata["why"] == "no engine"


async def test_a_handler_whose_own_work_was_cancelled_tells_its_caller_at_once(channel: Any) -> None:
    """grpc.aio sends nothing for it: the caller waited for its own deadline."""
    call = channel.unary_unary("/vime.test.Echo/Echo")(b"gives up", timeout=20)
    with pytest.raises(RpcError, match=r"what it waited for in echo\.vime was cancelled") as caught, rpc_errors():
        await asyncio.wait_for(call, 10)
    assert caught.value.code is grpc.StatusCode.ABORTED


async def test_a_fault_of_ours_goes_to_the_log_and_the_caller_gets_its_number(
    channel: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        error = await _fail(channel, b"bug")
    assert (error.code, error.reason) == (grpc.StatusCode.INTERNAL, "INTERNAL")
    assert "4711" not in str(error)
    logged = [record for record in caplog.records if record.exc_info]
    assert logged[0].fields["incident"] == error.metadata["incident"]  # type: ignore[attr-defined]  # ours: see vime_client.logs.Logger
    assert logged[0].exc_info is not None
    assert "4711" in str(logged[0].exc_info[1])


async def test_an_error_too_long_for_a_trailer_is_clipped_not_lost(channel: Any) -> None:
    error = await _fail(channel, b"long")
    assert error.code is grpc.StatusCode.INTERNAL
    assert error.message.endswith("...")
    assert len(error.metadata) == 12


@pytest.mark.parametrize("letter", ["a", "é", "語", "🧮", "\x00", "\udc80", "%"])
def test_a_long_message_in_any_script_keeps_its_code_and_reason(letter: str) -> None:
    facts = {f"fact{number}": letter * 5000 for number in range(20)}
    error = errors.InvalidArgument(letter * 5000, field=letter * 500, **facts)
    status = status_of(error, "echo.vime")
    assert status.message.endswith("...")
    assert _trailer_bytes(status) < 7000  # of 8 KiB; the rest is for what else travels
    assert (status.code, status.details[0].Is(error_details_pb2.ErrorInfo.DESCRIPTOR)) == (3, True)
    info = error_details_pb2.ErrorInfo()
    status.details[0].Unpack(info)
    assert (info.reason, info.domain) == ("INVALID_FIELD", "echo.vime")


def _trailer_bytes(status: status_pb2.Status) -> int:
    """As gRPC sends it: the message percent-encoded but for printable ASCII, the details in base64."""
    printable = "".join(map(chr, range(32, 127))).replace("%", "")
    return len(quote(status.message, safe=printable)) + len(base64.b64encode(status.SerializeToString()))


async def test_a_long_message_in_any_script_arrives(channel: Any) -> None:
    error = await _fail(channel, b"long " + "語".encode())
    assert error.code is grpc.StatusCode.INTERNAL
    assert error.message.startswith("語語")
    assert error.message.endswith("...")
    assert error.reason == "INTERNAL"
    assert error.metadata["fact0"].startswith("語")


async def test_an_error_of_a_call_further_on_is_passed_on_whole(service: Any, channel: Any) -> None:
    from vime_client.channel import ChannelSettings, open_channel
    from vime_service import ServerConfig, serving

    async def relay(request: bytes, context: Any) -> bytes:
        answer: bytes = await channel.unary_unary("/vime.test.Echo/Echo")(request)
        return answer

    def register(front: Any) -> None:
        handler = grpc.unary_unary_rpc_method_handler(relay)
        front.server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("vime.test.Relay", {"R": handler}),)
        )

    async with (
        serving("relay", "vime-service", ServerConfig(), register) as front,
        open_channel(front.address, ChannelSettings(max_attempts=1)) as to_front,
    ):
        with pytest.raises(RpcError) as caught, rpc_errors():
            await to_front.unary_unary("/vime.test.Relay/R")(b"full")
    assert (caught.value.reason, caught.value.domain, caught.value.retry_after) == ("FULL", "echo.vime", 2.5)
    assert caught.value.metadata["limit"] == "12"
