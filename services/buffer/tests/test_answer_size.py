"""Answers are filled by bytes as well as by count."""

from __future__ import annotations

import json

import pytest

from vime.buffer.v1 import table_service_pb2 as table_pb
from vime_buffer import convert
from vime_buffer.answer_size import lease_bytes, record_room
from vime_buffer.catalog import open_source
from vime_buffer.ledger import LedgerOptions
from vime_buffer.sources import SourceUnusable
from vime_buffer.testing import Desk, table

from .wire import buffer


def write(folder, prompts):
    path = folder / "large.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return path


async def test_32_records_of_3_mb_come_in_as_many_answers_as_they_need(tmp_path):
    path = write(tmp_path, (str(n) + "x" * 3_000_000 for n in range(32)))
    train = {"source": {"path": str(path)}, "sampling": {"max_tokens": 8}, "groups_per_step": 32}
    async with buffer(tmp_path, {"train": train}) as call:
        await call.begin()
        indices, answers = [], 0
        while len(indices) < 32:
            answer = await call.lease(32)
            assert answer.leases
            indices += [lease.prompt.index for lease in answer.leases]
            answers += 1
        assert (indices, answers) == (list(range(32)), 3)
        info = (await call.tables.GetTable(table_pb.GetTableRequest(name="train"), timeout=10)).table
        assert (info.counts.prompts_drawn, info.counts.prompts_open) == (32, 32)


async def test_a_page_ends_where_the_message_is_full(tmp_path):
    cap = 256 << 10
    async with buffer(tmp_path, message_bytes=cap) as call:
        config = table_pb.TableConfig(samples_per_prompt=1)
        config.source.path, config.source.name = str(tmp_path / "heldout.jsonl"), "heldout"
        config.sampling.max_tokens = 4
        config.sampling.extra_json = json.dumps({"x": "y" * 50_000})
        expected = [f"eval/{n:02}" for n in range(12)]
        for config.name in expected:
            await call.tables.CreateTable(table_pb.CreateTableRequest(config=config), timeout=10)
        names, token, pages = [], "", 0
        while token or not pages:
            page = await call.tables.ListTables(table_pb.ListTablesRequest(page_token=token), timeout=10)
            assert page.ByteSize() <= cap
            names += [info.config.name for info in page.tables]
            token, pages = page.next_page_token, pages + 1
        assert (names, pages) == ([*expected, "train"], 3)


@pytest.mark.parametrize(
    "prompt",
    [
        "\u6587" * 5000,
        [{"role": "user", "content": "\u00e9" * 5000}, {"role": "tool", "content": "", "tool_call_id": "x" * 99}] * 9,
        [{"role": "assistant", "content": None, "tool_calls": [[1, 2, 3]] * 999}],
        [2**32 - 1] * 5000,
        [7] * 5000,
    ],
)
def test_no_lease_is_larger_than_what_was_counted(ledger_dir, prompt):
    settings = table(write(ledger_dir, [prompt]), samples_per_prompt=3)
    desk = Desk(ledger_dir / "ledger", [settings])
    desk.begin()
    (lease,) = desk.lease(1).leases
    desk.close()
    size = convert.lease_to_proto(lease, settings).ByteSize()
    assert size <= lease_bytes(lease.record, settings) <= 2 * size + 5000


def test_a_record_that_fits_no_answer_is_refused_at_load(ledger_dir):
    settings = table(write(ledger_dir, ["a", "x" * 600_000]))
    options = LedgerOptions(folder=ledger_dir, run_id="run", seed=0, message_bytes=1 << 20)
    room = record_room(settings, 1 << 20)
    with pytest.raises(SourceUnusable, match=rf"line 2 \(byte 16\): needs 1200014 bytes .* at most {room}"):
        open_source(settings, options)
