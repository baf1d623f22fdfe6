"""What can be seen of the ledger: counts, laws, listings. Read-only, for the reading connection and for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vime_buffer.limiter import Limits, Occupancy, free_slots
from vime_buffer.schema import Database
from vime_buffer.settings import TableSettings
from vime_buffer.values import PAYLOAD_STATES, UNUSABLE, GroupRow, Place, State, Version, page_start
from vime_service.errors import DataLoss, FailedPrecondition, NotFound


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of a table. `inserted` and `drawn` count events; everything else is counted from the rows."""

    inserted: int
    stored: int
    leased: int
    consumed: int
    retired: int
    dropped: Mapping[str, int]
    evicted: Mapping[str, int]
    drawn: int
    open: int
    prompts_inserted: int
    requeued: int
    given_up: Mapping[str, int]
    payload_bytes: int
    free_slots: int
    prompts_unusable: int

    def broken_laws(self) -> dict[str, str]:
        """The numbers of each law that does not hold, by its name; none of them may ever be seen."""
        groups = (
            self.stored + self.leased + self.consumed + self.retired + sum(self.dropped.values())
            + sum(self.evicted.values())
        )  # fmt: skip
        prompts = self.open + self.prompts_inserted + self.requeued + sum(self.given_up.values())
        broken = {}
        if self.inserted != groups:
            broken["groups"] = f"inserted {self.inserted}, accounted for {groups}"
        if self.drawn != prompts:
            broken["prompts"] = f"drawn {self.drawn}, accounted for {prompts}"
        return broken


@dataclass(frozen=True, slots=True)
class TableView:
    """A table as tools and people see it."""

    settings: TableSettings
    counts: Counts
    policy: Version | None
    last_leased_step: int
    last_completed_step: int
    blocked: str = ""
    """Why its source cannot be used; `Buffer` knows, the rows do not."""
    skipped: Mapping[str, int] = field(default_factory=dict)
    """Records of the source that were skipped, by reason; as above."""


def table_view(db: Database, name: str) -> TableView:
    """One table.

    Raises:
        NotFound: there is none of this name.
    """
    row = db.one("SELECT id, settings FROM tables WHERE name = ?", name)
    run = db.one("SELECT * FROM run")
    if row is None or run is None:
        raise NotFound(f'there is no table "{name}"', kind="table", name=name)
    settings = TableSettings.stored(row["settings"])
    policy = None
    if run["policy_step"] is not None:
        policy = Version(run["run_id"], run["policy_incarnation"], run["policy_step"])
    completed = run["completed_step"]
    unpublished = 0
    if policy is not None:
        unpublished = db.value(
            "SELECT count(*) FROM batches WHERE state = 'completed' AND outcome = 1 AND step > ? AND step <= ?",
            policy.step,
            completed,
        )
    counts = table_counts(db, row["id"], settings, unpublished if policy else None)
    return TableView(settings, counts, policy, run["leased_step"], completed)


def table_names(db: Database, after: str, limit: int) -> list[str]:
    """Names in order, those after `after`."""
    return [row["name"] for row in db.all("SELECT name FROM tables WHERE name > ? ORDER BY name LIMIT ?", after, limit)]


def table_counts(db: Database, table_id: int, settings: TableSettings, unpublished: int | None) -> Counts:
    """All counts of a table. `unpublished` is None before a version is announced: nothing is admitted then."""
    rows = db.all(
        "SELECT state, count(*) AS n, sum(bytes) AS b FROM groups WHERE table_id = ? GROUP BY state", table_id
    )
    states = {State(row["state"]): int(row["n"]) for row in rows}
    events = {
        (row["kind"], row["reason"]): int(row["n"])
        for row in db.all("SELECT kind, reason, n FROM events WHERE table_id = ?", table_id)
    }
    dropped = db.all(
        "SELECT reason, sum(n) AS n FROM ("
        "SELECT reason, count(*) AS n FROM groups WHERE table_id = ? AND state = ? GROUP BY reason UNION ALL "
        "SELECT ?, count(*) FROM quarantined WHERE table_id = ? GROUP BY table_id) GROUP BY reason",
        table_id, State.DROPPED, UNUSABLE, table_id,
    )  # fmt: skip
    evicted = db.all("SELECT reason, count(*) AS n FROM evictions WHERE table_id = ? GROUP BY reason", table_id)
    occupancy = Occupancy(
        states.get(State.OPEN, 0),
        states.get(State.STORED, 0),
        states.get(State.LEASED, 0),
        waiting_places(db, table_id),
    )
    limits = Limits(settings.groups_per_step, settings.max_staleness, settings.capacity)
    free = 0 if settings.is_eval or unpublished is None else free_slots(occupancy, limits, unpublished)
    inserted = events.get(("inserted", ""), 0)
    return Counts(
        inserted=inserted,
        stored=occupancy.stored,
        leased=occupancy.leased,
        consumed=states.get(State.CONSUMED, 0),
        retired=states.get(State.RETIRED, 0),
        dropped={row["reason"]: row["n"] for row in dropped},
        evicted={row["reason"]: row["n"] for row in evicted},
        drawn=events.get(("drawn", ""), 0),
        open=occupancy.open,
        prompts_inserted=inserted,
        requeued=events.get(("requeued", ""), 0),
        given_up={reason: n for (kind, reason), n in events.items() if kind == "given_up"},
        payload_bytes=sum(int(row["b"] or 0) for row in rows),
        free_slots=free,
        prompts_unusable=db.value("SELECT count(*) FROM quarantined WHERE table_id = ? AND given_up", table_id),
    )


def waiting_places(db: Database, table_id: int) -> int:
    """Prompts that wait to be made again in their places of batches."""
    sql = "SELECT count(*) FROM groups WHERE table_id = ? AND state = 0 AND train_step IS NOT NULL"
    return int(db.value(sql, table_id))


def list_groups(
    db: Database,
    table: str,
    state: State | None,
    train_step: int | None,
    eval_step: int | None,
    page_token: str,
    limit: int,
) -> tuple[list[GroupRow], str]:
    """A page of groups in admission order, and the token of the next page ("" on the last).

    Raises:
        NotFound: no such table.
        InvalidArgument: not a token of ours.
    """
    table_id = db.value("SELECT id FROM tables WHERE name = ?", table)
    if table_id is None:
        raise NotFound(f'there is no table "{table}"', kind="table", name=table)
    after = page_start(page_token)
    if state is State.EVICTED:
        return _list_evicted(db, table_id, after, limit)
    where, values = "table_id = ? AND admission > ?", [table_id, after]
    if state is not None:
        where, values = where + " AND state = ?", [*values, state]
    else:
        where += " AND state BETWEEN 1 AND 6"
    for column, step in (("train_step", train_step), ("eval_step", eval_step)):
        if step is not None:
            where, values = f"{where} AND {column} = ?", [*values, step]
    rows = db.all(
        "SELECT groups.*, (SELECT run_id FROM run) AS run_id, (SELECT avg(value) FROM json_each(rewards)) AS mean "
        f"FROM groups WHERE {where} ORDER BY admission LIMIT ?",
        *values,
        limit + 1,
    )
    page = [
        GroupRow(
            row["group_id"],
            State(row["state"]),
            row["attempt"],
            row["train_step"],
            row["admission"],
            row["bytes"],
            None
            if row["oldest_step"] is None
            else Version(row["run_id"], row["oldest_incarnation"], row["oldest_step"]),
            row["mean"],
        )
        for row in rows[:limit]
    ]
    return page, str(page[-1].admission) if len(rows) > limit else ""


def _list_evicted(db: Database, table_id: int, after: int, limit: int) -> tuple[list[GroupRow], str]:
    rows = db.all(
        "SELECT evictions.*, admission FROM evictions JOIN groups USING (group_id) "
        "WHERE evictions.table_id = ? AND evictions.id > ? ORDER BY evictions.id LIMIT ?",
        table_id,
        after,
        limit + 1,
    )
    page = [
        GroupRow(row["group_id"], State.EVICTED, row["attempt"], None, row["admission"], 0, None, None)
        for row in rows[:limit]
    ]
    return page, str(rows[limit - 1]["id"]) if len(rows) > limit else ""


def group_places(db: Database, group_ids: Sequence[str]) -> list[Place]:
    """Where the payloads lie, in the order asked for.

    Raises:
        NotFound: a group was never inserted.
        FailedPrecondition: a payload is gone, or not there yet.
        DataLoss: a payload was found damaged before.
    """
    return [_place(db, group_id) for group_id in group_ids]


def _place(db: Database, group_id: str) -> Place:
    row = db.one("SELECT state, segment, offset, bytes, corrupted FROM groups WHERE group_id = ?", group_id)
    if row is None:
        raise NotFound(f"there is no group {group_id}", kind="group", name=group_id)
    if row["state"] not in PAYLOAD_STATES:
        state = State(row["state"]).name.lower()
        raise FailedPrecondition(
            f"group {group_id} has no payload: it is {state}", state=state, wanted="stored, leased or consumed"
        )
    if row["corrupted"]:
        name = f"segment-{row['segment']:08d}.seg"
        raise DataLoss(
            f"group {group_id}: the record at offset {row['offset']} of {name} is damaged; "
            "the next incarnation generates it again",
            segment=name,
            offset=row["offset"],
        )
    return Place(row["segment"], row["offset"], row["bytes"])
