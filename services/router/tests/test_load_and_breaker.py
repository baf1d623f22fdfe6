"""Counts that cannot leak, and a breaker that only the engine's own faults open."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest

from vime_router.breaker import Breaker, BreakerState
from vime_router.directory import EngineLoad
from vime_router.load import LoadBook
from vime_service.clock import ManualClock


async def test_a_call_is_counted_as_long_as_it_runs_however_it_ends() -> None:
    book = LoadBook()
    with book.hold(8):
        assert (book.calls, book.samples) == (1, 8)
    with pytest.raises(RuntimeError), book.hold(8):
        raise RuntimeError

    async def run() -> None:
        with book.hold(3):
            await asyncio.sleep(60)

    tasks = [asyncio.create_task(run()) for _ in range(200)]
    await asyncio.sleep(0)
    assert (book.calls, book.samples) == (200, 600)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (book.calls, book.samples, book.sent) == (0, 0, 202)


def test_what_a_heartbeat_tells_counts_on_top_of_the_routers_own_calls_but_not_twice() -> None:
    book = LoadBook()
    with book.hold(10):
        book.hear(EngineLoad(running=8, waiting=6, kv_cache_usage=0.5))
        assert book.total == 14
    assert book.total == 4  # others' samples; the router's own are over, whatever the engine said before
    book.hear(None)
    assert (book.total, book.kv_cache_usage) == (0, 0.0)


def test_the_breaker_opens_after_faults_in_a_row_and_tries_one_call_after_a_pause() -> None:
    clock = ManualClock()
    breaker = Breaker(clock, failures=3, pause_s=5.0)
    for fault in (True, True, False, True, True):
        with breaker.call():
            breaker.failed() if fault else breaker.succeeded()
        assert breaker.lets_pass
    breaker.failed()
    assert breaker.state is BreakerState.OPEN
    assert not breaker.lets_pass
    clock.advance(5.0)
    with breaker.call():
        assert not breaker.lets_pass  # one probe at a time
        breaker.failed()
    assert breaker.state is BreakerState.OPEN
    clock.advance(5.0)
    with breaker.call():
        breaker.succeeded()
    assert breaker.state is BreakerState.CLOSED
    assert breaker.faults == 6


def test_a_probe_that_its_client_cancels_decides_nothing_and_lets_the_next_one_try() -> None:
    clock = ManualClock()
    breaker = Breaker(clock, failures=1, pause_s=5.0)
    breaker.failed()
    clock.advance(5.0)
    with pytest.raises(asyncio.CancelledError), breaker.call():
        raise asyncio.CancelledError
    assert breaker.state is BreakerState.HALF_OPEN
    assert breaker.lets_pass


def test_a_silent_probe_closes_nothing_and_one_more_call_goes_in_each_pause() -> None:
    clock = ManualClock()
    breaker = Breaker(clock, failures=3, pause_s=5.0)
    for _ in range(3):
        breaker.failed()
    with ExitStack() as calls:
        for _ in range(4):
            clock.advance(4.9)
            assert not breaker.lets_pass
            clock.advance(0.1)
            assert breaker.lets_pass
            calls.enter_context(breaker.call())
            assert breaker.state is BreakerState.HALF_OPEN
        breaker.failed()  # one of them, in the end
        assert breaker.state is BreakerState.OPEN
    clock.advance(5.0)
    with breaker.call():
        breaker.answers()
        assert breaker.state is BreakerState.CLOSED
        breaker.failed()
    assert breaker.state is BreakerState.OPEN
    breaker.answers()  # of a call that was sent before
    assert breaker.state is BreakerState.OPEN


def test_a_long_probe_that_ends_late_takes_nothing_from_the_one_after_it() -> None:
    clock = ManualClock()
    breaker = Breaker(clock, failures=1, pause_s=5.0)
    breaker.failed()
    clock.advance(5.0)
    with breaker.call():
        clock.advance(5.0)
        assert breaker.lets_pass
        breaker.failed()
        clock.advance(5.0)
        second = breaker.call()
        second.__enter__()
        assert not breaker.lets_pass
    assert not breaker.lets_pass
    second.__exit__(None, None, None)
    assert breaker.lets_pass
