"""Pauses with an owner and an end, and device memory given away and back, over the fake engine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from vime_rollout.control import Control
from vime_rollout.engine import EngineError, FinishReason, MemoryPart, PauseMode
from vime_rollout.engines.fake import FakeEngine, make_weights
from vime_rollout.traffic import VersionSpan
from vime_service.errors import EngineFailed, FailedPrecondition, LoadFailed, StaleIncarnation, Unavailable

from .conftest import Stack, manifest_of, request_of, version
from .test_generation import PROMPT, slow, until_running

A, B = make_weights(0), make_weights(1)
ME = version(1)


@pytest.fixture
def control(fake_stack: Stack) -> Control:
    return Control(fake_stack.engine, fake_stack.weights, fake_stack.traffic, fake_stack.updater)


async def test_new_calls_wait_through_a_pause_and_running_ones_freeze(fake_stack: Stack, control: Control) -> None:
    await fake_stack.publish(1, A)
    slow(fake_stack)
    running = asyncio.create_task(fake_stack.generate("r", PROMPT, max_tokens=40))
    await until_running(fake_stack, "r/0")
    assert await control.pause(ME, PauseMode.KEEP, 60) == 0
    new = asyncio.create_task(fake_stack.generate("n", PROMPT))
    await asyncio.sleep(0.1)
    assert not running.done()
    assert not new.done()
    with pytest.raises(Unavailable, match="paused by a pause"):
        await fake_stack.generation.generate(request_of("x", PROMPT), 0.05)
    await control.resume(ME)
    assert len((await running)[0].token_ids) == 40
    await new


async def test_pauses_may_be_repeated_and_come_while_idle(fake_stack: Stack, control: Control) -> None:
    await fake_stack.publish(1, A)
    for mode in PauseMode:
        await control.pause(ME, mode, 60)
        await control.pause(ME, mode, 60)
        assert control.paused
        await control.resume(ME)
        await control.resume(ME)
        assert not control.paused
        await fake_stack.generate("r", PROMPT)


async def test_a_pause_ends_by_itself_and_a_repeated_one_starts_its_time_anew(
    fake_stack: Stack, control: Control
) -> None:
    await fake_stack.publish(1, A)
    await control.pause(ME, PauseMode.KEEP, 0.2)
    await asyncio.sleep(0.1)
    await control.pause(ME, PauseMode.KEEP, 0.3)
    await asyncio.sleep(0.2)
    assert control.paused
    await fake_stack.generate("r", PROMPT)
    assert not control.paused
    assert "without a Resume" in control.note


async def test_an_update_during_a_pause_leaves_the_pause_standing(fake_stack: Stack, control: Control) -> None:
    await fake_stack.publish(1, A)
    slow(fake_stack)
    running = asyncio.create_task(fake_stack.generate("r", PROMPT, max_tokens=60))
    await until_running(fake_stack, "r/0")
    await control.pause(ME, PauseMode.KEEP, 60)
    await fake_stack.publish(2, B)
    before = fake_stack.engine.progress()["r/0"]
    await asyncio.sleep(0.1)
    assert fake_stack.engine.progress()["r/0"] == before
    await control.resume(version(2))
    (sample,) = await running
    assert [span.version for span in sample.end.spans] == [version(1), version(2)]


async def test_a_lower_incarnation_may_neither_pause_nor_resume(fake_stack: Stack, control: Control) -> None:
    await fake_stack.publish(1, A, incarnation=2)
    for call in (control.pause(ME, PauseMode.ABORT, 1), control.resume(ME), control.give_device(ME)):
        with pytest.raises(StaleIncarnation):
            await call
    await fake_stack.generate("r", PROMPT)


async def test_a_device_given_away_ends_what_runs_and_comes_back_with_the_same_weights(
    fake_stack: Stack, control: Control
) -> None:
    await fake_stack.publish(1, A)
    slow(fake_stack)
    running = asyncio.create_task(fake_stack.generate("r", PROMPT, max_tokens=400))
    await until_running(fake_stack, "r/0")
    freed = await control.give_device(ME)
    assert freed == sum(tensor.numel() * 4 for tensor in A.values())
    assert (await running)[0].end.finish_reason is FinishReason.ABORT
    assert await control.give_device(ME) == 0
    with pytest.raises(FailedPrecondition, match="ReturnDevice first"):
        await fake_stack.updater.commit(version(2), [], 0, PauseMode.KEEP)
    await control.pause(ME, PauseMode.ABORT, 0.05)  # must not wake it when its time is over
    waiting = asyncio.create_task(fake_stack.generate("n", PROMPT))
    await asyncio.sleep(0.15)
    assert not waiting.done()
    await control.take_device(ME)
    await control.take_device(ME)
    assert (await waiting)[0].end.spans == (VersionSpan(0, version(1)),)


@pytest.mark.parametrize(
    "end", ["commit", "a commit that fails", "a commit that cannot pause", "abort", "resume", "nobody", "given again"]
)
async def test_a_device_taken_back_for_an_update_wakes_no_kv_before_the_new_weights_are_loaded(
    fake_stack: Stack, control: Control, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    engine, calls = fake_stack.engine, list[str]()
    await fake_stack.publish(1, A)
    await control.give_device(ME)
    if end == "nobody":
        monkeypatch.setattr("vime_rollout.control._YIELD_SECONDS", 0.05)
    await fake_stack.stage(manifest_of(2, B), B)
    wake, resume, load = engine.wake, engine.resume, engine.load_weights

    async def woken(part: MemoryPart | None = None) -> None:
        calls.append("all" if part is None else part.value)
        await wake(part)

    async def resumed() -> None:
        calls.append("resume")
        await resume()

    async def loaded(*args: Any) -> Any:
        calls.append("load")
        return await load(*args)

    async def slept() -> int:
        calls.append("sleep")
        return 0

    monkeypatch.setattr(engine, "wake", woken)
    monkeypatch.setattr(engine, "sleep", slept)
    monkeypatch.setattr(engine, "resume", resumed)
    monkeypatch.setattr(engine, "load_weights", loaded)
    await control.take_device(ME)
    waiting = asyncio.create_task(fake_stack.generate("n", PROMPT))
    await asyncio.sleep(0.01)
    assert (calls, waiting.done()) == (["weights"], False)
    if end == "commit":
        await fake_stack.updater.commit(version(2), [], 0, PauseMode.KEEP)
        assert calls[:4] == ["weights", "load", "kv_cache", "resume"]
        assert (await waiting)[0].end.spans == (VersionSpan(0, version(2)),)
    elif end == "a commit that cannot pause":

        async def stuck(mode: PauseMode) -> None:
            raise EngineError("it does not stand still")

        monkeypatch.setattr(engine, "pause", stuck)
        with pytest.raises(EngineFailed):
            await fake_stack.updater.commit(version(2), [], 0, PauseMode.KEEP)
        assert (calls, len(await waiting)) == (["weights", "kv_cache", "resume"], 1)
    elif end == "given again":  # all of it sleeps, or none
        await control.give_device(ME)
        assert calls == ["weights", "kv_cache", "sleep"]
        await control.resume(ME)
        assert (calls[3:], len(await waiting)) == (["all", "resume"], 1)
    elif end == "nobody":  # its owner vanished
        assert len(await waiting) == 1
        assert calls == ["weights", "kv_cache", "resume"]
    elif end == "a commit that fails":
        assert isinstance(engine, FakeEngine)
        engine.fail_next_load = "broken"
        with pytest.raises(LoadFailed):
            await fake_stack.updater.commit(version(2), [], 0, PauseMode.KEEP)
        assert calls == ["weights", "load", "kv_cache", "resume"]
        with pytest.raises(Unavailable):
            await waiting
    else:
        if end == "abort":
            await fake_stack.updater.abort(version(2), "test")
        else:
            await control.resume(ME)
        assert calls == ["weights", "kv_cache", "resume"]
        assert (await waiting)[0].end.spans == (VersionSpan(0, version(1)),)
    assert not control.paused


async def test_a_device_that_cannot_be_given_away_goes_on(
    fake_stack: Stack, control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fake_stack.publish(1, A)

    async def refuse() -> int:
        raise EngineError("sleep mode is off")

    monkeypatch.setattr(fake_stack.engine, "sleep", refuse)
    with pytest.raises(EngineFailed, match="sleep mode is off"):
        await control.give_device(ME)
    await fake_stack.generate("r", PROMPT)


async def test_a_pause_whose_caller_gave_up_while_it_waited_is_lifted_at_its_time(
    fake_stack: Stack, control: Control
) -> None:
    await fake_stack.publish(1, A)
    slow(fake_stack)
    running = asyncio.create_task(fake_stack.generate("r", PROMPT, max_tokens=400))
    await until_running(fake_stack, "r/0")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):  # the deadline of the call, long before the sample ends
            await control.pause(ME, PauseMode.WAIT, 0.3)
    assert control.paused
    await fake_stack.generate("n", PROMPT)
    assert not control.paused
    assert "without a Resume" in control.note
    running.cancel()


async def test_a_device_whose_taker_gave_up_while_it_was_given_away_can_be_taken_back(
    fake_stack: Stack, control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fake_stack.publish(1, A)

    async def endless() -> int:
        await asyncio.sleep(60)
        return 0

    monkeypatch.setattr(fake_stack.engine, "sleep", endless)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await control.give_device(ME)
    with pytest.raises(FailedPrecondition, match="ReturnDevice first"):
        await fake_stack.updater.commit(version(2), [], 0, PauseMode.KEEP)
    await control.take_device(ME)
    await fake_stack.generate("n", PROMPT)


@pytest.mark.parametrize("step", ["wake", "resume"])
@pytest.mark.parametrize("how", ["fails", "is cancelled"])
async def test_a_resume_that_failed_is_done_by_the_next_one(
    fake_stack: Stack, control: Control, monkeypatch: pytest.MonkeyPatch, step: str, how: str
) -> None:
    await fake_stack.publish(1, A)
    await control.give_device(ME)
    woken: list[str] = []
    wake = fake_stack.engine.wake

    async def count() -> None:
        woken.append("wake")
        await wake()

    async def fail() -> None:
        if how == "fails":
            raise EngineError("no answer")
        await asyncio.sleep(60)

    monkeypatch.setattr(fake_stack.engine, "wake", count)
    with monkeypatch.context() as patch:
        patch.setattr(fake_stack.engine, step, fail)
        with pytest.raises(EngineFailed if how == "fails" else TimeoutError):
            async with asyncio.timeout(0.05):
                await control.take_device(ME)
    assert control.paused
    with pytest.raises(FailedPrecondition, match="ReturnDevice first"):
        await fake_stack.updater.commit(version(2), [], 0, PauseMode.KEEP)
    with pytest.raises(Unavailable, match="paused by a pause"):
        await fake_stack.generation.generate(request_of("x", PROMPT), 0.05)
    woken.clear()
    await control.take_device(ME)
    assert woken == ["wake"]
    assert not control.paused
    await fake_stack.generate("r", PROMPT)


async def test_a_sleep_whose_answer_did_not_come_counts_as_asleep(
    fake_stack: Stack, control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fake_stack.publish(1, A)

    async def lost() -> int:
        raise EngineError("sleep took longer than 120 s")

    calls: list[str] = []
    wake, resume = fake_stack.engine.wake, fake_stack.engine.resume

    async def woken() -> None:
        calls.append("wake")
        if len(calls) == 1:
            raise EngineError("wake_up took longer than 120 s")
        await wake()

    async def resumed() -> None:
        calls.append("resume")
        await resume()

    monkeypatch.setattr(fake_stack.engine, "sleep", lost)
    monkeypatch.setattr(fake_stack.engine, "wake", woken)
    monkeypatch.setattr(fake_stack.engine, "resume", resumed)
    with pytest.raises(EngineFailed, match="sleep took longer"):
        await control.give_device(ME)
    assert calls == ["wake"]
    assert fake_stack.updater.asleep
    await control.take_device(ME)
    assert calls == ["wake", "wake", "resume"]
    await fake_stack.generate("r", PROMPT)


async def test_a_pause_whose_lifting_failed_is_lifted_later(
    fake_stack: Stack, control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fake_stack.publish(1, A)
    resume = fake_stack.engine.resume
    tries: list[str] = []

    async def at_second_try() -> None:
        tries.append("resume")
        if len(tries) == 1:
            raise EngineError("no answer")
        await resume()

    monkeypatch.setattr(fake_stack.engine, "resume", at_second_try)
    await control.pause(ME, PauseMode.KEEP, 0.1)
    await fake_stack.generate("r", PROMPT)
    assert len(tries) == 2
    assert not control.paused
