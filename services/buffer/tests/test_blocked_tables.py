"""A table whose source cannot be used is blocked by itself, and goes on once the file is back."""

from __future__ import annotations

import asyncio
import os
import resource
import sqlite3

import pytest

from vime.buffer.v1 import batch_service_pb2 as batch_pb
from vime.buffer.v1 import prompt_service_pb2 as prompt_pb
from vime.buffer.v1 import table_service_pb2 as table_pb
from vime_buffer import catalog, evals
from vime_buffer.schema import Database
from vime_buffer.testing import Desk, table, write_prompts
from vime_buffer.values import Blocked

from .wire import buffer


def come_back(desk, name="train"):
    found = desk.ledger.table(name)
    desk.call(
        lambda ledger: catalog.unblock(ledger, found, catalog.open_source(found.settings, ledger.options, found.digest))
    )


def change(path):
    path.write_bytes(path.read_bytes() + b'{"prompt": "another"}\n')


@pytest.mark.parametrize("harm", [os.unlink, change], ids=["gone", "changed"])
def test_a_restart_without_the_file_blocks_that_table_alone(make_desk, ledger_dir, harm):
    desk = make_desk(eval_prompts=2)
    desk.begin()
    held = desk.lease(1, ["train"]).leases[0]
    desk.close()
    path, content = ledger_dir / "train.jsonl", (ledger_dir / "train.jsonl").read_bytes()
    harm(path)
    tables = [table(path), table(ledger_dir / "heldout.jsonl", name="eval/heldout")]
    desk = Desk(ledger_dir / "ledger", tables)
    desk.begin()
    answer = desk.lease(5)
    assert {lease.table for lease in answer.leases} == {"eval/heldout"}
    for lease in answer.leases:
        desk.insert(lease)
    assert desk.lease(5).blocked is Blocked.SOURCE
    batch = desk.batch(1)
    assert batch.blocked is Blocked.SOURCE
    assert str(path) in batch.detail
    path.write_bytes(content)
    come_back(desk)
    assert desk.lease(1).leases[0].group_id == held.group_id
    assert desk.batch(1).detail == ""
    desk.close()


def test_a_file_that_goes_under_the_run_costs_nobody_a_lease(make_desk, ledger_dir):
    desk = make_desk(eval_prompts=2)
    desk.begin()
    os.rename(ledger_dir / "heldout.jsonl", ledger_dir / "away")
    answer = desk.lease(5)
    assert [lease.table for lease in answer.leases] == ["train", "train"]
    assert "heldout.jsonl cannot be read: No such file" in desk.ledger.table("eval/heldout").blocked
    for lease in answer.leases:
        desk.insert(lease)
    assert desk.batch(1).blocked is Blocked.EVAL  # it may come back at once
    desk.wait(61)
    assert len(desk.batch(1).groups) == 2
    os.rename(ledger_dir / "away", ledger_dir / "heldout.jsonl")
    come_back(desk, "eval/heldout")
    assert [lease.table for lease in desk.lease(2).leases] == ["eval/heldout"] * 2


def test_rounds_of_a_blocked_table_are_left_out(make_desk, ledger_dir):
    desk = make_desk(eval_prompts=2)
    os.unlink(ledger_dir / "heldout.jsonl")
    desk.ledger.table("eval/heldout").block("gone", 0.0)
    desk.begin()
    assert not desk.call(lambda ledger: evals.opened_at(ledger, 0))
    for lease in desk.lease().leases:
        desk.insert(lease)
    assert len(desk.batch(1).groups) == 2


def test_a_repeated_request_gets_what_can_be_read_and_loses_no_prompt(make_desk, ledger_dir):
    from vime_buffer.leases import lease_prompts

    desk = make_desk()
    desk.begin()

    def ask():
        return desk.call(lambda ledger: lease_prompts(ledger, "w", 2, (), "r"))

    first = [lease.group_id for lease in ask().leases]
    os.rename(ledger_dir / "train.jsonl", ledger_dir / "away")
    assert ask().blocked is Blocked.SOURCE
    os.rename(ledger_dir / "away", ledger_dir / "train.jsonl")
    come_back(desk)
    assert [lease.group_id for lease in ask().leases] == first
    assert desk.counts().requeued == 2


def test_many_tables_need_no_descriptors(ledger_dir):
    paths = [write_prompts(ledger_dir / f"{n}.jsonl", 2) for n in range(300)]
    tables = [table(path, name=f"eval/{n}") for n, path in enumerate(paths)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = max(int(number) for number in os.listdir("/proc/self/fd")) + 100  # other tests of this process hold some
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
    try:
        for _ in range(2):  # made, and found again
            desk = Desk(ledger_dir / "ledger", tables)
            desk.begin()
            assert len(desk.lease(1000).leases) == 600
            assert not any(table.blocked for table in desk.ledger.tables.values())
            desk.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_disk_that_refuses_meanwhile_does_not_end_the_look_out(tmp_path, monkeypatch):
    failed = asyncio.Semaphore(0)

    def no_commit(self):
        loop.call_soon_threadsafe(failed.release)
        raise sqlite3.OperationalError("database or disk is full")

    loop = asyncio.get_running_loop()
    monkeypatch.setattr("vime_buffer.buffer._MEND_S", 0.02)
    async with buffer(tmp_path) as call:
        await call.begin()
        os.rename(tmp_path / "train.jsonl", tmp_path / "away")
        assert (await call.lease()).blocked_by == prompt_pb.BLOCK_REASON_SOURCE
        with monkeypatch.context() as patch:
            patch.setattr(Database, "commit", no_commit)
            async with asyncio.timeout(30):
                for _ in range(5):
                    await failed.acquire()
        os.rename(tmp_path / "away", tmp_path / "train.jsonl")
        assert len((await call.lease(wait=9)).leases) == 2
        assert not call.service.stopping.is_set()


async def test_callers_are_told_why_and_go_on_by_themselves(tmp_path):
    async with buffer(tmp_path) as call:
        await call.begin()
        os.rename(tmp_path / "train.jsonl", tmp_path / "away")
        assert (await call.lease()).blocked_by == prompt_pb.BLOCK_REASON_SOURCE
        info = (await call.tables.GetTable(table_pb.GetTableRequest(name="train"), timeout=10)).table
        assert info.blocked == f"prompt source {tmp_path}/train.jsonl cannot be read: No such file or directory"
        request = batch_pb.LeaseBatchRequest(incarnation=call.incarnation, train_step=1)
        batch = await call.batches.LeaseBatch(request, timeout=1)
        assert (batch.blocked_by, batch.detail) == (prompt_pb.BLOCK_REASON_SOURCE, info.blocked)
        os.rename(tmp_path / "away", tmp_path / "train.jsonl")
        assert len((await call.lease(wait=9)).leases) == 2
        info = (await call.tables.GetTable(table_pb.GetTableRequest(name="train"), timeout=10)).table
        assert info.blocked == ""
