"""Disks that fail: a typed error, older data intact, and a service that goes on."""

from __future__ import annotations

import os
import sqlite3
from dataclasses import replace

import pytest

from vime_buffer import views
from vime_buffer.schema import Database
from vime_buffer.segments import Segments
from vime_buffer.values import Blocked
from vime_service.errors import DataLoss, FailedPrecondition, Internal, StorageFailed


def fail_with(number, message):
    def call(*_):
        raise OSError(number, message)

    return call


def test_a_disk_that_is_full_refuses_the_insert_and_takes_it_later(make_desk, monkeypatch):
    desk = make_desk()
    desk.begin()
    first, second = desk.lease().leases
    desk.insert(first)
    monkeypatch.setattr(os, "pwrite", fail_with(28, "No space left on device"))
    with pytest.raises(StorageFailed) as caught:
        desk.insert(second)
    assert caught.value.retry_after
    assert "segment-" in caught.value.metadata["path"]
    monkeypatch.undo()
    assert not desk.insert(second)
    assert len(desk.batch(1).groups) == 2


def test_a_sync_that_fails_acks_nothing_and_the_retry_is_stored_once(make_desk, monkeypatch):
    desk = make_desk()
    desk.begin()
    first, second = desk.lease().leases
    desk.insert(first)
    monkeypatch.setattr(os, "fdatasync", fail_with(5, "Input/output error"))
    with pytest.raises(StorageFailed):
        desk.insert(second)
    assert desk.counts().inserted == 1
    monkeypatch.undo()
    assert not desk.insert(second)
    groups = [group.group_id for group in desk.batch(1).groups]
    places = desk.call(lambda ledger: views.group_places(ledger.db, groups))
    assert len([desk.ledger.segments.read(place) for place in places]) == 2


def test_a_commit_that_fails_undoes_everything_and_leases_keep_their_holders(make_desk, monkeypatch):
    desk = make_desk()
    desk.begin()
    first, second = desk.lease().leases

    def no_commit(self):
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(Database, "commit", no_commit)
    for _ in range(3):
        with pytest.raises(StorageFailed, match="database or disk is full; older data is intact"):
            desk.writer.submit(lambda ledger: ledger.bump(1, "inserted")).result(10)
    monkeypatch.undo()
    assert desk.counts().inserted == 0
    assert not desk.insert(first)
    assert not desk.insert(second)


def test_one_refused_operation_does_not_spoil_the_others_of_its_batch(make_desk):
    desk = make_desk()

    def refuse(ledger):
        ledger.bump(1, "inserted", n=50)
        raise StorageFailed("no")

    def bug(ledger):
        ledger.bump(1, "inserted", n=50)
        raise ZeroDivisionError

    def good(ledger):
        ledger.bump(1, "requeued", n=1)
        ledger.bump(1, "drawn", n=1)
        return "done"

    futures = [desk.writer.submit(work) for work in (good, refuse, good, bug, good)]
    assert [futures[n].result(10) for n in (0, 2, 4)] == ["done"] * 3
    assert isinstance(futures[1].exception(10), StorageFailed)
    assert isinstance(futures[3].exception(10), ZeroDivisionError)
    assert (desk.counts().drawn, desk.counts().inserted) == (3, 0)


def test_a_damaged_database_is_named_at_start(make_desk, ledger_dir):
    make_desk().close()
    path = ledger_dir / "ledger" / "ledger.sqlite"
    path.write_bytes(b"this is no database" * 300)
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    with pytest.raises(DataLoss, match=r"ledger.sqlite is damaged or no ledger"):
        make_desk()


def test_a_ledger_of_a_later_schema_is_not_touched(make_desk, ledger_dir):
    make_desk().close()
    connection = sqlite3.connect(ledger_dir / "ledger" / "ledger.sqlite")
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(DataLoss, match="has schema 99; this version reads schemas up to 3"):
        make_desk()


def test_payloads_that_vanished_are_damage_of_those_groups_only(make_desk):
    desk = make_desk(40, options={"segment_bytes": 4096})
    desk.begin()
    for lease in desk.lease().leases:
        desk.insert(lease, payload=b"x" * 3000)
    lost, kept = [group.group_id for group in desk.batch(1).groups]
    (desk.folder / "segments" / "segment-00000001.seg").unlink()
    desk.close()
    desk = make_desk(40, options={"segment_bytes": 4096})
    places = desk.call(lambda ledger: views.group_places(ledger.db, [lost, kept]))
    with pytest.raises(DataLoss) as caught:
        desk.ledger.segments.read(places[0])
    assert caught.value.metadata["segment"] == "segment-00000001.seg"
    assert desk.ledger.segments.read(places[1]) == b"x" * 3000
    assert desk.batch(1).blocked is Blocked.NOT


def test_a_disk_that_refuses_reads_too_answers_every_call(make_desk, monkeypatch):
    desk = make_desk()
    desk.begin()
    first, second = desk.lease().leases

    def refuse(self, *_):
        raise sqlite3.OperationalError("disk I/O error")

    for name in ("commit", "rollback", "all", "one", "value"):
        monkeypatch.setattr(Database, name, refuse)
    for _ in range(3):
        with pytest.raises(StorageFailed, match="disk I/O error"):
            desk.writer.submit(lambda ledger: ledger.bump(1, "inserted")).result(10)
    monkeypatch.undo()
    assert desk.counts().inserted == 0
    assert not desk.insert(first)
    assert not desk.insert(second)


def test_a_disk_that_goes_on_failing_is_logged_once(make_desk, monkeypatch, caplog):
    desk = make_desk()
    desk.begin()

    def refuse(self):
        raise StorageFailed("cannot write to the disk")

    for owner, name in ((Database, "commit"), (Segments, "roll_back")):
        monkeypatch.setattr(owner, name, refuse)
    for _ in range(5):
        with pytest.raises(StorageFailed, match="cannot write to the disk"):
            desk.writer.submit(lambda ledger: ledger.bump(1, "inserted")).result(10)
    monkeypatch.undo()
    assert desk.counts().inserted == 0
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1


def test_a_fault_in_the_writer_itself_answers_every_call(make_desk, monkeypatch):
    desk = make_desk()

    def broken(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(desk.writer, "_on_commit", broken)
    with pytest.raises(Internal, match="ZeroDivisionError"):
        desk.writer.submit(lambda ledger: ledger.bump(1, "requeued")).result(10)
    monkeypatch.undo()
    assert desk.writer.submit(lambda ledger: ledger.bump(1, "drawn")).result(10) is None
    assert (desk.counts().drawn, desk.counts().requeued) == (1, 1)


def test_a_lease_loses_no_time_while_the_disk_refuses(make_desk, monkeypatch):
    desk = make_desk(lease_ttl=60)
    desk.begin()
    lease = desk.lease().leases[0]
    real = Database.commit

    def refuse(self):
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(Database, "commit", refuse)
    for _ in range(200):
        desk.clock.advance(0.5)
        with pytest.raises(StorageFailed):
            desk.writer.submit(lambda ledger: None).result(10)
    monkeypatch.setattr(Database, "commit", real)
    assert desk.keep_alive([lease.lease_id]) == ([], 60)


@pytest.mark.parametrize("beat", [1.5, 20])
def test_a_slow_buffer_still_ends_leases(make_desk, beat):
    desk = make_desk(lease_ttl=60)
    desk.begin()
    dead, alive = desk.lease().leases
    for _ in range(61):  # each beat costs a lease the second that a buffer in time may need
        desk.clock.advance(beat)
        assert desk.keep_alive([alive.lease_id]) == ([], 60)
    assert desk.keep_alive([dead.lease_id]) == ([dead.lease_id], 0)


TO_2 = (
    "DROP TABLE quarantined; ALTER TABLE run DROP COLUMN model; ALTER TABLE tables DROP COLUMN unusable_in_a_row; "
    "ALTER TABLE groups DROP COLUMN lease_sampling; ALTER TABLE groups DROP COLUMN inserted_by; "
    "ALTER TABLE groups DROP COLUMN engines; PRAGMA user_version = 2;"
)
TO_1 = (
    "DROP INDEX groups_request; ALTER TABLE groups DROP COLUMN request_id; "
    "ALTER TABLE batches DROP COLUMN published; PRAGMA user_version = 1;"
)


@pytest.mark.parametrize("back", [TO_2, TO_2 + TO_1])
def test_a_ledger_of_a_schema_before_goes_on(make_desk, ledger_dir, back):
    desk = make_desk()
    desk.begin()
    desk.train(1)
    leases = desk.lease().leases
    desk.close()
    connection = sqlite3.connect(ledger_dir / "ledger" / "ledger.sqlite")
    connection.executescript(back)
    connection.close()
    desk = make_desk()
    desk.complete(1)
    if TO_1 in back:
        desk.complete(1, publish=False)  # what was published then is not known any more
    for lease in leases:  # with seeds as they were made then
        desk.insert(replace(lease, seeds=(2**62, 2**62 + 1)))
    first = desk.batch(2).groups[0].group_id
    assert desk.quarantine(2, first).requeued == 1
    (lease,) = desk.lease().leases
    desk.insert(lease)
    desk.batch(2)
    desk.complete(2)
    with pytest.raises(FailedPrecondition, match=r"published_version \{1, 2\}, not unset"):
        desk.complete(2, publish=False)


@pytest.mark.parametrize("name", ["run#1", "run?mode=memory", "100%25", "a b"])
def test_a_folder_of_any_name_is_the_folder(make_desk, ledger_dir, name):
    desk = make_desk(folder=ledger_dir / name)
    desk.begin()
    reading = Database(ledger_dir / name / "ledger.sqlite", read_only=True)
    assert reading.value("SELECT incarnation FROM run") == 1
    reading.close()


def test_new_folders_are_synced_into_their_parents_once(make_desk, ledger_dir, monkeypatch):
    synced = []
    real = os.fsync

    def fsync(fd):
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    make_desk().close()
    assert synced == [str(ledger_dir), str(ledger_dir / "ledger")]
    make_desk()
    assert len(synced) == 2
