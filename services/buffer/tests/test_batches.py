"""Batches and steps: order, replay, refusals, the end. K31: dynamic sampling is bounded."""

from __future__ import annotations

import gc
import tracemalloc
from functools import partial

import pytest

from vime_buffer import leases, views
from vime_buffer.testing import RUN_ID
from vime_buffer.values import Awaited, Blocked, Failure, Outcome, Version
from vime_service.errors import FailedPrecondition, InvalidArgument, ResourceExhausted, StaleIncarnation, WrongStep


def names(answer):
    return [group.group_id.removeprefix("train/train:") for group in answer.groups]


def test_a_batch_is_in_admission_order_whatever_the_order_of_arrival(make_desk):
    desk = make_desk(groups_per_step=3, max_staleness=1)
    desk.begin()
    for lease in reversed(desk.lease().leases):
        desk.insert(lease)
    assert names(desk.batch(1)) == ["0:0", "0:1", "0:2"]


def test_training_waits_for_a_slow_prompt_and_no_prompt_starves(make_desk):
    desk = make_desk(max_staleness=3)
    desk.begin()
    slow, *fast = desk.lease().leases
    for lease in fast:
        desk.insert(lease)
    answer = desk.batch(1)
    assert (answer.blocked, answer.counts["open"], answer.counts["stored"]) == (Blocked.GENERATING, 1, 7)
    desk.insert(slow)
    assert names(desk.batch(1)) == ["0:0", "0:1"]


def test_a_batch_asked_for_again_is_the_same_also_after_a_restart(make_desk):
    desk = make_desk()
    desk.begin()
    for lease in desk.lease().leases:
        desk.insert(lease)
    first = desk.batch(1)
    assert not first.replayed
    desk.close()
    desk = make_desk()
    again = desk.batch(1)
    assert (again.groups, again.replayed) == (first.groups, True)


def test_steps_come_one_after_the_other(make_desk):
    desk = make_desk()
    desk.begin()
    with pytest.raises(WrongStep) as caught:
        desk.batch(2)
    assert caught.value.metadata == {"step": "2", "expected": "1"}
    with pytest.raises(WrongStep):
        desk.complete(1)
    desk.train(1)
    with pytest.raises(WrongStep):
        desk.batch(1)  # it is completed
    with pytest.raises(WrongStep, match="step 3 cannot be completed"):
        desk.complete(3)


def test_a_batch_may_be_fetched_ahead_and_staleness_is_that_of_its_own_step(make_desk):
    desk = make_desk(max_staleness=1)
    desk.begin()
    for lease in desk.lease().leases:
        desk.insert(lease)
    assert [group.staleness for group in desk.batch(1).groups] == [0, 0]
    assert [group.staleness for group in desk.batch(2).groups] == [1, 1]
    assert desk.lease().blocked is Blocked.ADMISSION
    desk.complete(1)
    desk.complete(2)
    assert [lease.fence.step for lease in desk.lease().leases] == [2] * 4


def test_completing_a_step_twice_is_one_completion(make_desk):
    desk = make_desk(retained_bytes=1)
    desk.begin()
    for lease in desk.lease().leases:
        desk.insert(lease)
    desk.batch(1)
    assert desk.complete(1) == desk.complete(1)
    with pytest.raises(FailedPrecondition, match="was completed as TRAINED, not as SKIPPED"):
        desk.complete(1, Outcome.SKIPPED)
    assert desk.counts().consumed == 2


def test_a_skipped_step_frees_its_slots_publishes_nothing_and_ages_nothing(make_desk):
    desk = make_desk()
    desk.begin()
    for step in (1, 2, 3):
        for lease in desk.lease().leases:
            assert lease.fence.step == 0  # the policy is still the version announced at first
            desk.insert(lease)
        assert [group.staleness for group in desk.batch(step).groups] == [0, 0]
        desk.complete(step, Outcome.SKIPPED)
    assert names(desk.batch(4)) == []
    assert desk.counts().consumed == 6


def test_a_published_version_must_be_the_step_s_own(make_desk):
    desk = make_desk()
    desk.begin()
    for lease in desk.lease().leases:
        desk.insert(lease)
    desk.batch(1)
    from vime_buffer import batches
    from vime_buffer.values import Version

    def complete(outcome, version):
        return lambda ledger: batches.complete_step(ledger, 1, 1, "train", outcome, version, final=False)

    for version in (Version("run", 1, 2), Version("run", 2, 1)):
        with pytest.raises(InvalidArgument, match="cannot publish"):
            desk.call(complete(Outcome.TRAINED, version))
    with pytest.raises(InvalidArgument, match="was skipped"):
        desk.call(complete(Outcome.SKIPPED, Version("run", 1, 1)))


def test_a_lower_incarnation_is_refused_everywhere(make_desk):
    desk = make_desk()
    desk.begin()
    desk.open()
    desk.incarnation = 1
    for call in (lambda: desk.batch(1), lambda: desk.complete(1), lambda: desk.checkpoint(0), lambda: desk.announce()):
        with pytest.raises(StaleIncarnation) as caught:
            call()
        assert caught.value.metadata == {"incarnation": "1", "current": "2"}
    desk.incarnation = 7
    with pytest.raises(FailedPrecondition, match="never granted"):
        desk.batch(1)


def test_a_publish_every_second_step_keeps_staleness_within_k(make_desk):
    desk = make_desk(40, max_staleness=1, publish_interval=2)
    desk.begin()
    seen = set()
    for step in range(1, 11):
        for lease in desk.lease().leases:
            desk.insert(lease)
        batch = desk.batch(step)
        assert len(batch.groups) == 2
        seen |= {group.staleness for group in batch.groups}
        desk.complete(step, publish=step % 2 == 0)
    assert seen == {0, 1}


# ------------------------------------------------------------------ K31


def test_k31_filters_that_drop_everything_end_in_a_clear_error(make_desk):
    desk = make_desk(100, max_drops_in_a_row=6)
    desk.begin()
    drops = 0
    while answer := desk.lease().leases:
        for lease in answer:
            desk.insert(lease, drop="zero_std")
            drops += 1
    assert drops == 6
    with pytest.raises(FailedPrecondition) as caught:
        desk.batch(1)
    assert "dropped 6 groups in a row (limit 6; reasons: zero_std)" in caught.value.message
    desk.begin()  # another incarnation may try again
    assert len(desk.lease().leases) == 2


OOPS = "ValueError: oops (mine.py:2)"


def test_a_reward_that_always_fails_ends_in_an_error_that_quotes_it(make_desk):
    desk = make_desk(100, groups_per_step=2, max_attempts=2)
    desk.begin()
    for _ in range(8):  # four prompts, twice each
        (lease, *_) = desk.lease(1).leases
        desk.call(partial(leases.fail_prompt, lease_id=lease.lease_id, failure=Failure.REWARD, detail=OOPS))
    message = r"4 prompts in a row .*\(limit max_failures_in_a_row 4\).*:3, REWARD: ValueError: oops \(mine.py:2\)"
    with pytest.raises(FailedPrecondition, match=message):
        desk.batch(1)
    desk.begin()  # another incarnation may try again
    assert desk.batch(1).blocked is Blocked.GENERATING


def fail(desk, lease, failure=Failure.INVALID, detail="prompt of 9 tokens, max_model_len 8"):
    return desk.call(lambda ledger: leases.fail_prompt(ledger, lease.lease_id, failure, detail))


@pytest.mark.parametrize("reason", ["GENERATION", "TIMEOUT", "USER_CODE", "UNSPECIFIED", "INVALID", "EXPIRED"])
def test_whatever_always_fails_ends_in_an_error_that_quotes_it_also_at_the_end_of_the_data(make_desk, reason):
    desk = make_desk(4, source={"epochs": 1}, max_attempts=2)
    desk.begin()
    for _ in range(10):
        for lease in desk.lease().leases:
            if reason == "EXPIRED":
                desk.wait(60)
            else:
                fail(desk, lease, Failure[reason], OOPS)
    assert dict(desk.counts().given_up) == {reason: 4}
    with pytest.raises(FailedPrecondition, match=rf"4 prompts in a row were given up .*the last: \S+, {reason}: "):
        desk.batch(1)


def test_workers_stop_at_the_bound_and_a_group_that_was_begun_before_is_waited_for(make_desk):
    desk = make_desk(100, max_failures_in_a_row=3)
    desk.begin()
    slow, quick = desk.lease().leases
    fail(desk, quick)
    for _ in range(2):
        desk.wait(1)
        fail(desk, desk.lease().leases[0])
    assert desk.lease().counts["failed_in_a_row"] == 3
    assert desk.batch(1).blocked is Blocked.GENERATING
    desk.insert(slow)
    (lease,) = desk.lease().leases
    desk.insert(lease)
    assert len(desk.batch(1).groups) == 2


def test_what_can_never_be_generated_is_given_up_at_once(make_desk):
    desk = make_desk(max_attempts=3)
    desk.begin()
    lease, _ = desk.lease().leases
    assert fail(desk, lease)
    assert fail(desk, lease)  # a retry
    assert dict(desk.counts().given_up) == {"INVALID": 1}
    assert lease.group_id not in {other.group_id for other in desk.lease().leases}
    desk.begin()
    assert lease.group_id not in {other.group_id for other in desk.lease().leases}


def test_a_batch_that_does_not_come_says_whom_it_waits_for(make_desk):
    desk = make_desk(groups_per_step=3, max_staleness=1)
    desk.begin()
    first, second, third, *_ = desk.lease(4).leases
    desk.wait(5)
    desk.insert(second)
    fail(desk, third, Failure.GENERATION)
    answer = desk.batch(1)
    assert answer.awaited == (
        Awaited(first.group_id, "train:0:0", 0, "worker", 5.0),
        Awaited(third.group_id, "train:0:2", 1),
    )
    for lease in (first, *desk.lease().leases):
        desk.insert(lease)
    desk.quarantine(1, second.group_id)
    assert desk.batch(1).awaited == (Awaited(second.group_id, "train:0:1", 1),)


def test_of_many_awaited_prompts_the_sixteen_that_wait_longest_are_named(make_desk):
    desk = make_desk(40, groups_per_step=20, selector="ready_first")
    desk.begin()
    late = [desk.wait(1) or desk.lease(1).leases[0].group_id for _ in range(20)]
    assert [prompt.group_id for prompt in desk.batch(1).awaited] == late[:16]


def test_k31_the_batch_after_a_refill_has_exactly_the_configured_size(make_desk):
    desk = make_desk(100, groups_per_step=4)
    desk.begin()
    for number in range(3):
        for position, lease in enumerate(desk.lease().leases):
            desk.insert(lease, drop="zero_std" if (number, position) in {(0, 1), (0, 2), (1, 0)} else "")
    assert names(desk.batch(1)) == ["0:0", "0:3", "0:5", "0:6"]
    assert desk.counts().dropped == {"zero_std": 3}


def test_a_kept_group_resets_the_count_of_drops(make_desk):
    desk = make_desk(100, max_drops_in_a_row=3)
    desk.begin()
    for number in range(12):
        (lease,) = desk.lease(1).leases
        desk.insert(lease, drop="" if number % 3 == 2 else "zero_std")
        if desk.counts().stored == 2:
            desk.batch(desk.ledger.run().leased_step + 1)
            desk.complete(desk.ledger.run().leased_step)


# ------------------------------------------------------------------ ready_first


def test_ready_first_evicts_what_is_too_old_and_waits_for_it_in_the_end(make_desk):
    desk = make_desk(100, selector="ready_first", max_staleness=1, max_evictions=2, groups_per_step=2)
    desk.begin()
    slow, *fast = desk.lease().leases
    for lease in fast:
        desk.insert(lease)
    trained, step = [], 0
    for _ in range(40):
        answer = desk.batch(step + 1)
        if answer.blocked is not Blocked.NOT:
            break
        step += 1
        assert all(group.staleness <= 1 for group in answer.groups)
        trained += names(answer)
        desk.complete(step)
        for lease in desk.lease().leases:
            if lease.group_id == slow.group_id:
                slow = lease
            else:
                desk.insert(lease)
        # The slow one arrives just after it became too old.
        if step % 3 == 0:
            desk.insert(slow)
    assert "0:0" not in trained
    assert desk.counts().evicted == {"STALE": 2}
    (slow,) = [lease for lease in desk.lease().leases if lease.group_id == slow.group_id]
    desk.insert(slow)
    assert names(desk.batch(step + 1))[0] == "0:0"
    assert len(trained) == len(set(trained))


# ------------------------------------------------------------------ budgets and ends


def test_consumed_bytes_ask_for_a_checkpoint_and_then_hold_training(make_desk):
    desk = make_desk(40, retained_bytes=2500)
    desk.begin()

    def step(number):
        for lease in desk.lease().leases:
            desk.insert(lease, payload=lease.group_id.encode() * 50)
        desk.batch(number)
        return desk.complete(number)

    assert not step(1).checkpoint_wanted  # 1500 of 2500 bytes
    assert step(2).checkpoint_wanted
    answer = desk.batch(3)
    assert answer.blocked is Blocked.RETAINED_BYTES
    assert answer.counts == {"consumed_bytes": 3000, "retained_bytes": 2500}
    assert desk.checkpoint(2, oldest_kept=1) == (2, 1500)
    assert desk.batch(3).blocked is Blocked.GENERATING
    assert desk.checkpoint(2, oldest_kept=1) == (0, 0)
    with pytest.raises(WrongStep):
        desk.checkpoint(9)
    with pytest.raises(InvalidArgument):
        desk.checkpoint(1, oldest_kept=2)


def test_retired_payloads_go_by_whole_segments(make_desk):
    desk = make_desk(100, options={"segment_bytes": 4096})
    desk.begin()
    folder = desk.folder / "segments"
    most = 0
    for step in range(1, 31):
        for lease in desk.lease().leases:
            desk.insert(lease, payload=lease.group_id.encode() * 100)
        desk.batch(step)
        desk.complete(step)
        desk.checkpoint(step)
        most = max(most, len(list(folder.iterdir())))
    assert most <= 3
    assert desk.counts().retired == 60


def test_the_last_batch_is_what_is_left_and_then_the_data_ends(make_desk):
    desk = make_desk(5, source={"epochs": 1}, groups_per_step=2)
    desk.begin()
    sizes = [len(desk.train(step)) for step in (1, 2, 3)]
    assert sizes == [2, 2, 1]
    assert desk.batch(4).blocked is Blocked.END_OF_DATA
    assert desk.lease().blocked is Blocked.END_OF_DATA


def test_a_final_step_closes_the_table(make_desk):
    desk = make_desk(max_staleness=1)
    desk.begin()
    kept = desk.lease().leases
    for lease in kept[:3]:
        desk.insert(lease)
    desk.batch(1)
    desk.complete(1, final=True)
    assert desk.lease().blocked is Blocked.CLOSED
    assert desk.batch(2).blocked is Blocked.CLOSED
    assert not desk.insert(kept[3])  # what is under way may still arrive


def test_nobody_asks_is_told_apart_from_being_generated(make_desk):
    from vime_buffer import batches

    desk = make_desk()
    desk.begin()
    ask = lambda asks: desk.call(lambda ledger: batches.lease_batch(ledger, 1, 1, "train", workers_ask=asks))  # noqa: E731
    assert ask(False).blocked is Blocked.NO_WORKER
    assert ask(True).blocked is Blocked.GENERATING
    lease = desk.lease(1).leases[0]
    assert ask(False).blocked is Blocked.GENERATING
    desk.call(lambda ledger: leases.fail_prompt(ledger, lease.lease_id, Failure.TIMEOUT, ""))
    assert ask(False).blocked is Blocked.NO_WORKER


def test_tables_share_the_steps_of_the_run(make_desk):
    desk = make_desk(eval_prompts=2)
    desk.begin()
    for lease in desk.lease().leases:
        desk.insert(lease)
    with pytest.raises(InvalidArgument, match="has no batches"):
        desk.batch(1, "eval/heldout")
    desk.batch(1)
    with pytest.raises(FailedPrecondition):
        desk.complete(1, table_name="eval/heldout")


def test_k25_many_rounds_leave_memory_and_files_flat(make_desk):
    """K25: what is held does not grow with what went through."""
    desk = make_desk(50, groups_per_step=10, options={"segment_bytes": 1 << 14})
    desk.begin()
    folder = desk.folder / "segments"

    def rounds(first, last):
        for step in range(first, last):
            for lease in desk.lease().leases:
                desk.insert(lease, payload=lease.group_id.encode() * 50)
            desk.batch(step)
            desk.complete(step)
            desk.checkpoint(step)
        gc.collect()
        return tracemalloc.get_traced_memory()[0], len(list(folder.iterdir()))

    rounds(1, 11)  # caches fill
    tracemalloc.start()
    try:
        before, files = rounds(11, 21)
        after, files_after = rounds(21, 61)
    finally:
        tracemalloc.stop()
    assert after - before < 40 * 10 * 100, "400 groups went through; 100 bytes of each would be a leak"
    assert files_after <= files <= 2
    view = desk.call(lambda ledger: views.table_view(ledger.db, "train"))
    assert view.counts.retired == 600
    assert view.counts.payload_bytes == 0


def test_all_bytes_together_ask_for_a_checkpoint_and_say_that_they_hold_training(make_desk):
    """Groups that wait take room as well: the budget may be full before the table has its retained_bytes."""
    desk = make_desk(40, max_staleness=1, retained_bytes=4500, options={"max_bytes": 5000, "segment_bytes": 4096})
    desk.begin()
    for lease in desk.lease().leases:
        desk.insert(lease, payload=lease.group_id.encode() * 60)  # 900 bytes each
    desk.batch(1)
    assert not desk.complete(1).checkpoint_wanted
    first, second = desk.lease().leases
    desk.batch(2)
    desk.insert(first, payload=b"x" * 900)
    assert desk.complete(2).checkpoint_wanted  # 4500 of 5000
    assert desk.batch(3).blocked is Blocked.GENERATING
    with pytest.raises(ResourceExhausted):
        desk.insert(second, payload=b"x" * 900)
    answer = desk.batch(3)
    assert answer.blocked is Blocked.RETAINED_BYTES
    assert (answer.counts["max_bytes"], answer.counts["consumed_bytes"]) == (5000, 3600)
    desk.checkpoint(2)
    assert desk.batch(3).blocked is Blocked.GENERATING
    desk.insert(second, payload=b"x" * 900)
    assert len(desk.batch(3).groups) == 2


def test_a_group_that_never_fits_costs_its_prompt_and_not_the_run(make_desk):
    """No checkpoint would make room for it: the trainer is not sent to make one."""
    desk = make_desk(10, max_attempts=2, retained_bytes=1000, options={"max_bytes": 5000})
    desk.begin()
    large, *_ = desk.lease(1).leases
    for last in (False, True):
        with pytest.raises(ResourceExhausted):
            desk.insert(large, payload=b"x" * 6000)
        assert desk.batch(1).blocked is Blocked.GENERATING
        assert desk.call(lambda ledger: leases.fail_prompt(ledger, large.lease_id, Failure.GENERATION, "")) is last  # noqa: B023  called at once
        for lease in desk.lease(1).leases:
            large = lease
    assert desk.counts().given_up == {"GENERATION": 1}
    for lease in (large, *desk.lease().leases):
        desk.insert(lease)
    assert names(desk.batch(1)) == ["0:1", "0:2"]


def test_groups_that_wait_ask_for_no_checkpoint(make_desk):
    """What no checkpoint frees may take most of the budget for as long as the run lasts."""
    options = {"max_bytes": 25000, "segment_bytes": 4096}
    desk = make_desk(60, groups_per_step=1, max_staleness=19, retained_bytes=20000, options=options)
    desk.begin()
    wanted = []
    for step in range(1, 21):
        for lease in desk.lease().leases:
            desk.insert(lease, payload=b"x" * 1000)  # twenty are under way
        desk.batch(step)
        assert desk.ledger.segments.total_bytes > 20000
        wanted.append(desk.complete(step).checkpoint_wanted)
        if wanted[-1]:
            desk.checkpoint(step)
    assert 3 <= sum(wanted) <= 8


def test_the_final_completion_may_bring_the_version_that_was_not_due_before(make_desk):
    desk = make_desk(2, max_staleness=1, publish_interval=2)
    desk.begin()
    desk.train(1, publish=False)
    assert desk.complete(1, final=True) == desk.complete(1, final=True)
    assert desk.call(lambda ledger: ledger.run().policy) == Version(RUN_ID, 1, 1)
    with pytest.raises(FailedPrecondition, match=r"published_version \{1, 1\}, not unset"):
        desk.complete(1, publish=False, final=True)


def test_a_step_completed_again_has_the_version_that_it_published(make_desk):
    desk = make_desk(max_staleness=1, publish_interval=2)
    desk.begin()
    for lease in desk.lease().leases:
        desk.insert(lease)
    desk.batch(1)
    desk.batch(2)
    desk.complete(1, publish=False)
    with pytest.raises(FailedPrecondition, match=r"published_version unset, not \{1, 1\}"):
        desk.complete(1)
    desk.complete(2)
    with pytest.raises(FailedPrecondition, match=r"published_version \{1, 2\}, not unset") as caught:
        desk.complete(2, publish=False)
    assert caught.value.metadata == {"state": "{1, 2}", "wanted": "unset"}
    assert desk.complete(2) == desk.complete(2)
    desk.begin(2)
    desk.complete(2, publish=False, final=True)  # the next life's trainer knows only that the step was trained
