"""Which engine a policy takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vime_router.policies import Candidate, Policy, RoundRobin, StickyLeastLoaded, StickyLeastLoadedConfig


def fleet(*loads: int, kv: Sequence[float] = ()) -> list[Candidate]:
    usage = [*kv, *[0.0] * len(loads)]
    return [Candidate(f"e{i}", "b", load, usage[i]) for i, load in enumerate(loads)]


def test_a_loaded_engine_gets_nothing_until_the_others_have_as_much() -> None:
    policy = StickyLeastLoaded()
    loads = [10, 0, 0]
    order = []
    for _ in range(23):
        chosen = policy.choose(fleet(*loads), "").candidate.engine_id
        order.append(chosen)
        loads[int(chosen[1])] += 1
    assert set(order[:20]) == {"e1", "e2"}
    assert loads == [11, 11, 11]


def test_equal_loads_take_turns_and_a_newcomer_is_not_flooded() -> None:
    policy = StickyLeastLoaded()
    for _ in range(100):
        policy.choose(fleet(0, 0), "")
    counts = Counter(policy.choose(fleet(0, 0, 0), "").candidate.engine_id for _ in range(30))
    assert counts == {"e0": 10, "e1": 10, "e2": 10}


def test_a_session_stays_within_the_margin_and_moves_for_good_beyond_it() -> None:
    policy = StickyLeastLoaded(StickyLeastLoadedConfig(load_margin=4))
    home = policy.choose(fleet(0, 0), "s").candidate.engine_id
    assert home == "e0"
    stays = policy.choose(fleet(4, 0), "s")
    assert (stays.candidate.engine_id, stays.sticky) == ("e0", True)
    moves = policy.choose(fleet(5, 0), "s")
    assert (moves.candidate.engine_id, moves.sticky) == ("e1", False)
    assert policy.choose(fleet(0, 4), "s").candidate.engine_id == "e1"


def test_an_engine_beyond_the_kv_budget_gets_nothing_while_another_is_within() -> None:
    policy = StickyLeastLoaded(StickyLeastLoadedConfig(kv_budget=0.8))
    assert policy.choose(fleet(0, 0), "s").candidate.engine_id == "e0"
    assert policy.choose(fleet(0, 9, kv=[0.81, 0.5]), "s").candidate.engine_id == "e1"
    assert policy.choose(fleet(3, 9, kv=[0.95, 0.9]), "t").candidate.engine_id == "e0"


def test_a_restarted_engine_has_no_cache_to_stay_for() -> None:
    policy = StickyLeastLoaded()
    policy.choose([Candidate("e0", "old", 0)], "s")
    assert policy.choose([Candidate("e0", "new", 0)], "s").sticky is False


def test_the_longest_unused_session_is_forgotten_first() -> None:
    policy = StickyLeastLoaded(StickyLeastLoadedConfig(max_sessions=2))
    for session in ("a", "b", "a", "c"):
        policy.choose(fleet(0), session)
    assert [policy.choose(fleet(0), session).sticky for session in ("a", "c")] == [True, True]
    assert policy.choose(fleet(0), "b").sticky is False


def test_round_robin_goes_on_where_it_was_when_engines_come_and_go() -> None:
    policy = RoundRobin()
    full, without = fleet(0, 0, 0), [c for c in fleet(0, 0, 0) if c.engine_id != "e1"]
    taken = [policy.choose(c, "").candidate.engine_id for c in (full, without, without, full, full)]
    assert taken == ["e0", "e2", "e0", "e1", "e2"]


@pytest.mark.parametrize("make", [RoundRobin, StickyLeastLoaded])
@given(
    calls=st.lists(
        st.tuples(st.lists(st.integers(0, 50), min_size=1, max_size=5), st.sampled_from(["", "s", "t"])), max_size=20
    )
)
def test_every_policy_takes_one_of_the_candidates(make: type[Policy], calls: list[tuple[list[int], str]]) -> None:
    policy = make()
    for loads, session in calls:
        candidates = fleet(*loads)
        assert policy.choose(candidates, session).candidate in candidates
