"""Tables over restarts: what may change, and what would silently mean other prompts."""

from __future__ import annotations

import json
import os

import pytest

from vime_buffer import catalog, views
from vime_buffer.testing import Desk, table, write_prompts
from vime_buffer.values import State
from vime_service.errors import FailedPrecondition, ImpossibleConfig, InvalidArgument, NotFound, Unavailable


def test_some_settings_may_change_at_a_restart_and_others_are_named(make_desk):
    make_desk(max_attempts=3).close()
    desk = make_desk(max_attempts=5, retained_bytes=99)
    assert desk.ledger.table("train").settings.max_attempts == 5
    desk.close()
    with pytest.raises(FailedPrecondition) as caught:
        make_desk(groups_per_step=4)
    assert "groups_per_step is 2 in the ledger and cannot become 4" in caught.value.message


def test_a_source_may_move_but_not_change(make_desk, ledger_dir):
    desk = make_desk(4)
    desk.begin()
    desk.train(1)
    desk.close()
    os.rename(ledger_dir / "train.jsonl", ledger_dir / "elsewhere.jsonl")
    moved = table(ledger_dir / "elsewhere.jsonl", source={"name": "train"})
    for tables in ([moved], []):  # where it is now is in the ledger
        desk = Desk(ledger_dir / "ledger", tables)
        assert desk.ledger.table("train").settings.source.path == ledger_dir / "elsewhere.jsonl"
        desk.lease()
        desk.close()
    other = table(write_prompts(ledger_dir / "other.jsonl", 4, first=9), source={"name": "train"})
    for path in (other, table(write_prompts(ledger_dir / "elsewhere.jsonl", 5), source={"name": "train"})):
        desk = Desk(ledger_dir / "ledger", [path])
        assert "changed since the run began" in desk.ledger.table("train").blocked
        desk.close()


def test_lines_that_are_skipped_now_and_were_not_before_move_no_record(ledger_dir):
    path = ledger_dir / "train.jsonl"
    path.write_text("".join(json.dumps({"prompt": "x" * size}) + "\n" for size in (1, 200_000, 2)))
    tables = [table(path, source={"lenient": True})]
    Desk(ledger_dir / "ledger", tables).close()
    desk = Desk(ledger_dir / "ledger", tables, message_bytes=300_000)  # the second is too large for that
    assert "other lines are skipped" in desk.ledger.table("train").blocked
    # A ledger that was begun before this was noted goes on.
    desk.call(lambda ledger: ledger.db.run("UPDATE tables SET source_digest = substr(source_digest, 1, 32)"))
    desk.close()
    desk = Desk(ledger_dir / "ledger", tables)
    assert not desk.ledger.table("train").blocked
    desk.close()


def test_bytes_that_are_kept_must_leave_room_for_new_ones(make_desk, ledger_dir):
    with pytest.raises(ImpossibleConfig) as caught:
        make_desk(retained_bytes=5000, options={"max_bytes": 5000})
    assert caught.value.metadata == {"retained_bytes": "5000", "max_bytes": "5000"}
    desk = make_desk(retained_bytes=4000, options={"max_bytes": 5000}, folder=ledger_dir / "second")
    sft = table(write_prompts(ledger_dir / "sft.jsonl", 4), name="sft", retained_bytes=1000)
    with pytest.raises(ImpossibleConfig):
        desk.call(lambda ledger: catalog.create_table(ledger, sft, catalog.open_source(sft, ledger.options)))
    larger = desk.ledger.table("train").settings.model_copy(update={"retained_bytes": 6000})
    with pytest.raises(ImpossibleConfig):
        desk.call(lambda ledger: catalog.update_table(ledger, larger))
    desk.close()
    with pytest.raises(ImpossibleConfig):  # of tables that are in no configuration as well
        Desk(ledger_dir / "second", max_bytes=3000)


def test_tables_may_shrink_together(ledger_dir):
    """Beside the old budget of the others none of them, nor a new one, would fit any more."""

    def tables(retained, *names):
        return [
            table(write_prompts(ledger_dir / f"{name}.jsonl", 4), name=name, retained_bytes=retained) for name in names
        ]

    Desk(ledger_dir / "ledger", tables(4000, "train", "sft"), max_bytes=9000).close()
    desk = Desk(ledger_dir / "ledger", tables(1000, "unscored", "train", "sft"), max_bytes=4000)
    assert [table.settings.retained_bytes for table in desk.ledger.tables.values()] == [1000] * 3
    desk.close()
    with pytest.raises(ImpossibleConfig):
        Desk(ledger_dir / "ledger", tables(1500, "unscored", "train", "sft"), max_bytes=4000)


def test_a_ledger_that_has_settings_without_effect_goes_on_without_them(make_desk):
    desk = make_desk(eval_prompts=2)
    old = {
        "train": {"eval_hold": False, "max_evictions": 5},
        "eval/heldout": {"publish_interval": 3, "max_evictions": 5},
    }
    for name, idle in old.items():
        stored = desk.ledger.table(name).settings.model_copy(update=idle).model_dump_json()
        values = ("UPDATE tables SET settings = ? WHERE name = ?", stored, name)
        desk.call(lambda ledger, values=values: ledger.db.run(*values))
    desk.close()
    desk = make_desk(eval_prompts=2)
    assert desk.ledger.table("train").settings.eval_hold


def test_another_seed_is_refused(make_desk):
    make_desk().close()
    with pytest.raises(FailedPrecondition, match="begun with seed 7, not 8"):
        make_desk(options={"seed": 8})


def test_one_folder_has_one_process(make_desk):
    make_desk()
    with pytest.raises(Unavailable, match="open in another process"):
        make_desk()


def test_groups_in_a_batch_cannot_be_deleted_and_a_refusal_deletes_nothing(make_desk):
    desk = make_desk(groups_per_step=1, max_staleness=2)
    desk.begin()
    held, free, waiting = desk.lease().leases
    desk.insert(held)
    desk.insert(free)
    desk.batch(1)

    def delete(*group_ids):
        return desk.call(lambda ledger: catalog.delete_groups(ledger, "train", group_ids))

    with pytest.raises(FailedPrecondition, match="is leased in the batch of step 1"):
        delete(free.group_id, held.group_id)
    with pytest.raises(FailedPrecondition, match="is open"):
        delete(waiting.group_id)
    with pytest.raises(NotFound):
        delete("train/none")
    assert desk.counts().dropped == {}
    assert delete(free.group_id, free.group_id) == 1
    assert desk.insert(free)  # a late retry finds that it was there
    desk.begin(0)
    with pytest.raises(FailedPrecondition, match="in the batch of step 1"):
        delete(held.group_id)  # stored again, but the ledger has it in a batch


def test_listings_page_in_admission_order_by_state_and_by_step(make_desk):
    desk = make_desk(groups_per_step=2, max_staleness=2)
    desk.begin()
    desk.train(1)
    desk.lease(1)

    def page(state=None, step=None, token="", limit=100):
        return desk.call(lambda ledger: views.list_groups(ledger.db, "train", state, step, None, token, limit))

    rows, token = page(limit=4)
    assert [row.admission for row in rows] == [1, 2, 3, 4]
    more, end = page(token=token, limit=4)
    assert ([row.admission for row in more], end) == ([5, 6, 7], "")
    assert [row.train_step for row in page(State.CONSUMED)[0]] == [1, 1]
    assert [row.group_id for row in page(step=1)[0]] == ["train/train:0:0", "train/train:0:1"]
    for wrong in ("x", "²", "-1", "9" * 5000):
        with pytest.raises(InvalidArgument, match="no page token"):
            page(token=wrong)
    desk.begin(0, recipe_digest="changed")
    assert [row.state for row in page(State.EVICTED)[0]] == [State.EVICTED] * 2
