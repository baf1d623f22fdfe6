"""Who may drive: one loop or one mode lease, and every stop ends in a final state that watchers see."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from vime.trainer.v1 import trainer_service_pb2 as pb
from vime_service.errors import FailedPrecondition, ModeHeld, Unimplemented
from vime_trainer.controller import Trainer
from vime_trainer.loop.events import EventLog, State, Status
from vime_trainer.loop.ports import RankDied
from vime_trainer.servicers import TrainerServicer


class Loop:
    """A loop that runs until it is told to stop."""

    def __init__(self) -> None:
        self.status = Status(State.RUNNING, "run", 4, train_step=1)
        self.stopped = asyncio.Event()
        self.end = State.FINISHED

    def stop(self) -> None:
        self.stopped.set()

    async def save_soon(self) -> tuple[int, str]:
        return 1, "/checkpoints/1"

    async def run(self) -> None:
        await self.stopped.wait()
        self.status = Status(self.end, "run", 4, train_step=2)


@pytest.fixture
def loops() -> list[Loop]:
    return []


@pytest.fixture
def events() -> EventLog:
    return EventLog()


@pytest.fixture
def trainer(tmp_path: Path, ranks, loops: list[Loop], events: EventLog) -> Trainer:
    def make_loop() -> Loop:
        loops.append(Loop())
        return loops[-1]

    return Trainer(ranks, events, make_loop, Status(State.IDLE, "run", 4), tmp_path / "started", 1, ())


async def watched(events: EventLog, after: int = 0) -> list[State]:
    async with asyncio.timeout(2.0):
        return [event.state async for _, event in events.watch(after)]


async def test_a_stop_at_once_ends_in_a_final_state_and_ends_the_watches(trainer, events):
    await trainer.start()
    await asyncio.sleep(0.01)
    status = await trainer.stop(now=True)
    assert (status.state, status.stopped) == (State.FINISHED, True)
    assert (await watched(events))[-1] is State.FINISHED
    assert not trainer.was_started


async def test_a_loop_that_is_started_after_a_stop_can_be_watched(trainer, events, loops):
    await trainer.start()
    await trainer.stop(now=True)
    await trainer.start()
    watching = asyncio.create_task(watched(events))
    await asyncio.sleep(0.02)
    assert not watching.done()
    loops[-1].stop()
    assert State.FINISHED in await watching


async def test_a_stop_while_the_ranks_start_is_heeded(trainer, events, ranks, loops):
    started = asyncio.Event()
    ranks.start = started.wait
    await trainer.start()
    await asyncio.sleep(0.01)
    await trainer.stop(now=False)
    started.set()
    assert (await watched(events))[-1] is State.FINISHED
    assert loops == []
    assert trainer.status.state is State.FINISHED


async def test_a_stop_between_two_incarnations_ends_in_a_final_state(trainer, events, ranks, monkeypatch):
    async def die() -> None:
        raise RankDied("rank 0 was killed by SIGKILL")

    monkeypatch.setattr("vime_trainer.controller._BACKOFF_S", 0.05)
    ranks.start = die
    await trainer.start()
    await asyncio.sleep(0.01)
    assert trainer.status.state is State.RECOVERING
    await trainer.stop(now=False)
    assert (await watched(events))[-1] is State.FINISHED


async def test_a_start_while_a_stop_is_under_way_is_refused_and_not_lost(trainer):
    await trainer.start()
    await asyncio.sleep(0.01)
    trainer._loop.stop = lambda: None  # it is still in its step
    await trainer.stop(now=False)
    with pytest.raises(FailedPrecondition, match="ends after the step in hand"):
        await trainer.start()
    await trainer.stop(now=True)


async def test_the_mode_lease_does_not_run_out_under_a_call_of_its_holder(trainer):
    lease = await trainer.acquire_mode("me", 0.02)
    with trainer.driving(lease):
        await asyncio.sleep(0.05)
        with pytest.raises(ModeHeld, match="me drives"):
            await trainer.start()
        with pytest.raises(ModeHeld, match="me drives"):
            await trainer.acquire_mode("other", 1.0)
    with trainer.driving(lease):
        pass
    await asyncio.sleep(0.05)
    with pytest.raises(FailedPrecondition, match="unknown or over"), trainer.driving(lease):
        pass


async def test_the_mode_lease_does_not_run_out_while_its_ranks_load(trainer, ranks):
    async def slow(_: object) -> None:
        await asyncio.sleep(0.05)

    ranks.load = slow
    acquiring = asyncio.create_task(trainer.acquire_mode("me", 0.02))
    await asyncio.sleep(0.04)
    with pytest.raises(ModeHeld):
        await trainer.acquire_mode("other", 1.0)
    with trainer.driving(await acquiring):
        pass


async def test_a_watcher_of_an_earlier_process_misses_nothing_of_the_next(monkeypatch):
    earlier = EventLog()
    for step in range(3):
        await earlier.add(Status(State.RUNNING, "run", 4, train_step=step))
    await earlier.close()
    seen = [number async for number, _ in earlier.watch(0)][-1]
    await asyncio.sleep(0.01)  # no process starts sooner after its predecessor's last event
    later = EventLog()
    for step in range(5):
        await later.add(Status(State.RUNNING, "run", 4, train_step=step))
    await later.close()
    assert [event.train_step async for _, event in later.watch(seen)] == [0, 1, 2, 3, 4]


async def test_a_checkpoint_is_that_of_the_running_loop_and_of_nothing_else(trainer):
    servicer = TrainerServicer(trainer, None, None)
    with pytest.raises(Unimplemented, match="belongs to a step of the ledger"):
        await servicer.SaveCheckpoint(pb.SaveCheckpointRequest(mode_lease_id="mine"), None)
    with pytest.raises(FailedPrecondition, match="no loop runs"):
        await servicer.SaveCheckpoint(pb.SaveCheckpointRequest(), None)
    await trainer.start()
    await asyncio.sleep(0.01)
    saved = await servicer.SaveCheckpoint(pb.SaveCheckpointRequest(), None)
    assert (saved.train_step, saved.path) == (1, "/checkpoints/1")
    await trainer.stop(now=True)


async def test_a_loop_that_ended_incomplete_stays_so(trainer, events, loops):
    await trainer.start()
    await asyncio.sleep(0.01)
    loops[-1].end = State.INCOMPLETE
    loops[-1].stop()
    states = await watched(events)
    assert State.FINISHED not in states
    assert trainer.status.state is State.INCOMPLETE
    assert not trainer.was_started


async def test_a_start_says_what_it_waits_for(trainer, events, ranks, monkeypatch):
    monkeypatch.setattr("vime_trainer.controller._SAY_S", 0.01)
    ranks.starting = "after 40 s not up yet: rank 1 (38 s of processor time)"
    up = asyncio.Event()
    ranks.start = up.wait
    await trainer.start()
    await asyncio.sleep(0.1)
    assert trainer.status.activity == f"starting the ranks: {ranks.starting}"
    up.set()
    await trainer.stop(now=True)
