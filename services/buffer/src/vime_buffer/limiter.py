"""The scheduler of the whole system, as arithmetic: may one more prompt be admitted?

Nothing here counts, waits or remembers. Every argument is derived from the table's rows in the transaction that acts
on the answer, so a restart or a rewind cannot leave a counter behind that disagrees with the ledger.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Groups of a table that hold a slot."""

    open: int
    """Prompts leased to workers."""
    stored: int
    """Groups waiting for training."""
    leased: int
    """Groups of batches that are not completed."""
    places: int = 0
    """Prompts that wait to be made again in their place of a batch: training comes to them before any new one."""

    @property
    def total(self) -> int:
        """Slots taken."""
        return self.open + self.stored + self.leased + self.places


@dataclass(frozen=True, slots=True)
class Limits:
    """Settings of the admission rule; `capacity` bounds open + stored, 0 means unbounded."""

    groups_per_step: int
    max_staleness: int
    capacity: int = 0


def free_slots(occupancy: Occupancy, limits: Limits, unpublished_steps: int = 0) -> int:
    """Prompts that may be admitted now: open + stored + leased + places < (k + 1 - unpublished) * groups_per_step.

    `unpublished_steps` are steps trained since the policy version: with a publish in every step it is 0 and this is
    DESIGN's rule. A prompt admitted with N slots taken is trained at most N // groups_per_step + 1 steps after the last
    completed one, so its staleness is at most unpublished + (k - unpublished) = k.
    """
    window = max(0, limits.max_staleness + 1 - unpublished_steps) * limits.groups_per_step
    free = window - occupancy.total
    if limits.capacity:
        free = min(free, limits.capacity - occupancy.open - occupancy.stored)
    return max(0, free)


def may_refill(train_step: int, completed_step: int, max_staleness: int, unpublished_steps: int = 0) -> bool:
    """May a prompt whose place in a recorded batch is empty be generated again?

    It takes the slot that its batch already has, so only its staleness matters: the step it belongs to is known.
    """
    return train_step - 1 - completed_step + unpublished_steps <= max_staleness


def near_enough(newest_step: int, completed_step: int, limits: Limits, unpublished_steps: int = 0) -> int:
    """How many prompts outside of batches, in the order of admission, may be generated now as far as staleness goes.

    The i-th of them is trained at most i // groups_per_step + 1 steps after the newest batch, so one that was admitted
    before and waits again may be made like a refill. Without this a window that a rewind left full, and that steps
    without a publish make smaller, would hold back the prompt that training waits for.
    """
    steps = limits.max_staleness + 1 - (newest_step - completed_step) - unpublished_steps
    return max(0, steps) * limits.groups_per_step


def staleness(train_step: int, oldest_step: int, skipped_steps: Collection[int] = ()) -> int:
    """Versions between the policy that trains `train_step` and the oldest version of a group, at least 0.

    A skipped step changed no weights, so it ages nothing. A version newer than the policy (a batch that is trained
    again after a rewind) counts as 0.
    """
    unchanged = sum(1 for step in skipped_steps if oldest_step < step < train_step)
    return max(0, train_step - 1 - oldest_step - unchanged)
