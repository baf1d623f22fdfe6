"""The workers' side: prompts out, groups in. A lease ends in exactly one way: inserted, queued again, or given up."""

from __future__ import annotations

import json
import re
import secrets
import sqlite3
from collections.abc import Sequence
from typing import Any

from vime_buffer.admission import admit
from vime_buffer.answer_size import lease_bytes
from vime_buffer.evals import finish_round_if_done
from vime_buffer.ledger import NO_LEASE, Ledger
from vime_buffer.seeds import group_seeds
from vime_buffer.settings import SamplingSettings
from vime_buffer.sources import SourceUnusable
from vime_buffer.values import (
    DROP_DELETED,
    DROP_OTHER,
    GIVE_UP_EXPIRED,
    Failure,
    Insert,
    LeaseGrant,
    PromptAnswer,
    PromptRecord,
    State,
    Version,
    prompt_id,
)
from vime_service.answer_size import Room
from vime_service.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    LeaseLost,
    NotFound,
    ResourceExhausted,
)
from vime_service.logging import get_logger

_log = get_logger(__name__)
MAX_DROP_REASONS = 64
"""Reasons of one table that have a count of their own."""
_ATTEMPT = re.compile("[0-9]{1,10}")
_QUOTED = 300
"""Characters of a failure's detail that LeaseBatch quotes."""


def lease_prompts(
    ledger: Ledger, worker_id: str, max_prompts: int, tables: Sequence[str], request_id: str = ""
) -> PromptAnswer:
    """Lease up to `max_prompts` prompts, as many as one message carries, eval rounds first. A request that was answered
    gets its open leases again.

    A source that cannot be read blocks its table, and the others are drawn from.

    Raises:
        NotFound: one of `tables` does not exist.
    """
    for name in tables:
        ledger.table(name)
    if request_id and (answered := _answered_before(ledger, worker_id, request_id)):
        return PromptAnswer(answered)
    names = frozenset(tables) or frozenset(ledger.tables)
    while True:
        blocked = _blocked(ledger)
        admitted = admit(ledger, max_prompts, names)
        leases = _grant_what_fits(ledger, admitted.rows, worker_id, request_id)
        if leases or _blocked(ledger) == blocked:  # otherwise another table may have prompts; this ends with the tables
            return PromptAnswer(leases, admitted.blocked, admitted.counts)


def _blocked(ledger: Ledger) -> int:
    return sum(1 for table in ledger.tables.values() if table.blocked)


def _grant_what_fits(ledger: Ledger, rows: Sequence[int], worker_id: str, request_id: str) -> tuple[LeaseGrant, ...]:
    """Leases of the first rows that fit into one message; the others stay queued, in their order."""
    room = Room(ledger.options.message_bytes)
    leases: list[LeaseGrant] = []
    for row_id in rows:
        row = ledger.db.one("SELECT * FROM groups WHERE id = ?", row_id)
        assert row is not None, "admission named it in this transaction"
        record = _record(ledger, row)
        if record is None:
            continue
        if not room.takes(lease_bytes(record, ledger.table_by_id(row["table_id"]).settings)):
            break
        leases.append(_grant(ledger, row, worker_id, request_id, record))
    return tuple(leases)


def _record(ledger: Ledger, row: Any) -> PromptRecord | None:
    """The prompt of a row; None, and its table is blocked, if the source cannot be read."""
    table = ledger.table_by_id(row["table_id"])
    if table.source is None:
        return None
    try:
        return table.source.read(row["epoch"], row["source_index"])
    except SourceUnusable as error:
        table.block(error.message, ledger.clock.now())
        return None


def _answered_before(ledger: Ledger, worker_id: str, request_id: str) -> tuple[LeaseGrant, ...]:
    rows = ledger.db.all(
        "SELECT * FROM groups WHERE request_id = ? AND worker_id = ? "
        "ORDER BY eval_step IS NULL, train_step IS NULL, train_step, place, admission",
        request_id,
        worker_id,
    )
    now = ledger.clock.now()
    leases = []
    for row in rows:
        settings = ledger.table_by_id(row["table_id"]).settings
        record = _record(ledger, row)
        if record is None:  # the caller never gets it: somebody else will, once the source is back
            ledger.requeue(row)
            continue
        ledger.lease_times.extend(row["lease_id"], now, settings.lease_ttl, settings.max_lease)
        leases.append(_lease(ledger, row, record))
    return tuple(leases)


def _grant(ledger: Ledger, row: Any, worker_id: str, request_id: str, record: PromptRecord) -> LeaseGrant:
    fence, settings = _fence(ledger, row), ledger.table_by_id(row["table_id"]).settings
    lease_id = f"{row['group_id']}#{row['attempt']}.{secrets.token_hex(4)}"
    ledger.db.run(
        "UPDATE groups SET state = ?, lease_id = ?, worker_id = ?, request_id = ?, "
        "fence_incarnation = ?, fence_step = ?, lease_sampling = ? WHERE id = ?",
        State.OPEN, lease_id, worker_id, request_id or None, fence.incarnation, fence.step,
        settings.sampling.model_dump_json(), row["id"],
    )  # fmt: skip
    ledger.bump(row["table_id"], "drawn")
    ledger.lease_times.begin(lease_id, ledger.clock.now(), settings.lease_ttl)
    return _lease(ledger, ledger.db.one("SELECT * FROM groups WHERE id = ?", row["id"]), record)


def _lease(ledger: Ledger, row: Any, record: PromptRecord) -> LeaseGrant:
    """What the worker is told of an open lease."""
    table = ledger.table_by_id(row["table_id"])
    settings = table.settings
    return LeaseGrant(
        lease_id=row["lease_id"],
        table=table.name,
        record=record,
        group_id=row["group_id"],
        attempt=row["attempt"],
        fence=Version(ledger.options.run_id, row["fence_incarnation"], row["fence_step"]),
        exact=settings.is_eval,
        num_samples=settings.samples_per_prompt,
        ttl=settings.lease_ttl,
        eval_step=row["eval_step"],
        seeds=group_seeds(ledger.options.seed, record.prompt_id, settings.samples_per_prompt),
        reward=settings.reward,
        sampling=_sampling(row) or settings.sampling,
    )


def _sampling(row: sqlite3.Row) -> SamplingSettings | None:
    """What the lease said; None for one of before it was noted. The table's may have changed since."""
    return SamplingSettings.model_validate_json(row["lease_sampling"]) if row["lease_sampling"] else None


def _fence(ledger: Ledger, row: Any) -> Version:
    run = ledger.run()
    assert run.policy is not None, "nothing is admitted before a version is announced"
    if row["eval_step"] is None:
        return run.policy
    found = ledger.db.one(
        "SELECT incarnation, version_step FROM rounds WHERE table_id = ? AND step = ?",
        row["table_id"],
        row["eval_step"],
    )
    assert found is not None, "a queued eval prompt has an open round"
    return Version(run.run_id, found["incarnation"], found["version_step"])


def insert_group(ledger: Ledger, insert: Insert) -> bool:
    """Store a finished group, or drop it with the filter's reason. True if the same bytes were there already.

    Raises:
        NotFound: the group or the attempt was never leased.
        LeaseLost: the attempt was superseded, expired or given up.
        AlreadyExists: the attempt is there with other bytes.
        InvalidArgument: it is of another prompt, or its versions do not pass the lease's fence.
        ResourceExhausted: the byte budget is used up.
        StorageFailed: the disk is.
    """
    facts = insert.facts
    row = ledger.db.one("SELECT * FROM groups WHERE group_id = ?", facts.group_id)
    if row is None or ledger.table_by_id(row["table_id"]).name != facts.table:
        raise NotFound(f"group {facts.group_id} was never leased", kind="group", name=facts.group_id)
    if facts.attempt > row["attempt"]:
        raise NotFound(
            f"attempt {facts.attempt} of group {facts.group_id} was never leased; the current one is {row['attempt']}",
            kind="attempt",
            name=f"{facts.group_id}#{facts.attempt}",
        )
    if facts.attempt < row["attempt"] or row["state"] in (State.QUEUED, State.GIVEN_UP, State.WITHDRAWN):
        raise _lost(row, facts.attempt)
    if row["state"] != State.OPEN:
        return _same_again(row, insert)
    if row["lease_id"] != insert.lease_id:
        raise _lost(row, facts.attempt)
    _check_prompt(ledger, row, facts.prompt_id)
    if insert.drop_reason:
        _drop(ledger, row, insert)
    else:
        _check_terms(ledger, row, insert)
        _store(ledger, row, insert)
    ledger.lease_ended(insert.lease_id)
    return False


def _check_prompt(ledger: Ledger, row: sqlite3.Row, actual: str) -> None:
    source = ledger.table_by_id(row["table_id"]).settings.source
    expected = prompt_id(source.name, row["epoch"], row["source_index"])
    if actual != expected:
        raise InvalidArgument(
            f'group {row["group_id"]} has the prompt "{actual}", its lease has "{expected}"',
            field="group.prompt.prompt_id",
            expected=expected,
            actual=actual,
        )


def _check_terms(ledger: Ledger, row: sqlite3.Row, insert: Insert) -> None:
    """The group is what the lease asked for: of its record, sampled as it said, with its seeds."""
    sampling = _sampling(row)
    if sampling is None:  # leased before terms were noted, with seeds that are made otherwise now
        return
    wrong = None if insert.sampling is None else sampling.differs(insert.sampling)
    if wrong is not None:
        field, expected, actual = wrong
        raise InvalidArgument(
            f"group {row['group_id']} was sampled with {field} {actual}, its lease says {expected}",
            field=f"group.sampling.{field}",
            expected=expected,
            actual=actual,
        )
    table = ledger.table_by_id(row["table_id"])
    seeds = group_seeds(ledger.options.seed, insert.facts.prompt_id, table.settings.samples_per_prompt)
    stranger = next((seed for seed in insert.facts.seeds if seed not in seeds), None)
    if stranger is not None:
        raise InvalidArgument(
            f"group {row['group_id']} has a sample of seed {stranger}, which is none of its lease's",
            field="samples.seed",
            actual=stranger,
        )
    record = _record(ledger, row)
    if record is None:  # the source went away since: that is no fault of a group that was leased before
        _log.warning("a group's prompt cannot be compared", group_id=row["group_id"], cause=table.blocked)
        return
    if differs := insert.prompt_differs(record):
        raise InvalidArgument(
            f"group {row['group_id']}: {differs} is not that of its lease's prompt {record.prompt_id}", field=differs
        )


def _same_again(row: sqlite3.Row, insert: Insert) -> bool:
    dropped = row["reason"] if row["state"] == State.DROPPED and row["reason"] != DROP_DELETED else ""
    same = dropped == insert.drop_reason or (dropped == DROP_OTHER and insert.drop_reason != "")
    if same and row["digest"] == insert.digest:
        return True
    raise AlreadyExists(
        f"attempt {row['attempt']} of group {row['group_id']} was inserted before with other content",
        kind="group",
        name=row["group_id"],
        attempt=row["attempt"],
    )


def _store(ledger: Ledger, row: sqlite3.Row, insert: Insert) -> None:
    facts, table = insert.facts, ledger.table_by_id(row["table_id"])
    oldest, newest = _check_versions(ledger, row, insert, exact=table.settings.is_eval)
    used, limit = ledger.segments.total_bytes, ledger.options.max_bytes
    if used + len(insert.payload) > limit:
        ledger.refused_bytes[insert.lease_id] = len(insert.payload)
        raise ResourceExhausted(
            f"the byte budget is used up: {used} of {limit} bytes; a checkpoint frees consumed groups",
            kind="bytes",
            limit=limit,
            actual=used + len(insert.payload),
        )
    place = ledger.segments.append(insert.payload)
    ledger.db.run(
        f"UPDATE groups SET state = ?, segment = ?, offset = ?, bytes = ?, digest = ?, sample_tokens = ?, "
        f"oldest_incarnation = ?, oldest_step = ?, newest_step = ?, rewards = ?, truncated = ?, response_tokens = ?, "
        f"inserted_by = ?, engines = ?, {NO_LEASE} WHERE id = ?",
        State.STORED, place.segment, place.offset, place.nbytes, insert.digest, json.dumps(facts.sample_tokens),
        oldest.incarnation, oldest.step, newest.step, json.dumps(facts.rewards), facts.truncated,
        facts.response_tokens, row["worker_id"], json.dumps(facts.engines), row["id"],
    )  # fmt: skip
    ledger.bump(table.id, "inserted")
    _not_failing(ledger, table.id)
    if ledger.db.run("UPDATE tables SET drops_in_a_row = 0 WHERE id = ? AND drops_in_a_row > 0", table.id):
        ledger.workers_may_go_on = True  # too many drops may have held them
    if row["eval_step"] is not None:
        finish_round_if_done(ledger, table, row["eval_step"])


def _drop(ledger: Ledger, row: sqlite3.Row, insert: Insert) -> None:
    if row["eval_step"] is not None:
        raise InvalidArgument(
            f"group {row['group_id']} belongs to an eval round; eval groups are never dropped",
            field="drop_reason",
            value=insert.drop_reason,
        )
    reason = _counted_as(ledger, row["table_id"], insert.drop_reason)
    ledger.db.run(
        f"UPDATE groups SET state = ?, reason = ?, digest = ?, train_step = NULL, place = NULL, {NO_LEASE} "
        "WHERE id = ?",
        State.DROPPED, reason, insert.digest, row["id"],
    )  # fmt: skip
    ledger.bump(row["table_id"], "inserted")
    ledger.bump(row["table_id"], "dropped", reason)
    ledger.db.run("UPDATE tables SET drops_in_a_row = drops_in_a_row + 1 WHERE id = ?", row["table_id"])
    _not_failing(ledger, row["table_id"])
    ledger.workers_may_go_on = True


def _not_failing(ledger: Ledger, table_id: int) -> None:
    if ledger.failed_in_a_row.pop(table_id, 0):
        ledger.workers_may_go_on = True  # too many failures may have held them


def _counted_as(ledger: Ledger, table_id: int, reason: str) -> str:
    """The reason, or `other` where a filter has made so many that they are no counts any more."""
    known = {
        row["reason"]
        for row in ledger.db.all("SELECT reason FROM events WHERE table_id = ? AND kind = 'dropped'", table_id)
    }
    return reason if reason in known or len(known) < MAX_DROP_REASONS else DROP_OTHER


def _check_versions(ledger: Ledger, row: sqlite3.Row, insert: Insert, *, exact: bool) -> tuple[Version, Version]:
    """The group's oldest and newest version, each of them having passed the lease's fence. Without one: the fence's."""
    run = ledger.run()
    fence = Version(run.run_id, row["fence_incarnation"], row["fence_step"])
    versions = insert.facts.versions or (fence,)
    for version in versions:
        if exact and version != fence:
            raise _bad_version(row, f"must come from exactly {fence}, found {version}", fence, version)
        if not version.satisfies_at_least(fence):
            raise _bad_version(row, f"must come from {fence} or newer, found {version}", fence, version)
        if version.incarnation > run.incarnation or (
            version.incarnation == run.incarnation and version.step > run.leased_step
        ):
            raise _bad_version(row, f"names {version}, which no trainer can have published yet", fence, version)
    return versions[0], versions[-1]


def _bad_version(row: sqlite3.Row, what: str, fence: Version, found: Version) -> InvalidArgument:
    return InvalidArgument(
        f"group {row['group_id']} {what}", field="version_spans", fence=str(fence), actual=str(found)
    )


# ------------------------------------------------------------------ ends of leases


def fail_prompt(ledger: Ledger, lease_id: str, failure: Failure, detail: str) -> bool:
    """Give a lease back; True if that was the last attempt. A worker that stops costs the prompt no attempt.

    Asked again, it answers the same.

    Raises:
        NotFound: the lease never existed.
        FailedPrecondition: its group was inserted.
    """
    row = ledger.db.one("SELECT * FROM groups WHERE lease_id = ?", lease_id)
    if row is None:
        return _ended_before(ledger, lease_id)
    given_up = end_attempt(ledger, row, failure.name, detail, counts=failure is not Failure.SHUTDOWN)
    _log.info("lease given back", lease_id=lease_id, failure=failure.name, given_up=given_up, detail=detail[:200])
    return given_up


def _ended_before(ledger: Ledger, lease_id: str) -> bool:
    group_id, _, rest = lease_id.rpartition("#")
    attempt = rest.partition(".")[0]
    row = ledger.db.one("SELECT * FROM groups WHERE group_id = ?", group_id)
    if row is None or not _ATTEMPT.fullmatch(attempt) or int(attempt) > row["attempt"]:
        raise NotFound(f"lease {lease_id} never existed", kind="lease", name=lease_id)
    if int(attempt) < row["attempt"]:
        return False
    if row["state"] == State.GIVEN_UP:
        return True
    if row["state"] in (State.OPEN, State.WITHDRAWN):
        raise _lost(row, int(attempt))
    raise FailedPrecondition(
        f"the group of lease {lease_id} was inserted", state=State(row["state"]).name, wanted=State.OPEN.name
    )


def end_attempt(ledger: Ledger, row: Any, reason: str, detail: str = "", *, counts: bool = True) -> bool:
    """End an open lease without a group; True if the prompt is given up: attempts are used up, or can never help."""
    table = ledger.table_by_id(row["table_id"])
    last = counts and (reason == Failure.INVALID.name or row["failures"] + 1 >= table.settings.max_attempts)
    if counts:
        ledger.db.run("UPDATE groups SET failures = failures + 1 WHERE id = ?", row["id"])
        ledger.last_failure[table.id] = f"{row['group_id']}, {reason}: {detail[:_QUOTED] or 'without a word'}"
    if last:
        ledger.give_up(row, reason)
        if not ledger.failed_in_a_row[table.id]:
            ledger.failing_since[table.id] = ledger.clock.now()
        ledger.failed_in_a_row[table.id] += 1
        if row["eval_step"] is not None:
            finish_round_if_done(ledger, table, row["eval_step"])
    else:
        ledger.requeue(row)
    return last


def expire_due(ledger: Ledger) -> int:
    """End every lease whose time is over; how many there were."""
    due = ledger.lease_times.due(ledger.clock.now())
    for lease_id in due:
        row = ledger.db.one("SELECT * FROM groups WHERE lease_id = ?", lease_id)
        if row is None:
            ledger.lease_ended(lease_id)
            continue
        outlived = ledger.lease_times.outlived(lease_id)
        why = "lease ended after max_lease, though it was kept alive" if outlived else "lease expired"
        given_up = end_attempt(ledger, row, Failure.TIMEOUT.name if outlived else GIVE_UP_EXPIRED, why)
        _log.warning(why, lease_id=lease_id, worker_id=row["worker_id"], given_up=given_up)
    return len(due)


def keep_alive(ledger: Ledger, worker_id: str, lease_ids: Sequence[str]) -> tuple[list[str], float]:
    """Extend leases of a worker ("" is not compared): those that are gone or another's, and the shortest new time."""
    lost: list[str] = []
    ttls: list[float] = []
    now = ledger.clock.now()
    for lease_id in lease_ids:
        row = ledger.db.one("SELECT table_id, worker_id FROM groups WHERE lease_id = ?", lease_id)
        if row is None or worker_id not in ("", row["worker_id"]):
            lost.append(lease_id)
            continue
        settings = ledger.table_by_id(row["table_id"]).settings
        ttls.append(ledger.lease_times.extend(lease_id, now, settings.lease_ttl, settings.max_lease))
    return lost, min(ttls, default=0.0)


def release(ledger: Ledger, lease_ids: Sequence[str]) -> None:
    """Take back leases that were granted to a caller who did not wait for the answer; costs no attempt."""
    for lease_id in lease_ids:
        row = ledger.db.one("SELECT * FROM groups WHERE lease_id = ?", lease_id)
        if row is not None:
            ledger.requeue(row)


def _lost(row: sqlite3.Row, attempt: int) -> LeaseLost:
    return LeaseLost(
        f"the lease of group {row['group_id']}, attempt {attempt}, is over; "
        f"the prompt is {State(row['state']).name.lower()} at attempt {row['attempt']}",
        group_id=row["group_id"],
        attempt=attempt,
        current=row["attempt"],
    )
