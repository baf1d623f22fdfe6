"""The weight update: one version on every engine, whatever members do."""

from __future__ import annotations

import asyncio

import pytest

from vime_trainer.loop import publisher as publisher_module
from vime_trainer.loop.ports import RankDied, Refused
from vime_trainer.loop.publisher import PublishConfig, Publisher, PublishFailed
from vime_trainer.loop.versions import Version

CONFIG = PublishConfig(engines_timeout_s=0.3, max_attempts=3)


async def test_every_engine_commits_in_one_group(make_engine, make_fleet, ranks, version):
    fleet = make_fleet(make_engine("a"), make_engine("b"))
    published = await Publisher(CONFIG, fleet, ranks).publish(version)
    assert published.committed == ["a", "b"]
    assert published.failed == {}
    assert published.bytes_sent == 200
    assert [world for _, world in ranks.sends] == [3]
    assert sorted(rank for _, _, rank, _ in fleet.prepared) == [1, 2]
    assert {e.serving for e in fleet.engines.values()} == {version}


async def test_a_refusing_engine_is_dropped_and_the_group_formed_again_without_it(
    make_engine, make_fleet, ranks, version
):
    fleet = make_fleet(make_engine("a"), make_engine("b", refuse_prepare="tensor w is missing"))
    published = await Publisher(CONFIG, fleet, ranks).publish(version)
    assert published.committed == ["a"]
    assert published.failed == {"b": "tensor w is missing"}
    assert ranks.sends[0][1] == 2  # the sender and one engine
    assert fleet.engines["a"].aborted  # the first formation had the wrong size


async def test_a_failed_transfer_is_tried_again_under_a_new_generation(make_engine, make_fleet, ranks, version):
    ranks.send_fails = ["connection reset"]
    fleet = make_fleet(make_engine("a"))
    published = await Publisher(CONFIG, fleet, ranks).publish(version)
    assert published.committed == ["a"]
    first, second = (generation for generation, _ in ranks.sends)
    assert second > first
    assert fleet.engines["a"].aborted == ["connection reset"]


async def test_generations_of_a_later_incarnation_are_higher_even_in_a_new_process(
    make_engine, make_fleet, ranks, version
):
    await Publisher(CONFIG, make_fleet(make_engine("a")), ranks).publish(version)
    await Publisher(CONFIG, make_fleet(make_engine("a")), ranks).publish(Version("run", 2, 7))
    assert ranks.sends[1][0] > ranks.sends[0][0] + 1000


async def test_too_few_engines_fail_the_publish_and_say_why(make_engine, make_fleet, ranks, version):
    fleet = make_fleet(make_engine("a", dirty_commit="canary 0.3 above 1e-4"))
    with pytest.raises(PublishFailed, match=r"0 engines committed, 1 needed.*canary 0.3"):
        await Publisher(CONFIG, fleet, ranks).publish(version)


async def test_an_engine_that_died_is_waited_for_until_it_is_back(make_engine, make_fleet, ranks, version, monkeypatch):
    monkeypatch.setattr(publisher_module, "_AWAY_S", 0.01)
    patient = PublishConfig(engines_timeout_s=20, max_attempts=1)
    published = await Publisher(patient, make_fleet(make_engine("a", away_for=7)), ranks).publish(version)
    assert published.committed == ["a"]


async def test_an_engine_that_stays_away_fails_the_publish_when_the_time_is_over(
    make_engine, make_fleet, ranks, version, monkeypatch
):
    monkeypatch.setattr(publisher_module, "_AWAY_S", 0.01)
    with pytest.raises(PublishFailed, match=r"0 engines committed, 1 needed.*connection refused"):
        await Publisher(CONFIG, make_fleet(make_engine("a", away_for=10**6)), ranks).publish(version)


async def test_an_engine_that_is_away_does_not_hold_up_the_others(make_engine, make_fleet, ranks, version):
    fleet = make_fleet(make_engine("a"), make_engine("b", away_for=10**6))
    published = await Publisher(PublishConfig(engines_timeout_s=600), fleet, ranks).publish(version)
    assert (published.committed, published.failed) == (["a"], {"b": "connection refused"})


async def test_no_usable_engine_within_the_time_fails_with_the_numbers(make_engine, make_fleet, ranks, version):
    fleet = make_fleet(make_engine("a", usable=False))
    with pytest.raises(PublishFailed, match=r"0 usable engines after 0 s, 1 needed"):
        await Publisher(CONFIG, fleet, ranks).publish(version)


async def test_an_engine_that_serves_the_version_already_is_counted_and_not_sent_to(
    make_engine, make_fleet, ranks, version
):
    fleet = make_fleet(make_engine("a", serving=version), make_engine("b"))
    published = await Publisher(CONFIG, fleet, ranks).publish(version)
    assert published.committed == ["a", "b"]
    assert ranks.sends[-1][1] == 2


async def test_a_joiner_is_brought_to_the_current_version_without_touching_the_others(
    make_engine, make_fleet, ranks, version
):
    fleet = make_fleet(make_engine("a"))
    publisher = Publisher(CONFIG, fleet, ranks)
    await publisher.publish(version)
    fleet.engines["late"] = make_engine("late")
    assert await publisher.catch_up(version) == ["late"]
    assert await publisher.catch_up(version) == []
    assert ranks.described == [version]  # described again, its canary would be that of weights trained since
    assert fleet.engines["late"].serving == version
    assert ranks.sends[-1][1] == 2


async def test_a_rank_that_dies_ends_the_publish(make_engine, make_fleet, ranks, version):
    async def die(*_: object) -> float:
        raise RankDied("rank 0 was killed by SIGKILL")

    ranks.send = die
    with pytest.raises(RankDied):
        await Publisher(CONFIG, make_fleet(make_engine("a")), ranks).publish(version)


async def test_a_rank_that_dies_in_the_transfer_ends_it_before_the_engines_notice(
    make_engine, make_fleet, ranks, version
):
    async def die(*_: object) -> float:
        raise RankDied("rank 0 was killed by SIGKILL")

    async def wait(*_: object) -> None:
        await asyncio.Event().wait()

    fleet = make_fleet(make_engine("a"))
    ranks.send, fleet.await_staged = die, wait
    with pytest.raises(RankDied):
        await asyncio.wait_for(Publisher(CONFIG, fleet, ranks).publish(version), 2.0)


async def test_a_member_that_breaks_every_group_does_not_keep_the_others_from_the_version(
    make_engine, make_fleet, ranks, version
):
    fleet = make_fleet(make_engine("a"), make_engine("b"), make_engine("c"))
    send = ranks.send

    async def without_b(described, generation, world, timeout_s):
        if fleet.engines["b"].joined[0] == generation:
            raise Refused("rank 2 of the group never came")
        return await send(described, generation, world, timeout_s)

    ranks.send = without_b
    published = await Publisher(CONFIG, fleet, ranks).publish(version)
    assert published.committed == ["a", "c"]
    assert published.failed == {"b": "transfer: rank 2 of the group never came"}
