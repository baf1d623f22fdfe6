"""Groups that training could not use: out of their batch, counted, kept, made again, and never served twice."""

from __future__ import annotations

import pytest

from vime_buffer import catalog, leases, quarantine
from vime_buffer.testing import table, write_prompts
from vime_buffer.values import Blocked, Failure, ModelLimits, Outcome, Unusable
from vime_service.errors import (
    FailedPrecondition,
    InvalidArgument,
    LeaseLost,
    NotFound,
    StaleIncarnation,
    WrongStep,
)


def ids(answer):
    return [group.group_id for group in answer.groups]


def filled(desk, step=1):
    for lease in desk.lease().leases:
        desk.insert(lease)
    return ids(desk.batch(step))


def listed(desk, limit=10, token=""):
    return desk.call(lambda ledger: quarantine.list_quarantined(ledger.db, "train", token, limit))


def payload(desk, group_id, attempt=0):
    return desk.call(lambda ledger: quarantine.quarantined_payload(ledger.db, group_id, attempt))


def test_a_group_leaves_its_batch_and_its_prompt_is_made_again_in_its_place(make_desk):
    desk = make_desk(groups_per_step=3)
    desk.begin()
    batch = filled(desk)
    done = desk.quarantine(1, batch[1], detail="expert 9 of 8")
    assert (done.requeued, done.given_up) == (1, 0)
    counts = desk.counts()
    assert (counts.inserted, counts.leased, dict(counts.dropped)) == (3, 2, {"unusable": 1})
    waits = desk.batch(1)
    assert (waits.blocked, waits.groups) == (Blocked.GENERATING, ())
    with pytest.raises(FailedPrecondition, match="the batch of step 1 is not whole: 1 of 3"):
        desk.complete(1)
    (lease,) = desk.lease().leases  # no slot is free: it takes its own place
    assert (lease.group_id, lease.attempt) == (batch[1], 1)
    desk.insert(lease)
    again = desk.batch(1)
    assert (ids(again), [group.attempt for group in again.groups]) == (batch, [0, 1, 0])
    desk.complete(1)
    assert desk.counts().consumed == 3


def test_quarantining_twice_is_once_also_after_the_group_was_made_again(make_desk):
    desk = make_desk()
    desk.begin()
    first, _ = filled(desk)
    before = desk.quarantine(1, first)
    same = [Unusable(first, 0, "bad")]
    ask = lambda ledger: quarantine.quarantine_groups(ledger, 1, 1, "train", same)  # noqa: E731
    assert desk.call(ask) == before
    filled(desk)
    assert desk.call(ask) == before
    assert len(listed(desk)[0]) == 1


def test_after_its_last_attempt_the_prompt_is_given_up_and_the_batch_goes_on_without_it(make_desk):
    desk = make_desk(max_attempts=2)
    desk.begin()
    first, second = filled(desk)
    desk.quarantine(1, first)
    filled(desk)
    assert desk.quarantine(1, first).given_up == 1
    assert ids(desk.batch(1)) == [second]
    desk.complete(1)
    counts = desk.counts()
    assert (dict(counts.dropped), counts.consumed, dict(counts.given_up)) == ({"unusable": 2}, 1, {})
    desk.begin(0)
    assert ids(desk.batch(1)) == [second]
    assert desk.counts().prompts_unusable == 1  # also where the trainer resumes from before that


def test_a_batch_of_which_nothing_is_left_is_chosen_anew(make_desk):
    desk = make_desk(max_attempts=1)
    desk.begin()
    first = filled(desk)
    assert desk.quarantine(1, *first).given_up == 2
    assert desk.batch(1).blocked is Blocked.GENERATING
    again = filled(desk)
    assert len(again) == 2
    assert not set(again) & set(first)
    desk.complete(1)


def test_of_batches_leased_ahead_the_next_takes_the_step_of_an_empty_one(make_desk):
    desk = make_desk(max_attempts=1, max_staleness=1)
    desk.begin()
    first = filled(desk)
    ahead = ids(desk.batch(2))
    desk.quarantine(1, *first)
    assert ids(desk.batch(1)) == ahead
    desk.complete(1)
    assert len(filled(desk, 2)) == 2
    desk.complete(2)


def test_a_restart_of_either_side_never_serves_it_again(make_desk):
    desk = make_desk()
    desk.begin()
    desk.train(1)
    made = desk.lease().leases
    for lease in made:
        desk.insert(lease)
    bad, good = ids(desk.batch(2))
    desk.quarantine(2, bad)
    with pytest.raises(LeaseLost):  # nor can its worker bring it back
        desk.insert(made[0])
    desk.close()
    desk = make_desk()
    desk.begin(1)
    assert desk.batch(2).blocked is Blocked.GENERATING
    (lease,) = desk.lease().leases
    assert (lease.group_id, lease.attempt) == (bad, 1)
    desk.insert(lease)
    assert [(group.group_id, group.attempt) for group in desk.batch(2).groups] == [(bad, 1), (good, 0)]


def test_the_bound_in_a_row_counts_until_a_step_is_trained_or_a_run_resumes(make_desk):
    desk = make_desk(20, max_unusable_in_a_row=2)
    desk.begin()
    for step in (1, 2):
        desk.quarantine(step, *filled(desk, step))
        filled(desk, step)
        desk.complete(step)
    desk.quarantine(3, *filled(desk, 3))
    filled(desk, 3)
    desk.complete(3, Outcome.SKIPPED)  # a step that changed nothing says nothing
    desk.quarantine(4, filled(desk, 4)[0])
    with pytest.raises(FailedPrecondition, match=r"could not use 3 groups in a row \(limit max_unusable_in_a_row 2\)"):
        desk.batch(4)
    desk.begin(3)
    assert len(filled(desk, 4)) == 2
    desk.complete(4)


def test_the_newest_payloads_are_kept_within_their_budget(make_desk):
    desk = make_desk(groups_per_step=3, options={"quarantine_bytes": 100})
    desk.begin()
    for lease in desk.lease().leases:
        desk.insert(lease, payload=lease.group_id.encode().ljust(40, b"."))
    first, second, third = ids(desk.batch(1))
    desk.quarantine(1, first)
    desk.call(
        lambda ledger: quarantine.quarantine_groups(
            ledger, 1, 1, "train", [Unusable(second, 0, "x" * 900), Unusable(third, 0, "no")]
        )
    )
    rows, token = listed(desk, 2)
    assert [(row.group_id, row.kept, row.nbytes) for row in rows] == [(third, True, 40), (second, True, 40)]
    assert (len(rows[1].detail), rows[0].worker_id, rows[0].train_step) == (500, "worker", 1)
    (oldest,), end = listed(desk, 2, token)
    assert (oldest.group_id, oldest.kept, end) == (first, False, "")
    assert payload(desk, third) == third.encode().ljust(40, b".")
    with pytest.raises(NotFound, match="40 bytes, is not kept"):
        payload(desk, first)
    with pytest.raises(NotFound, match="never quarantined"):
        payload(desk, first, 1)


def test_what_is_no_group_of_the_leased_batch_is_refused_and_nothing_is_taken_out(make_desk):
    desk = make_desk(max_staleness=1)
    desk.begin()
    batch = filled(desk)

    def ask(step, *groups, incarnation=1):
        return desk.call(lambda ledger: quarantine.quarantine_groups(ledger, incarnation, step, "train", groups))

    good = Unusable(batch[0], 0, "")
    with pytest.raises(FailedPrecondition, match="attempt 1 of group train/train:0:1 is not in the batch of step 1"):
        ask(1, good, Unusable(batch[1], 1, ""))
    with pytest.raises(FailedPrecondition, match="attempt 9 of"):  # named twice: neither is passed over
        ask(1, Unusable(batch[0], 9, ""), good)
    with pytest.raises(FailedPrecondition, match="no such group"):
        ask(1, good, Unusable("train/train:0:2", 0, ""))
    with pytest.raises(WrongStep, match="step 2 has no leased batch"):
        ask(2, Unusable("train/train:0:2", 0, ""))
    with pytest.raises(StaleIncarnation):
        ask(1, good, incarnation=0)
    with pytest.raises(InvalidArgument, match="groups is empty"):
        ask(1)
    assert (desk.counts().leased, listed(desk)) == (2, ([], ""))
    desk.complete(1)
    with pytest.raises(WrongStep):
        ask(1, good)


def test_the_model_is_kept_with_the_run(make_desk):
    model = ModelLimits(100, 64, (1, 3), 8, 2)
    desk = make_desk()
    desk.begin(model=model)
    desk.close()
    desk = make_desk()
    assert desk.ledger.model == model
    desk.begin()
    assert desk.ledger.model is None


def test_a_group_whose_payload_is_damaged_leaves_its_batch_like_any_other(make_desk, ledger_dir):
    desk = make_desk()
    desk.begin()
    first, _ = filled(desk)
    (segment,) = (ledger_dir / "ledger" / "segments").glob("*.seg")
    segment.write_bytes(segment.read_bytes().replace(first.encode(), b"?" * len(first)))
    desk.quarantine(1, first, detail="CORRUPTED")
    assert [(row.group_id, row.kept) for row in listed(desk)[0]] == [(first, False)]
    (lease,) = desk.lease().leases
    desk.insert(lease)
    assert len(desk.batch(1).groups) == 2


def test_a_place_that_is_made_again_may_fail_like_any_prompt_and_is_not_waited_for_then(make_desk):
    desk = make_desk(max_attempts=2)
    desk.begin()
    first, second = filled(desk)
    desk.quarantine(1, first)
    (lease,) = desk.lease().leases
    assert desk.call(lambda ledger: leases.fail_prompt(ledger, lease.lease_id, Failure.GENERATION, ""))
    assert ids(desk.batch(1)) == [second]
    desk.complete(1)


def test_tables_that_take_turns_keep_their_steps(make_desk, ledger_dir):
    """A batch of which nothing is left, between one of its own table and one of another that is leased ahead."""
    sft = table(write_prompts(ledger_dir / "sft.jsonl", 10, first=50), name="sft", max_staleness=1)
    desk = make_desk(max_attempts=1, max_staleness=1)
    desk.call(lambda ledger: catalog.configure_tables(ledger, [sft]))
    desk.begin()
    for lease in desk.lease(100, ["train", "sft"]).leases:
        desk.insert(lease)
    first = ids(desk.batch(1))
    ahead = ids(desk.batch(2, "sft"))
    desk.quarantine(1, *first)
    again = ids(desk.batch(1))
    assert len(again) == 2
    assert not set(again) & set(first)
    assert ids(desk.batch(2, "sft")) == ahead
    desk.complete(1)
    desk.complete(2, table_name="sft")


def test_a_step_that_is_nobodys_after_a_rewind_takes_the_next_batch_of_whoever_asks(make_desk, ledger_dir):
    ends = {"source": {"epochs": 1}, "max_staleness": 3}
    sft = table(write_prompts(ledger_dir / "sft.jsonl", 4, first=50), name="sft", **ends)
    desk = make_desk(4, max_attempts=1, **ends)
    desk.call(lambda ledger: catalog.configure_tables(ledger, [sft]))
    desk.begin()
    for lease in desk.lease(100, ["train", "sft"]).leases:
        desk.insert(lease)
    turns = ["train", "sft", "train", "sft"]
    batches = [ids(desk.batch(step, name)) for step, name in enumerate(turns, start=1)]
    desk.begin(0)
    assert ids(desk.batch(1)) == batches[0]
    desk.quarantine(1, *batches[0])
    assert ids(desk.batch(1)) == batches[2]
    desk.complete(1)
    assert ids(desk.batch(2, "sft")) == batches[1]
    desk.complete(2, table_name="sft")
    assert desk.batch(3).blocked is Blocked.END_OF_DATA
    assert ids(desk.batch(3, "sft")) == batches[3]
    desk.complete(3, table_name="sft")
