"""The awaited half of the buffer: what becomes of calls whose caller went away, and of polls."""

from __future__ import annotations

import asyncio
import sqlite3
import threading

import pytest

from vime_buffer import leases
from vime_buffer.buffer import Buffer
from vime_buffer.changes import Changes
from vime_buffer.ledger import Ledger, LedgerOptions
from vime_buffer.schema import Database
from vime_buffer.testing import RUN_ID, finished, table, write_prompts
from vime_buffer.values import Failure, Version
from vime_service.clock import ManualClock
from vime_service.errors import Draining


@pytest.fixture
async def buffer(ledger_dir):
    options = LedgerOptions(folder=ledger_dir / "ledger", run_id=RUN_ID, seed=7)
    opened = Buffer(Ledger(options, ManualClock()))
    await opened.create_table(table(write_prompts(ledger_dir / "train.jsonl", 10)))
    await opened.open_incarnation(RUN_ID, 0, 0, "", regenerate=False)
    await opened.announce_version(Version(RUN_ID, 1, 0))
    yield opened
    await opened.close()


async def test_a_lease_that_waits_for_the_writer_is_never_granted_to_a_caller_who_left(buffer):
    entered, release = threading.Event(), threading.Event()

    def block(ledger):
        entered.set()
        return release.wait(10)

    blocking = buffer._writer.submit(block)
    assert await asyncio.to_thread(entered.wait, 10)
    asked = asyncio.create_task(buffer.lease_prompts("w", 2, [], 5.0))
    await asyncio.sleep(0.05)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    release.set()
    assert blocking.result(10)
    assert (await buffer.table("train")).counts.drawn == 0


async def test_a_lease_that_is_being_committed_when_its_caller_leaves_is_given_back(buffer, monkeypatch):
    entered, release = threading.Event(), threading.Event()
    real = leases.lease_prompts

    def slow(*arguments):
        entered.set()
        assert release.wait(10)
        return real(*arguments)

    monkeypatch.setattr(leases, "lease_prompts", slow)
    asked = asyncio.create_task(buffer.lease_prompts("w", 2, [], 5.0))
    assert await asyncio.to_thread(entered.wait, 10)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    release.set()
    monkeypatch.setattr(leases, "lease_prompts", real)
    again = await buffer.lease_prompts("w", 2, [], 5.0)
    counts = (await buffer.table("train")).counts
    assert [lease.attempt for lease in again.leases] == [1, 1]
    assert (counts.drawn, counts.requeued, counts.open) == (4, 2, 2)


async def test_workers_that_wait_are_woken_by_free_slots_and_not_by_inserts(buffer, monkeypatch):
    first, second = (await buffer.lease_prompts("w", 2, [], 0)).leases
    looks = 0
    real = leases.lease_prompts

    def counted(*arguments):
        nonlocal looks
        looks += 1
        return real(*arguments)

    monkeypatch.setattr(leases, "lease_prompts", counted)
    waiting = asyncio.create_task(buffer.lease_prompts("w", 2, [], 20))
    await asyncio.sleep(0.05)
    insert = finished(first)
    await buffer._write(lambda ledger: leases.insert_group(ledger, insert))
    await asyncio.sleep(0.05)
    assert looks == 1
    await buffer.fail_prompt(second.lease_id, Failure.GENERATION, "")
    (again,) = (await asyncio.wait_for(waiting, 5)).leases
    assert (again.group_id, looks) == (second.group_id, 2)


async def test_a_poll_is_woken_by_a_change_and_not_by_a_timer():
    changes = Changes(asyncio.get_running_loop())
    looks = 0

    async def look():
        nonlocal looks
        looks += 1
        return looks, looks == 3

    polling = asyncio.create_task(changes.poll(look, 30))
    for _ in range(2):
        await asyncio.sleep(0.02)
        changes.announce()
    assert await asyncio.wait_for(polling, 5) == 3


async def test_a_change_during_a_look_is_not_missed():
    changes = Changes(asyncio.get_running_loop())
    looks = 0

    async def look():
        nonlocal looks
        looks += 1
        if looks == 1:
            changes.announce()  # it happens after this look read its state
        return looks, looks == 2

    assert await asyncio.wait_for(changes.poll(look, 30), 5) == 2


async def test_a_poll_ends_with_its_time_or_with_the_service():
    changes = Changes(asyncio.get_running_loop())

    async def look():
        return "blocked", False

    assert await changes.poll(look, 0.05) == "blocked"
    assert await changes.poll(look, 0) == "blocked"
    polling = asyncio.create_task(changes.poll(look, 30))
    await asyncio.sleep(0.02)
    changes.stop()
    with pytest.raises(Draining):
        await polling


class Beats(ManualClock):
    """Every sleep ends at once, and half a second later."""

    async def sleep(self, seconds):
        await asyncio.sleep(0)
        self.advance(seconds)


@pytest.fixture
def no_space(monkeypatch):
    """Statements that change rows meet a full disk while `full` holds something."""
    full = []
    real = Database.run

    def run(self, sql, *values):
        if full and sql.startswith(("UPDATE", "INSERT")):
            raise sqlite3.OperationalError("database or disk is full")
        return real(self, sql, *values)

    monkeypatch.setattr(Database, "run", run)
    return full


async def test_the_sweep_outlives_a_full_disk(ledger_dir, no_space, caplog):
    clock = Beats()
    opened = Buffer(Ledger(LedgerOptions(folder=ledger_dir / "ledger", run_id=RUN_ID, seed=7), clock))
    await opened.create_table(table(write_prompts(ledger_dir / "train.jsonl", 10)))
    await opened.open_incarnation(RUN_ID, 0, 0, "", regenerate=False)
    await opened.announce_version(Version(RUN_ID, 1, 0))
    await opened.lease_prompts("w", 2, [], 0)
    no_space.append("full")
    sweep = asyncio.create_task(opened.sweep())
    while clock.now() < 70:
        await asyncio.sleep(0.01)
    assert not sweep.done()
    assert (await opened.table("train")).counts.open == 2
    no_space.clear()
    while (await opened.table("train")).counts.open:
        await asyncio.sleep(0.01)
    assert [record.message for record in caplog.records if "commit failed" in record.message] != []
    assert len([record for record in caplog.records if "commit failed" in record.message]) == 1
    await opened.close()
    await asyncio.wait_for(sweep, 5)


async def test_a_keep_alive_that_came_in_time_counts(buffer):
    """The process stood still, or its disk did: what the buffer could not hear in time was still said in time."""
    clock = buffer._ledger.clock
    lease, other = (await buffer.lease_prompts("w", 2, [], 0)).leases
    entered, release = threading.Event(), threading.Event()

    def stand_still(ledger):
        entered.set()
        return release.wait(10)

    stalled = buffer._writer.submit(stand_still)
    assert await asyncio.to_thread(entered.wait, 10)
    beat = asyncio.create_task(buffer.keep_alive("w", [lease.lease_id]))
    await asyncio.sleep(0.05)
    clock.advance(90)
    release.set()
    assert stalled.result(10)
    assert await beat == ([], 60)
    assert (await buffer.table("train")).counts.open == 2  # the other one has the time that it had
    for _ in range(120):
        clock.advance(0.5)
        await buffer.keep_alive("w", [])
    assert (await buffer.keep_alive("w", [other.lease_id]))[0] == [other.lease_id]
