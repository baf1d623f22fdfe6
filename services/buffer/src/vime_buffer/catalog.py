"""Tables: made, changed, emptied by hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from vime_buffer.answer_size import record_room
from vime_buffer.ledger import NO_PAYLOAD, Ledger, LedgerOptions, Table
from vime_buffer.settings import MUTABLE, TableSettings, changed_fields, check_budget, check_table
from vime_buffer.sources import JsonlSource, SourceUnusable, same_records, scan
from vime_buffer.values import DROP_DELETED, State
from vime_service.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PermissionDenied,
)
from vime_service.logging import get_logger

_log = get_logger(__name__)
CHECKED = 256 << 20
"""Bytes of each source that are checked before a start: some seconds."""


def open_source(settings: TableSettings, options: LedgerOptions, digest: str | None = None) -> JsonlSource:
    """Check a table's source, which must have the bytes it had when the table was made.

    Raises:
        SourceUnusable: it cannot be used, or its content changed: cursors and prompt ids would mean other prompts.
    """
    source = JsonlSource(settings.source, options.seed, record_room(settings, options.message_bytes))
    if digest is not None and not same_records(digest, source.digest):
        raise SourceUnusable(
            f"prompt source {settings.source.path} changed since the run began, or other lines are skipped "
            f"(digest-skipped {source.digest}, was {digest}); restore it or begin a new run",
            field="source.path",
            state=source.digest,
            wanted=digest,
        )
    if source.skipped:
        first = source.first_skipped
        _log.warning("bad lines skipped", table=settings.name, skipped=dict(source.skipped), first=first)
    return source


def check_data(
    tables: Iterable[TableSettings], message_bytes: int, at_most: int = CHECKED
) -> tuple[list[str], list[str]]:
    """What keeps a run from starting in the sources of all tables, and what is worth knowing, in sentences.

    Args:
        tables: settings, checked and filled in.
        message_bytes: the message cap.
        at_most: bytes of each file that are looked at.
    """
    problems: list[str] = []
    notes: list[str] = []
    for table in tables:
        try:
            found = scan(table.source, record_room(table, message_bytes), at_most)
        except SourceUnusable as error:
            said = [error.message]
        else:
            said = found.problems(lenient=table.source.lenient)
            if not found.whole:
                notes.append(f"{found.path}: only the first {found.checked} bytes were checked")
            if found.bad and not said:
                notes.append(f"{found.path}: bad lines that are skipped: {dict(found.bad)}")
        problems.extend(f'table "{table.name}": {sentence}' for sentence in said)
    return problems, notes


def check_root(path: Path, roots: Sequence[Path]) -> Path:
    """The real path of a source that a caller names; it must lie inside one of the folders.

    Raises:
        PermissionDenied: it does not, after symbolic links and `..` are followed.
    """
    candidates = [path] if path.is_absolute() else [root / path for root in roots]
    for candidate in candidates:
        try:
            real = candidate.resolve()
        except ValueError:  # it holds a NUL, which no path may
            break
        if any(real.is_relative_to(root) for root in roots):
            return real
    raise PermissionDenied(
        f"prompt source {path} lies in none of the folders this buffer may read: "
        f"{', '.join(map(str, roots)) or 'none configured'} (setting buffer.source_roots)",
        method="CreateTable",
        path=path,
    )


def create_table(ledger: Ledger, settings: TableSettings, source: JsonlSource) -> TableSettings:
    """Make a table, or find the same one. Its settings with defaults filled in.

    Raises:
        AlreadyExists: it is there with other settings or another file.
        InvalidArgument: another file has the source's name.
        ImpossibleConfig: its retained_bytes leave no room.
    """
    if settings.name not in ledger.tables:
        _check_budget_with(ledger, [settings])
    return _make(ledger, settings, source)


def _make(ledger: Ledger, settings: TableSettings, source: JsonlSource) -> TableSettings:
    settings = settings.filled()
    found = ledger.tables.get(settings.name)
    if found is None:
        _check_new(ledger, settings, source)
    else:
        _check_same(found, settings, source)
        _move(ledger, found, source)
        return found.settings
    ledger.db.run(
        "INSERT INTO tables (name, settings, source_digest) VALUES (?, ?, ?)",
        settings.name, settings.model_dump_json(), source.digest,
    )  # fmt: skip
    table_id = ledger.db.value("SELECT id FROM tables WHERE name = ?", settings.name)
    ledger.add_table(table_id, settings, source.digest, source)
    ledger.workers_may_go_on = True
    return settings


def _check_new(ledger: Ledger, settings: TableSettings, source: JsonlSource) -> None:
    """Prompt ids begin with the source's name, so that one name must mean one file's prompts."""
    for other in ledger.tables.values():
        if other.settings.source.name == settings.source.name and not same_records(other.digest, source.digest):
            raise InvalidArgument(
                f'table "{settings.name}": "{settings.source.name}" is the source {other.settings.source.path} '
                f'of table "{other.name}", which has other content than {settings.source.path}; '
                "give one of them another source.name",
                field="source.name",
                value=settings.source.name,
            )


def _check_budget_with(ledger: Ledger, changed: Iterable[TableSettings]) -> None:
    """Of all tables as they will be: those that change together count together."""
    known = {name: table.settings for name, table in ledger.tables.items()}
    after = known | {settings.name: settings for settings in changed}
    check_budget(after.values(), ledger.options.max_bytes)


def _check_same(found: Table, settings: TableSettings, source: JsonlSource) -> None:
    different = changed_fields(found.settings, settings)
    if not different and not same_records(found.digest, source.digest):
        different = ["source"]
    if different:
        raise AlreadyExists(
            f'table "{settings.name}" exists with other settings: {", ".join(different)}',
            kind="table",
            name=settings.name,
            fields=",".join(different),
        )


def _move(ledger: Ledger, table: Table, source: JsonlSource) -> None:
    """The same content may lie elsewhere now."""
    settings = table.settings.at(source.settings.path)
    ledger.db.run("UPDATE tables SET settings = ? WHERE id = ?", settings.model_dump_json(), table.id)
    table.settings = settings
    unblock(ledger, table, source)


def unblock(ledger: Ledger, table: Table, source: JsonlSource) -> None:
    """A table's source can be used (again), and who waits for it looks again."""
    table.unblock(source)
    ledger.workers_may_go_on = True


def configure_tables(ledger: Ledger, tables: Iterable[TableSettings]) -> None:
    """Bring the tables of the configuration into the ledger, at start.

    Raises:
        FailedPrecondition: a setting that the run depends on differs from the ledger's.
        ImpossibleConfig: the tables of the ledger keep more bytes than there may be.
    """
    configured = list(tables)
    _check_budget_with(ledger, configured)
    for settings in configured:
        found = ledger.tables.get(settings.name)
        if found is None:
            _make(ledger, settings, open_source(settings, ledger.options))
        elif changed_fields(found.settings, settings):
            _change(ledger, found, settings)


def update_table(ledger: Ledger, settings: TableSettings) -> None:
    """Change the settings that may change.

    Raises:
        NotFound: no such table.
        FailedPrecondition: another setting differs.
        ImpossibleConfig, InvalidArgument: the new settings cannot work.
    """
    table = ledger.table(settings.name)
    _check_budget_with(ledger, [settings])
    _change(ledger, table, settings)


def _change(ledger: Ledger, table: Table, settings: TableSettings) -> None:
    settings = settings.filled()
    check_table(settings)
    if settings.source.path.resolve() != table.settings.source.path.resolve():
        raise FailedPrecondition(
            f'table "{settings.name}": its source is {table.settings.source.path}, not {settings.source.path}; '
            "that it moved is said by the configuration at a restart, or by CreateTable",
            state=table.settings.source.path,
            wanted=settings.source.path,
            field="source.path",
        )
    settings = settings.at(table.settings.source.path)
    fixed = [field for field in changed_fields(table.settings, settings) if field not in MUTABLE]
    if fixed:
        field = fixed[0]
        old, new = getattr(table.settings, field), getattr(settings, field)
        raise FailedPrecondition(
            f'table "{settings.name}": {field} is {old} in the ledger and cannot become {new} while the run goes on; '
            f"changeable are {', '.join(MUTABLE)}",
            state=old,
            wanted=new,
            field=field,
        )
    ledger.db.run("UPDATE tables SET settings = ? WHERE id = ?", settings.model_dump_json(), table.id)
    table.settings = settings


def delete_groups(ledger: Ledger, table_name: str, group_ids: Sequence[str]) -> int:
    """Drop stored groups by hand, all or none; how many. Ones that were deleted before count again.

    Raises:
        NotFound: no such table or group.
        FailedPrecondition: a group is not stored, or a batch in the ledger holds it.
        InvalidArgument: the table is an eval table.
    """
    table = ledger.table(table_name)
    if table.settings.is_eval:
        raise InvalidArgument(f'groups of "{table_name}" belong to their eval round', field="table", value=table_name)
    for group_id in dict.fromkeys(group_ids):
        _delete_group(ledger, table, group_id)
    ledger.segments_may_have_died = ledger.workers_may_go_on = True
    return len(set(group_ids))


def _delete_group(ledger: Ledger, table: Table, group_id: str) -> None:
    row = ledger.db.one(
        "SELECT id, state, reason, train_step, digest FROM groups WHERE table_id = ? AND group_id = ?",
        table.id,
        group_id,
    )
    if row is None:
        raise NotFound(f'table "{table.name}" has no group {group_id}', kind="group", name=group_id)
    if row["state"] == State.DROPPED and row["reason"] == DROP_DELETED:
        return
    if row["state"] != State.STORED or row["train_step"] is not None:
        held = f" in the batch of step {row['train_step']}" if row["train_step"] is not None else ""
        state = State(row["state"]).name.lower()
        raise FailedPrecondition(
            f"group {group_id} is {state}{held}; only stored groups outside of batches can be deleted",
            state=state,
            wanted="stored",
        )
    ledger.db.run(
        f"UPDATE groups SET state = ?, reason = ?, {NO_PAYLOAD} WHERE id = ?", State.DROPPED, DROP_DELETED, row["id"]
    )
    ledger.db.run("UPDATE groups SET digest = ? WHERE id = ?", row["digest"], row["id"])
