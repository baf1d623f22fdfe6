"""Watches of the trainer's events wait for news, and never spin."""

from __future__ import annotations

import asyncio

import pytest

from vime_trainer.loop.events import EventLog, State, Status


@pytest.mark.timeout(20)
@pytest.mark.parametrize("after", [0, 1, 2**62])
async def test_a_watch_of_a_log_without_events_waits_and_lets_others_work(after: int) -> None:
    events = EventLog()
    watching = asyncio.ensure_future(anext(aiter(events.watch(after))))
    await asyncio.sleep(0.01)  # a watch that spins would never let this return
    assert not watching.done()
    await events.add(Status(State.RUNNING, "run", 4))
    _, event = await watching
    assert event.state is State.RUNNING


async def test_a_watch_of_a_closed_log_without_events_ends() -> None:
    events = EventLog()
    await events.close()
    async with asyncio.timeout(2.0):
        assert [event async for event in events.watch(0)] == []
