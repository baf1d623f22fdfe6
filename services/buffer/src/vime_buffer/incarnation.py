"""Incarnations: who trains now, and the rewind that makes the ledger fit the checkpoint that was resumed from.

Let c be the step resumed from. Everything up to c is trained, everything after it is not:

- batches up to c that were leased count as completed (the checkpoint holds what they changed);
- batches after c become stored again, each still in its batch: the same step will get the same groups;
- prompt leases of the old incarnation are void, their prompts queued in their old place;
- with another training recipe the batches after c, and groups sampled by weights after c, are evicted instead.
"""

from __future__ import annotations

from vime_buffer.evals import announce_rounds, opened_at, rewind_rounds
from vime_buffer.ledger import Ledger, RunState
from vime_buffer.values import (
    EVICT_CORRUPTED,
    EVICT_LOST_LINEAGE,
    EVICT_REGENERATED,
    ModelLimits,
    Opened,
    Outcome,
    Place,
    State,
    Version,
)
from vime_service.errors import FailedPrecondition, InvalidArgument, ResumeOutOfRange
from vime_service.logging import get_logger

_log = get_logger(__name__)


def open_incarnation(
    ledger: Ledger,
    run_id: str,
    resume_step: int,
    highest_known: int,
    recipe_digest: str,
    *,
    regenerate: bool,
    model: ModelLimits | None = None,
) -> Opened:
    """Grant max(own, highest_known) + 1 and rewind to `resume_step`, in one transaction.

    Args:
        recipe_digest: of the training recipe; "" says nothing about it.
        regenerate: accept steps that the ledger does not cover.
        model: what groups are held to from now on; None: nothing is known of it.

    Raises:
        FleetOwned: another run's id.
        ResumeOutOfRange: the ledger does not cover `resume_step`, and not `regenerate`.
    """
    ledger.check_run_id(run_id)
    run = ledger.run()
    newest = max(ledger.db.value("SELECT coalesce(max(step), 0) FROM batches"), run.completed_step)
    oldest = run.oldest_kept_step
    if not oldest <= resume_step <= newest and not regenerate:
        raise ResumeOutOfRange(
            f"cannot resume from step {resume_step}: the ledger covers steps {oldest} to {newest} "
            "(regenerate makes lost steps anew)",
            resume_step=resume_step,
            oldest=oldest,
            newest=newest,
        )
    incarnation = max(run.incarnation, highest_known) + 1
    changed = bool(recipe_digest and run.recipe_digest and recipe_digest != run.recipe_digest)
    requeued = _void_leases(ledger)
    _settle(ledger, resume_step)
    rewound, again = _rewind(ledger, resume_step, evict=changed)
    requeued += again + rewind_rounds(ledger, resume_step)
    ledger.db.run("UPDATE tables SET closed = 0, drops_in_a_row = 0, unusable_in_a_row = 0")
    ledger.failed_in_a_row.clear()
    ledger.db.run(
        "UPDATE run SET incarnation = ?, resume_step = ?, recipe_digest = ?, policy_incarnation = NULL, "
        "policy_step = NULL, leased_step = ?, completed_step = ?, oldest_kept_step = ?, model = ?",
        incarnation, resume_step, recipe_digest or run.recipe_digest, resume_step, resume_step,
        oldest if oldest <= resume_step <= newest else resume_step,  # whatever follows it is made anew and kept
        model.stored() if model else None,
    )  # fmt: skip
    ledger.model = model
    last = max(ledger.db.value("SELECT coalesce(max(step), 0) FROM batches"), resume_step)
    _log.info(
        "incarnation opened", incarnation=incarnation, resume_step=resume_step, last_ledger_step=last,
        rewound_groups=rewound, requeued_prompts=requeued, recipe_changed=changed,
    )  # fmt: skip
    return Opened(incarnation, last, ledger.run().oldest_kept_step, rewound, requeued)


def _void_leases(ledger: Ledger) -> int:
    """Open prompts of training tables are queued again; they cost no attempt. Eval prompts go with their rounds."""
    rows = ledger.db.all("SELECT * FROM groups WHERE state = ? AND eval_step IS NULL", State.OPEN)
    for row in rows:
        ledger.requeue(row)
    return len(rows)


def _settle(ledger: Ledger, resume_step: int) -> None:
    """What is in the checkpoint is trained, whether or not its CompleteStep ever arrived."""
    ledger.db.run(
        "UPDATE groups SET state = ? WHERE train_step <= ? AND state IN (?, ?)",
        State.CONSUMED, resume_step, State.LEASED, State.STORED,
    )  # fmt: skip
    # A place that was being made again is in the checkpoint as well: its prompt must not be trained twice. It stays the
    # batch's, for a rewind that goes further back.
    ledger.db.run(
        "UPDATE groups SET state = ? WHERE train_step <= ? AND state = ?",
        State.WITHDRAWN, resume_step, State.QUEUED,
    )  # fmt: skip
    ledger.db.run(
        "UPDATE batches SET state = 'completed', outcome = coalesce(outcome, ?) WHERE step <= ?",
        Outcome.TRAINED, resume_step,
    )  # fmt: skip


def _rewind(ledger: Ledger, resume_step: int, *, evict: bool) -> tuple[int, int]:
    """Groups stored again and prompts queued again."""
    requeued = 0
    # Eval groups go with their rounds: of one that is done, the ledger has what the round gave, and no payload is read.
    for row in ledger.db.all("SELECT * FROM groups WHERE corrupted = 1 AND state IN (2, 3, 4) AND eval_step IS NULL"):
        if row["train_step"] is None or row["train_step"] > resume_step:
            ledger.evict(row, EVICT_CORRUPTED, keep_place=True)
            requeued += 1
    for row in ledger.db.all("SELECT * FROM groups WHERE train_step > ? AND state = ?", resume_step, State.RETIRED):
        ledger.evict(row, EVICT_LOST_LINEAGE if evict else EVICT_REGENERATED, keep_place=True)
        requeued += 1
    requeued += ledger.db.run(
        "UPDATE groups SET state = ? WHERE train_step > ? AND state = ?", State.QUEUED, resume_step, State.WITHDRAWN
    )
    if evict:
        return 0, requeued + _evict_lineage(ledger, resume_step)
    rewound = ledger.db.run(
        "UPDATE groups SET state = ? WHERE train_step > ? AND state IN (?, ?)",
        State.STORED, resume_step, State.LEASED, State.CONSUMED,
    )  # fmt: skip
    ledger.db.run(
        "UPDATE batches SET state = 'recorded', outcome = NULL, published = NULL, final = 0 WHERE step > ?", resume_step
    )
    return rewound, requeued


def _evict_lineage(ledger: Ledger, resume_step: int) -> int:
    """Groups of later batches, and stored ones that weights after the checkpoint sampled."""
    rows = ledger.db.all(
        "SELECT * FROM groups WHERE state IN (2, 3, 4) AND eval_step IS NULL "
        "AND (train_step > ? OR (train_step IS NULL AND newest_step > ?))",
        resume_step,
        resume_step,
    )
    for row in rows:
        ledger.evict(row, EVICT_LOST_LINEAGE)
    ledger.db.run("UPDATE groups SET train_step = NULL, place = NULL WHERE train_step > ?", resume_step)
    ledger.db.run("DELETE FROM batches WHERE step > ?", resume_step)
    return len(rows)


def announce_version(ledger: Ledger, version: Version) -> tuple[str, ...]:
    """Set the incarnation's first policy version; admission starts. Names of the tables whose eval rounds opened.

    Raises:
        FleetOwned: another run's version.
        StaleIncarnation: the incarnation is over.
        InvalidArgument: it is not the version resumed from.
        FailedPrecondition: no incarnation was opened.
    """
    ledger.check_run_id(version.run_id)
    if version.incarnation == 0:
        raise FailedPrecondition(
            "OpenIncarnation comes first: incarnation 0 trains nothing", state="no incarnation", wanted="an incarnation"
        )
    run = _check_announced(ledger, version)
    if run.policy is not None:
        return opened_at(ledger, version.step)
    ledger.db.run("UPDATE run SET policy_incarnation = ?, policy_step = ?", version.incarnation, version.step)
    ledger.workers_may_go_on = True
    return announce_rounds(ledger, version.step, version)


def _check_announced(ledger: Ledger, version: Version) -> RunState:
    run = ledger.check_incarnation(version.incarnation)
    if version.step != run.resume_step:
        raise InvalidArgument(
            f"incarnation {run.incarnation} resumed from step {run.resume_step}; its first version cannot be {version}",
            field="version.step",
            expected=run.resume_step,
            actual=version.step,
        )
    return run


def mark_corrupted(ledger: Ledger, group_id: str, place: Place) -> None:
    """Note that a payload is damaged: reads fail from now on, and the next incarnation has the group made again.

    Raises:
        FailedPrecondition: the group's payload is not there any more; what was read was an older one, or none.
    """
    sql = "UPDATE groups SET corrupted = 1 WHERE group_id = ? AND segment = ? AND offset = ?"
    if not ledger.db.run(sql, group_id, place.segment, place.offset):
        raise FailedPrecondition(
            f"group {group_id} changed while it was read; ask for its batch again",
            state="changed",
            wanted="stored, leased or consumed as it was",
        )
