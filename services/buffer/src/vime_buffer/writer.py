"""The one thread that writes: operations wait in a queue, and those that wait together share one commit.

An operation is a function of the ledger. It is answered only after its payloads (fdatasync) and its rows (commit, with
synchronous = FULL) are on disk, so that what a caller was told survives a crash. An operation that is refused undoes
itself alone; if the disk refuses the commit, all of them are undone and told so.
"""

from __future__ import annotations

import queue
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from vime_buffer.schema import OWN_FAULTS, Database, database_failed
from vime_buffer.segments import Segments
from vime_service.errors import Draining, Internal, VimeError
from vime_service.logging import get_logger

_log = get_logger(__name__)
_MAX_BATCH = 512

T = TypeVar("T")
LedgerT = TypeVar("LedgerT", bound="Storage")


class Storage(Protocol):
    """What the writer needs of the ledger."""

    db: Database
    segments: Segments

    def before_batch(self) -> None:
        """Do what time has brought (leases that ended), in the transaction of the operations that follow."""
        ...

    def recover(self) -> None:
        """Rebuild what is kept in memory from the rows: a transaction was undone."""
        ...

    def answered(self) -> None:
        """Note that a batch was answered by its results, not by a failure."""
        ...

    def after_commit(self) -> None:
        """Clean up what a commit left to do (segments that died)."""
        ...


@dataclass(slots=True)
class _Operation:
    work: Callable[[Any], Any]
    future: Future[Any]


_Answer = tuple[_Operation, Any, Exception | None]


class Writer(Generic[LedgerT]):
    """Runs operations on a ledger in its own thread.

    Args:
        ledger: everything in it belongs to this thread from now on.
        on_commit: called in this thread after operations changed something.
    """

    def __init__(self, ledger: LedgerT, on_commit: Callable[[], None] = lambda: None) -> None:
        self._ledger = ledger
        self._on_commit = on_commit
        self._queue: queue.SimpleQueue[_Operation | None] = queue.SimpleQueue()
        self._closing = threading.Lock()
        self._closed = False
        self._changes = 0
        self._undone = False  # a transaction failed and what is in memory is not rebuilt yet
        self._failing = ""  # why, as it was logged: once is enough for a disk that stays full
        self._thread = threading.Thread(target=self._loop, name="ledger-writer", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[LedgerT], T]) -> Future[T]:
        """Run `work(ledger)` in a transaction; the future is done when its result is durable.

        Raises:
            Draining: the writer is closed.
        """
        future: Future[T] = Future()
        operation = _Operation(work, future)
        with self._closing:
            if self._closed:
                raise Draining("the ledger is closed")
            self._queue.put(operation)
        return future

    def close(self, timeout: float = 30.0) -> bool:
        """Finish what waits, then stop; True if the thread ended in time."""
        with self._closing:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    # -------------------------------------------------------------- the thread

    def _loop(self) -> None:
        ending = False
        while not ending:
            batch: list[_Operation] = []
            # unbounded: this is the thread's idle state, and close() puts the None that ends it
            item = self._queue.get()
            while item is not None:
                if item.future.set_running_or_notify_cancel():
                    batch.append(item)
                if len(batch) >= _MAX_BATCH or self._queue.empty():
                    break
                item = self._queue.get_nowait()  # nobody else takes from it
            ending = item is None
            if batch:
                self._run_safely(batch)

    def _run_safely(self, batch: list[_Operation]) -> None:
        """If this thread died, every caller from then on would wait for ever."""
        try:
            self._run(batch)
        except Exception as error:  # noqa: BLE001  see above
            _log.error("the writer failed", exc_info=error)
            self._undone = True
            failure = Internal(f"the ledger failed: {type(error).__name__}; see the buffer's log")
            for operation in batch:
                if not operation.future.done():
                    operation.future.set_exception(failure)

    def _run(self, batch: list[_Operation]) -> None:
        db, segments = self._ledger.db, self._ledger.segments
        answers: list[_Answer] = []
        changed = False
        failure: VimeError | None = None
        try:
            if self._undone:
                self._restore()
            db.begin()
            self._ledger.before_batch()
            answers = [self._run_one(operation) for operation in batch]
            changed = db.value("SELECT total_changes()") != self._changes
            segments.sync()
            db.commit()
        except sqlite3.Error as error:
            failure = database_failed(db.path, error)
        except VimeError as error:
            failure = error
        except Exception as error:  # noqa: BLE001  if this thread died, every caller would wait for ever
            _log.error("the ledger failed", exc_info=error)
            failure = Internal(f"the ledger failed: {type(error).__name__}; see the buffer's log")
        if failure is not None:
            self._undo(batch, failure)
            return
        if self._failing:
            self._failing = ""
            _log.info("the ledger can be written again")
        self._ledger.answered()
        if changed:
            self._changed()
        for operation, result, refusal in answers:
            if refusal is None:
                operation.future.set_result(result)
            else:
                operation.future.set_exception(refusal)

    def _changed(self) -> None:
        try:
            self._changes = self._ledger.db.value("SELECT total_changes()")
            self._ledger.after_commit()
        except (sqlite3.Error, OSError) as error:  # the operations are durable, whatever this met
            _log.error("cleaning up after a commit failed; the next start does it", cause=str(error))
        self._on_commit()

    def _run_one(self, operation: _Operation) -> _Answer:
        db, segments = self._ledger.db, self._ledger.segments
        mark = segments.mark()
        db.run("SAVEPOINT operation")
        result: Any = None
        refused: Exception | None = None
        try:
            result = operation.work(self._ledger)
        except VimeError as error:
            refused = error
        except sqlite3.Error as error:
            if not isinstance(error, OWN_FAULTS):
                raise  # the disk refuses: that is the whole batch's concern
            refused = error
        except Exception as error:  # noqa: BLE001  a fault of ours belongs to this operation's caller alone
            refused = error
        if refused is not None:
            db.run("ROLLBACK TO operation")
            segments.forget(mark)
            if not isinstance(refused, VimeError):  # a refusal comes before anything in memory is touched
                self._ledger.recover()
        db.run("RELEASE operation")
        return operation, result, refused

    def _undo(self, batch: list[_Operation], failure: VimeError) -> None:
        """Answer first: what follows needs the disk that has just failed."""
        for operation in batch:
            operation.future.set_exception(failure)
        if self._failing != failure.message:
            self._failing = failure.message
            _log.error("a commit failed, its operations are undone", operations=len(batch), cause=failure.message)
        self._undone = True
        try:
            self._restore()
        except (sqlite3.Error, OSError, VimeError) as error:  # the next batch tries again, and says so if it fails
            _log.debug("what was undone cannot be read", cause=str(error))

    def _restore(self) -> None:
        """Be where the last commit left the ledger. Until this succeeds no operation may run."""
        self._ledger.db.rollback()
        self._ledger.segments.roll_back()
        self._ledger.recover()
        self._undone = False
