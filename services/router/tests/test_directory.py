"""The directory: what heartbeats, silence and restarts mean."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vime_router.directory import Ages, Change, Directory, EngineState, Liveness, Report
from vime_router.fences import Version
from vime_service.clock import ManualClock
from vime_service.errors import AlreadyExists, NotFound, StaleIncarnation

AGES = Ages(suspect=3.0, dead=10.0, forget=100.0, deaf=1.0)


def report(engine_id: str = "e0", boot: str = "b0", port: int = 1, **fields: Any) -> Report:
    base = Report(engine_id, boot, f"127.0.0.1:{port}", "tiny", True, EngineState.SERVING, Version("run", 1, 1))
    return replace(base, **fields)


def pass_time(directory: Directory, clock: ManualClock, seconds: float) -> list[Report]:
    """Let time pass as it does in a healthy router: with a sweep every quarter of a period."""
    dead = []
    for _ in range(round(seconds * 4)):
        clock.advance(0.25)
        dead += directory.sweep()
    return dead


def test_silence_makes_an_engine_suspect_then_dead_then_forgotten() -> None:
    clock = ManualClock()
    directory = Directory(clock, AGES)
    directory.hear(report())
    entry = directory.entry("e0")
    pass_time(directory, clock, 2.75)
    assert directory.liveness(entry) is Liveness.ALIVE
    pass_time(directory, clock, 0.25)
    assert directory.liveness(entry) is Liveness.SUSPECT
    assert pass_time(directory, clock, 7.0) == [entry.report]
    assert directory.liveness(entry) is Liveness.DEAD
    assert directory.members() == []
    pass_time(directory, clock, 90.0)
    with pytest.raises(NotFound, match="no engine 'e0'"):
        directory.entry("e0")


def test_an_engine_that_speaks_again_is_alive_again() -> None:
    clock = ManualClock()
    directory = Directory(clock, AGES)
    directory.hear(report())
    pass_time(directory, clock, 20.0)
    assert directory.hear(report()).change is Change.RETURNED
    assert directory.liveness(directory.entry("e0")) is Liveness.ALIVE
    assert len(directory.members()) == 1


def test_silence_while_the_router_itself_stood_still_is_not_the_engines() -> None:
    clock = ManualClock()
    directory = Directory(clock, AGES)
    directory.hear(report())
    pass_time(directory, clock, 2.0)
    clock.advance(60.0)  # the process was stopped, or its machine slept
    assert directory.sweep() == []
    assert directory.age(directory.entry("e0")) == 2.0
    assert pass_time(directory, clock, 8.0) == [directory.entry("e0").report]


def test_the_generation_grows_when_a_member_comes_goes_or_restarts_and_only_then() -> None:
    clock = ManualClock()
    directory = Directory(clock, AGES, first_generation=100)
    seen = [directory.generation]

    def note() -> int:
        seen.append(directory.generation)
        return seen[-1] - seen[-2]

    directory.hear(report())
    assert note() == 1  # came
    directory.hear(report(state=EngineState.DIRTY, version=None))
    assert note() == 0  # only its state changed
    directory.hear(report(boot="b1", port=2))
    assert note() == 1  # restarted
    directory.hear(report("teacher", port=3, updatable=False))
    assert note() == 0  # weight updates pass it by
    pass_time(directory, clock, 10.0)
    assert note() == 1  # died
    directory.hear(report(boot="b1", port=2))
    assert note() == 1  # came back
    assert seen[0] == 100


def test_a_new_boot_ends_the_old_life_at_the_same_id_and_at_the_same_address() -> None:
    directory = Directory(ManualClock(), AGES)
    first = report()
    directory.hear(first)
    heard = directory.hear(report(boot="b1", port=2))
    assert (heard.change, heard.ended) == (Change.REPLACED, (first,))
    heard = directory.hear(report("e1", "b2", port=2))  # another slot took the address over
    assert [ended.boot_id for ended in heard.ended] == ["b1"]
    assert [entry.report.engine_id for entry in directory.entries()] == ["e1"]


def test_a_process_that_was_replaced_cannot_take_its_place_back_while_its_successor_lives() -> None:
    clock = ManualClock()
    directory = Directory(clock, AGES)
    directory.hear(report(boot="old"))
    directory.hear(report(boot="new", port=2))
    with pytest.raises(
        AlreadyExists,
        match=r"boot old of engine e0 at 127.0.0.1:1 was replaced by boot new of engine e0 at 127.0.0.1:2",
    ):
        directory.hear(report(boot="old"))
    pass_time(directory, clock, 10.0)
    assert directory.hear(report(boot="old")).change is Change.REPLACED


def test_an_engine_replaced_at_its_address_cannot_return() -> None:
    clock = ManualClock()
    directory = Directory(clock, AGES)
    directory.hear(report("e0"))
    assert directory.hear(report("e1")).ended == (report("e0"),)  # both say 127.0.0.1:1
    for _ in range(3):  # else the two would end each other's calls with every heartbeat
        with pytest.raises(AlreadyExists, match=r"engine e0 at 127.0.0.1:1 was replaced by boot b0 of engine e1 at"):
            directory.hear(report("e0"))
        assert directory.hear(report("e1")).change is Change.REFRESHED
    directory.hear(report("e2"))
    with pytest.raises(AlreadyExists, match="replaced by boot b0 of engine e2"):  # who replaced its successor
        directory.hear(report("e0"))
    pass_time(directory, clock, 10.0)
    assert directory.hear(report("e0")).change is Change.REPLACED
    with pytest.raises(AlreadyExists, match=r"engine e2 .* was replaced by boot b0 of engine e0"):
        directory.hear(report("e2"))


def test_the_generation_grows_when_an_engine_is_no_longer_a_member_after_its_restart() -> None:
    clock = ManualClock()
    directory = Directory(clock, AGES)
    directory.hear(report())
    generations = [directory.generation]
    for boot, updatable in (("b1", False), ("b2", False), ("b3", True), ("b3", False), ("b3", True)):
        directory.hear(report(boot=boot, updatable=updatable))
        generations.append(directory.generation)
    assert [after - before for before, after in itertools.pairwise(generations)] == [1, 0, 1, 1, 1]
    directory.hear(report("teacher", updatable=False))  # takes its address over
    assert directory.generation == generations[-1] + 1
    assert directory.members() == []


def test_members_are_looked_at_without_declaring_anybody_dead() -> None:
    clock = ManualClock()
    directory = Directory(clock, replace(AGES, deaf=60.0))
    directory.hear(report())
    clock.advance(11.0)
    assert directory.members() == []
    assert directory.sweep() == [report()]  # told to whoever sweeps, who ends its calls


def test_draining_lasts_until_the_engine_restarts() -> None:
    directory = Directory(ManualClock(), AGES)
    directory.hear(report())
    directory.set_draining("e0", True)
    directory.hear(report())
    assert directory.entry("e0").draining
    directory.hear(report(boot="b1"))
    assert not directory.entry("e0").draining


def test_a_trainer_of_an_earlier_incarnation_is_refused_with_both_numbers() -> None:
    directory = Directory(ManualClock(), AGES)
    directory.hear(report(version=Version("run", 3, 9)))
    with pytest.raises(StaleIncarnation, match="incarnation 2 of run run is over: 3 was seen"):
        directory.admit_caller(Version("run", 2, 50))
    directory.admit_caller(Version("other", 1, 0))
    directory.admit_caller(Version("run", 4, 0))
    with pytest.raises(StaleIncarnation):
        directory.admit_caller(Version("run", 3, 9))


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("beat"), st.integers(0, 2), st.integers(0, 2)),
            st.tuples(st.just("wait"), st.integers(1, 12), st.just(0)),
        ),
        max_size=40,
    )
)
def test_whatever_happens_members_are_what_spoke_lately_and_the_generation_tells_every_change(
    events: list[tuple[str, int, int]],
) -> None:
    clock = ManualClock()
    directory = Directory(clock, AGES)
    heard: dict[str, tuple[str, float]] = {}
    members: list[tuple[str, str]] = []
    for kind, first, second in events:
        before, generation = members, directory.generation
        if kind == "wait":
            pass_time(directory, clock, first)
        else:
            # Boots of one engine only go up: a replaced process that speaks again has a test of its own.
            engine_id, boot = f"e{first}", max(f"b{second}", heard.get(f"e{first}", ("b0", 0.0))[0])
            directory.hear(report(engine_id, boot, port=1 + first))
            heard[engine_id] = (boot, clock.now())
        members = [entry.report.key for entry in directory.members()]
        alive = [(e, boot) for e, (boot, at) in sorted(heard.items()) if clock.now() - at < AGES.dead]
        assert members == alive
        assert (directory.generation > generation) == (members != before)


@given(st.lists(st.builds(Version, st.just("r"), st.integers(1, 3), st.integers(0, 3)), min_size=3, max_size=3))
def test_newer_is_an_order_that_never_crosses_incarnations_backwards(versions: list[Version]) -> None:
    for a, b, c in itertools.permutations(versions):
        assert a.is_at_least(a)
        if a.is_at_least(b) and b.is_at_least(a):
            assert a == b
        if a.is_at_least(b) and b.is_at_least(c):
            assert a.is_at_least(c)
        if a.incarnation < b.incarnation:
            assert not a.is_at_least(b)
