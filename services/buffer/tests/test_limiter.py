"""The admission rule as arithmetic."""

from __future__ import annotations

import pytest

from vime_buffer.limiter import Limits, Occupancy, free_slots, may_refill, staleness


@pytest.mark.parametrize(
    ("k", "occupied", "free"),
    [
        (0, Occupancy(0, 0, 0), 8),
        (0, Occupancy(3, 2, 1), 2),
        (0, Occupancy(0, 0, 8), 0),  # a leased batch holds its slots until CompleteStep: that is on-policy training
        (1, Occupancy(0, 0, 8), 8),
        (1, Occupancy(0, 0, 8, places=3), 5),  # what training comes to first keeps its slots
        (1, Occupancy(8, 4, 8), 0),
        (3, Occupancy(1, 1, 8), 22),
    ],
)
def test_slots_are_k_plus_one_batches_minus_what_is_taken(k, occupied, free):
    assert free_slots(occupied, Limits(groups_per_step=8, max_staleness=k)) == free


def test_capacity_bounds_open_and_stored_but_not_leased():
    limits = Limits(groups_per_step=4, max_staleness=3, capacity=6)
    assert free_slots(Occupancy(2, 2, 0), limits) == 2
    assert free_slots(Occupancy(2, 4, 4), limits) == 0


def test_steps_without_a_publish_take_their_staleness_from_the_window():
    limits = Limits(groups_per_step=4, max_staleness=1)
    assert free_slots(Occupancy(0, 0, 0), limits, unpublished_steps=0) == 8
    assert free_slots(Occupancy(0, 0, 0), limits, unpublished_steps=1) == 4
    assert free_slots(Occupancy(0, 0, 0), limits, unpublished_steps=2) == 0


@pytest.mark.parametrize(("k", "interval"), [(0, 1), (1, 1), (1, 2), (3, 1), (3, 2), (3, 4)])
def test_in_admission_order_no_group_is_ever_older_than_k(k, interval):
    """Plays the rule for 40 steps with the slowest possible training and the fastest possible rollout."""
    gps, limits = 3, Limits(groups_per_step=3, max_staleness=k)
    stored: list[int] = []  # policy step of each waiting group, in admission order
    policy = 0
    oldest = 0
    for step in range(1, 41):
        unpublished = step - 1 - policy
        stored += [policy] * free_slots(Occupancy(0, len(stored), 0), limits, unpublished)
        batch, stored = stored[:gps], stored[gps:]
        assert len(batch) == gps, "the rule must never starve a batch"
        oldest = max(oldest, *(staleness(step, version) for version in batch))
        if step % interval == 0:
            policy = step
    assert oldest == k  # the bound is reached and never passed


def test_a_skipped_step_ages_nothing_and_a_newer_version_counts_as_zero():
    assert staleness(5, 2) == 2
    assert staleness(5, 2, skipped_steps=[3]) == 1
    assert staleness(5, 2, skipped_steps=[1, 2, 5]) == 2
    assert staleness(3, 7) == 0


def test_a_lost_place_of_a_recorded_batch_may_be_filled_as_far_ahead_as_staleness_allows():
    assert may_refill(train_step=4, completed_step=3, max_staleness=0)
    assert not may_refill(train_step=5, completed_step=3, max_staleness=0)
    assert may_refill(train_step=5, completed_step=3, max_staleness=1)
    assert not may_refill(train_step=5, completed_step=3, max_staleness=1, unpublished_steps=1)
