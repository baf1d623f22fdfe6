"""The state of an engine's weights: every step, every refusal, and what is served at each point."""

from __future__ import annotations

from itertools import product

import pytest

from vime_rollout.weights import ANY_WEIGHTS, Fence, FenceKind, Phase, Prepared, WeightState
from vime_service.bulk import VersionKey
from vime_service.errors import (
    FailedPrecondition,
    FenceNotMet,
    FleetOwned,
    StaleIncarnation,
    Unavailable,
    VersionConflict,
    VimeError,
    WrongStep,
)


def v(step: int, incarnation: int = 1, run: str = "run") -> VersionKey:
    return VersionKey(run, incarnation, step)


def at_least(version: VersionKey) -> Fence:
    return Fence(FenceKind.AT_LEAST, version)


def exactly(version: VersionKey) -> Fence:
    return Fence(FenceKind.EXACTLY, version)


def serving(version: VersionKey, state: WeightState | None = None, digest: str = "d") -> WeightState:
    state = state or WeightState()
    assert state.prepare(version, digest, 1) is Prepared.START
    state.staged(version)
    state.begin_load(version)
    state.committed(version)
    return state


def test_an_empty_engine_becomes_serving_through_every_phase() -> None:
    state = WeightState()
    names = [state.name]
    state.prepare(v(1), "d", 1)
    names.append(state.name)
    state.staged(v(1))
    state.begin_load(v(1))
    names.append(state.name)
    state.committed(v(1))
    names.append(state.name)
    assert names == ["EMPTY", "STAGING", "STAGING", "SERVING"]
    assert state.serving is not None
    assert (state.serving.version, state.serving.digest) == (v(1), "d")


def test_the_old_version_is_served_until_the_new_one_is_committed() -> None:
    state = serving(v(1))
    state.prepare(v(2), "e", 2)
    assert state.admit(ANY_WEIGHTS) == v(1)
    state.staged(v(2))
    state.begin_load(v(2))
    assert state.admit(ANY_WEIGHTS) == v(1)
    state.committed(v(2))
    assert state.admit(ANY_WEIGHTS) == v(2)


@pytest.mark.parametrize("phase", [Phase.RECEIVING, Phase.STAGED])
def test_a_dropped_update_leaves_the_old_version(phase: Phase) -> None:
    state = serving(v(1))
    state.prepare(v(2), "e", 2)
    if phase is Phase.STAGED:
        state.staged(v(2))
    assert state.drop(v(2))
    assert not state.drop(v(2))
    assert state.name == "SERVING"
    assert state.admit(ANY_WEIGHTS) == v(1)


def test_a_load_refused_before_it_began_leaves_the_old_version() -> None:
    state = serving(v(1))
    state.prepare(v(2), "e", 2)
    state.staged(v(2))
    state.begin_load(v(2))
    state.load_refused(v(2))
    assert state.name == "SERVING"
    assert state.admit(ANY_WEIGHTS) == v(1)


def test_a_load_that_failed_leaves_nothing_to_serve_until_a_later_commit() -> None:
    state = serving(v(1))
    state.prepare(v(2), "e", 2)
    state.staged(v(2))
    state.begin_load(v(2))
    state.load_failed(v(2), "disk on fire")
    assert state.name == "DIRTY"
    assert state.serving is None
    with pytest.raises(Unavailable, match="DIRTY, the weights are unknown: disk on fire"):
        state.admit(ANY_WEIGHTS)
    serving(v(2), state, "e")
    assert state.name == "SERVING"
    assert state.admit(ANY_WEIGHTS) == v(2)


def test_an_update_that_is_being_loaded_cannot_be_dropped_or_replaced() -> None:
    state = serving(v(1))
    state.prepare(v(2), "e", 2)
    state.staged(v(2))
    state.begin_load(v(2))
    with pytest.raises(FailedPrecondition, match="is being loaded"):
        state.drop(v(2))
    with pytest.raises(FailedPrecondition, match="is being loaded"):
        state.prepare(v(3), "f", 3)


def test_steps_out_of_order_are_refused_and_change_nothing() -> None:
    steps = {
        "staged": WeightState.staged,
        "begin_load": WeightState.begin_load,
        "committed": WeightState.committed,
        "load_refused": WeightState.load_refused,
    }
    right = {Phase.RECEIVING: {"staged"}, Phase.STAGED: {"begin_load"}, Phase.LOADING: {"committed", "load_refused"}}
    for phase, (name, step), version in product(Phase, steps.items(), (v(2), v(3))):
        state = serving(v(1))
        state.prepare(v(2), "e", 2)
        assert state.update is not None
        state.update.phase = phase
        if version == v(2) and name in right[phase]:
            step(state, version)
            continue
        with pytest.raises(FailedPrecondition, match="there is run/1/2"):
            step(state, version)
        assert state.update.phase is phase
        assert state.serving is not None
        assert state.serving.version == v(1)


def test_the_same_prepare_again_is_the_same_and_a_new_generation_replaces_it() -> None:
    state = WeightState()
    assert state.prepare(v(1), "d", 1) is Prepared.START
    assert state.prepare(v(1), "d", 1) is Prepared.SAME
    state.staged(v(1))
    assert state.prepare(v(1), "d", 1) is Prepared.SAME
    assert state.prepare(v(1), "d", 2) is Prepared.START
    assert state.update is not None
    assert state.update.phase is Phase.RECEIVING


def test_a_served_version_needs_no_transfer() -> None:
    assert serving(v(1)).prepare(v(1), "d", 9) is Prepared.ALREADY_SERVING


def test_a_version_names_one_digest_for_ever() -> None:
    state = serving(v(1))
    with pytest.raises(VersionConflict, match="known with manifest digest d, not e"):
        state.prepare(v(1), "e", 2)
    state.prepare(v(2), "x", 2)
    state.drop(v(2))
    with pytest.raises(VersionConflict):
        state.prepare(v(2), "y", 3)
    assert state.prepare(v(2), "x", 3) is Prepared.START


def test_a_refused_manifest_leaves_its_version_free_and_a_known_one_bound() -> None:
    state = WeightState()
    state.prepare(v(1), "d", 1)
    state.refused(v(1))
    assert state.name == "EMPTY"
    assert state.prepare(v(1), "e", 2) is Prepared.START
    state.drop(v(1))
    state.prepare(v(1), "e", 3)
    state.refused(v(1))
    with pytest.raises(VersionConflict):
        state.prepare(v(1), "d", 4)


def test_a_lower_incarnation_is_refused_by_every_control_call_and_a_higher_one_may_go_back_in_steps() -> None:
    state = serving(v(7, incarnation=2))
    with pytest.raises(StaleIncarnation, match="incarnation 1 is over, 2 has been seen") as caught:
        state.prepare(v(9, incarnation=1), "x", 2)
    assert caught.value.metadata == {"incarnation": "1", "current": "2"}
    with pytest.raises(StaleIncarnation):
        state.check_caller(v(99, incarnation=1))
    assert state.prepare(v(3, incarnation=3), "y", 2) is Prepared.START
    with pytest.raises(StaleIncarnation):
        state.check_caller(v(7, incarnation=2))


def test_an_older_step_of_the_same_incarnation_is_refused() -> None:
    with pytest.raises(WrongStep, match="step 4 is older than step 5"):
        serving(v(5)).prepare(v(4), "x", 2)


def test_another_run_is_refused_and_the_owner_is_named() -> None:
    state = serving(v(1))
    with pytest.raises(FleetOwned, match="belongs to run 'run', the caller is of run 'other'"):
        state.prepare(v(1, run="other"), "x", 2)
    with pytest.raises(FleetOwned):
        state.check_caller(v(1, incarnation=9, run="other"))


def test_a_teacher_serves_what_it_loaded_and_takes_no_updates() -> None:
    state = WeightState(updatable=False)
    state.serve_initial()
    assert state.admit(ANY_WEIGHTS) is None
    with pytest.raises(FenceNotMet):
        state.admit(at_least(v(0)))
    with pytest.raises(FailedPrecondition, match="takes no weight updates"):
        state.prepare(v(1), "d", 1)


def test_an_empty_engine_admits_nobody() -> None:
    with pytest.raises(Unavailable, match="EMPTY, no weights are published yet"):
        WeightState().admit(ANY_WEIGHTS)


@pytest.mark.parametrize(
    ("fence", "passes"),
    [
        (ANY_WEIGHTS, True),
        (exactly(v(5, 2)), True),
        (exactly(v(5, 1)), False),
        (exactly(v(4, 2)), False),
        (exactly(v(5, 2, "other")), False),
        (at_least(v(5, 2)), True),
        (at_least(v(4, 2)), True),
        (at_least(v(6, 2)), False),
        (at_least(v(5, 1)), True),
        (at_least(v(6, 1)), False),  # the newest of a lost incarnation is newer than the first of the next
        (at_least(v(5, 3)), False),
        (at_least(v(1, 1, "other")), False),
    ],
)
def test_a_fence_passes_exactly_the_versions_it_means(fence: Fence, passes: bool) -> None:
    state = serving(v(5, 2))
    if passes:
        assert state.admit(fence) == v(5, 2)
        return
    with pytest.raises(FenceNotMet) as caught:
        state.admit(fence)
    assert caught.value.metadata["serving"] == "run/2/5"


def test_no_refusal_changes_what_is_served() -> None:
    state = serving(v(5, 2))
    for version, digest in [(v(5, 2), "other"), (v(1, 1), "x"), (v(1, 2), "x"), (v(9, 9, "other"), "x")]:
        with pytest.raises(VimeError):
            state.prepare(version, digest, 3)
        assert (state.name, state.admit(ANY_WEIGHTS)) == ("SERVING", v(5, 2))
