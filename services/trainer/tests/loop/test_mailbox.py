"""Commands reach every rank once, results are collected, and nobody waits for the dead."""

from __future__ import annotations

import asyncio

import pytest

from vime_service.errors import InvalidArgument, PermissionDenied
from vime_trainer.ranks.mailbox import Mailbox


async def rank_loop(box: Mailbox, rank: int, answers: list, stop_after: int = 1) -> None:
    done = 0
    while done < stop_after:
        found = await box.next("secret", rank, done, 1.0)
        if found:
            done, command = found
            answers.append((rank, command))
            await box.report("secret", rank, done, f"{command} by {rank}")


async def test_every_rank_gets_the_command_and_results_come_in_rank_order():
    box: Mailbox = Mailbox(2, "secret")
    answers: list = []
    ranks = asyncio.gather(*(rank_loop(box, r, answers) for r in (1, 0)))
    assert await box.run("train", 5.0) == {0: "train by 0", 1: "train by 1"}
    await ranks
    assert sorted(answers) == [(0, "train"), (1, "train")]


async def test_a_silent_rank_is_named_when_the_time_is_over():
    box: Mailbox = Mailbox(2, "secret")
    task = asyncio.create_task(rank_loop(box, 0, []))
    with pytest.raises(TimeoutError, match=r"ranks \[1\] did not finish"):
        await box.run("train", 0.2)
    await task


async def test_a_failed_rank_ends_the_wait_for_the_others():
    box: Mailbox = Mailbox(2, "secret")
    task = asyncio.create_task(rank_loop(box, 0, []))
    assert await box.run("train", 5.0, failed=lambda result: True) == {0: "train by 0"}
    await task


async def test_the_others_may_still_answer_after_one_has_failed():
    box: Mailbox = Mailbox(2, "secret")
    running = asyncio.create_task(box.run("train", 5.0, failed=lambda result: True, peers_s=5.0))
    await rank_loop(box, 0, [])
    assert not running.done()
    await rank_loop(box, 1, [])
    assert await running == {0: "train by 0", 1: "train by 1"}


async def test_a_death_wakes_whoever_waits():
    box: Mailbox = Mailbox(1, "secret")
    running = asyncio.create_task(box.run("train", 5.0))
    await asyncio.sleep(0)
    await box.fail(ConnectionError("rank 0 died"))
    with pytest.raises(ConnectionError, match="rank 0 died"):
        await running
    with pytest.raises(ConnectionError):
        await box.run("again", 5.0)


async def test_a_rank_of_another_launch_or_outside_the_world_is_refused():
    box: Mailbox = Mailbox(1, "secret")
    with pytest.raises(PermissionDenied):
        await box.attach("older", 0, "host:1")
    with pytest.raises(InvalidArgument, match="rank 3 is outside the world of 1"):
        await box.attach("secret", 3, "host:1")


async def test_a_repeated_report_changes_nothing_and_asking_ends_without_a_command():
    box: Mailbox = Mailbox(1, "secret")
    assert await box.next("secret", 0, 0, 0.05) is None
    task = asyncio.create_task(rank_loop(box, 0, []))
    assert await box.run("a", 5.0) == {0: "a by 0"}
    await task
    await box.report("secret", 0, 1, "late")  # the same command again
