"""Which prompts may be leased now: eval rounds first, then what the limiter of each table lets in.

Within a table: places of recorded batches that lost their group, then prompts that were admitted before, then new ones
from the source. All in admission order, so that nothing overtakes. The first, and those of the second that training
needs next, wait for no slot: a rewind may have filled all of them with groups that can only be trained after these.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from vime_buffer.ledger import Ledger, RunState, Table
from vime_buffer.limiter import Limits, Occupancy, free_slots, may_refill, near_enough
from vime_buffer.values import Blocked, State, prompt_id
from vime_buffer.views import waiting_places


@dataclass(frozen=True, slots=True)
class Admitted:
    """Row ids of prompts to lease, or why there are none."""

    rows: tuple[int, ...] = ()
    blocked: Blocked = Blocked.NOT
    counts: Mapping[str, int] = field(default_factory=dict)


def admit(ledger: Ledger, wanted: int, tables: Collection[str]) -> Admitted:
    """Up to `wanted` prompts of `tables`; new ones get their row and admission number here."""
    run = ledger.run()
    if run.policy is None:
        return Admitted(blocked=Blocked.NO_VERSION, counts={"incarnation": run.incarnation})
    rows = _eval_rows(ledger, wanted, tables)
    refusals: list[Admitted] = []
    for table in ledger.tables.values():
        if table.name not in tables or table.settings.is_eval:
            continue
        more = _table_rows(ledger, run, table, wanted - len(rows)) if len(rows) < wanted else Admitted()
        rows += more.rows
        if more.blocked is not Blocked.NOT:
            refusals.append(more)
    if rows:
        return Admitted(tuple(rows))
    refusals += _eval_refusal(ledger, run, tables, alone=not refusals)
    order = (
        Blocked.ADMISSION,
        Blocked.EVAL,
        Blocked.GENERATING,
        Blocked.SOURCE,  # it may come back: until then the data has not ended
        Blocked.END_OF_DATA,
        Blocked.CLOSED,
    )
    return min(refusals, key=lambda refusal: order.index(refusal.blocked))


def _eval_rows(ledger: Ledger, wanted: int, tables: Collection[str]) -> list[int]:
    rounds = ledger.db.all(
        "SELECT rounds.table_id, rounds.step FROM rounds WHERE done_at IS NULL AND version_step IS NOT NULL "
        "ORDER BY step, table_id"
    )
    rows: list[int] = []
    for found in rounds:
        if len(rows) >= wanted:
            break
        table = ledger.table_by_id(found["table_id"])
        if table.name in tables and not table.blocked:
            rows += _ids(
                ledger,
                "SELECT id FROM groups WHERE table_id = ? AND eval_step = ? AND state = 0 ORDER BY admission LIMIT ?",
                found["table_id"],
                found["step"],
                wanted - len(rows),
            )
    return rows


def _eval_refusal(ledger: Ledger, run: RunState, tables: Collection[str], *, alone: bool) -> list[Admitted]:
    """Why no eval prompt is there. `alone`: the worker draws from no other table, so this is its whole answer."""
    ids = [table.id for table in ledger.tables.values() if table.settings.is_eval and table.name in tables]
    marks = ",".join("?" * len(ids))
    pending = ledger.db.value(
        f"SELECT count(*) FROM groups JOIN rounds ON rounds.table_id = groups.table_id AND rounds.step = eval_step "
        f"WHERE groups.table_id IN ({marks}) AND done_at IS NULL AND groups.state IN (0, 1)",
        *ids,
    )
    if pending:
        return [Admitted(blocked=Blocked.EVAL, counts={"eval_pending": pending})]
    if not alone:
        return []
    trains = [row["closed"] for row in ledger.db.all("SELECT closed FROM tables WHERE name NOT LIKE 'eval/%'")]
    ended = bool(trains) and all(trains)  # no step follows that could open a round
    counts = {"eval_pending": 0, "completed_step": run.completed_step}
    return [Admitted(blocked=Blocked.CLOSED if ended else Blocked.ADMISSION, counts=counts)]


def _table_rows(ledger: Ledger, run: RunState, table: Table, wanted: int) -> Admitted:
    row = ledger.db.one("SELECT closed, drops_in_a_row FROM tables WHERE id = ?", table.id)
    assert row is not None, "tables in memory are in the rows"
    if row["closed"]:
        return Admitted(blocked=Blocked.CLOSED, counts={"completed_step": run.completed_step})
    counts = occupancy_counts(ledger, run, table)
    if table.blocked and (counts["queued"] or not exhausted(ledger, table)):
        return Admitted(blocked=Blocked.SOURCE, counts=counts)
    if row["drops_in_a_row"] >= table.settings.max_drops_in_a_row:
        # Generating more would go on for ever; LeaseBatch tells the trainer, whose next incarnation may try again.
        return Admitted(blocked=Blocked.ADMISSION, counts={**counts, "drops_in_a_row": row["drops_in_a_row"]})
    failed = ledger.failed_in_a_row[table.id]
    if failed >= table.settings.max_failures_in_a_row:  # likewise
        return Admitted(blocked=Blocked.ADMISSION, counts={**counts, "failed_in_a_row": failed})
    refills = _refills(ledger, run, table, wanted)
    due = min(_due(ledger, run, table), wanted - len(refills))
    slots = max(0, min(counts["free_slots"], wanted - len(refills)) - due)  # they take theirs first
    waiting = _ids(
        ledger,
        "SELECT id FROM groups WHERE table_id = ? AND state = 0 AND train_step IS NULL ORDER BY admission LIMIT ?",
        table.id,
        due + slots,
    )
    rows = refills + waiting + _draw(ledger, table, due + slots - len(waiting))
    if rows:
        return Admitted(tuple(rows))
    if counts["free_slots"] == 0 and (counts["queued"] or not exhausted(ledger, table)):
        return Admitted(blocked=Blocked.ADMISSION, counts=counts)
    waits = counts["open"] or counts["queued"]
    return Admitted(blocked=Blocked.GENERATING if waits else Blocked.END_OF_DATA, counts=counts)


def _refills(ledger: Ledger, run: RunState, table: Table, wanted: int) -> list[int]:
    """Places of recorded batches, nearest first, as far ahead as staleness allows."""
    unpublished = ledger.unpublished_steps(run)
    found = ledger.db.all(
        "SELECT id, train_step FROM groups WHERE table_id = ? AND state = 0 AND train_step IS NOT NULL "
        "ORDER BY train_step, place LIMIT ?",
        table.id,
        wanted,
    )
    k = table.settings.max_staleness
    return [r["id"] for r in found if may_refill(r["train_step"], run.completed_step, k, unpublished)]


def _due(ledger: Ledger, run: RunState, table: Table) -> int:
    """How many of the waiting prompts, the first in admission order, belong to batches near enough to be made now."""
    newest = max(run.leased_step, ledger.db.value("SELECT coalesce(max(step), 0) FROM batches"))
    limits = _limits(table)
    within = near_enough(newest, run.completed_step, limits, ledger.unpublished_steps(run))
    sql = (
        "SELECT count(*) FROM (SELECT state FROM groups WHERE table_id = ? AND state IN (0, 1, 2) "
        "AND train_step IS NULL ORDER BY admission LIMIT ?) WHERE state = 0"
    )
    return int(ledger.db.value(sql, table.id, within))


def may_admit(ledger: Ledger, run: RunState, table: Table) -> bool:
    """True if a worker that asks would be given a prompt that waits, or one for a free slot."""
    free = occupancy_counts(ledger, run, table)["free_slots"]
    return free > 0 or bool(_refills(ledger, run, table, 1)) or _due(ledger, run, table) > 0


def _limits(table: Table) -> Limits:
    settings = table.settings
    return Limits(settings.groups_per_step, settings.max_staleness, settings.capacity)


def _draw(ledger: Ledger, table: Table, wanted: int) -> list[int]:
    """Admit new prompts: the cursor moves and the rows appear in one transaction."""
    source = table.source
    if wanted <= 0 or source is None:
        return []
    cursor = ledger.db.one("SELECT epoch, position, next_admission FROM tables WHERE id = ?", table.id)
    assert cursor is not None, "tables in memory are in the rows"
    epoch, position, admission = cursor["epoch"], cursor["position"], cursor["next_admission"]
    drawn: list[tuple[object, ...]] = []
    while len(drawn) < wanted and source.has(epoch):
        index = source.index_at(epoch, position)
        name = f"{table.name}/{prompt_id(source.settings.name, epoch, index)}"
        drawn.append((table.id, name, admission, epoch, index, State.QUEUED))
        admission += 1
        position += 1
        if position == source.records:
            epoch, position = epoch + 1, 0
    if drawn:
        ledger.db.many(
            "INSERT INTO groups (table_id, group_id, admission, epoch, source_index, state) VALUES (?, ?, ?, ?, ?, ?)",
            drawn,
        )
        ledger.db.run(
            "UPDATE tables SET epoch = ?, position = ?, next_admission = ? WHERE id = ?",
            epoch, position, admission, table.id,
        )  # fmt: skip
    first = admission - len(drawn)
    return _ids(
        ledger,
        "SELECT id FROM groups WHERE table_id = ? AND admission >= ? ORDER BY admission LIMIT ?",
        table.id,
        first,
        len(drawn),
    )


def exhausted(ledger: Ledger, table: Table) -> bool:
    """True if the source has no more prompts that were never admitted."""
    return not table.settings.source.has(ledger.db.value("SELECT epoch FROM tables WHERE id = ?", table.id))


def occupancy_counts(ledger: Ledger, run: RunState, table: Table) -> dict[str, int]:
    """The counts behind a refusal: who holds the slots, and how far training is."""
    rows = ledger.db.all(
        "SELECT state, count(*) AS n FROM groups WHERE table_id = ? AND state IN (0, 1, 2, 3) GROUP BY state", table.id
    )
    by_state = {row["state"]: int(row["n"]) for row in rows}
    occupancy = Occupancy(
        by_state.get(State.OPEN, 0),
        by_state.get(State.STORED, 0),
        by_state.get(State.LEASED, 0),
        waiting_places(ledger.db, table.id),
    )
    settings = table.settings
    unpublished = ledger.unpublished_steps(run)
    return {
        "queued": by_state.get(State.QUEUED, 0),
        "open": occupancy.open,
        "stored": occupancy.stored,
        "leased": occupancy.leased,
        "free_slots": free_slots(occupancy, _limits(table), unpublished),
        "groups_per_step": settings.groups_per_step,
        "max_staleness": settings.max_staleness,
        "policy_step": run.policy.step if run.policy else 0,
        "unpublished_steps": unpublished,
        "completed_step": run.completed_step,
    }


def _ids(ledger: Ledger, sql: str, *values: object) -> list[int]:
    return [row["id"] for row in ledger.db.all(sql, *values)] if values[-1] else []
