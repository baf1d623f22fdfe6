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
from vime_service.errors import (
    AlreadyExists,
    DataLoss,
    Draining,
    FailedPrecondition,
    InvalidArgument,
    StorageFailed,
)


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


@pytest.mark.parametrize(
    ("code", "kind"),
    [(sqlite3.SQLITE_IOERR, StorageFailed), (sqlite3.SQLITE_CORRUPT, DataLoss), (sqlite3.SQLITE_NOTADB, DataLoss)],
)
async def test_a_database_that_cannot_be_read_is_a_typed_error_and_no_reader_is_lost(buffer, monkeypatch, code, kind):
    def refuse(*_):
        error = sqlite3.DatabaseError("refused")
        error.sqlite_errorcode = code
        raise error

    monkeypatch.setattr(Database, "one", refuse)
    monkeypatch.setattr(Database, "rollback", refuse)
    with pytest.raises(kind, match=r"ledger.sqlite.*refused"):
        await buffer.table("train")
    monkeypatch.undo()
    assert (await buffer.table("train")).counts.open == 0


async def test_a_repeated_request_gets_the_leases_that_answered_it(buffer):
    first = await buffer.lease_prompts("w", 2, [], 0, "r1")
    again = await buffer.lease_prompts("w", 2, [], 0, "r1")
    assert len(first.leases) == 2
    assert again == first
    assert (await buffer.table("train")).counts.drawn == 2
    assert (await buffer.lease_prompts("another", 2, [], 0, "r1")).leases == ()
    await buffer.fail_prompt(first.leases[0].lease_id, Failure.GENERATION, "")
    assert (await buffer.lease_prompts("w", 2, [], 0, "r1")).leases == first.leases[1:]
    (other,) = (await buffer.lease_prompts("w", 2, [], 0, "r2")).leases
    assert other.attempt == 1
    with pytest.raises(InvalidArgument, match="request_id has 129 characters"):
        await buffer.lease_prompts("w", 2, [], 0, "x" * 129)


async def test_the_repeat_of_a_call_that_was_left_keeps_its_leases(buffer, monkeypatch):
    """The caller's connection broke while the answer was committed, and its channel asks again at once."""
    entered, release = threading.Event(), threading.Event()
    real = leases.lease_prompts

    def slow(*arguments):
        entered.set()
        assert release.wait(10)
        return real(*arguments)

    monkeypatch.setattr(leases, "lease_prompts", slow)
    left = asyncio.create_task(buffer.lease_prompts("w", 2, [], 5.0, "r1"))
    assert await asyncio.to_thread(entered.wait, 10)
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    repeat = asyncio.create_task(buffer.lease_prompts("w", 2, [], 5.0, "r1"))
    await asyncio.sleep(0.05)
    release.set()
    got = (await repeat).leases
    await asyncio.sleep(0.05)
    assert [lease.attempt for lease in got] == [0, 0]
    assert await buffer.keep_alive("w", [lease.lease_id for lease in got]) == ([], 60)
    assert (await buffer.table("train")).counts.drawn == 2
    assert not buffer._newest


async def test_a_broken_law_is_logged_once_with_its_numbers(buffer, caplog):
    await buffer.check_laws()
    await buffer._write(lambda ledger: ledger.bump(1, "drawn", n=3))
    for _ in range(3):
        await buffer.check_laws()
    (record,) = [record for record in caplog.records if "conservation" in record.getMessage()]
    assert "drawn 3, accounted for 0" in str(record.__dict__)
    await buffer._write(lambda ledger: ledger.bump(1, "drawn", n=-3))
    await buffer.check_laws()
    await buffer._write(lambda ledger: ledger.bump(1, "drawn", n=1))
    await buffer.check_laws()
    assert len([record for record in caplog.records if "conservation" in record.getMessage()]) == 2


async def test_a_table_of_another_file_under_a_used_source_name_is_refused(buffer, ledger_dir):
    other = write_prompts(ledger_dir / "heldout.jsonl", 3, first=50)
    with pytest.raises(InvalidArgument, match=r'"train" is the source .*train.jsonl of table "train"'):
        await buffer.create_table(table(other, name="eval/heldout", source={"name": "train"}))
    await buffer.create_table(table(ledger_dir / "train.jsonl", name="eval/same", source={"name": "train"}))
    await buffer.create_table(table(other, name="eval/heldout"))


async def test_making_a_table_again_moves_its_file_and_takes_no_other(buffer, ledger_dir):
    (ledger_dir / "train.jsonl").rename(ledger_dir / "moved.jsonl")
    made = await buffer.create_table(table(ledger_dir / "moved.jsonl", source={"name": "train"}))
    assert made.source.path == ledger_dir / "moved.jsonl"
    assert len((await buffer.lease_prompts("w", 1, [], 0)).leases) == 1
    other = write_prompts(ledger_dir / "other.jsonl", 11)
    with pytest.raises(AlreadyExists, match="other settings: source"):
        await buffer.create_table(table(other, source={"name": "train"}))
    with pytest.raises(FailedPrecondition, match="is said by the configuration at a restart"):
        await buffer.update_table(table(other, source={"name": "train"}))
    assert (await buffer.update_table(made)).settings == made


async def test_a_reader_that_was_overtaken_by_a_rewind_marks_nothing(buffer, ledger_dir):
    async def generate():
        for lease in (await buffer.lease_prompts("w", 9, [], 0)).leases:
            insert = finished(lease)
            await buffer._write(lambda ledger, insert=insert: leases.insert_group(ledger, insert))

    await generate()
    ids = [group.group_id for group in (await buffer.lease_batch(1, 1, "train", 1)).groups]
    reading = buffer.get_groups(ids, 1)
    assert len(await anext(reading)) == 1
    path = ledger_dir / "ledger" / "segments" / "segment-00000001.seg"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(DataLoss):
        [part async for part in buffer.get_groups(ids[1:], 1)]
    await buffer.open_incarnation(RUN_ID, 0, 0, "", regenerate=False)
    await buffer.announce_version(Version(RUN_ID, 2, 0))
    await generate()
    with pytest.raises(FailedPrecondition, match="changed while it was read"):
        await anext(reading)
    assert [group.group_id for group in (await buffer.lease_batch(2, 1, "train", 1)).groups] == ids
    assert len([part async for part in buffer.get_groups(ids, 1)]) == 2
