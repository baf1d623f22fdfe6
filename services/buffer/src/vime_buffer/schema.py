"""The ledger's database: its tables, and how it is opened."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vime_service.errors import DataLoss, InvalidArgument, StorageFailed, VimeError

SCHEMA_VERSION = 3
_QUARANTINED = """
-- Groups that training could not use: taken out of their batch, counted as dropped{unusable}, kept for people.
CREATE TABLE quarantined (
    id INTEGER PRIMARY KEY,
    table_id INTEGER NOT NULL,
    group_id TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    prompt_id TEXT NOT NULL,
    train_step INTEGER NOT NULL,
    detail TEXT NOT NULL,
    worker_id TEXT NOT NULL,
    engines TEXT NOT NULL,               -- JSON array
    bytes INTEGER NOT NULL,
    payload BLOB,                        -- NULL once newer ones have taken its room
    given_up INTEGER NOT NULL,           -- that was its prompt's last attempt
    UNIQUE (group_id, attempt)
);
CREATE INDEX quarantined_table ON quarantined (table_id, id);
"""
_MIGRATIONS = {
    1: """
ALTER TABLE groups ADD COLUMN request_id TEXT;
CREATE INDEX groups_request ON groups (request_id) WHERE request_id IS NOT NULL;
ALTER TABLE batches ADD COLUMN published INTEGER;
""",
    2: f"""
ALTER TABLE run ADD COLUMN model TEXT;
ALTER TABLE tables ADD COLUMN unusable_in_a_row INTEGER NOT NULL DEFAULT 0;
ALTER TABLE groups ADD COLUMN lease_sampling TEXT;
ALTER TABLE groups ADD COLUMN inserted_by TEXT;
ALTER TABLE groups ADD COLUMN engines TEXT;
{_QUARANTINED}""",
}
"""What makes a ledger of a version one of the next; a folder outlives the program that began it."""

_SCHEMA = f"""
-- One row: the run, its incarnation, the policy version (NULL until announced) and how far it is.
CREATE TABLE run (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    run_id TEXT NOT NULL,
    seed INTEGER NOT NULL,
    incarnation INTEGER NOT NULL DEFAULT 0,
    resume_step INTEGER NOT NULL DEFAULT 0,
    recipe_digest TEXT NOT NULL DEFAULT '',
    policy_incarnation INTEGER,
    policy_step INTEGER,
    leased_step INTEGER NOT NULL DEFAULT 0,
    completed_step INTEGER NOT NULL DEFAULT 0,
    oldest_kept_step INTEGER NOT NULL DEFAULT 0,
    model TEXT                           -- ModelLimits as JSON; NULL: nothing is known of it
);

CREATE TABLE tables (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    settings TEXT NOT NULL,              -- TableSettings as JSON
    source_digest TEXT NOT NULL,
    epoch INTEGER NOT NULL DEFAULT 0,    -- cursor: the next prompt to admit
    position INTEGER NOT NULL DEFAULT 0,
    next_admission INTEGER NOT NULL DEFAULT 1,
    closed INTEGER NOT NULL DEFAULT 0,
    drops_in_a_row INTEGER NOT NULL DEFAULT 0,
    unusable_in_a_row INTEGER NOT NULL DEFAULT 0 -- groups quarantined since a step was trained
);

-- Events that happened, ever. The laws compare them with the rows of `groups` and `evictions`.
CREATE TABLE events (
    table_id INTEGER NOT NULL,
    kind TEXT NOT NULL,                  -- drawn, inserted, requeued, given_up, dropped
    reason TEXT NOT NULL DEFAULT '',
    n INTEGER NOT NULL,
    PRIMARY KEY (table_id, kind, reason)
) WITHOUT ROWID;

-- One row for each prompt that was ever admitted, and its group.
CREATE TABLE groups (
    id INTEGER PRIMARY KEY,
    table_id INTEGER NOT NULL,
    group_id TEXT NOT NULL UNIQUE,
    admission INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    source_index INTEGER NOT NULL,
    eval_step INTEGER,
    state INTEGER NOT NULL,
    attempt INTEGER NOT NULL DEFAULT 0,  -- grows with every lease that ended without a group that stayed
    failures INTEGER NOT NULL DEFAULT 0, -- attempts that count against max_attempts
    evictions INTEGER NOT NULL DEFAULT 0,
    reason TEXT NOT NULL DEFAULT '',
    corrupted INTEGER NOT NULL DEFAULT 0,
    lease_id TEXT,
    worker_id TEXT,
    request_id TEXT,                     -- of the LeasePrompts call that the lease answered; NULL if it named none
    fence_incarnation INTEGER,
    fence_step INTEGER,
    lease_sampling TEXT,                 -- SamplingSettings of the lease as JSON: the table's may change meanwhile
    train_step INTEGER,                  -- the batch it belongs to, also while a rewind made it stored again
    place INTEGER,                       -- position in that batch
    segment INTEGER,
    offset INTEGER,
    bytes INTEGER NOT NULL DEFAULT 0,
    digest BLOB,                         -- of the inserted bytes, kept when the payload goes
    sample_tokens TEXT,                  -- JSON array
    oldest_incarnation INTEGER,
    oldest_step INTEGER,
    newest_step INTEGER,
    rewards TEXT,                        -- JSON array: rewards of scored samples
    truncated INTEGER NOT NULL DEFAULT 0,
    response_tokens INTEGER NOT NULL DEFAULT 0,
    inserted_by TEXT,                    -- the worker
    engines TEXT                         -- JSON array: engines that generated it
);
CREATE UNIQUE INDEX groups_order ON groups (table_id, admission);
CREATE INDEX groups_state ON groups (table_id, state, admission, bytes);
CREATE UNIQUE INDEX groups_lease ON groups (lease_id) WHERE lease_id IS NOT NULL;
CREATE INDEX groups_request ON groups (request_id) WHERE request_id IS NOT NULL;
CREATE INDEX groups_step ON groups (train_step, place) WHERE train_step IS NOT NULL;
CREATE INDEX groups_segment ON groups (segment) WHERE segment IS NOT NULL;
CREATE INDEX groups_round ON groups (table_id, eval_step, state) WHERE eval_step IS NOT NULL;

-- The ledger proper: which step trains which batch (its groups are the rows with that train_step).
CREATE TABLE batches (
    step INTEGER PRIMARY KEY,
    table_id INTEGER NOT NULL,
    state TEXT NOT NULL,                 -- recorded (by an earlier lease, to be replayed), leased, completed
    outcome INTEGER,
    published INTEGER,                   -- incarnation of the version published after it, 0: none, NULL: not known
    final INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX batches_skipped ON batches (step) WHERE outcome = 2;

CREATE TABLE evictions (
    id INTEGER PRIMARY KEY,
    table_id INTEGER NOT NULL,
    group_id TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    reason TEXT NOT NULL
);
CREATE INDEX evictions_reason ON evictions (table_id, reason);

{_QUARANTINED}
-- Eval rounds. A version of NULL waits for the next AnnounceVersion.
CREATE TABLE rounds (
    table_id INTEGER NOT NULL,
    step INTEGER NOT NULL,
    incarnation INTEGER,
    version_step INTEGER,
    opened_at REAL NOT NULL,
    done_at REAL,
    PRIMARY KEY (table_id, step)
) WITHOUT ROWID;
"""

OWN_FAULTS = (sqlite3.IntegrityError, sqlite3.ProgrammingError, sqlite3.DataError, sqlite3.NotSupportedError)
"""Errors that a wrong statement makes, on a disk that is well."""
_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


class Database:
    """A connection with short names for what the ledger does all the time. Used by one thread at a time."""

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        """Open the file, making it and its tables if they are not there.

        Raises:
            StorageFailed: the folder cannot be written.
            DataLoss: the file is no ledger, or is damaged.
        """
        self.path = path
        try:
            self._connection = sqlite3.connect(
                f"{path.absolute().as_uri()}?mode=ro" if read_only else path,
                uri=read_only,
                isolation_level=None,
                check_same_thread=False,
                timeout=10.0,
                cached_statements=256,
            )
            self._connection.row_factory = sqlite3.Row
            if not read_only:
                self._prepare()
        except sqlite3.Error as error:
            raise database_failed(path, error) from None

    def _prepare(self) -> None:
        run = self._connection.execute
        # EXCLUSIVE would be simpler against a second process, but it would also shut out the reading connection; the
        # folder has a lock file of its own.
        run("PRAGMA journal_mode = WAL")
        run("PRAGMA synchronous = FULL")
        run("PRAGMA wal_autocheckpoint = 1000")
        version = run("PRAGMA user_version").fetchone()[0]
        if version not in (0, *_MIGRATIONS, SCHEMA_VERSION):
            raise DataLoss(
                f"{self.path} has schema {version}; this version reads schemas up to {SCHEMA_VERSION}",
                segment=self.path.name,
                offset=0,
            )
        steps = [_SCHEMA] if version == 0 else [_MIGRATIONS[older] for older in range(version, SCHEMA_VERSION)]
        if steps:
            self._connection.executescript(f"BEGIN;{''.join(steps)}PRAGMA user_version = {SCHEMA_VERSION};COMMIT;")

    def run(self, sql: str, *values: object) -> int:
        """Execute; the number of rows changed."""
        return self._execute(sql, values).rowcount

    def many(self, sql: str, rows: Sequence[Sequence[object]]) -> None:
        """Execute once for each row of values."""
        self._connection.executemany(sql, rows)

    def all(self, sql: str, *values: object) -> list[sqlite3.Row]:
        """All rows."""
        return self._execute(sql, values).fetchall()

    def one(self, sql: str, *values: object) -> sqlite3.Row | None:
        """The first row, or None."""
        row: sqlite3.Row | None = self._execute(sql, values).fetchone()
        return row

    def value(self, sql: str, *values: object) -> Any:
        """The first column of the first row; None if there is no row."""
        row = self._execute(sql, values).fetchone()
        return row[0] if row else None

    def _execute(self, sql: str, values: Sequence[object]) -> sqlite3.Cursor:
        try:
            return self._connection.execute(sql, values)
        except OverflowError:  # the contract counts to 2^64, SQLite to 2^63
            largest = max(value for value in values if isinstance(value, int))
            message = f"{largest} is beyond {2**63 - 1}, the largest number that the ledger knows"
            raise InvalidArgument(message, value=largest, limit=2**63 - 1) from None

    def begin(self, how: str = "IMMEDIATE") -> None:
        """Begin a transaction."""
        self._connection.execute(f"BEGIN {how}")

    def commit(self) -> None:
        """Commit it."""
        self._connection.execute("COMMIT")

    def rollback(self) -> None:
        """Undo it, if it is still open (SQLite ends it by itself after some errors)."""
        if self._connection.in_transaction:
            self._connection.execute("ROLLBACK")

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def database_failed(path: Path, error: sqlite3.Error) -> VimeError:
    """What a caller is told when SQLite fails: damage, or a disk that refuses."""
    if getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGE:
        return DataLoss(f"{path} is damaged or no ledger: {error}", segment=path.name, offset=0)
    return StorageFailed(f"cannot use {path}: {error}; older data is intact", path=path)
