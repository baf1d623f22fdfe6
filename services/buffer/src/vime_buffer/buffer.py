"""The buffer as its servicers see it: every call of the ledger, awaited, with long polls that end in time.

Writes go to the writer's thread, reads to threads of their own with a connection that only reads; the event loop never
touches a disk. A poll that waits is woken by the next commit, not by a timer.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar

from vime_buffer import batches, catalog, evals, incarnation, leases, quarantine, views
from vime_buffer.changes import Changes
from vime_buffer.content import GroupContent, GroupRules
from vime_buffer.digests import payload_digest
from vime_buffer.ledger import Ledger, Table
from vime_buffer.schema import OWN_FAULTS, Database, database_failed
from vime_buffer.settings import TableSettings, check_table
from vime_buffer.sources import JsonlSource, SourceUnusable
from vime_buffer.validation import check_drop_reason, check_group
from vime_buffer.values import (
    BatchAnswer,
    Blocked,
    Completed,
    Failure,
    GroupFacts,
    GroupRow,
    Insert,
    ModelLimits,
    Opened,
    Outcome,
    Place,
    PromptAnswer,
    Quarantine,
    QuarantinedRow,
    RoundResult,
    State,
    Unusable,
    Version,
)
from vime_buffer.writer import Writer
from vime_service.errors import DataLoss, Draining, InvalidArgument, MessageTooLarge, VimeError
from vime_service.logging import get_logger

_log = get_logger(__name__)
_LARGE = 256 << 10
"""Groups above this many bytes are checked in a thread, so that other calls go on meanwhile."""
_SWEEP_S = 0.5
"""How often leases that ended are looked for while no call does it."""

_MEND_S = 1.0
"""How often the sources of blocked tables are looked for, at most."""

_LAWS_EVERY = 20
"""Beats of the sweep between two looks at the conservation laws."""
_LONGEST_ID = 128
_WATCH_PAUSE_S = 0.1

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BufferLimits:
    """Settings of the calls; see `BufferSettings`."""

    max_group_bytes: int = 48 << 20
    worker_silence_s: float = 10.0


@dataclass(eq=False, slots=True)
class _Asked:
    """One LeasePrompts call. `left`: its caller went away while its leases were being committed."""

    worker_id: str
    request_id: str
    left: bool = False

    @property
    def key(self) -> object:
        """The same for the repeats of a call that names itself."""
        return (self.worker_id, self.request_id) if self.request_id else self


class Buffer:
    """An open ledger with its threads. Make it inside a running event loop."""

    def __init__(self, ledger: Ledger, limits: BufferLimits | None = None) -> None:
        self._ledger = ledger
        self._limits = limits or BufferLimits()
        self._loop = asyncio.get_running_loop()
        self.changes = Changes(self._loop)
        self._slots = Changes(self._loop)
        self._writer = Writer(ledger, self._committed)
        self._reading = Database(ledger.db.path, read_only=True)
        # One thread for the one reading connection; payload files are read side by side.
        self._reader = ThreadPoolExecutor(1, "ledger-reader")
        self._payloads = ThreadPoolExecutor(2, "payload-reader")
        self._asking = 0
        self._newest: dict[object, _Asked] = {}
        self._broken: set[tuple[str, str]] = set()
        self._asked_at = float("-inf")

    async def close(self) -> None:
        """Finish what waits and close the files."""
        self.stop_waiting()
        await asyncio.to_thread(self._writer.close)
        # bounded by: reads of local files, which wait for nobody
        self._reader.shutdown()
        # bounded by: as above
        self._payloads.shutdown()
        self._reading.close()
        self._ledger.close()

    def stop_waiting(self) -> None:
        """End every poll and watch."""
        self.changes.stop()
        self._slots.stop()

    def _committed(self) -> None:
        """Wake who waits; called in the writer's thread. Hundreds of workers are not woken by every insert."""
        self.changes.announce_from_thread()
        if self._ledger.workers_may_go_on:
            self._ledger.workers_may_go_on = False
            self._slots.announce_from_thread()

    async def sweep(self) -> None:
        """Have the writer end leases whose time is over, and watch the laws, for ever; to be run as a task."""
        beats = 0
        while not self.changes.stopped:
            # A fixed beat, whether or not a lease ends: a beat that is missing tells the ledger that it was deaf.
            await self._ledger.clock.sleep(_SWEEP_S)
            try:
                await self._write(lambda ledger: None)  # the writer ends them before any operation
                beats += 1
                if beats % _LAWS_EVERY == 0:
                    await self.check_laws()
            except Draining:
                return
            except VimeError:
                continue  # the writer said why; the disk may be better at the next beat

    async def mend_sources(self) -> None:
        """Look for the sources of blocked tables, for ever; to be run as a task. Looking takes 1/20 of one thread."""
        seen: dict[str, str] = {}
        while not self.changes.stopped:
            began = self._loop.time()
            for table in [table for table in self._ledger.tables.values() if table.blocked]:
                with suppress(VimeError):  # the writer said why; the next look tries again
                    await self._mend_source(table)
            blocked = {name: table.blocked for name, table in self._ledger.tables.items() if table.blocked}
            if blocked != seen:  # no row changed, so that no commit says it
                seen = blocked
                self.changes.announce()
                self._slots.announce()
            await self._ledger.clock.sleep(max(_MEND_S, 20 * (self._loop.time() - began)))

    async def _mend_source(self, table: Table) -> None:
        try:
            source = await asyncio.to_thread(catalog.open_source, table.settings, self._ledger.options, table.digest)
            await self._write(lambda ledger: catalog.unblock(ledger, table, source))
        except SourceUnusable as error:
            reason = error.message
            await self._write(lambda ledger: table.block(reason, ledger.clock.now()))

    async def check_laws(self) -> None:
        """Log an error for every conservation law that broke since the last look; none of them ever may."""
        views_ = await self._read(_all_tables)
        broken = {(view.settings.name, law): text for view in views_ for law, text in view.counts.broken_laws().items()}
        for (table, law), numbers in broken.items():
            if (table, law) not in self._broken:
                _log.error("a conservation law is broken", table=table, law=law, numbers=numbers)
        self._broken = set(broken)

    # -------------------------------------------------------------- workers

    async def lease_prompts(
        self, worker_id: str, max_prompts: int, tables: Sequence[str], wait_s: float, request_id: str = ""
    ) -> PromptAnswer:
        """See `leases.lease_prompts`; waits up to `wait_s` for admission."""
        if max_prompts < 1:
            raise InvalidArgument("max_prompts must be at least 1, not 0", field="max_prompts", value=max_prompts)
        if len(request_id) > _LONGEST_ID:
            raise InvalidArgument(
                f"request_id has {len(request_id)} characters, at most {_LONGEST_ID} may be",
                field="request_id",
                limit=_LONGEST_ID,
                actual=len(request_id),
            )
        call = _Asked(worker_id, request_id)
        self._newest[call.key] = call
        self._asking += 1
        try:
            return await self._slots.poll(lambda: self._try_lease(call, max_prompts, tables), wait_s)
        finally:
            self._asking -= 1
            self._asked_at = self._ledger.clock.now()
            if not call.left:
                self._forget(call)

    async def _try_lease(self, call: _Asked, max_prompts: int, tables: Sequence[str]) -> tuple[PromptAnswer, bool]:
        future = self._writer.submit(
            lambda ledger: leases.lease_prompts(ledger, call.worker_id, max_prompts, tables, call.request_id)
        )
        try:
            answer = await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if not future.cancel():  # it is being committed: nobody will hold these leases
                call.left = True
                future.add_done_callback(lambda done: self._in_loop(lambda: self._give_back(call, done)))
            raise
        return answer, bool(answer.leases) or answer.blocked is Blocked.CLOSED

    def _in_loop(self, work: Callable[[], None]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(work)

    def _forget(self, call: _Asked) -> bool:
        """The call is over; False if it was repeated meanwhile, so that its leases are the repeat's."""
        if self._newest.get(call.key) is not call:
            return False
        del self._newest[call.key]
        return True

    def _give_back(self, call: _Asked, future: Future[PromptAnswer]) -> None:
        if not self._forget(call) or future.cancelled() or future.exception() is not None:
            return
        # bounded by: the callback, which comes when it is done
        ids = [lease.lease_id for lease in future.result().leases]
        if ids and not self.changes.stopped:
            self._writer.submit(lambda ledger: leases.release(ledger, ids))

    async def keep_alive(self, worker_id: str, lease_ids: Sequence[str]) -> tuple[list[str], float]:
        """See `leases.keep_alive`."""
        return await self._write(lambda ledger: leases.keep_alive(ledger, worker_id, lease_ids))

    async def insert_group(self, lease_id: str, group: GroupContent, payload: bytes, drop_reason: str) -> bool:
        """Check a group and store it durably, or drop it; True if it was there already.

        Raises:
            MessageTooLarge: the group is above `max_group_bytes`.
            InvalidArgument: see `validation.check_group`.
        """
        limit = self._limits.max_group_bytes
        if len(payload) > limit:
            raise MessageTooLarge(
                f"group {group.group_id} has {len(payload)} bytes, the cap is {limit}", limit=limit, actual=len(payload)
            )
        table = self._ledger.table(group.table).settings
        facts: GroupFacts
        if drop_reason:
            check_drop_reason(drop_reason)
            facts = GroupFacts(group.group_id, group.attempt, group.table, group.prompt_id, (), 0, 0, (), ())
        elif len(payload) > _LARGE:
            facts = await asyncio.to_thread(check_group, group, self._rules(table))
        else:
            facts = check_group(group, self._rules(table))
        sampling = None if table.kind == "sft" else group.sampling  # nothing was sampled there
        insert = Insert(lease_id, facts, payload, payload_digest(payload), drop_reason, sampling, group.prompt_differs)
        return await self._write(lambda ledger: leases.insert_group(ledger, insert))

    def _rules(self, table: TableSettings) -> GroupRules:
        return GroupRules(
            run_id=self._ledger.options.run_id,
            num_samples=table.samples_per_prompt,
            require_routes=table.require_routes,
            needs_logprobs=table.kind != "sft",
            model=self._ledger.model,
            max_forks=table.max_forks,
            max_reward_parts=table.max_reward_parts,
        )

    async def fail_prompt(self, lease_id: str, failure: Failure, detail: str) -> bool:
        """See `leases.fail_prompt`."""
        return await self._write(lambda ledger: leases.fail_prompt(ledger, lease_id, failure, detail))

    # -------------------------------------------------------------- the trainer

    async def open_incarnation(
        self,
        run_id: str,
        resume_step: int,
        highest_known: int,
        recipe_digest: str,
        *,
        regenerate: bool,
        model: ModelLimits | None = None,
    ) -> Opened:
        """See `incarnation.open_incarnation`."""
        return await self._write(
            lambda ledger: incarnation.open_incarnation(
                ledger, run_id, resume_step, highest_known, recipe_digest, regenerate=regenerate, model=model
            )
        )

    async def announce_version(self, version: Version) -> tuple[str, ...]:
        """See `incarnation.announce_version`."""
        return await self._write(lambda ledger: incarnation.announce_version(ledger, version))

    async def lease_batch(self, incarnation_: int, step: int, table: str, wait_s: float) -> BatchAnswer:
        """See `batches.lease_batch`; waits up to `wait_s` for the batch."""

        async def attempt() -> tuple[BatchAnswer, bool]:
            asks = self._workers_ask()
            answer = await self._write(
                lambda ledger: batches.lease_batch(ledger, incarnation_, step, table, workers_ask=asks)
            )
            return answer, answer.blocked in (Blocked.NOT, Blocked.END_OF_DATA, Blocked.CLOSED, Blocked.RETAINED_BYTES)

        return await self.changes.poll(attempt, wait_s)

    def _workers_ask(self) -> bool:
        silence = self._ledger.clock.now() - self._asked_at
        return self._asking > 0 or silence < self._limits.worker_silence_s

    async def complete_step(
        self, incarnation_: int, step: int, table: str, outcome: Outcome, published: Version | None, *, final: bool
    ) -> Completed:
        """See `batches.complete_step`."""
        return await self._write(
            lambda ledger: batches.complete_step(ledger, incarnation_, step, table, outcome, published, final=final)
        )

    async def checkpoint_committed(self, incarnation_: int, step: int, oldest_kept_step: int) -> tuple[int, int]:
        """See `batches.checkpoint_committed`."""
        return await self._write(
            lambda ledger: batches.checkpoint_committed(ledger, incarnation_, step, oldest_kept_step)
        )

    async def quarantine_groups(
        self, incarnation_: int, step: int, table: str, groups: Sequence[Unusable]
    ) -> Quarantine:
        """See `quarantine.quarantine_groups`.

        Raises:
            FailedPrecondition: more groups in a row were unusable than the table allows; they leave all the same.
        """
        done = await self._write(lambda ledger: quarantine.quarantine_groups(ledger, incarnation_, step, table, groups))
        await self._write(lambda ledger: quarantine.check_unusable(ledger, ledger.table(table)))
        return done

    async def get_groups(self, group_ids: Sequence[str], message_bytes: int) -> AsyncIterator[list[bytes]]:
        """Payloads in the order asked for, in lists of up to `message_bytes` (or one larger payload).

        Raises:
            NotFound, FailedPrecondition, DataLoss: see `views.group_places`, `Segments.read` and
                `incarnation.mark_corrupted`.
        """
        places = await self._read(lambda db: views.group_places(db, group_ids))
        loop = asyncio.get_running_loop()
        for part in _parts(places, message_bytes):
            payloads, damage = await loop.run_in_executor(self._payloads, self._read_payloads, places[part])
            if damage is not None:
                group_id, place = group_ids[part][len(payloads)], places[part][len(payloads)]
                await self._mark_corrupted(group_id, place)
                _log.error("a payload is damaged", group_id=group_id, cause=damage.message)
                raise damage
            yield payloads

    def _read_payloads(self, places: Sequence[Place]) -> tuple[list[bytes], DataLoss | None]:
        """Payloads up to the first damaged one, and what is wrong with that."""
        payloads: list[bytes] = []
        for place in places:
            try:
                payloads.append(self._ledger.segments.read(place))
            except DataLoss as error:
                return payloads, error
        return payloads, None

    async def _mark_corrupted(self, group_id: str, place: Place) -> None:
        await self._write(lambda ledger: incarnation.mark_corrupted(ledger, group_id, place))

    # -------------------------------------------------------------- tables

    async def eval_round(self, table: str, step: int) -> RoundResult:
        """See `evals.round_result`."""
        run_id, now = self._ledger.options.run_id, self._ledger.wall()
        return await self._read(lambda db: evals.round_result(db, table, step, run_id, now))

    async def create_table(self, settings: TableSettings) -> TableSettings:
        """Check a table, read its source and make it; see `catalog.create_table`."""
        check_table(settings)
        settings = settings.filled()
        source: JsonlSource = await asyncio.to_thread(catalog.open_source, settings, self._ledger.options)
        return await self._write(lambda ledger: catalog.create_table(ledger, settings, source))

    async def update_table(self, settings: TableSettings) -> views.TableView:
        """See `catalog.update_table`."""
        await self._write(lambda ledger: catalog.update_table(ledger, settings))
        return await self.table(settings.name)

    async def delete_groups(self, table: str, group_ids: Sequence[str]) -> int:
        """See `catalog.delete_groups`."""
        return await self._write(lambda ledger: catalog.delete_groups(ledger, table, group_ids))

    async def table(self, name: str) -> views.TableView:
        """See `views.table_view`."""
        return self._with_source(await self._read(lambda db: views.table_view(db, name)))

    def _with_source(self, view: views.TableView) -> views.TableView:
        table = self._ledger.tables.get(view.settings.name)
        if table is None:
            return view
        source = table.source
        return replace(view, blocked=table.blocked, skipped=dict(source.skipped) if source else {})

    def settings(self, name: str) -> TableSettings:
        """Settings of a table, without a look at the disk."""
        return self._ledger.table(name).settings

    async def watch(self, name: str, left: Callable[[], float]) -> AsyncIterator[views.TableView]:
        """The table now and after every change, at most ten times a second, while `left()` seconds remain."""
        shown: views.TableView | None = None
        while not self.changes.stopped:
            changed = self.changes.ticket()
            view = await self.table(name)
            if view != shown:
                yield view
                shown = view
            if not await self.changes.wait(changed, left()):
                return
            await asyncio.sleep(min(_WATCH_PAUSE_S, left()))  # commits in the meantime share one message

    async def tables(self, after: str, limit: int) -> list[views.TableView]:
        """Up to `limit` tables in the order of their names, those after `after`."""
        found = await self._read(
            lambda db: [views.table_view(db, name) for name in views.table_names(db, after, limit)]
        )
        return [self._with_source(view) for view in found]

    def look(self) -> list[views.TableView]:
        """Every table now; for metrics, from any thread."""
        return self._reader.submit(self._snapshot, _all_tables).result(timeout=5.0)

    async def list_groups(
        self, table: str, state: State | None, train_step: int | None, eval_step: int | None, token: str, limit: int
    ) -> tuple[list[GroupRow], str]:
        """See `views.list_groups`."""
        return await self._read(lambda db: views.list_groups(db, table, state, train_step, eval_step, token, limit))

    async def list_quarantined(self, table: str, token: str, limit: int) -> tuple[list[QuarantinedRow], str]:
        """See `quarantine.list_quarantined`."""
        return await self._read(lambda db: quarantine.list_quarantined(db, table, token, limit))

    async def quarantined_payload(self, group_id: str, attempt: int) -> bytes:
        """See `quarantine.quarantined_payload`."""
        return await self._read(lambda db: quarantine.quarantined_payload(db, group_id, attempt))

    # -------------------------------------------------------------- threads

    async def _write(self, work: Callable[[Ledger], T]) -> T:
        return await asyncio.wrap_future(self._writer.submit(work))

    async def _read(self, work: Callable[[Database], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._reader, self._snapshot, work)

    def _snapshot(self, work: Callable[[Database], T]) -> T:
        """All statements of one read see one commit: the laws hold in every answer.

        Raises:
            StorageFailed, DataLoss: the database cannot be read.
        """
        try:
            self._reading.rollback()  # of a read whose end failed
            self._reading.begin("DEFERRED")
            try:
                return work(self._reading)
            finally:
                self._reading.rollback()
        except OWN_FAULTS:
            raise
        except sqlite3.Error as error:
            raise database_failed(self._reading.path, error) from None


def _all_tables(db: Database) -> list[views.TableView]:
    return [views.table_view(db, name) for name in views.table_names(db, "", 1000)]


def _parts(places: Sequence[Place], limit: int) -> Iterator[slice]:
    """Runs of payloads that together stay within `limit` bytes; a payload above it is a run of its own."""
    first, size = 0, 0
    for position, place in enumerate(places):
        if position > first and size + place.nbytes > limit:
            yield slice(first, position)
            first, size = position, 0
        size += place.nbytes
    if places:
        yield slice(first, len(places))
