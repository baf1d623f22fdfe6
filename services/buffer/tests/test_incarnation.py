"""Incarnations and rewinds: the crash table of DESIGN section 5, row by row. K27: capacity after recovery."""

from __future__ import annotations

import pytest

from vime_buffer import incarnation, leases, views
from vime_buffer.testing import RUN_ID
from vime_buffer.values import Blocked, Failure, Outcome, Version
from vime_service.errors import (
    FailedPrecondition,
    FleetOwned,
    InvalidArgument,
    LeaseLost,
    ResumeOutOfRange,
    StaleIncarnation,
)


def names(answer):
    return [group.group_id for group in answer.groups]


def generate(desk):
    for lease in desk.lease().leases:
        desk.insert(lease)


def trained_to(desk, step):
    """Batches by step, after `step` steps."""
    desk.begin()
    return {number: desk.train(number) for number in range(1, step + 1)}


def damage(desk, group_id):
    """A reader found that the payload is damaged."""
    (place,) = desk.call(lambda ledger: views.group_places(ledger.db, [group_id]))
    desk.call(lambda ledger: incarnation.mark_corrupted(ledger, group_id, place))


# ------------------------------------------------------------------ granting


def test_incarnations_rise_above_everything_known_and_survive_a_restart(make_desk):
    desk = make_desk()
    assert desk.open().incarnation == 1
    assert desk.open(highest_known=7).incarnation == 8
    desk.close()
    desk = make_desk()
    assert desk.incarnation == 8
    assert desk.open(highest_known=3).incarnation == 9


def test_another_run_is_refused_by_name(make_desk):
    desk = make_desk()
    with pytest.raises(FleetOwned) as caught:
        desk.call(lambda ledger: incarnation.open_incarnation(ledger, "other", 0, 0, "", regenerate=False))
    assert caught.value.metadata == {"run_id": "other", "owner": RUN_ID}
    desk.close()
    with pytest.raises(FleetOwned, match='belongs to run "run", not to "else"'):
        make_desk(options={"run_id": "else"})


def test_the_first_version_is_that_of_the_step_resumed_from_and_may_be_announced_twice(make_desk):
    desk = make_desk()
    trained_to(desk, 2)
    desk.open(2)
    with pytest.raises(InvalidArgument, match=r"resumed from step 2; its first version cannot be \{2, 3\}"):
        desk.announce(3)
    with pytest.raises(StaleIncarnation):
        desk.call(lambda ledger: incarnation.announce_version(ledger, Version(RUN_ID, 1, 2)))
    with pytest.raises(FleetOwned):
        desk.call(lambda ledger: incarnation.announce_version(ledger, Version("other", 2, 2)))
    assert desk.announce(2) == desk.announce(2) == ()
    desk.train(3)
    desk.announce(2)  # a late retry does not turn the policy back
    assert desk.lease().leases[0].fence.step == 3


# ------------------------------------------------------------------ the crash table


def test_trainer_dies_after_the_optimizer_step_the_batch_is_served_again(make_desk):
    desk = make_desk(max_staleness=1)
    trained_to(desk, 2)
    generate(desk)
    batch = desk.batch(3)
    opened = desk.begin(2)
    assert (opened.incarnation, opened.last_ledger_step, opened.rewound_groups) == (2, 3, 2)
    again = desk.batch(3)
    assert (names(again), again.replayed) == (names(batch), True)


def test_trainer_dies_after_publish_responses_newer_than_the_policy_count_as_staleness_zero(make_desk):
    desk = make_desk(max_staleness=1)
    trained_to(desk, 2)
    late = desk.lease().leases
    assert [lease.fence.step for lease in late] == [2, 2]
    before = desk.batch(3)
    for lease in late:  # {1, 3} is published and serves, its CompleteStep never arrives
        desk.insert(lease, Version(RUN_ID, 1, 3))
    desk.begin(2)
    again = desk.batch(3)
    assert (names(again), again.replayed) == (names(before), True)
    desk.complete(3)
    batch = desk.batch(4)
    assert names(batch) == [lease.group_id for lease in late]
    assert [group.staleness for group in batch.groups] == [0, 0]
    assert [group.oldest for group in batch.groups] == [Version(RUN_ID, 1, 3)] * 2


def test_trainer_dies_before_its_checkpoint_the_lost_steps_are_replayed_in_order(make_desk):
    desk = make_desk(40, max_staleness=1)
    batches = trained_to(desk, 5)
    generate(desk)
    opened = desk.begin(2)
    assert (opened.last_ledger_step, opened.oldest_resumable_step, opened.rewound_groups) == (5, 0, 6)
    for step in (3, 4, 5):
        batch = desk.batch(step)
        assert (names(batch), batch.replayed) == (batches[step], True)
        desk.complete(step)
    generate(desk)
    fresh = desk.batch(6)
    assert not fresh.replayed
    assert names(fresh) == ["train/train:0:10", "train/train:0:11"]


def test_pointer_renamed_before_checkpoint_committed_every_covered_step_is_accepted(make_desk):
    desk = make_desk(40)
    batches = trained_to(desk, 4)
    desk.checkpoint(2, oldest_kept=1)
    for resume in (1, 2, 3, 4, 2, 1):
        assert desk.begin(resume).oldest_resumable_step == 1
    for step in (2, 3, 4):
        assert names(desk.batch(step)) == batches[step]
        desk.complete(step)


def test_a_checkpoint_of_a_step_whose_completion_never_arrived_counts_it_as_trained(make_desk):
    desk = make_desk(40)
    trained_to(desk, 1)
    generate(desk)
    lost = names(desk.batch(2))
    opened = desk.begin(2)
    assert (opened.last_ledger_step, opened.rewound_groups) == (2, 0)
    assert desk.counts().consumed == 4
    assert not set(desk.train(3)) & set(lost)


def test_steps_that_the_ledger_does_not_cover_are_refused_with_its_range(make_desk):
    desk = make_desk(40)
    trained_to(desk, 4)
    desk.checkpoint(3, oldest_kept=2)
    for resume in (1, 5):
        with pytest.raises(ResumeOutOfRange) as caught:
            desk.open(resume)
        assert caught.value.metadata == {"resume_step": str(resume), "oldest": "2", "newest": "4"}
    assert desk.ledger.run().incarnation == 1  # a refusal changes nothing


def test_regenerate_makes_lost_steps_anew_in_the_same_batches(make_desk):
    desk = make_desk(40)
    batches = trained_to(desk, 4)
    desk.checkpoint(3, oldest_kept=3)
    opened = desk.begin(1, regenerate=True)
    assert (opened.requeued_prompts, opened.rewound_groups) == (4, 2)
    assert desk.counts().evicted == {"REGENERATED": 4}
    for step in (2, 3, 4):
        leases_now = desk.lease().leases
        if step < 4:  # one batch at a time: made by a policy that is at most k steps behind
            assert [lease.group_id for lease in leases_now] == batches[step]
            assert all(lease.fence.step == step - 1 and lease.attempt == 1 for lease in leases_now)
        for lease in leases_now:
            desk.insert(lease)
        assert names(desk.batch(step)) == batches[step]
        desk.complete(step)
    assert desk.train(5) == ["train/train:0:8", "train/train:0:9"]


def test_regenerate_accepts_a_ledger_that_knows_less_than_the_checkpoint(make_desk):
    desk = make_desk(40)
    opened = desk.begin(7, regenerate=True)
    assert (opened.last_ledger_step, opened.oldest_resumable_step) == (7, 7)
    assert desk.train(8) == ["train/train:0:0", "train/train:0:1"]
    with pytest.raises(ResumeOutOfRange):
        desk.open(6)


# ------------------------------------------------------------------ leases and lineage


def test_leases_of_the_old_incarnation_are_void_and_their_prompts_keep_their_place(make_desk):
    desk = make_desk(40, max_staleness=1, max_attempts=1)
    desk.begin()
    old = desk.lease().leases
    desk.insert(old[2])
    opened = desk.begin(0)
    assert opened.requeued_prompts == 3
    for lease in (old[0], old[1], old[3]):
        with pytest.raises(LeaseLost):
            desk.insert(lease)
    assert desk.keep_alive([old[0].lease_id])[0] == [old[0].lease_id]
    new = desk.lease().leases
    assert [lease.group_id for lease in new] == [lease.group_id for lease in (old[0], old[1], old[3])]
    assert all(lease.attempt == 1 and lease.fence.incarnation == 2 for lease in new)
    for lease in new:
        desk.insert(lease)
    assert names(desk.batch(1)) == [old[0].group_id, old[1].group_id]
    assert desk.counts().given_up == {}  # a trainer's death costs a prompt no attempt


def test_another_training_recipe_evicts_the_lost_lineage_and_keeps_the_order(make_desk):
    desk = make_desk(40, max_staleness=1)
    batches = trained_to(desk, 3)
    generate(desk)
    opened = desk.begin(1, recipe_digest="changed")
    assert (opened.rewound_groups, opened.last_ledger_step) == (0, 1)
    # Lost: batches 2 and 3, and the stored groups that weights after step 1 sampled.
    assert desk.counts().evicted == {"LOST_LINEAGE": 8}
    assert desk.train(2) == batches[2]
    assert desk.train(3) == batches[3]


def test_the_same_recipe_or_none_evicts_nothing(make_desk):
    desk = make_desk(40)
    trained_to(desk, 3)
    assert desk.begin(1).rewound_groups == 4
    assert desk.begin(1, recipe_digest="").rewound_groups == 0  # they are stored already
    assert desk.counts().evicted == {}
    assert desk.counts().stored == 4


def test_a_second_rewind_may_go_further_back_or_forward(make_desk):
    desk = make_desk(40)
    batches = trained_to(desk, 5)
    desk.begin(3)
    desk.begin(1)
    assert names(desk.batch(2)) == batches[2]
    desk.begin(4)
    counts = desk.counts()
    assert (counts.consumed, counts.stored) == (8, 2)
    assert names(desk.batch(5)) == batches[5]


def test_a_rewind_opens_a_closed_table_again(make_desk):
    desk = make_desk(40)
    batches = trained_to(desk, 2)
    generate(desk)
    last = names(desk.batch(3))
    desk.complete(3, final=True)
    assert desk.lease().blocked is Blocked.CLOSED
    desk.begin(2)
    assert batches
    assert names(desk.batch(3)) == last
    desk.complete(3)
    assert desk.train(4)


def test_a_damaged_group_of_a_batch_is_made_again_in_its_place(make_desk):
    desk = make_desk(40)
    batches = trained_to(desk, 3)
    damaged = batches[2][1]
    damage(desk, damaged)
    desk.begin(1)
    assert desk.counts().evicted == {"CORRUPTED": 1}
    assert desk.batch(2).blocked is Blocked.GENERATING
    (lease,) = desk.lease().leases
    assert (lease.group_id, lease.attempt) == (damaged, 1)
    desk.insert(lease)
    assert names(desk.batch(2)) == batches[2]
    desk.complete(2)
    assert names(desk.batch(3)) == batches[3]


def test_a_place_that_stays_empty_shortens_its_batch_and_an_empty_batch_is_chosen_anew(make_desk):
    desk = make_desk(40, max_attempts=1)
    batches = trained_to(desk, 2)
    for group_id in batches[2]:
        damage(desk, group_id)
    desk.begin(1)
    for lease in desk.lease().leases:
        desk.call(lambda ledger, lost=lease: leases.fail_prompt(ledger, lost.lease_id, Failure.GENERATION, ""))
    assert desk.train(2) == ["train/train:0:4", "train/train:0:5"]


def test_after_regenerate_new_checkpoints_can_be_resumed(make_desk):
    desk = make_desk(60)
    trained_to(desk, 8)
    desk.checkpoint(8, oldest_kept=7)
    assert desk.begin(3, regenerate=True).oldest_resumable_step == 3
    batches = {step: desk.train(step) for step in (4, 5, 6)}
    assert desk.begin(5).oldest_resumable_step == 3
    assert names(desk.batch(6)) == batches[6]
    desk.checkpoint(5)
    with pytest.raises(ResumeOutOfRange):
        desk.open(4)


def test_a_rewind_with_a_publish_interval_reaches_the_end(make_desk):
    """The window is full of groups for later batches, and the one prompt that training waits for has no slot."""
    desk = make_desk(40, groups_per_step=2, max_staleness=1, publish_interval=2)
    desk.begin()
    generate(desk)
    desk.batch(1)
    desk.complete(1, publish=False)
    second = names(desk.batch(2))
    desk.complete(2)
    first, *others = desk.lease().leases
    assert len(others) == 3
    for lease in others:
        desk.insert(lease)
    desk.begin(1)
    assert names(desk.batch(2)) == second
    desk.complete(2, publish=False)
    waits = desk.batch(3)
    assert (waits.blocked, waits.counts["queued"], waits.counts["free_slots"]) == (Blocked.GENERATING, 1, 0)
    (again,) = desk.lease().leases
    assert again.group_id == first.group_id
    desk.insert(again)
    third = desk.batch(3)
    assert names(third) == [first.group_id, others[0].group_id]
    assert max(group.staleness for group in third.groups) <= 1
    desk.complete(3)
    assert names(desk.batch(4)) == [lease.group_id for lease in others[1:]]


def test_a_prompt_that_waits_for_training_is_blocked_by_admission(make_desk):
    desk = make_desk(40, groups_per_step=1, max_staleness=0)
    desk.begin()
    desk.train(1)
    generate(desk)
    desk.batch(2)
    desk.begin(1)
    damage(desk, "train/train:0:1")
    desk.begin(0)  # batch 2 has to be made again, and must wait for step 1
    assert desk.counts().free_slots == 0
    answer = desk.lease()
    assert (answer.blocked, answer.counts["queued"]) == (Blocked.ADMISSION, 1)
    desk.batch(1)
    assert desk.batch(2).blocked is Blocked.ADMISSION


def test_a_replayed_batch_is_never_older_than_k(make_desk):
    desk = make_desk(40)
    desk.begin()
    generate(desk)
    first = names(desk.batch(1))
    desk.complete(1, Outcome.SKIPPED)
    generate(desk)
    second = names(desk.batch(2))
    desk.begin(0)
    assert names(desk.batch(1)) == first
    desk.complete(1)  # the same step changes the weights this time
    assert desk.batch(2).blocked is Blocked.GENERATING
    again = desk.lease().leases
    assert [lease.group_id for lease in again] == second
    for lease in again:
        assert lease.fence.step == 1
        desk.insert(lease)
    batch = desk.batch(2)
    assert (names(batch), [group.staleness for group in batch.groups]) == (second, [0, 0])
    assert desk.counts().evicted == {"STALE": 2}


def test_a_replay_that_is_fetched_ahead_waits_for_what_decides_its_age(make_desk):
    desk = make_desk(40, max_staleness=1)
    desk.begin()
    batches = {}
    for step in (1, 2, 3):
        generate(desk)
        batches[step] = names(desk.batch(step))
        desk.complete(step, Outcome.SKIPPED)
    desk.begin(0)
    for step in (1, 2):
        assert names(desk.batch(step)) == batches[step]
    assert desk.batch(3).blocked is Blocked.ADMISSION  # two steps old, unless one of the two is skipped again
    for step in (1, 2):
        desk.complete(step, Outcome.SKIPPED)
    assert names(desk.batch(3)) == batches[3]
    assert desk.counts().evicted == {}


# ------------------------------------------------------------------ K27


def test_k27_after_recovery_the_window_is_that_of_the_rows_not_of_a_counter(make_desk):
    """Batch 8, max_staleness 1, resumed at version 100 with a stalled trainer: at most 16 groups, not 816."""
    desk = make_desk(50, groups_per_step=8, max_staleness=1)
    desk.begin(100, regenerate=True)
    admitted = 0
    for _ in range(200):
        answer = desk.lease(8)
        for lease in answer.leases:
            admitted += 1
            desk.insert(lease)
    counts = desk.counts()
    assert (admitted, counts.stored + counts.open) == (16, 16)
    desk.begin(100)
    assert desk.lease().blocked is Blocked.ADMISSION


def test_k27_after_a_rewind_nothing_is_admitted_until_the_replay_has_caught_up(make_desk):
    desk = make_desk(100, groups_per_step=2, max_staleness=1)
    trained_to(desk, 10)
    desk.begin(2)
    for step in range(3, 11):
        occupied = desk.counts().stored + desk.counts().leased
        assert (desk.lease().leases == ()) == (occupied >= 4)
        desk.batch(step)
        desk.complete(step)


def test_k27_a_prompt_that_takes_five_times_longer_is_trained_in_every_epoch(make_desk):
    desk = make_desk(8, groups_per_step=2, max_staleness=1, source={"epochs": 3})
    desk.begin()
    running = {}
    trained = []
    step = 1
    for now in range(400):
        for lease in desk.lease().leases:
            slow = lease.group_id.endswith(":3")
            running[lease.group_id] = (now + (5 if slow else 1), lease)
        for group_id, (ready, _lease) in list(running.items()):
            if ready <= now:
                desk.insert(running.pop(group_id)[1])
        answer = desk.batch(step)
        if answer.blocked is Blocked.END_OF_DATA:
            break
        if answer.groups:
            assert all(group.staleness <= 1 for group in answer.groups)
            trained += names(answer)
            desk.complete(step)
            step += 1
    assert trained == [f"train/train:{epoch}:{index}" for epoch in range(3) for index in range(8)]
    assert desk.counts().evicted == {}


def test_a_reader_of_an_older_payload_does_not_mark_the_newer_one(make_desk):
    desk = make_desk(40)
    batches = trained_to(desk, 2)
    group_id = batches[2][0]
    (older,) = desk.call(lambda ledger: views.group_places(ledger.db, [group_id]))
    damage(desk, group_id)
    desk.begin(1)
    generate(desk)
    with pytest.raises(FailedPrecondition, match="changed while it was read"):
        desk.call(lambda ledger: incarnation.mark_corrupted(ledger, group_id, older))
    assert names(desk.batch(2)) == batches[2]
    assert desk.call(lambda ledger: views.group_places(ledger.db, [group_id])) != [older]
    assert desk.begin(1).requeued_prompts == 0


def test_a_batch_that_was_never_made_again_is_still_the_batch_of_its_step(make_desk):
    """Back to an old checkpoint, on to a newer one of the old lineage, and further back than both."""
    desk = make_desk(40)
    batches = trained_to(desk, 2)
    desk.checkpoint(2)
    desk.begin(1, regenerate=True)
    desk.begin(2)
    assert not set(desk.train(3)) & set(batches[2])  # it is in the checkpoint
    desk.begin(0, regenerate=True)
    for step in (1, 2):
        assert desk.train(step) == batches[step]


def test_the_step_of_a_batch_that_is_lost_as_a_whole_goes_to_the_next_one(make_desk):
    """The batches that follow hold every slot: prompts for a batch chosen anew would wait for them, and they for it."""
    desk = make_desk(40, max_attempts=1, groups_per_step=2, max_staleness=1)
    batches = trained_to(desk, 3)
    for group_id in batches[1]:
        damage(desk, group_id)
    desk.begin(0)
    for lease in desk.lease().leases:
        desk.call(lambda ledger, lost=lease: leases.fail_prompt(ledger, lost.lease_id, Failure.GENERATION, ""))
    assert desk.counts().free_slots == 0
    for step in (1, 2):
        assert names(desk.batch(step)) == batches[step + 1]
        desk.complete(step)
    generate(desk)
    assert names(desk.batch(3))
