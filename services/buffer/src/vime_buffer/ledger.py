"""The ledger: the run, its tables, and the few row changes that everything else is made of.

Everything here runs in the writer's thread, inside a transaction. What is kept in memory is either constant (settings,
sources) or advice (when a lease ends); `recover` rebuilds it from the rows.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vime_buffer.lease_times import LeaseTimes
from vime_buffer.schema import Database
from vime_buffer.segments import RECORD_OVERHEAD, Segments, make_folder, storage_failed
from vime_buffer.selectors import Selector, make_selector
from vime_buffer.settings import TableSettings
from vime_buffer.sources import JsonlSource, SourceUnusable
from vime_buffer.values import ModelLimits, State, Version
from vime_service.clock import Clock
from vime_service.errors import FailedPrecondition, FleetOwned, NotFound, StaleIncarnation, Unavailable
from vime_service.logging import get_logger

_log = get_logger(__name__)

NO_PAYLOAD = (
    "segment = NULL, offset = NULL, bytes = 0, digest = NULL, sample_tokens = NULL, oldest_incarnation = NULL, "
    "oldest_step = NULL, newest_step = NULL, rewards = NULL, truncated = 0, response_tokens = 0, corrupted = 0, "
    "inserted_by = NULL, engines = NULL"
)
NO_LEASE = (
    "lease_id = NULL, worker_id = NULL, request_id = NULL, fence_incarnation = NULL, fence_step = NULL, "
    "lease_sampling = NULL"
)

_DEAF_S = 1.0
"""The sweep has the writer look twice a second. If that did not happen for this long, the process or its disk stood
still, and keep-alives that came in time waited. What is longer than this is pardoned, and no more: a buffer that is
always late would otherwise end no lease at all."""


@dataclass(frozen=True, slots=True)
class RunState:
    """The row of `run`."""

    run_id: str
    seed: int
    incarnation: int
    resume_step: int
    recipe_digest: str
    policy: Version | None
    """None until the incarnation's first version is announced."""
    leased_step: int
    completed_step: int
    oldest_kept_step: int


@dataclass(slots=True)
class Table:
    """A table as the writer knows it. Counts and cursors are never kept here."""

    id: int
    settings: TableSettings
    digest: str
    """Of the source's content when the table was made; prompt ids and the cursor mean that."""
    source: JsonlSource | None
    """None while it cannot be used."""
    selector: Selector
    blocked: str = ""
    """Why the source cannot be used."""
    blocked_at: float = 0.0
    """Since when, by the ledger's clock."""

    @property
    def name(self) -> str:
        """Its name."""
        return self.settings.name

    def block(self, reason: str, now: float) -> None:
        """Its source cannot be used. Other tables go on; this one does once `unblock` brings the source back."""
        if not self.blocked:
            self.blocked_at = now
        if reason != self.blocked:
            _log.error("a table is blocked", table=self.name, cause=reason)
        self.source, self.blocked = None, reason

    def unblock(self, source: JsonlSource) -> None:
        """Its source can be used (again)."""
        if self.blocked:
            _log.info("a table goes on", table=self.name, path=source.settings.path)
        self.source, self.blocked = source, ""


@dataclass(frozen=True, slots=True)
class LedgerOptions:
    """Where the ledger lies and how large it may grow; see `BufferSettings`."""

    folder: Path
    run_id: str
    seed: int
    segment_bytes: int = 64 << 20
    max_bytes: int = 64 << 30
    quarantine_bytes: int = 256 << 20
    message_bytes: int = 64 << 20
    """Cap of one message: what an answer of leases, and so each of them, may have."""
    source_paths: Mapping[str, Path] = field(default_factory=dict)
    """Where the configuration says that the sources of tables are now; elsewhere they are where they were."""


class Ledger:
    """An open ledger. Make it before the writer, close it after."""

    def __init__(self, options: LedgerOptions, clock: Clock, wall: Callable[[], float] = time.time) -> None:
        """Open the folder, or begin a new ledger in it.

        Raises:
            Unavailable: another process has it open.
            FleetOwned, FailedPrecondition: it belongs to another run, or was begun with another seed.
            StorageFailed: it cannot be written.
            DataLoss: its database is damaged.
        """
        self.options = options
        self.clock = clock
        self.wall = wall
        self.tables: dict[str, Table] = {}
        self.lease_times = LeaseTimes()
        self._looked_at = self._answered_at = clock.now()
        self.workers_may_go_on = False
        """A prompt or a slot became free since the last commit: workers that wait are to look again."""
        self.model: ModelLimits | None = None
        """The model that is trained, as its trainer described it; of `run.model`."""
        self.failed_in_a_row: Counter[int] = Counter()
        """By table id: prompts given up since a group was last inserted; anew after a restart."""
        self.failing_since: dict[int, float] = {}
        """By table id: when the first of them was given up."""
        self.last_failure: dict[int, str] = {}
        """By table id: how the last attempt failed, for people."""
        self.segments_may_have_died = False
        """Payloads went since the last commit."""
        self.refused_bytes: dict[str, int] = {}
        """Sizes of groups that the byte budget refused, by lease: advice for what LeaseBatch answers."""
        try:
            make_folder(options.folder)
            self._lock = _lock_folder(options.folder)
        except OSError as error:
            raise storage_failed(options.folder, error, "use") from None
        try:
            self._open()
        except BaseException:
            os.close(self._lock)
            raise

    def _open(self) -> None:
        options = self.options
        self.db = Database(options.folder / "ledger.sqlite")
        self._begin_run()
        ends = self.db.all(
            "SELECT segment, max(offset + bytes) AS at FROM groups WHERE segment IS NOT NULL GROUP BY segment"
        )
        live_ends = {row["segment"]: row["at"] + RECORD_OVERHEAD for row in ends}
        self.segments = Segments(options.folder / "segments", options.segment_bytes, live_ends)
        if self.segments.torn_bytes:
            _log.warning("cut the torn tail of the newest segment", bytes=self.segments.torn_bytes)
        self._load_tables()
        self.recover()

    def close(self) -> None:
        """Close files. The writer must have ended."""
        self.segments.close()
        self.db.close()
        os.close(self._lock)

    # -------------------------------------------------------------- what the writer calls

    def before_batch(self) -> None:
        """End the leases whose time is over; time in which nobody could be answered counts against none of them."""
        from vime_buffer.leases import expire_due  # it builds on this module

        now = self.clock.now()
        deaf_from = max(self._looked_at, self._answered_at + _DEAF_S)
        if now > deaf_from:
            self.lease_times.pardon(now - deaf_from)
        self._looked_at = now
        expire_due(self)

    def answered(self) -> None:
        """Note that the operations of a batch are answered."""
        self._answered_at = self._looked_at

    def recover(self) -> None:
        """Forget what an undone transaction left in memory; open leases that are not known get a fresh time."""
        self.model = ModelLimits.of(self.db.value("SELECT model FROM run"))
        settings = {row["name"]: row["settings"] for row in self.db.all("SELECT name, settings FROM tables")}
        for name in [name for name in self.tables if name not in settings]:
            del self.tables[name]
        for name, table in self.tables.items():
            table.settings = TableSettings.stored(settings[name])
        open_rows = self.db.all("SELECT lease_id, table_id FROM groups WHERE state = ?", State.OPEN)
        still_open = {row["lease_id"] for row in open_rows}
        self.refused_bytes = {key: size for key, size in self.refused_bytes.items() if key in still_open}
        ttls = {table.id: table.settings.lease_ttl for table in self.tables.values()}
        self.lease_times.restore(((row["lease_id"], ttls[row["table_id"]]) for row in open_rows), self.clock.now())

    def after_commit(self) -> None:
        """Delete segments that died. Only after a commit that said so: rows must never point at missing files."""
        if self.segments_may_have_died:
            self.segments_may_have_died = False
            live = self.db.all("SELECT DISTINCT segment FROM groups WHERE segment IS NOT NULL")
            self.segments.delete_dead({row["segment"] for row in live})

    # -------------------------------------------------------------- the run

    def run(self) -> RunState:
        """The run as it is now."""
        row = self.db.one("SELECT * FROM run")
        assert row is not None, "_begin_run made it"
        policy = None
        if row["policy_step"] is not None:
            policy = Version(row["run_id"], row["policy_incarnation"], row["policy_step"])
        return RunState(
            row["run_id"],
            row["seed"],
            row["incarnation"],
            row["resume_step"],
            row["recipe_digest"],
            policy,
            row["leased_step"],
            row["completed_step"],
            row["oldest_kept_step"],
        )

    def check_incarnation(self, incarnation: int) -> RunState:
        """The run, for a caller of the current incarnation.

        Raises:
            StaleIncarnation: the caller's is lower.
            FailedPrecondition: the caller's was never granted.
        """
        run = self.run()
        if incarnation < run.incarnation:
            raise StaleIncarnation(
                f"incarnation {incarnation} is over; the current one is {run.incarnation}",
                incarnation=incarnation,
                current=run.incarnation,
            )
        if incarnation > run.incarnation:
            raise FailedPrecondition(
                f"incarnation {incarnation} was never granted; the current one is {run.incarnation}",
                state=f"incarnation {run.incarnation}",
                wanted=f"incarnation {incarnation}",
            )
        return run

    def check_run_id(self, run_id: str) -> None:
        """Raises FleetOwned unless `run_id` is this ledger's run."""
        if run_id != self.options.run_id:
            raise FleetOwned(
                f'this buffer belongs to run "{self.options.run_id}", not to "{run_id}"',
                run_id=run_id,
                owner=self.options.run_id,
            )

    def skipped_steps(self) -> list[int]:
        """Steps that changed no weights."""
        return [row["step"] for row in self.db.all("SELECT step FROM batches WHERE outcome = 2")]

    def unpublished_steps(self, run: RunState) -> int:
        """Steps trained since the policy version."""
        if run.policy is None:
            return 0
        sql = "SELECT count(*) FROM batches WHERE state = 'completed' AND outcome = 1 AND step > ? AND step <= ?"
        return int(self.db.value(sql, run.policy.step, run.completed_step))

    # -------------------------------------------------------------- tables

    def table(self, name: str) -> Table:
        """The table called `name`.

        Raises:
            NotFound: there is none.
        """
        found = self.tables.get(name)
        if found is None:
            known = ", ".join(sorted(self.tables)) or "none"
            raise NotFound(f'there is no table "{name}"; known: {known}', kind="table", name=name)
        return found

    def table_by_id(self, table_id: int) -> Table:
        """The table with this row id."""
        return next(table for table in self.tables.values() if table.id == table_id)

    # -------------------------------------------------------------- rows

    def lease_ended(self, lease_id: str) -> None:
        """Forget what memory holds of a lease."""
        self.lease_times.end(lease_id)
        self.refused_bytes.pop(lease_id, None)

    def bump(self, table_id: int, kind: str, reason: str = "", n: int = 1) -> None:
        """Count events."""
        if n:
            self.db.run(
                "INSERT INTO events (table_id, kind, reason, n) VALUES (?, ?, ?, ?) "
                "ON CONFLICT DO UPDATE SET n = n + excluded.n",
                table_id, kind, reason, n,
            )  # fmt: skip

    def requeue(self, row: Any) -> None:
        """An open attempt ends without a group; its prompt waits for the next, in its old place."""
        self.db.run(
            f"UPDATE groups SET state = ?, attempt = attempt + 1, {NO_LEASE} WHERE id = ?", State.QUEUED, row["id"]
        )
        self.bump(row["table_id"], "requeued")
        self.lease_ended(row["lease_id"])
        self.workers_may_go_on = True

    def give_up(self, row: Any, reason: str) -> None:
        """An open attempt ends and was the last."""
        self.db.run(
            f"UPDATE groups SET state = ?, reason = ?, train_step = NULL, place = NULL, {NO_LEASE} WHERE id = ?",
            State.GIVEN_UP,
            reason,
            row["id"],
        )
        self.bump(row["table_id"], "given_up", reason)
        self.lease_ended(row["lease_id"])
        self.workers_may_go_on = True

    def evict(self, row: Any, reason: str, *, to: State = State.QUEUED, keep_place: bool = False) -> None:
        """A group that was inserted goes, counted; its prompt waits to be generated again (or is withdrawn)."""
        self.db.run(
            "INSERT INTO evictions (table_id, group_id, attempt, reason) VALUES (?, ?, ?, ?)",
            row["table_id"], row["group_id"], row["attempt"], reason,
        )  # fmt: skip
        place = "" if keep_place else "train_step = NULL, place = NULL, "
        stale = "evictions = evictions + 1, " if reason == "STALE" else ""
        self.db.run(
            f"UPDATE groups SET state = ?, attempt = attempt + 1, failures = 0, {place}{stale}{NO_PAYLOAD} "
            "WHERE id = ?",
            to,
            row["id"],
        )
        self.segments_may_have_died = self.workers_may_go_on = True

    # -------------------------------------------------------------- opening

    def _begin_run(self) -> None:
        found = self.db.one("SELECT run_id, seed FROM run")
        if found is None:
            self.db.run("INSERT INTO run (id, run_id, seed) VALUES (1, ?, ?)", self.options.run_id, self.options.seed)
            return
        self.check_owner(found["run_id"])
        if found["seed"] != self.options.seed:
            raise FailedPrecondition(
                f"the ledger in {self.options.folder} was begun with seed {found['seed']}, not {self.options.seed}",
                state=f"seed {found['seed']}",
                wanted=f"seed {self.options.seed}",
            )

    def check_owner(self, owner: str) -> None:
        """Raises FleetOwned if the folder is another run's."""
        if owner != self.options.run_id:
            raise FleetOwned(
                f'the ledger in {self.options.folder} belongs to run "{owner}", not to "{self.options.run_id}"',
                run_id=self.options.run_id,
                owner=owner,
            )

    def _load_tables(self) -> None:
        """A source that cannot be used blocks its table alone; it may come back while others are trained on."""
        from vime_buffer.catalog import open_source  # it builds on this module

        for row in self.db.all("SELECT id, settings, source_digest FROM tables ORDER BY id"):
            settings = TableSettings.stored(row["settings"])
            path = self.options.source_paths.get(settings.name, settings.source.path)
            moved = path != settings.source.path
            settings = settings.at(path)
            if moved:
                self.db.run("UPDATE tables SET settings = ? WHERE id = ?", settings.model_dump_json(), row["id"])
            table = self.add_table(row["id"], settings, row["source_digest"])
            try:
                table.unblock(open_source(settings, self.options, table.digest))
            except SourceUnusable as error:
                table.block(error.message, self.clock.now())

    def add_table(
        self, table_id: int, settings: TableSettings, digest: str, source: JsonlSource | None = None
    ) -> Table:
        """Know a table that is in the rows."""
        selector = make_selector(settings.selector, settings.max_staleness, settings.max_evictions)
        self.tables[settings.name] = table = Table(table_id, settings, digest, source, selector)
        return table


def _lock_folder(folder: Path) -> int:
    """One process at a time; the lock goes with the process, however it ends."""
    fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise Unavailable(f"the ledger in {folder} is open in another process", folder=folder) from None
    return fd
