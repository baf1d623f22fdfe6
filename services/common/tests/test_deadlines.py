"""A handler knows how long it may take, whoever set the bound."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from vime_client.channel import ChannelSettings, open_channel
from vime_service import Deadline, ManualClock, ServerConfig, patience, remaining, serving


class _Context:
    def __init__(self, left: float | None) -> None:
        self._left = left

    def time_remaining(self) -> float | None:
        return self._left


def test_a_deadline_runs_down_with_its_clock_and_stops_at_zero() -> None:
    clock = ManualClock()
    deadline = Deadline.after(2.0, clock)
    clock.advance(1.5)
    assert (deadline.remaining, deadline.expired) == (0.5, False)
    clock.advance(9.0)
    assert (deadline.remaining, deadline.expired) == (0.0, True)


def test_a_reserve_leaves_time_for_the_answer() -> None:
    assert remaining(_Context(1.0), reserve=0.25) == 0.75
    assert remaining(_Context(0.1), reserve=0.25) == 0.0


def test_a_long_poll_leaves_a_fifth_of_the_time_for_its_answer_and_never_more_than_two_seconds() -> None:
    assert [patience(_Context(left)) for left in (0.0, 1.0, 60.0)] == [0.0, 0.8, 58.0]


def test_outside_the_chassis_a_call_without_a_deadline_is_refused() -> None:
    with pytest.raises(RuntimeError, match="this call has no deadline"):
        remaining(_Context(None))


async def test_inside_the_chassis_there_always_is_one() -> None:
    async def tell(request: bytes, context: Any) -> bytes:
        return str(remaining(context)).encode()

    def register(service: Any) -> None:
        handlers = {"Tell": grpc.unary_unary_rpc_method_handler(tell)}
        service.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("vime.test.Clock", handlers),))

    config = ServerConfig(max_call_seconds=30.0, grace_seconds=0.1)
    settings = ChannelSettings(method_timeouts_s={"*/Tell": 7.0})
    async with (
        serving("clock", "vime-service", config, register) as service,
        grpc.aio.insecure_channel(service.address) as bare,
        open_channel(service.address, settings) as ours,
    ):
        assert 29.0 < float(await bare.unary_unary("/vime.test.Clock/Tell")(b"")) <= 30.0
        assert 6.0 < float(await ours.unary_unary("/vime.test.Clock/Tell")(b"")) <= 7.1
        assert 2.0 < float(await ours.unary_unary("/vime.test.Clock/Tell")(b"", timeout=3.0)) <= 3.1
