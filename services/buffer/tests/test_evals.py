"""Eval rounds: when they open, on which version, what they hold up, what a rewind does to them."""

from __future__ import annotations

from math import comb

import pytest

from vime_buffer import evals, leases
from vime_buffer.evals import pass_at_k
from vime_buffer.testing import RUN_ID
from vime_buffer.values import Blocked, Failure, Outcome, Version
from vime_service.errors import InvalidArgument, LeaseLost, NotFound, ResourceExhausted

EVAL = "eval/heldout"


@pytest.fixture
def desk(make_desk):
    return make_desk(40, eval_prompts=3, evals={"eval_interval": 2})


def take(desk, table):
    return desk.lease(100, [table]).leases


def finish_round(desk, **changes):
    for lease in take(desk, EVAL):
        desk.insert(lease, **changes)


def train(desk, step, **changes):
    for lease in take(desk, "train"):
        desk.insert(lease)
    assert desk.batch(step).groups
    return desk.complete(step, **changes)


def result(desk, step):
    return desk.call(lambda ledger: evals.round_result(ledger.db, EVAL, step, RUN_ID, ledger.wall()))


def test_rounds_open_before_step_one_at_the_interval_and_at_the_end(desk):
    desk.open()
    assert desk.announce() == (EVAL,)
    finish_round(desk)
    assert train(desk, 1).opened_evals == ()
    assert train(desk, 2).opened_evals == (EVAL,)
    finish_round(desk)
    assert train(desk, 3, final=True).opened_evals == (EVAL,)
    assert desk.complete(3, final=True).opened_evals == (EVAL,)  # asked again
    finish_round(desk)
    assert [result(desk, step).done for step in (0, 2, 3)] == [True] * 3


def test_an_interval_of_zero_means_only_before_and_after(make_desk):
    desk = make_desk(40, eval_prompts=1)
    desk.open()
    assert desk.announce() == (EVAL,)
    finish_round(desk)
    for step in (1, 2, 3):
        assert train(desk, step).opened_evals == ()
    assert train(desk, 4, final=True).opened_evals == (EVAL,)


def test_a_trainer_that_learns_at_the_end_of_the_data_may_close_the_step_before(make_desk):
    desk = make_desk(2, eval_prompts=1, source={"epochs": 1})
    desk.begin()
    finish_round(desk)
    train(desk, 1)
    assert desk.batch(2).blocked is Blocked.END_OF_DATA
    assert desk.complete(1, final=True).opened_evals == (EVAL,)
    assert desk.batch(2).blocked is Blocked.EVAL
    finish_round(desk)
    assert desk.batch(2).blocked is Blocked.CLOSED


@pytest.mark.parametrize("done", [True, False])
def test_the_final_round_runs_on_what_was_published_for_it(make_desk, done):
    """Publishing was not due when the step's own round opened, and the data turned out to end there."""
    desk = make_desk(4, eval_prompts=3, evals={"eval_interval": 2}, max_staleness=2, publish_interval=3)
    desk.begin()
    finish_round(desk)
    train(desk, 1, publish=False)
    assert train(desk, 2, publish=False).opened_evals == (EVAL,)
    first, second, third = take(desk, EVAL)
    desk.insert(first)
    desk.call(lambda ledger: leases.fail_prompt(ledger, second.lease_id, Failure.GENERATION, ""))
    if done:
        desk.insert(third)
        finish_round(desk)
    assert result(desk, 2).version == Version(RUN_ID, 1, 0)
    for _ in range(2):  # asked again, it stays
        assert desk.complete(2, final=True).opened_evals == (EVAL,)
        assert result(desk, 2).version == Version(RUN_ID, 1, 2)
    again = take(desk, EVAL)
    assert [lease.fence for lease in again] == [Version(RUN_ID, 1, 2)] * 3
    if not done:
        with pytest.raises(LeaseLost):
            desk.insert(third)
    for lease in again:
        desk.insert(lease)
    assert desk.complete(2, final=True).opened_evals == (EVAL,)
    assert (result(desk, 2).done, result(desk, 2).inserted, take(desk, EVAL)) == (True, 3, ())
    assert desk.counts(EVAL).evicted == {"STALE": 3 if done else 1}


def test_after_a_skipped_last_step_the_final_round_runs_on_the_last_trained_one(make_desk):
    desk = make_desk(4, eval_prompts=1, evals={"eval_interval": 2}, max_staleness=2, publish_interval=3)
    desk.begin()
    finish_round(desk)
    train(desk, 1, publish=False)
    train(desk, 2, outcome=Outcome.SKIPPED)
    finish_round(desk)
    skipped = {"outcome": Outcome.SKIPPED, "final": True}
    for wrong in (0, 2):
        with pytest.raises(InvalidArgument, match=r"cannot publish version .*, only \{1, 1\}"):
            desk.complete(2, published_step=wrong, **skipped)
    for _ in range(2):
        desk.complete(2, published_step=1, **skipped)
    assert result(desk, 2).version == Version(RUN_ID, 1, 1)
    finish_round(desk)
    assert result(desk, 2).done


def test_eval_prompts_come_first_with_exactly_the_round_s_version(desk):
    desk.begin()
    found = desk.lease(4).leases
    assert [lease.table for lease in found] == [EVAL] * 3 + ["train"]
    first = found[0]
    assert (first.group_id, first.eval_step, first.exact) == (f"{EVAL}@0/heldout:0:0", 0, True)
    with pytest.raises(InvalidArgument, match="must come from exactly"):
        desk.insert(first, Version(RUN_ID, 1, 1))
    assert not desk.insert(first)


def test_the_next_batch_waits_until_the_round_is_done(desk):
    desk.begin()
    for lease in take(desk, "train"):
        desk.insert(lease)
    answer = desk.batch(1)
    assert (answer.blocked, answer.counts["eval_pending"]) == (Blocked.EVAL, 3)
    finish_round(desk)
    assert desk.batch(1).groups


def test_a_batch_is_not_fetched_ahead_over_a_step_that_will_hold(make_desk):
    """Otherwise it could be trained and published while the round still needs the version before."""
    desk = make_desk(40, eval_prompts=1, evals={"eval_interval": 2}, max_staleness=3)
    desk.begin()
    finish_round(desk)
    for lease in take(desk, "train"):
        desk.insert(lease)
    assert desk.batch(1).groups
    assert desk.batch(2).groups
    assert desk.batch(3).blocked is Blocked.EVAL
    desk.complete(1)
    desk.complete(2)
    finish_round(desk)
    assert desk.batch(3).groups


def test_without_hold_training_goes_on_and_what_comes_too_late_is_left_out_and_counted(make_desk):
    desk = make_desk(40, eval_prompts=3, evals={"eval_hold": False, "max_attempts": 1})
    desk.begin()
    first, second, third = take(desk, EVAL)
    desk.insert(first)
    train(desk, 1)
    with pytest.raises(InvalidArgument):
        desk.insert(second, Version(RUN_ID, 1, 1))
    for lease in (second, third):
        desk.call(lambda ledger, lost=lease: leases.fail_prompt(ledger, lost.lease_id, Failure.GENERATION, "fence"))
    found = result(desk, 0)
    assert (found.done, found.prompts, found.inserted, found.given_up) == (True, 3, 1, 2)


def test_the_result_counts_scored_unscored_truncated_and_time(make_desk):
    desk = make_desk(40, eval_prompts=2, evals={"samples_per_prompt": 4})
    desk.begin()
    one, two = take(desk, EVAL)
    desk.wait(2)
    desk.insert(one, rewards=[1, 1, 0, 0.5])
    half = result(desk, 0)
    assert (half.done, half.inserted, half.seconds) == (False, 1, 2)
    desk.wait(3)
    desk.insert(two, rewards=[1])
    desk.wait(100)
    found = result(desk, 0)
    assert (found.done, found.scored, found.unscored, found.seconds) == (True, 5, 3, 5)
    assert found.mean_reward == pytest.approx(3.5 / 5)
    assert found.mean_response_tokens == 4
    # pass@1: means of 2/4 and 1/1; pass@2 and @4 only over the prompt with enough scored samples
    assert found.pass_at_k == {1: 0.75, 2: 1 - comb(2, 2) / comb(4, 2), 4: 1.0}
    assert found.version == Version(RUN_ID, 1, 0)
    with pytest.raises(NotFound):
        result(desk, 1)


def test_pass_at_k_is_the_unbiased_estimator():
    assert pass_at_k([(4, 1)]) == {1: 0.25, 2: 0.5, 4: 1.0}
    assert pass_at_k([(8, 0), (8, 8)]) == {1: 0.5, 2: 0.5, 4: 0.5, 8: 0.5}
    assert pass_at_k([(0, 0)]) == {}
    assert pass_at_k([]) == {}


def test_eval_groups_are_consumed_when_the_round_is_done_and_retired_once_the_next_one_opens(desk):
    desk.begin()
    finish_round(desk)
    assert (desk.counts(EVAL).consumed, desk.counts(EVAL).stored) == (3, 0)
    train(desk, 1)
    desk.checkpoint(1)
    assert (desk.counts(EVAL).consumed, desk.counts().retired) == (3, 2)  # people may still want to read the answers
    train(desk, 2)
    desk.checkpoint(2)
    assert desk.counts(EVAL).retired == 3
    assert result(desk, 0).mean_reward == 0.5  # the result outlives the payloads


def test_a_round_whose_payloads_are_kept_is_nothing_that_a_checkpoint_could_free(make_desk):
    desk = make_desk(40, eval_prompts=3, options={"max_bytes": 1000, "segment_bytes": 4096}, retained_bytes=100)
    desk.begin()
    for lease in take(desk, EVAL):
        desk.insert(lease, payload=b"x" * 250)
    leases = take(desk, "train")
    for lease in leases:
        with pytest.raises(ResourceExhausted):
            desk.insert(lease, payload=b"y" * 250)
    assert desk.batch(1).blocked is Blocked.GENERATING


def test_filters_never_drop_eval_groups(desk):
    desk.begin()
    lease = take(desk, EVAL)[0]
    with pytest.raises(InvalidArgument, match="never dropped"):
        desk.insert(lease, drop="zero_std")


# ------------------------------------------------------------------ rewinds


def test_an_unfinished_round_starts_over_on_the_new_incarnation_s_version(desk):
    desk.begin()
    done, waiting, _ = take(desk, EVAL)
    desk.insert(done)
    desk.open(0)
    assert desk.lease().blocked is Blocked.NO_VERSION
    assert desk.announce() == (EVAL,)
    with pytest.raises(LeaseLost):
        desk.insert(waiting)
    again = take(desk, EVAL)
    assert [lease.group_id for lease in again] == [f"{EVAL}@0/heldout:0:{n}" for n in range(3)]
    assert all(lease.fence == Version(RUN_ID, 2, 0) and lease.attempt == 1 for lease in again[:2])
    for lease in again:
        desk.insert(lease)
    assert desk.counts(EVAL).evicted == {"LOST_LINEAGE": 1}
    assert result(desk, 0).version == Version(RUN_ID, 2, 0)


def test_a_finished_round_of_the_step_resumed_from_is_kept(desk):
    desk.begin()
    finish_round(desk)
    desk.open(0)
    assert desk.announce() == ()
    assert result(desk, 0).version == Version(RUN_ID, 1, 0)


def test_rounds_of_lost_steps_are_taken_back_and_held_again(desk):
    desk.begin()
    finish_round(desk)
    train(desk, 1)
    train(desk, 2)
    finish_round(desk, rewards=[1, 1])
    desk.begin(1)
    with pytest.raises(NotFound):
        result(desk, 2)
    assert desk.counts(EVAL).evicted == {"LOST_LINEAGE": 3}
    assert train(desk, 2).opened_evals == (EVAL,)
    finish_round(desk, rewards=[0, 0])
    found = result(desk, 2)
    assert (found.mean_reward, found.version) == (0.0, Version(RUN_ID, 2, 2))


def test_a_final_round_that_was_cut_off_is_finished_by_the_next_incarnation(desk):
    desk.begin()
    finish_round(desk)
    train(desk, 1, final=True)
    take(desk, EVAL)
    desk.begin(1)
    finish_round(desk)
    assert result(desk, 1).done
    assert desk.complete(1, final=True).opened_evals == (EVAL,)
    assert desk.batch(2).blocked is Blocked.CLOSED


def test_an_older_unfinished_round_ends_as_it_is(make_desk):
    desk = make_desk(40, eval_prompts=3, evals={"eval_hold": False})
    desk.begin()
    done, _open = desk.lease(2, [EVAL]).leases
    desk.insert(done)
    train(desk, 1)
    desk.begin(1)
    found = result(desk, 0)
    assert (found.done, found.inserted, found.given_up) == (True, 1, 2)
    assert take(desk, EVAL) == ()


def test_a_finished_round_keeps_its_results_when_a_payload_is_damaged(desk):
    desk.begin()
    finish_round(desk, rewards=[1.0, 0.0])
    before = result(desk, 0)
    train(desk, 1)
    group_id = f"{EVAL}@0/heldout:0:1"
    desk.call(lambda ledger: ledger.db.run("UPDATE groups SET corrupted = 1 WHERE group_id = ?", group_id))
    for step in (1, 0):
        desk.begin(step)
        assert result(desk, 0) == before
    assert desk.counts(EVAL).evicted == {}
