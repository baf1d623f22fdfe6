"""The trainer's side: a batch is in the ledger before it is handed out, and a step is completed once."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from typing import Any, NoReturn

from vime_buffer.admission import exhausted, may_admit, occupancy_counts
from vime_buffer.evals import LATEST_ROUND, holding, open_due_rounds, opened_at, will_hold
from vime_buffer.ledger import Ledger, RunState, Table
from vime_buffer.limiter import staleness
from vime_buffer.quarantine import check_unusable, drop_empty_batches
from vime_buffer.selectors import Candidate
from vime_buffer.values import (
    EVICT_STALE,
    Awaited,
    BatchAnswer,
    BatchGroup,
    Blocked,
    Completed,
    Outcome,
    State,
    Version,
    prompt_id,
)
from vime_service.errors import FailedPrecondition, InvalidArgument, WrongStep
from vime_service.logging import get_logger

_log = get_logger(__name__)
_MOST_AWAITED = 16
_WANTED_FROM = 0.8
"""Share of the room for consumed groups from which CompleteStep asks for a checkpoint: one more batch should fit."""


def lease_batch(ledger: Ledger, incarnation: int, step: int, table_name: str, *, workers_ask: bool) -> BatchAnswer:
    """The batch of `step`, or why there is none yet.

    Raises:
        StaleIncarnation, NotFound: see `Ledger`.
        WrongStep: the step is neither leased nor the next.
        FailedPrecondition: filters dropped too many groups in a row, too many prompts in a row were
            given up, or training could not use too many in a row.
    """
    run = ledger.check_incarnation(incarnation)
    table = ledger.table(table_name)
    if table.settings.is_eval:
        raise InvalidArgument(
            f'table "{table_name}" is an eval table; it has no batches', field="table", value=table_name
        )
    batch = ledger.db.one("SELECT * FROM batches WHERE step = ?", step)
    if batch is not None and batch["state"] == "leased" and batch["table_id"] == table.id:
        return _leased(ledger, run, table, step, workers_ask)
    if step != run.leased_step + 1 or (batch is not None and batch["table_id"] != table.id):
        _wrong_step(ledger, step, run, batch)
    held = _held(ledger, run, table)
    if held is not None:
        return held
    recorded = _recorded(ledger, run, table, step, workers_ask)
    if recorded is not None:
        return recorded
    ledger.db.run("DELETE FROM batches WHERE step = ?", step)  # none of its groups came back
    return _select(ledger, run, table, step, workers_ask)


def _wrong_step(ledger: Ledger, step: int, run: RunState, batch: sqlite3.Row | None) -> NoReturn:
    if batch is not None and step > run.completed_step:
        other = ledger.table_by_id(batch["table_id"]).name
        raise WrongStep(f'step {step} has its batch from table "{other}"', step=step, expected=step, table=other)
    raise WrongStep(
        f"step {step} cannot be leased: the last one leased is {run.leased_step}, "
        f"the last one completed {run.completed_step}; expected {run.leased_step + 1}",
        step=step,
        expected=run.leased_step + 1,
    )


def _held(ledger: Ledger, run: RunState, table: Table) -> BatchAnswer | None:
    """What keeps the table as a whole from being leased."""
    pending = holding(ledger)
    closed = ledger.db.value("SELECT closed FROM tables WHERE id = ?", table.id)
    if run.policy is None:
        return BatchAnswer(blocked=Blocked.NO_VERSION, counts={"incarnation": run.incarnation})
    if pending:
        detail = "; ".join(t.blocked for t in ledger.tables.values() if t.settings.is_eval and t.blocked)
        return BatchAnswer(blocked=Blocked.EVAL, counts={"eval_pending": pending}, detail=detail)
    if closed:
        return BatchAnswer(blocked=Blocked.CLOSED, counts={"completed_step": run.completed_step})
    unfinished = range(run.completed_step + 1, run.leased_step + 1)
    if will_hold(ledger, unfinished):
        # A batch handed out now would be trained and published while the round still needs the version before it.
        return BatchAnswer(blocked=Blocked.EVAL, counts={"leased_steps": len(unfinished)})
    consumed = _consumed_bytes(ledger, table)
    if consumed >= table.settings.retained_bytes:
        counts = {"consumed_bytes": consumed, "retained_bytes": table.settings.retained_bytes}
        return BatchAnswer(blocked=Blocked.RETAINED_BYTES, counts=counts)
    return None


def _leased(ledger: Ledger, run: RunState, table: Table, step: int, workers_ask: bool) -> BatchAnswer:
    """The batch again; once what training could not use is made anew, or without it where its prompts were given up."""
    rows = _rows_of(ledger, step)
    if not rows and _take_the_next(ledger, table, step):
        drop_empty_batches(ledger)
        rows = _rows_of(ledger, step)
    if not rows:  # batches of other tables follow, or it would not be leased any more
        return _select(ledger, run, table, step, workers_ask)
    if any(row["state"] not in (State.STORED, State.LEASED) for row in rows):
        return _blocked(ledger, run, table, step, workers_ask)
    ledger.db.run("UPDATE groups SET state = ? WHERE train_step = ? AND state = ?", State.LEASED, step, State.STORED)
    return BatchAnswer(_groups_of(ledger, step), replayed=True)


def _rows_of(ledger: Ledger, step: int) -> list[sqlite3.Row]:
    return ledger.db.all("SELECT * FROM groups WHERE train_step = ? ORDER BY place", step)


def _recorded(ledger: Ledger, run: RunState, table: Table, step: int, workers_ask: bool) -> BatchAnswer | None:
    """The batch as an earlier incarnation leased it; None if nothing is left of it, or there was none.

    Replay is exact, with one exception: where an earlier step was skipped then and changed the weights now, a group may
    have grown older than `max_staleness`. Such a group is made again in its place.
    """
    rows = _rows_of(ledger, step)
    if not rows and _take_the_next(ledger, table, step):
        rows = _rows_of(ledger, step)
    old = [row for row in rows if row["state"] == State.STORED and _too_old(ledger, table, step, row)]
    if old and run.completed_step < step - 1:  # a step on the way may be skipped again, as it was then
        return BatchAnswer(blocked=Blocked.ADMISSION, counts=occupancy_counts(ledger, run, table))
    for row in old:
        ledger.evict(row, EVICT_STALE, keep_place=True)
    if old or any(row["state"] != State.STORED for row in rows):
        return _blocked(ledger, run, table, step, workers_ask)
    if not rows:
        return None
    ledger.db.run("UPDATE batches SET state = 'leased' WHERE step = ?", step)
    ledger.db.run("UPDATE groups SET state = ? WHERE train_step = ?", State.LEASED, step)
    ledger.db.run("UPDATE run SET leased_step = ?", step)
    return BatchAnswer(_groups_of(ledger, step), replayed=True)


def _take_the_next(ledger: Ledger, table: Table, step: int) -> bool:
    """Nothing is left of a batch: the table's next recorded one takes its step, if there is one.

    New prompts in its place would be trained out of order, and have no slot while the batches that follow hold all.
    """
    following = ledger.db.value(
        "SELECT min(train_step) FROM groups WHERE table_id = ? AND train_step > ?", table.id, step
    )
    if following is None:
        return False
    # Where tables take turns, the batch of this step may have been another's that is gone.
    ledger.db.run("INSERT OR IGNORE INTO batches (step, table_id, state) VALUES (?, ?, 'recorded')", step, table.id)
    ledger.db.run("UPDATE groups SET train_step = ? WHERE table_id = ? AND train_step = ?", step, table.id, following)
    return True


def _too_old(ledger: Ledger, table: Table, step: int, row: sqlite3.Row) -> bool:
    if not _ages(table):
        return False
    return staleness(step, row["oldest_step"], ledger.skipped_steps()) > table.settings.max_staleness


def _ages(table: Table) -> bool:
    return table.settings.kind != "sft"  # nothing was sampled there, so nothing grows old


def _select(ledger: Ledger, run: RunState, table: Table, step: int, workers_ask: bool) -> BatchAnswer:
    settings = table.settings
    size = settings.groups_per_step
    skipped = ledger.skipped_steps()
    while True:
        ended = exhausted(ledger, table)
        candidates = _candidates(ledger, table, step, skipped, None if table.selector.whole_table else size)
        # At the end of the data the last batch is what is left: a shorter batch, never prompts that vanish.
        wanted = min(size, len(candidates)) if ended else size
        if wanted == 0:
            _check_failures(ledger, table)
            return BatchAnswer(blocked=Blocked.END_OF_DATA, counts=occupancy_counts(ledger, run, table))
        choice = table.selector.choose(candidates, wanted)
        for candidate in choice.evict:
            row = ledger.db.one("SELECT * FROM groups WHERE id = ?", candidate.row)
            ledger.evict(row, EVICT_STALE)
        if not choice.evict:
            break
    if not choice.take:
        _check_drops(ledger, table)
        return _blocked(ledger, run, table, step, workers_ask)
    ledger.db.run("INSERT OR REPLACE INTO batches (step, table_id, state) VALUES (?, ?, 'leased')", step, table.id)
    ledger.db.many(
        "UPDATE groups SET state = ?, train_step = ?, place = ? WHERE id = ?",
        [(State.LEASED, step, place, c.row) for place, c in enumerate(choice.take)],
    )
    ledger.db.run("UPDATE run SET leased_step = max(leased_step, ?)", step)
    return BatchAnswer(_groups_of(ledger, step))


def _candidates(ledger: Ledger, table: Table, step: int, skipped: Sequence[int], limit: int | None) -> list[Candidate]:
    rows = ledger.db.all(
        "SELECT id, admission, state, oldest_step, evictions FROM groups "
        "WHERE table_id = ? AND state IN (0, 1, 2) AND train_step IS NULL ORDER BY admission LIMIT ?",
        table.id,
        -1 if limit is None else limit,
    )
    aging = _ages(table)
    return [
        Candidate(
            row["id"],
            row["admission"],
            row["state"] == State.STORED,
            staleness(step, row["oldest_step"], skipped) if row["state"] == State.STORED and aging else 0,
            row["evictions"],
        )
        for row in rows
    ]


def _check_drops(ledger: Ledger, table: Table) -> None:
    drops = ledger.db.value("SELECT drops_in_a_row FROM tables WHERE id = ?", table.id)
    limit = table.settings.max_drops_in_a_row
    if drops >= limit:
        reasons = ledger.db.all(
            "SELECT DISTINCT reason FROM (SELECT reason FROM groups WHERE table_id = ? AND state = ? "
            "ORDER BY admission DESC LIMIT ?)",
            table.id,
            State.DROPPED,
            drops,
        )
        names = ", ".join(row["reason"] for row in reasons)
        raise FailedPrecondition(
            f'table "{table.name}": filters dropped {drops} groups in a row (limit {limit}; reasons: {names}), '
            "so that no batch can fill; check the reward and the filter, or raise max_drops_in_a_row",
            state=f"drops_in_a_row {drops}",
            wanted=f"fewer than {limit}",
            drops_in_a_row=drops,
            limit=limit,
        )


def _open_since(ledger: Ledger, table: Table, moment: float) -> bool:
    """True if a lease of the table is open that was granted by then."""
    rows = ledger.db.all("SELECT lease_id FROM groups WHERE table_id = ? AND state = ?", table.id, State.OPEN)
    now = ledger.clock.now()
    return any(now - ledger.lease_times.age(row["lease_id"], now) <= moment for row in rows)


def _check_failures(ledger: Ledger, table: Table) -> None:
    """What fails for every prompt would go through all of them, and end as the end of the data.

    Some failures are quick and a group takes long: one that was begun before the row of them may still be made.
    """
    number, limit = ledger.failed_in_a_row[table.id], table.settings.max_failures_in_a_row
    if number >= limit and not _open_since(ledger, table, ledger.failing_since[table.id]):
        raise FailedPrecondition(
            f'table "{table.name}": {number} prompts in a row were given up (limit max_failures_in_a_row {limit}), '
            f"so no batch can fill; the last: {ledger.last_failure.get(table.id, 'unknown')}",
            state=f"failed_in_a_row {number}",
            wanted=f"fewer than {limit}",
        )


def _blocked(ledger: Ledger, run: RunState, table: Table, step: int, workers_ask: bool) -> BatchAnswer:
    _check_failures(ledger, table)
    check_unusable(ledger, table)
    counts = occupancy_counts(ledger, run, table)
    consumed = _consumed_bytes(ledger)
    if counts["open"] and consumed and _no_group_fits(ledger, table):  # a checkpoint would make room
        full = {
            "total_bytes": ledger.segments.total_bytes,
            "max_bytes": ledger.options.max_bytes,
            "consumed_bytes": consumed,
        }
        return BatchAnswer(blocked=Blocked.RETAINED_BYTES, counts=full)
    if counts["open"]:
        reason = Blocked.GENERATING
    elif table.blocked:
        reason = Blocked.SOURCE
    elif not may_admit(ledger, run, table):
        reason = Blocked.ADMISSION
    else:
        reason = Blocked.GENERATING if workers_ask else Blocked.NO_WORKER
    return BatchAnswer(blocked=reason, counts=counts, awaited=_awaited(ledger, table, step), detail=table.blocked)


def _awaited(ledger: Ledger, table: Table, step: int) -> tuple[Awaited, ...]:
    """The prompts that the batch of `step` waits for: leased ones, the oldest lease first, then queued ones."""
    rows = [row for row in _rows_of(ledger, step) if row["state"] in (State.QUEUED, State.OPEN)]
    if not rows:  # the batch is not chosen yet
        rows = ledger.db.all(
            "SELECT * FROM (SELECT * FROM groups WHERE table_id = ? AND state IN (0, 1, 2) AND train_step IS NULL "
            "ORDER BY admission LIMIT ?) WHERE state != 2",
            table.id,
            -1 if table.selector.whole_table else table.settings.groups_per_step,
        )
    now = ledger.clock.now()
    found = [
        Awaited(
            row["group_id"],
            prompt_id(table.settings.source.name, row["epoch"], row["source_index"]),
            row["attempt"],
            row["worker_id"] or "",
            ledger.lease_times.age(row["lease_id"], now) if row["lease_id"] else None,
        )
        for row in rows
    ]
    found.sort(key=lambda prompt: -1.0 if prompt.leased_for is None else prompt.leased_for, reverse=True)
    return tuple(found[:_MOST_AWAITED])


def _no_group_fits(ledger: Ledger, table: Table) -> bool:
    """True if every group that workers are making was refused for its size, and would be again."""
    rows = ledger.db.all("SELECT lease_id FROM groups WHERE table_id = ? AND state = ?", table.id, State.OPEN)
    room = ledger.options.max_bytes - ledger.segments.total_bytes
    return all(ledger.refused_bytes.get(row["lease_id"], 0) > room for row in rows)


def _groups_of(ledger: Ledger, step: int) -> tuple[BatchGroup, ...]:
    run_id = ledger.options.run_id
    skipped = ledger.skipped_steps()
    return tuple(
        BatchGroup(
            group_id=row["group_id"],
            attempt=row["attempt"],
            sample_tokens=tuple(json.loads(row["sample_tokens"])),
            oldest=Version(run_id, row["oldest_incarnation"], row["oldest_step"]),
            staleness=staleness(step, row["oldest_step"], skipped),
        )
        for row in _rows_of(ledger, step)
    )


# ------------------------------------------------------------------ the end of a step


def complete_step(
    ledger: Ledger,
    incarnation: int,
    step: int,
    table_name: str,
    outcome: Outcome,
    published: Version | None,
    *,
    final: bool,
) -> Completed:
    """Ack the batch of `step`, set the policy version, free the slots, open eval rounds: one transaction.

    Asked again, it answers the same; `final` may be added then, for a trainer that learns at END_OF_DATA that the step
    before was the last, and with it the version published since, if none was due before. After a skipped step that is
    the version of the last step that was trained.

    Raises:
        StaleIncarnation, WrongStep, InvalidArgument: as their messages say.
        FailedPrecondition: the step was completed with another outcome or another published version.
    """
    run = ledger.check_incarnation(incarnation)
    table = ledger.table(table_name)
    if published is not None:
        ledger.check_run_id(published.run_id)
    batch = ledger.db.one("SELECT * FROM batches WHERE step = ?", step)
    if batch is not None and batch["table_id"] != table.id:
        _wrong_step(ledger, step, run, batch)
    if 0 < step <= run.completed_step:
        return _completed_again(ledger, run, batch, step, outcome, published, final)
    _check_published(ledger, run, step, outcome, published, final)
    if batch is None or batch["state"] != "leased" or step != run.completed_step + 1:
        raise WrongStep(
            f"step {step} cannot be completed: the last one completed is {run.completed_step}, "
            f"the last one leased {run.leased_step}",
            step=step,
            expected=run.completed_step + 1,
        )
    _check_whole(ledger, step)
    ledger.db.run("UPDATE groups SET state = ? WHERE train_step = ? AND state = 3", State.CONSUMED, step)
    if outcome is Outcome.TRAINED:
        ledger.db.run("UPDATE tables SET unusable_in_a_row = 0 WHERE id = ?", table.id)
    ledger.db.run("UPDATE batches SET state = 'completed', outcome = ? WHERE step = ?", outcome, step)
    ledger.db.run("UPDATE run SET completed_step = ?", step)
    _set_published(ledger, step, published)
    opened = _after_step(ledger, step, final)
    ledger.workers_may_go_on = True
    return Completed(_checkpoint_wanted(ledger, batch["table_id"]), opened)


def _check_whole(ledger: Ledger, step: int) -> None:
    rows = _rows_of(ledger, step)
    left = [row["group_id"] for row in rows if row["state"] != State.LEASED]
    if left or not rows:
        raise FailedPrecondition(
            f"the batch of step {step} is not whole: {len(left)} of {len(rows)} groups are made again since training "
            f"could not use them{', the first ' + left[0] if left else ''}; lease it again",
            state=f"{len(left)} of {len(rows)} missing",
            wanted="whole",
        )


def _completed_again(
    ledger: Ledger,
    run: RunState,
    batch: sqlite3.Row | None,
    step: int,
    outcome: Outcome,
    published: Version | None,
    final: bool,
) -> Completed:
    if batch is not None and batch["outcome"] != outcome:
        raise FailedPrecondition(
            f"step {step} was completed as {Outcome(batch['outcome']).name}, not as {outcome.name}",
            state=Outcome(batch["outcome"]).name,
            wanted=outcome.name,
        )
    if batch is not None and batch["published"] is not None and step > run.resume_step:
        trained = _trained_step(ledger, run, step, outcome)
        before = Version(run.run_id, batch["published"], trained) if batch["published"] else None
        if before is None and final and step == run.completed_step:
            _check_published(ledger, run, step, outcome, published, final)
            _set_published(ledger, step, published)
        elif before != published:
            raise FailedPrecondition(
                f"step {step} was completed with published_version {before or 'unset'}, not {published or 'unset'}",
                state=before or "unset",
                wanted=published or "unset",
            )
    else:  # an earlier incarnation completed it
        _check_published(ledger, run, step, outcome, published, final)
    if final and step == run.completed_step:
        _after_step(ledger, step, final)
        ledger.workers_may_go_on = True
    wanted = batch is not None and _checkpoint_wanted(ledger, batch["table_id"])
    return Completed(wanted, opened_at(ledger, step))


def _set_published(ledger: Ledger, step: int, published: Version | None) -> None:
    ledger.db.run("UPDATE batches SET published = ? WHERE step = ?", published.incarnation if published else 0, step)
    if published is not None:
        ledger.db.run("UPDATE run SET policy_incarnation = ?, policy_step = ?", published.incarnation, published.step)


def _after_step(ledger: Ledger, step: int, final: bool) -> tuple[str, ...]:
    if final:
        # Every table of the run: no step follows in any of them.
        ledger.db.run("UPDATE tables SET closed = 1 WHERE name NOT LIKE 'eval/%'")
        ledger.db.run("UPDATE batches SET final = 1 WHERE step = ?", step)
    policy = ledger.run().policy
    if policy is None:
        return ()
    return open_due_rounds(ledger, step, policy, final=final)


def _trained_step(ledger: Ledger, run: RunState, step: int, outcome: Outcome) -> int:
    """The step whose weights the trainer holds after `step`."""
    if outcome is Outcome.TRAINED:
        return step
    sql = "SELECT coalesce(max(step), 0) FROM batches WHERE state = 'completed' AND outcome = 1 AND step <= ?"
    return max(run.resume_step, int(ledger.db.value(sql, step)))


def _check_published(
    ledger: Ledger, run: RunState, step: int, outcome: Outcome, published: Version | None, final: bool
) -> None:
    if published is None:
        return
    if outcome is Outcome.SKIPPED and not final:
        raise InvalidArgument(
            f"step {step} was skipped, so it changed nothing that could be published as {published}",
            field="published_version",
            actual=published,
        )
    expected = Version(run.run_id, run.incarnation, _trained_step(ledger, run, step, outcome))
    if published != expected:
        raise InvalidArgument(
            f"step {step} of incarnation {run.incarnation} cannot publish version {published}, only {expected}",
            field="published_version",
            expected=expected,
            actual=published,
        )


def _consumed_bytes(ledger: Ledger, table: Table | None = None) -> int:
    """Bytes that a checkpoint may free, of one table or of all."""
    total = 0
    for each in ledger.tables.values() if table is None else (table,):
        sql = "SELECT coalesce(sum(bytes), 0) FROM groups WHERE table_id = ? AND state = ?"
        if each.settings.is_eval:  # else the index holds all that is asked for
            sql += f" AND NOT {LATEST_ROUND}"
        total += int(ledger.db.value(sql, each.id, State.CONSUMED))
    return total


def _checkpoint_wanted(ledger: Ledger, table_id: int) -> bool:
    table = ledger.table_by_id(table_id)
    if _consumed_bytes(ledger, table) >= _WANTED_FROM * table.settings.retained_bytes:
        return True
    consumed = _consumed_bytes(ledger)
    # What is not consumed stays whatever is checkpointed: it makes the room smaller and fills none of it.
    room = ledger.options.max_bytes - (ledger.segments.total_bytes - consumed)
    return consumed > 0 and consumed >= _WANTED_FROM * room


def checkpoint_committed(ledger: Ledger, incarnation: int, step: int, oldest_kept_step: int) -> tuple[int, int]:
    """Let payloads of steps up to `oldest_kept_step` go: groups retired and bytes freed.

    Raises:
        StaleIncarnation: see `Ledger`.
        WrongStep: the checkpoint is of a step that is not completed.
        InvalidArgument: the oldest kept step is after the checkpoint's.
    """
    run = ledger.check_incarnation(incarnation)
    if step > run.completed_step:
        raise WrongStep(
            f"no checkpoint of step {step} can exist: the last one completed is {run.completed_step}",
            step=step,
            expected=run.completed_step,
        )
    if oldest_kept_step > step:
        raise InvalidArgument(
            f"the oldest kept step {oldest_kept_step} is after the checkpoint's step {step}",
            field="oldest_kept_step",
            expected=step,
            actual=oldest_kept_step,
        )
    where = f"state = ? AND (train_step <= ? OR (eval_step <= ? AND NOT {LATEST_ROUND}))"
    values: tuple[Any, ...] = (State.CONSUMED, oldest_kept_step, oldest_kept_step)
    found = ledger.db.one(f"SELECT count(*) AS n, coalesce(sum(bytes), 0) AS b FROM groups WHERE {where}", *values)
    assert found is not None, "an aggregate has one row"
    ledger.db.run(
        f"UPDATE groups SET state = ?, segment = NULL, offset = NULL, bytes = 0 WHERE {where}", State.RETIRED, *values
    )
    ledger.db.run("UPDATE run SET oldest_kept_step = max(oldest_kept_step, ?)", oldest_kept_step)
    ledger.segments_may_have_died = True
    return int(found["n"]), int(found["b"])
