"""Every group has one rank, and ranks are about equally loaded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vime_trainer.loop.plan import assign_groups


@given(st.lists(st.integers(0, 1000)), st.integers(1, 8))
def test_the_longest_rank_is_at_most_four_thirds_of_the_best(tokens, ranks):
    chosen = assign_groups(tokens, ranks)
    assert len(chosen) == len(tokens)
    load = [sum(t for t, r in zip(tokens, chosen, strict=True) if r == rank) for rank in range(ranks)]
    best = max(max(tokens, default=0), sum(tokens) / ranks)
    assert max(load) <= best * 4 / 3 + max(tokens, default=0)
    assert set(chosen) <= set(range(ranks))


def test_it_is_deterministic_and_named_by_hand():
    assert assign_groups([5, 5, 4, 3, 3], 2) == [0, 1, 0, 1, 1]


def test_no_rank_is_refused():
    with pytest.raises(ValueError, match="ranks = 0"):
        assign_groups([1], 0)
