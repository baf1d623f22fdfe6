"""Groups that training found it cannot use: out of their batch, counted, kept for people, and made again.

The payload is copied into the database, so that a few bad groups do not keep whole segment files alive. A group that
was taken out is never served again, whatever is resumed: its row begins the next attempt in the same transaction.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence

from vime_buffer.ledger import NO_PAYLOAD, Ledger, Table
from vime_buffer.schema import Database
from vime_buffer.values import UNUSABLE, Place, Quarantine, QuarantinedRow, State, Unusable, page_start, prompt_id
from vime_service.errors import DataLoss, FailedPrecondition, InvalidArgument, NotFound, WrongStep
from vime_service.logging import get_logger

_log = get_logger(__name__)
_LONGEST_DETAIL = 500


def quarantine_groups(
    ledger: Ledger, incarnation: int, step: int, table_name: str, groups: Sequence[Unusable]
) -> Quarantine:
    """Take groups out of the leased batch of `step`, all or none. Asked again, it answers the same.

    The caller has `check_unusable` follow in a transaction of its own: what was taken out stays out, also where the
    bound says that the run must end, so that a run that is resumed does not meet it again.

    Raises:
        StaleIncarnation, NotFound: see `Ledger`.
        WrongStep: the table has no leased batch of this step.
        FailedPrecondition: a group is not in that batch, or of another attempt.
        InvalidArgument: no group is named.
    """
    run = ledger.check_incarnation(incarnation)
    table = ledger.table(table_name)
    if not groups:
        raise InvalidArgument("groups is empty: no group is named", field="groups")
    named = {(group.group_id, group.attempt): group for group in groups}.values()
    given_up = [_once(ledger, table, step, group, run.completed_step) for group in named]
    drop_empty_batches(ledger)
    _make_room(ledger)
    ledger.segments_may_have_died = ledger.workers_may_go_on = True
    return Quarantine(given_up.count(False), given_up.count(True))


def check_unusable(ledger: Ledger, table: Table) -> None:
    """Raises FailedPrecondition where more groups in a row were unusable than the table allows."""
    in_a_row = ledger.db.value("SELECT unusable_in_a_row FROM tables WHERE id = ?", table.id)
    limit = table.settings.max_unusable_in_a_row
    if in_a_row > limit:
        last = ledger.db.one(
            "SELECT group_id, detail FROM quarantined WHERE table_id = ? ORDER BY id DESC LIMIT 1", table.id
        )
        assert last is not None, "they were counted when they got their rows"
        raise FailedPrecondition(
            f'table "{table.name}": training could not use {in_a_row} groups in a row (limit max_unusable_in_a_row '
            f"{limit}); the last: {last['group_id']}: {last['detail'] or 'without a word'}",
            state=f"unusable_in_a_row {in_a_row}",
            wanted=f"at most {limit}",
        )


def _once(ledger: Ledger, table: Table, step: int, group: Unusable, completed_step: int) -> bool:
    """True if its prompt is given up."""
    before = ledger.db.one(
        "SELECT given_up FROM quarantined WHERE group_id = ? AND attempt = ?", group.group_id, group.attempt
    )
    if before is not None:
        return bool(before["given_up"])
    batch = ledger.db.one("SELECT state, table_id FROM batches WHERE step = ?", step)
    if batch is None or batch["state"] != "leased" or batch["table_id"] != table.id:
        raise WrongStep(
            f'step {step} has no leased batch of table "{table.name}"; the last one completed is {completed_step}',
            step=step,
            expected=completed_step + 1,
        )
    row = ledger.db.one("SELECT * FROM groups WHERE group_id = ? AND train_step = ?", group.group_id, step)
    if row is None or row["state"] != State.LEASED or row["attempt"] != group.attempt:
        found = "no such group" if row is None else f"attempt {row['attempt']}, {State(row['state']).name.lower()}"
        raise FailedPrecondition(
            f"attempt {group.attempt} of group {group.group_id} is not in the batch of step {step}: {found}",
            state=found,
            wanted="leased",
        )
    return _take_out(ledger, table, row, group.detail[:_LONGEST_DETAIL])


def _take_out(ledger: Ledger, table: Table, row: sqlite3.Row, detail: str) -> bool:
    given_up = bool(row["failures"] + 1 >= table.settings.max_attempts)
    ledger.db.run(
        "INSERT INTO quarantined (table_id, group_id, attempt, prompt_id, train_step, detail, worker_id, engines, "
        "bytes, payload, given_up) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        table.id, row["group_id"], row["attempt"],
        prompt_id(table.settings.source.name, row["epoch"], row["source_index"]), row["train_step"], detail,
        row["inserted_by"] or "", row["engines"] or "[]", row["bytes"], _payload(ledger, row), given_up,
    )  # fmt: skip
    if given_up:
        # The attempt ended with an insert and counts as that; the prompt has no attempt left to count.
        ledger.db.run(
            f"UPDATE groups SET state = ?, reason = ?, train_step = NULL, place = NULL, {NO_PAYLOAD} WHERE id = ?",
            State.GIVEN_UP, UNUSABLE, row["id"],
        )  # fmt: skip
    else:
        ledger.db.run(
            f"UPDATE groups SET state = ?, attempt = attempt + 1, failures = failures + 1, {NO_PAYLOAD} WHERE id = ?",
            State.QUEUED, row["id"],
        )  # fmt: skip
    ledger.db.run("UPDATE tables SET unusable_in_a_row = unusable_in_a_row + 1 WHERE id = ?", table.id)
    _log.warning(
        "group quarantined", group_id=row["group_id"], attempt=row["attempt"], train_step=row["train_step"],
        worker_id=row["inserted_by"], given_up=given_up, detail=detail,
    )  # fmt: skip
    return given_up


def _payload(ledger: Ledger, row: sqlite3.Row) -> bytes | None:
    """None where the budget has no room for it, or it cannot be read: the group leaves its batch all the same."""
    if row["bytes"] > ledger.options.quarantine_bytes:
        return None
    try:
        return ledger.segments.read(Place(row["segment"], row["offset"], row["bytes"]))
    except DataLoss as error:
        _log.warning("a quarantined payload cannot be kept", group_id=row["group_id"], cause=error.message)
        return None


def _make_room(ledger: Ledger) -> None:
    """The newest payloads that together fit are kept."""
    ledger.db.run(
        "UPDATE quarantined SET payload = NULL WHERE payload IS NOT NULL AND id NOT IN (SELECT id FROM ("
        "SELECT id, sum(bytes) OVER (ORDER BY id DESC) AS newer FROM quarantined WHERE payload IS NOT NULL"
        ") WHERE newer <= ?)",
        ledger.options.quarantine_bytes,
    )


def drop_empty_batches(ledger: Ledger) -> None:
    """The last batches that are leased and have no group left are not leased any more: their steps choose anew."""
    while ledger.db.run(
        "UPDATE batches SET state = 'recorded' WHERE step = (SELECT leased_step FROM run) AND state = 'leased' "
        "AND NOT EXISTS (SELECT 1 FROM groups WHERE train_step = step)"
    ):
        ledger.db.run("UPDATE run SET leased_step = leased_step - 1")


# ------------------------------------------------------------------ what can be seen (reading connection)


def list_quarantined(db: Database, table: str, page_token: str, limit: int) -> tuple[list[QuarantinedRow], str]:
    """A page, the newest first, and the token of the next one ("" on the last).

    Raises:
        NotFound: no such table.
        InvalidArgument: not a token of ours.
    """
    table_id = db.value("SELECT id FROM tables WHERE name = ?", table)
    if table_id is None:
        raise NotFound(f'there is no table "{table}"', kind="table", name=table)
    before = page_start(page_token)
    rows = db.all(
        "SELECT id, group_id, attempt, prompt_id, train_step, detail, worker_id, engines, bytes, "
        "payload IS NOT NULL AS kept FROM quarantined WHERE table_id = ? AND (? = 0 OR id < ?) "
        "ORDER BY id DESC LIMIT ?",
        table_id, before, before, limit + 1,
    )  # fmt: skip
    page = [
        QuarantinedRow(
            row["group_id"],
            row["attempt"],
            row["prompt_id"],
            row["train_step"],
            row["detail"],
            row["worker_id"],
            tuple(json.loads(row["engines"])),
            row["bytes"],
            bool(row["kept"]),
        )
        for row in rows[:limit]
    ]
    return page, str(rows[limit - 1]["id"]) if len(rows) > limit else ""


def quarantined_payload(db: Database, group_id: str, attempt: int) -> bytes:
    """The group as it was inserted.

    Raises:
        NotFound: it was never quarantined, or newer ones have taken its room.
    """
    row = db.one("SELECT payload, bytes FROM quarantined WHERE group_id = ? AND attempt = ?", group_id, attempt)
    name = f"{group_id}#{attempt}"
    if row is None:
        raise NotFound(f"attempt {attempt} of group {group_id} was never quarantined", kind="group", name=name)
    if row["payload"] is None:
        raise NotFound(
            f"the payload of attempt {attempt} of group {group_id}, {row['bytes']} bytes, is not kept: "
            "quarantine_bytes has no room for it beside newer ones",
            kind="payload",
            name=name,
        )
    return bytes(row["payload"])
