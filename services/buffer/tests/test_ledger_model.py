"""A state machine of buffer, trainer and workers, in which anything may die, expire or be said twice at any point.

Whatever the order of events: both laws hold after each of them, nothing is trained twice or lost, staleness stays
within k, a rewind gives the same batches again, and every accepted configuration reaches the end of its data.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from vime_buffer import leases
from vime_buffer.quarantine import quarantine_groups
from vime_buffer.testing import RUN_ID, Desk, table, write_prompts
from vime_buffer.values import Blocked, Failure, Outcome, State, Unusable, Version
from vime_service.clock import ManualClock
from vime_service.errors import FailedPrecondition, LeaseLost, ResumeOutOfRange

PROMPTS = 14
EVAL_PROMPTS = 2
EVAL = "eval/heldout"
TTL = 60


class LedgerMachine(RuleBasedStateMachine):
    """The buffer is real; the trainer and the workers are played here, with what they would remember."""

    desk: Desk

    def __init__(self):
        super().__init__()
        memory = Path("/dev/shm")
        self.folder = Path(tempfile.mkdtemp(dir=memory if os.access(memory, os.W_OK) else None))
        self.clock = ManualClock()
        self.held = []  # leases that a worker works on
        self.past = []  # inserts that were acked: they may be sent again
        self.batches = {}  # step -> ids, as the trainer got them; those after a rewind must be the same
        self.completed = 0
        self.leased = 0
        self.published = 0
        self.oldest_kept = 0
        self.incarnation = 0
        self.left = {}  # ids that were dropped or given up, with the reason
        self.rewound = 0  # prompts that were under way after the last rewind
        self.unusable = set()  # (group id, attempt) that training could not use

    # -------------------------------------------------------------- set-up

    @initialize(
        k=st.sampled_from([0, 1, 3]),
        groups_per_step=st.integers(1, 3),
        interval=st.integers(1, 4),
        selector=st.sampled_from(["admission_order", "ready_first"]),
        attempts=st.integers(1, 3),
        epochs=st.integers(1, 2),
        shuffle=st.booleans(),
        evals=st.booleans(),
        hold=st.booleans(),
        fresh_end=st.booleans(),
    )
    def configure(self, k, groups_per_step, interval, selector, attempts, epochs, shuffle, evals, hold, fresh_end):
        self.fresh_end = fresh_end
        self.k, self.gps, self.interval = k, groups_per_step, min(interval, k + 1)
        self.selector = selector
        self.tables = [
            table(
                write_prompts(self.folder / "train.jsonl", PROMPTS),
                source={"epochs": epochs, "shuffle": shuffle},
                samples_per_prompt=1,
                groups_per_step=groups_per_step,
                max_staleness=k,
                publish_interval=self.interval,
                selector=selector,
                max_attempts=attempts,
                max_unusable_in_a_row=10_000,
            )
        ]
        if evals:
            self.tables.append(
                table(
                    write_prompts(self.folder / "heldout.jsonl", EVAL_PROMPTS, first=99),
                    name=EVAL,
                    eval_interval=2,
                    eval_hold=hold,
                    max_attempts=attempts,
                )
            )
        self.all_ids = {f"train/train:{epoch}:{index}" for epoch in range(epochs) for index in range(PROMPTS)}
        self.open_buffer()
        self.resume(0)

    def open_buffer(self):
        self.desk = Desk(self.folder / "ledger", self.tables, self.clock, segment_bytes=4096)
        self.desk.incarnation = self.incarnation

    def resume(self, step, **options):
        opened = self.desk.open(step, **options)
        assert opened.incarnation > self.incarnation, "incarnations rise"
        self.incarnation = opened.incarnation
        self.desk.announce(step)
        self.completed = self.leased = self.published = step
        for later in [s for s in self.batches if s > opened.last_ledger_step]:
            del self.batches[later]
        self.rewound = self.under_way()

    # -------------------------------------------------------------- workers

    @rule(wanted=st.integers(1, 8))
    def lease(self, wanted):
        before = set(self.admitted())
        answer = self.desk.lease(wanted)
        if {lease.group_id for lease in answer.leases if not lease.exact} - before:
            window = (self.k + 1 - self.trained_since_publish) * self.gps
            assert self.under_way() <= window, "new prompts come into free slots only"
        for lease in answer.leases:
            if lease.exact:
                assert lease.fence.incarnation == self.incarnation or lease.fence.step <= self.completed
            else:
                assert lease.fence == Version(RUN_ID, self.incarnation, self.published)
            assert lease.group_id not in self.left
        self.held += answer.leases

    @precondition(lambda self: self.held)
    @rule(data=st.data(), newer=st.booleans())
    def insert(self, data, newer):
        lease = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        version = lease.fence
        if newer and not lease.exact and lease.fence.incarnation == self.incarnation:
            version = Version(RUN_ID, self.incarnation, self.published)
        with suppress(LeaseLost):
            self.desk.insert(lease, version)
            self.past.append((lease, version))

    @precondition(lambda self: self.past)
    @rule(data=st.data())
    def insert_again(self, data):
        """A retry after an answer that got lost: present, or superseded, never a second copy."""
        lease, version = data.draw(st.sampled_from(self.past))
        before = self.desk.counts(lease.table).inserted
        with suppress(LeaseLost):
            assert self.desk.insert(lease, version)
        assert self.desk.counts(lease.table).inserted == before

    @precondition(lambda self: any(not lease.exact for lease in self.held))
    @rule(data=st.data())
    def drop(self, data):
        lease = data.draw(st.sampled_from([lease for lease in self.held if not lease.exact]))
        self.held.remove(lease)
        with suppress(LeaseLost):
            self.desk.insert(lease, drop="zero_std")
            self.left[lease.group_id] = "zero_std"

    @precondition(lambda self: self.held)
    @rule(data=st.data(), failure=st.sampled_from([Failure.GENERATION, Failure.SHUTDOWN]), twice=st.booleans())
    def fail(self, data, failure, twice):
        lease = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        work = lambda ledger: leases.fail_prompt(ledger, lease.lease_id, failure, "")  # noqa: E731
        with suppress(LeaseLost):
            given_up = self.desk.call(work)
            if twice:
                assert self.desk.call(work) == given_up
        self.note_given_up()

    @rule(seconds=st.sampled_from([1, TTL // 2, TTL]))
    def time_passes(self, seconds):
        self.desk.wait(seconds)
        self.note_given_up()

    @precondition(lambda self: self.held)
    @rule()
    def keep_alive(self):
        ids = [lease.lease_id for lease in self.held]
        lost, _ = self.desk.keep_alive(ids)
        self.held = [lease for lease in self.held if lease.lease_id not in lost]

    def note_given_up(self):
        rows = self.desk.call(
            lambda ledger: ledger.db.all(
                "SELECT group_id FROM groups WHERE state = ? AND eval_step IS NULL", State.GIVEN_UP
            )
        )
        self.left |= {row["group_id"]: "given up" for row in rows}

    # -------------------------------------------------------------- trainer

    @rule()
    def lease_batch(self):
        self.try_batch()

    def try_batch(self, step=None):
        step = step or self.leased + 1
        if self.unusable:  # nothing is leased ahead of a batch that may be made again
            step = self.completed + 1
        try:
            answer = self.desk.batch(step)
        except FailedPrecondition as error:
            if "in a row" not in error.message:
                raise
            return None
        if answer.blocked is not Blocked.NOT:
            return answer
        ids = [group.group_id for group in answer.groups]
        assert all(group.staleness <= self.k for group in answer.groups), "nothing is older than k"
        assert not set(ids) & set(self.left), "what was dropped or given up is not trained"
        attempts = {(group.group_id, group.attempt) for group in answer.groups}
        assert not attempts & self.unusable, "what training could not use is never served again"
        earlier = {group_id for s, batch in self.batches.items() if s < step for group_id in batch}
        assert not set(ids) & earlier, "nothing is trained twice"
        # Places that were made again may have stayed empty: their prompts were dropped or given up this time.
        recorded = {s: [g for g in batch if g not in self.left] for s, batch in self.batches.items() if s >= step}
        served = min((s for s, batch in recorded.items() if batch), default=step)  # of an empty one, the next
        recorded = recorded.get(served, [])
        if answer.replayed:
            self.batches[served] = []
            assert ids == recorded, "a replayed batch is the batch"
        else:
            assert not recorded, "a batch in the ledger is never chosen anew"
            assert len(ids) == self.gps or self.data_ended(), "a batch is whole until the data ends"
        self.batches[step] = ids
        self.leased = max(self.leased, step)
        self.trim()
        return answer

    def trim(self):
        """Of the batches that are leased, the last ones that have nothing left are leased no more."""
        while self.leased > self.completed and not set(self.batches[self.leased]) - set(self.left):
            del self.batches[self.leased]
            self.leased -= 1

    @precondition(lambda self: self.leased == self.completed + 1)
    @rule(data=st.data(), twice=st.booleans())
    def quarantine(self, data, twice):
        step = self.leased
        answer = self.try_batch(step)
        if answer is None or answer.blocked is not Blocked.NOT:
            return
        self.take_out(step, data.draw(st.lists(st.sampled_from(answer.groups), min_size=1, unique=True)), twice)

    def take_out(self, step, bad, twice=False):
        if not bad:
            return
        groups = [Unusable(group.group_id, group.attempt, "bad") for group in bad]
        work = lambda ledger: quarantine_groups(ledger, self.incarnation, step, "train", groups)  # noqa: E731
        done = self.desk.call(work)
        assert done.requeued + done.given_up == len(bad)
        if twice:
            assert self.desk.call(work) == done
        self.unusable |= {(group.group_id, group.attempt) for group in bad}
        self.note_given_up()
        self.trim()

    def data_ended(self):
        return len(self.admitted()) == len(self.all_ids)

    def admitted(self):
        rows = self.desk.call(
            lambda ledger: ledger.db.all(
                "SELECT group_id, admission FROM groups WHERE eval_step IS NULL ORDER BY admission"
            )
        )
        return [row["group_id"] for row in rows]

    @precondition(lambda self: self.leased)
    @rule(data=st.data())
    def lease_batch_again(self, data):
        if self.leased > self.completed:
            self.try_batch(data.draw(st.integers(self.completed + 1, self.leased)))

    @rule(wanted=st.integers(1, 8), slow=st.booleans(), bad=st.integers(0, 2))
    def work(self, wanted, slow, bad):
        """What workers and trainer do when nothing goes wrong; without it few runs get far enough to lose much."""
        leases = self.desk.lease(wanted).leases
        self.held += leases[: int(slow)]  # one takes longer than all others
        for lease in leases[int(slow) :]:
            self.desk.insert(lease)
        self.try_batch()
        if bad and self.leased == self.completed + 1:
            self.take_out(self.leased, self.desk.batch(self.leased).groups[:bad])
        if self.leased > self.completed:
            self.do_complete(skipped=False)

    @precondition(lambda self: self.leased > self.completed)
    @rule(skipped=st.booleans(), twice=st.booleans())
    def complete(self, skipped, twice):
        if self.do_complete(skipped) and twice:
            self.desk.complete(
                self.completed,
                Outcome.SKIPPED if skipped else Outcome.TRAINED,
                publish=self.published == self.completed,
            )

    def do_complete(self, skipped):
        step = self.completed + 1
        answer = self.try_batch(step)
        if answer is None or answer.blocked is not Blocked.NOT:
            return False
        trained = self.trained_since_publish + (not skipped)
        publish = not skipped and trained >= self.interval
        outcome = Outcome.SKIPPED if skipped else Outcome.TRAINED
        self.desk.complete(step, outcome, publish=publish)
        self.completed = step
        self.skipped = {s for s in self.skipped if s < step} | ({step} if skipped else set())
        if publish:
            self.published = step
        return True

    skipped: set[int] = frozenset()

    @property
    def trained_since_publish(self):
        return sum(1 for step in range(self.published + 1, self.completed + 1) if step not in self.skipped)

    @precondition(lambda self: self.completed > self.oldest_kept)
    @rule(data=st.data())
    def checkpoint(self, data):
        oldest = data.draw(st.integers(self.oldest_kept, self.completed))
        self.desk.checkpoint(self.completed, oldest)
        self.oldest_kept = oldest

    # -------------------------------------------------------------- deaths

    @rule(torn=st.binary(max_size=40))
    def buffer_dies(self, torn):
        """Acked operations are on disk; of others there may be half a record behind the last segment."""
        self.desk.close()
        files = sorted((self.folder / "ledger" / "segments").glob("*.seg"))
        if files:
            with files[-1].open("ab") as file:
                file.write(torn)
        self.open_buffer()

    @rule(data=st.data())
    def trainer_dies(self, data):
        whole = (step for step, batch in self.batches.items() if set(batch) - set(self.left))
        newest = max([self.completed, *whole])
        resume = data.draw(st.integers(self.oldest_kept, newest))
        self.resume(resume)

    @precondition(lambda self: self.oldest_kept > 0)
    @rule(data=st.data())
    def an_old_checkpoint_is_used(self, data):
        resume = data.draw(st.integers(0, self.oldest_kept - 1))
        try:
            self.desk.open(resume)
            raise AssertionError("a step whose payloads are gone was accepted")
        except ResumeOutOfRange:
            pass
        self.resume(resume, regenerate=True)
        self.oldest_kept = resume

    # -------------------------------------------------------------- always

    @invariant()
    def slots_are_never_overdrawn(self):
        if not hasattr(self, "desk"):
            return
        now = self.under_way()
        assert now <= max((self.k + 1) * self.gps, self.rewound)
        self.rewound = min(self.rewound, now)

    def under_way(self):
        """Prompts of training that are admitted and not trained; those that wait to be leased again included."""
        sql = "SELECT count(*) FROM groups WHERE state IN (0, 1, 2, 3) AND eval_step IS NULL"
        return self.desk.call(lambda ledger: ledger.db.value(sql))

    @invariant()
    def order_is_kept(self):
        """In admission order everything before the last trained prompt is trained, or left for a stated reason."""
        if not hasattr(self, "desk") or self.selector != "admission_order":
            return
        trained = [g for step in sorted(self.batches) for g in self.batches[step] if g not in self.left]
        admitted = self.admitted()
        assert trained == [group_id for group_id in admitted if group_id in set(trained)]
        if trained:
            before = admitted[: admitted.index(trained[-1])]
            assert set(before) <= set(trained) | set(self.left)

    # -------------------------------------------------------------- liveness

    def teardown(self):
        try:
            if hasattr(self, "desk"):
                self.run_to_the_end()
                self.desk.close()
        finally:
            shutil.rmtree(self.folder)

    def run_to_the_end(self):
        """From here on workers and trainer do their work: the data must end, with every prompt accounted for."""
        self.desk.wait(TTL)
        if self.fresh_end:
            self.resume(self.completed)
        for _ in range(400):
            for lease in self.desk.lease().leases:
                self.desk.insert(lease)
            self.note_given_up()
            answer = self.try_batch()
            if answer is None:  # too many drops in a row: the next incarnation may go on
                self.resume(self.completed)
            if answer is not None and answer.blocked is Blocked.END_OF_DATA:
                break
            if self.leased > self.completed:
                self.do_complete(skipped=False)
        else:
            raise AssertionError(f"no end of data: {answer}")
        trained = [group_id for batch in self.batches.values() for group_id in batch]
        assert len(trained) == len(set(trained)), "doubled"
        assert set(trained) | set(self.left) == self.all_ids, "lost"


def test_anything_may_die_at_any_point():
    run_state_machine_as_test(
        LedgerMachine,
        settings=settings(
            # CI walks the same paths each time; VIME_MODEL_EXAMPLES=n looks for new ones.
            max_examples=int(os.environ.get("VIME_MODEL_EXAMPLES", "25")),
            derandomize="VIME_MODEL_EXAMPLES" not in os.environ,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
