"""Prompt leases: order, attempts, expiry, inserts. K25: bounded buffer; K26: duplicates."""

from __future__ import annotations

import dataclasses

import pytest

from vime_buffer import catalog, leases
from vime_buffer.testing import RUN_ID, finished
from vime_buffer.values import Blocked, Failure, Version
from vime_service.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    LeaseLost,
    NotFound,
    ResourceExhausted,
)


def fail(desk, lease, failure=Failure.GENERATION):
    return desk.call(lambda ledger: leases.fail_prompt(ledger, lease.lease_id, failure, "why"))


def ids(answer):
    return [lease.group_id.removeprefix("train/train:") for lease in answer.leases]


def test_nothing_is_admitted_before_a_version_is_announced(make_desk):
    desk = make_desk()
    assert desk.lease().blocked is Blocked.NO_VERSION
    desk.open()
    assert desk.lease().blocked is Blocked.NO_VERSION
    desk.announce()
    assert ids(desk.lease()) == ["0:0", "0:1"]


@pytest.mark.parametrize(("k", "slots"), [(0, 2), (1, 4), (3, 8)])
def test_one_setting_is_the_difference_between_synchronous_and_asynchronous(make_desk, k, slots):
    desk = make_desk(max_staleness=k)
    desk.begin()
    assert len(desk.lease().leases) == slots
    answer = desk.lease()
    assert (answer.blocked, answer.counts["open"], answer.counts["free_slots"]) == (Blocked.ADMISSION, slots, 0)


def test_a_lease_carries_what_a_worker_needs(make_desk):
    desk = make_desk(samples_per_prompt=4, reward="exact", lease_ttl=70)
    desk.begin()
    lease = desk.lease(1).leases[0]
    assert (lease.attempt, lease.num_samples, lease.ttl, lease.reward) == (0, 4, 70, "exact")
    assert lease.fence == Version(RUN_ID, 1, 0)
    assert not lease.exact
    assert len(set(lease.seeds)) == 4
    assert lease.record.record_json == '{"prompt": "0 + 1 =", "answer": 1}'


def test_seeds_are_the_same_in_every_attempt(make_desk):
    desk = make_desk()
    desk.begin()
    first = desk.lease(1).leases[0]
    fail(desk, first)
    again = desk.lease(1).leases[0]
    assert (again.attempt, again.seeds, again.group_id) == (1, first.seeds, first.group_id)
    assert again.lease_id != first.lease_id


def test_the_cursor_goes_through_the_epochs_and_stops(make_desk):
    desk = make_desk(3, source={"epochs": 2}, max_staleness=9)
    desk.begin()
    assert ids(desk.lease()) == ["0:0", "0:1", "0:2", "1:0", "1:1", "1:2"]
    assert desk.lease().blocked is Blocked.GENERATING


def test_the_cursor_is_durable(make_desk):
    desk = make_desk(max_staleness=4)
    desk.begin()
    assert ids(desk.lease(3)) == ["0:0", "0:1", "0:2"]
    desk.close()
    desk = make_desk(max_staleness=4)
    assert ids(desk.lease(3)) == ["0:3", "0:4", "0:5"]


# ------------------------------------------------------------------ ends of a lease


def test_a_prompt_that_fails_keeps_its_place_and_is_given_up_after_its_last_attempt(make_desk):
    desk = make_desk(max_attempts=3)
    desk.begin()
    first, second = desk.lease().leases
    for attempt in range(3):
        assert (first.group_id, first.attempt) == ("train/train:0:0", attempt)
        assert fail(desk, first) is (attempt == 2)
        if attempt < 2:
            (first,) = desk.lease().leases
    assert ids(desk.lease()) == ["0:2"]  # its slot goes to the next prompt
    counts = desk.counts()
    assert (counts.drawn, counts.open, counts.requeued, counts.given_up) == (5, 2, 2, {"GENERATION": 1})
    assert not desk.insert(second)


def test_the_slot_of_a_given_up_prompt_is_free_at_once(make_desk):
    desk = make_desk(max_attempts=1)
    desk.begin()
    first, second = desk.lease().leases
    desk.insert(second)
    assert fail(desk, first)
    (third,) = desk.lease().leases
    assert third.group_id == "train/train:0:2"
    desk.insert(third)
    assert [group.group_id for group in desk.batch(1).groups] == [second.group_id, third.group_id]


def test_a_stopping_worker_costs_the_prompt_no_attempt(make_desk):
    desk = make_desk(max_attempts=1)
    desk.begin()
    for attempt in range(5):
        lease = desk.lease(1).leases[0]
        assert lease.attempt == attempt
        assert not fail(desk, lease, Failure.SHUTDOWN)
    assert desk.counts().given_up == {}


def test_giving_a_lease_back_twice_answers_the_same(make_desk):
    desk = make_desk(max_attempts=2)
    desk.begin()
    lease = desk.lease(1).leases[0]
    assert not fail(desk, lease)
    assert not fail(desk, lease)
    last = desk.lease(1).leases[0]
    assert fail(desk, last)
    assert fail(desk, last)
    assert (desk.counts().requeued, desk.counts().given_up) == (1, {"GENERATION": 1})
    with pytest.raises(NotFound):
        desk.call(lambda ledger: leases.fail_prompt(ledger, "train/none#0.x", Failure.TIMEOUT, ""))
    other = desk.lease(1).leases[0]
    desk.insert(other)
    with pytest.raises(FailedPrecondition, match="was inserted"):
        fail(desk, other)


def test_a_lease_ends_by_the_server_s_clock_and_late_results_are_fenced(make_desk):
    desk = make_desk(lease_ttl=60)
    desk.begin()
    first, second = desk.lease().leases
    desk.wait(59)
    assert desk.keep_alive([first.lease_id]) == ([], 60)
    desk.wait(1)
    again = desk.lease().leases
    assert [(lease.group_id, lease.attempt) for lease in again] == [(second.group_id, 1)]
    assert desk.keep_alive([second.lease_id]) == ([second.lease_id], 0.0)
    with pytest.raises(LeaseLost):
        desk.insert(second)
    assert not desk.insert(first)
    assert desk.counts().requeued == 1


def test_a_lease_that_expires_three_times_is_given_up(make_desk):
    desk = make_desk(max_attempts=3)
    desk.begin()
    for _ in range(3):
        assert "train/train:0:0" in [lease.group_id for lease in desk.lease().leases]
        desk.wait(60)
    assert desk.counts().given_up == {"EXPIRED": 2}  # both prompts that were out


def test_open_leases_survive_a_restart_with_a_fresh_time(make_desk):
    desk = make_desk()
    desk.begin()
    first, second = desk.lease().leases
    desk.wait(59)
    desk.close()
    desk = make_desk()
    desk.wait(59)
    assert not desk.insert(first)
    desk.wait(1)
    with pytest.raises(LeaseLost):
        desk.insert(second)


def test_leases_taken_back_cost_nothing(make_desk):
    desk = make_desk(max_attempts=1)
    desk.begin()
    answer = desk.lease()
    desk.call(lambda ledger: leases.release(ledger, [lease.lease_id for lease in answer.leases]))
    assert ids(desk.lease()) == ["0:0", "0:1"]


# ------------------------------------------------------------------ inserts


def test_k26_an_insert_is_idempotent_by_its_bytes(make_desk):
    desk = make_desk()
    desk.begin()
    lease = desk.lease().leases[0]
    assert not desk.insert(lease)
    assert desk.insert(lease)
    assert desk.counts().inserted == 1
    with pytest.raises(AlreadyExists, match="other content"):
        desk.insert(lease, payload=b"other")
    with pytest.raises(AlreadyExists):
        desk.insert(lease, drop="zero_std")


def test_k26_unknown_groups_and_attempts_are_not_found(make_desk):
    desk = make_desk()
    desk.begin()
    lease = desk.lease().leases[0]
    with pytest.raises(NotFound):
        desk.insert(dataclasses.replace(lease, group_id="train/train:0:9"))
    with pytest.raises(NotFound, match=r"attempt 1 .* was never leased"):
        desk.insert(dataclasses.replace(lease, attempt=1))
    with pytest.raises(NotFound):
        desk.insert(dataclasses.replace(lease, table="eval/none"))


def test_k26_a_superseded_attempt_is_refused_and_nothing_is_trained_twice(make_desk):
    desk = make_desk()
    desk.begin()
    old, other = desk.lease().leases
    fail(desk, old)
    (new,) = desk.lease().leases
    with pytest.raises(LeaseLost) as caught:
        desk.insert(old)
    assert caught.value.metadata == {"group_id": old.group_id, "attempt": "0", "current": "1"}
    desk.insert(new)
    desk.insert(other)
    assert desk.insert(new)
    trained = [group.group_id for group in desk.batch(1).groups]
    assert len(trained) == len(set(trained)) == 2


def test_a_retry_after_training_still_finds_its_group(make_desk):
    desk = make_desk()
    desk.begin()
    kept = desk.lease().leases
    for lease in kept:
        desk.insert(lease)
    desk.batch(1)
    desk.complete(1)
    assert desk.insert(kept[0])
    desk.checkpoint(1)
    assert desk.insert(kept[0])  # its payload is gone, its digest is not


def test_a_dropped_group_frees_its_slot_and_its_retry_is_no_second_drop(make_desk):
    desk = make_desk()
    desk.begin()
    lease = desk.lease().leases[0]
    assert not desk.insert(lease, drop="zero_std")
    assert desk.insert(lease, drop="zero_std")
    with pytest.raises(AlreadyExists):
        desk.insert(lease, drop="other")
    counts = desk.counts()
    assert (counts.inserted, counts.dropped, counts.free_slots) == (1, {"zero_std": 1}, 1)
    assert ids(desk.lease()) == ["0:2"]


def test_a_group_must_pass_the_fence_of_its_lease(make_desk):
    desk = make_desk(max_staleness=1)
    desk.begin()
    desk.train(1)
    desk.train(2)
    lease = desk.lease().leases[0]
    assert lease.fence.step == 2
    with pytest.raises(InvalidArgument, match=r"must come from \{1, 2\} or newer, found \{1, 1\}"):
        desk.insert(lease, Version(RUN_ID, 1, 1))
    with pytest.raises(InvalidArgument, match="no trainer can have published yet"):
        desk.insert(lease, Version(RUN_ID, 1, 9))
    with pytest.raises(InvalidArgument, match="no trainer can have published yet"):
        desk.insert(lease, Version(RUN_ID, 2, 2))
    assert not desk.insert(lease)


def test_the_byte_budget_refuses_with_a_time_to_try_again(make_desk):
    desk = make_desk(options={"max_bytes": 5000}, retained_bytes=1000)
    desk.begin()
    first, second = desk.lease().leases
    desk.insert(first, payload=b"x" * 3000)
    with pytest.raises(ResourceExhausted) as caught:
        desk.insert(second, payload=b"y" * 3000)
    assert caught.value.retry_after
    assert (caught.value.metadata["kind"], caught.value.metadata["limit"]) == ("bytes", "5000")
    assert not desk.insert(second, payload=b"y" * 100)


# ------------------------------------------------------------------ K25


def test_k25_a_producer_without_a_consumer_is_held_at_capacity(make_desk):
    desk = make_desk(200, groups_per_step=8, max_staleness=1)  # capacity 16
    desk.begin()
    put = 0
    for _ in range(200):
        answer = desk.lease(1)
        if not answer.leases:
            assert answer.blocked is Blocked.ADMISSION
            continue
        desk.insert(answer.leases[0])
        put += 1
        counts = desk.counts()
        assert counts.stored + counts.open <= 16
    assert put == 16


def test_k25_everything_put_is_consumed_evicted_or_held_and_nothing_is_too_old(make_desk):
    """Another table takes steps, so that the version advances by 3 under groups that wait here."""
    desk = make_desk(200, groups_per_step=8, max_staleness=1)
    from vime_buffer.testing import table, write_prompts

    other = table(write_prompts(desk.folder.parent / "sft.jsonl", 40), name="sft", groups_per_step=1)
    desk.call(lambda ledger: catalog.configure_tables(ledger, [other]))
    desk.begin()
    for lease in desk.lease(100, ["train"]).leases:
        desk.insert(lease)
    for step in (1, 2, 3):
        (lease,) = desk.lease(1, ["sft"]).leases
        desk.insert(lease)
        assert desk.batch(step, "sft").groups
        desk.complete(step, table_name="sft")
    trained = []
    for step in (4, 5):
        while (batch := desk.batch(step)).blocked is not Blocked.NOT:  # version 0 is 3 behind: evicted, never served
            for lease in desk.lease(100, ["train"]).leases:
                assert lease.fence.step >= 3
                desk.insert(lease)
        assert all(group.staleness <= 1 for group in batch.groups)
        trained += [group.group_id for group in batch.groups]
        desk.complete(step)
    assert trained == [f"train/train:0:{n}" for n in range(16)]  # their prompts were queued again, in order
    counts = desk.counts()
    assert counts.evicted == {"STALE": 16}
    assert counts.inserted == counts.consumed + sum(counts.evicted.values()) + counts.stored


def test_prompts_that_wait_and_new_ones_together_stay_within_the_slots(make_desk):
    desk = make_desk(eval_prompts=2, evals={"eval_hold": False})
    desk.begin()
    assert len(desk.lease(3).leases) == 3  # two of the eval round, one of training
    desk.wait(60)
    assert ids(desk.lease(5, ["train"])) == ["0:0", "0:1"]
    assert desk.counts().free_slots == 0


@pytest.mark.parametrize("longest", [0, 90, 1800])
def test_a_long_episode_keeps_its_lease_within_its_longest_time(make_desk, longest):
    desk = make_desk(lease_ttl=60, max_lease=longest, max_attempts=1)
    desk.begin()
    kept, silent = desk.lease().leases
    beats = (longest or 20 * 60) // 30
    left = []
    for _ in range(beats - 1):
        desk.wait(30)
        lost, ttl = desk.keep_alive([kept.lease_id])
        assert not lost
        left.append(ttl)
    assert left == [60] * (beats - 2) + [30]
    desk.wait(30)
    assert desk.keep_alive([kept.lease_id, silent.lease_id]) == ([kept.lease_id, silent.lease_id], 0)
    assert desk.counts().given_up == {"EXPIRED": 1, "TIMEOUT": 1}


def test_a_longest_time_that_changes_counts_for_leases_that_are_out(make_desk):
    desk = make_desk(lease_ttl=60, max_lease=90)
    desk.begin()
    (kept,) = desk.lease(1).leases
    longer = desk.ledger.table("train").settings.model_copy(update={"max_lease": 120})
    desk.call(lambda ledger: catalog.update_table(ledger, longer))
    for _ in range(3):
        desk.wait(30)
        assert desk.keep_alive([kept.lease_id])[0] == []
    desk.wait(30)
    assert desk.keep_alive([kept.lease_id]) == ([kept.lease_id], 0)


def test_only_the_holder_keeps_a_lease_alive(make_desk):
    desk = make_desk(lease_ttl=60)
    desk.begin()
    lease = desk.lease().leases[0]
    desk.wait(30)
    assert desk.keep_alive([lease.lease_id], worker_id="") == ([], 60)  # a client that says nothing
    desk.wait(59)
    assert desk.keep_alive([lease.lease_id], worker_id="another") == ([lease.lease_id], 0)
    desk.wait(1)
    assert desk.keep_alive([lease.lease_id]) == ([lease.lease_id], 0)


def test_every_span_must_pass_the_fence(make_desk):
    """A version of a lost incarnation may have a higher step than the fence and is still not in its lineage."""
    desk = make_desk(max_staleness=1)
    desk.begin()
    desk.open(6, regenerate=True)
    desk.announce(6)
    for lease in desk.lease(2).leases:
        desk.insert(lease)
    desk.batch(7)
    desk.complete(7)
    desk.begin(6)
    desk.batch(7)
    lease = desk.lease().leases[0]
    assert lease.fence == Version(RUN_ID, 3, 6)
    for version in (Version(RUN_ID, 1, 6), Version(RUN_ID, 1, 7), Version(RUN_ID, 2, 7)):
        insert = finished(lease)
        insert = dataclasses.replace(insert, facts=dataclasses.replace(insert.facts, versions=(lease.fence, version)))
        with pytest.raises(InvalidArgument) as caught:
            desk.call(lambda ledger, insert=insert: leases.insert_group(ledger, insert))
        assert caught.value.metadata["actual"] == str(version)
    assert not desk.insert(lease)


def test_a_group_is_of_the_prompt_that_was_leased(make_desk):
    desk = make_desk()
    desk.begin()
    first, second = desk.lease().leases
    insert = finished(first)
    swapped = dataclasses.replace(insert, facts=dataclasses.replace(insert.facts, prompt_id=second.record.prompt_id))
    for drop in ("", "zero_std"):
        wrong = dataclasses.replace(swapped, drop_reason=drop)
        with pytest.raises(InvalidArgument, match='has the prompt "train:0:1", its lease has "train:0:0"') as caught:
            desk.call(lambda ledger, wrong=wrong: leases.insert_group(ledger, wrong))
        assert caught.value.metadata == {
            "field": "group.prompt.prompt_id",
            "expected": "train:0:0",
            "actual": "train:0:1",
        }


def test_reasons_of_drops_are_bounded(make_desk):
    desk = make_desk(200, groups_per_step=1, max_drops_in_a_row=1000)
    desk.begin()
    for n in range(leases.MAX_DROP_REASONS + 3):
        (lease,) = desk.lease().leases
        desk.insert(lease, drop=f"reason_{n}")
        assert desk.insert(lease, drop=f"reason_{n}")  # a retry
    (lease,) = desk.lease().leases
    desk.insert(lease, drop="reason_0")
    dropped = desk.counts().dropped
    assert (len(dropped), dropped["other"], dropped["reason_0"]) == (leases.MAX_DROP_REASONS + 1, 3, 2)


def test_a_worker_that_draws_from_eval_tables_alone_is_told_why_it_waits(make_desk):
    desk = make_desk(eval_prompts=1, evals={"eval_interval": 2})
    desk.begin()
    only = ["eval/heldout"]
    (lease,) = desk.lease(5, only).leases
    assert (desk.lease(5, only).blocked, desk.lease(5, only).counts) == (Blocked.EVAL, {"eval_pending": 1})
    desk.insert(lease)
    answer = desk.lease(5, only)
    assert (answer.blocked, answer.counts) == (Blocked.ADMISSION, {"eval_pending": 0, "completed_step": 0})
    for lease in desk.lease(5, ["train"]).leases:
        desk.insert(lease)
    desk.batch(1)
    desk.complete(1, final=True)
    (lease,) = desk.lease(5, only).leases
    desk.insert(lease)
    answer = desk.lease(5, only)
    assert (answer.blocked, answer.counts) == (Blocked.CLOSED, {"eval_pending": 0, "completed_step": 1})
