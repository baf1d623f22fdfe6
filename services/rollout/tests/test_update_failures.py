"""Weight updates whose caller gives up, or whose engine fails where nobody foresaw it, over the fake engine."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from vime_rollout.control import Control
from vime_rollout.engine import EngineError, PauseMode
from vime_rollout.engines.fake import make_weights
from vime_rollout.staging_area import StagingArea
from vime_rollout.traffic import VersionSpan
from vime_rollout.transfers import Rendezvous
from vime_service.bulk import FileStaging, Manifest
from vime_service.errors import (
    EngineFailed,
    FailedPrecondition,
    LoadFailed,
    TransferFailed,
    Unavailable,
)

from .conftest import Stack, manifest_of, request_of, version
from .test_generation import PROMPT, slow, until_running

A, B = make_weights(0), make_weights(1)


def staged_files(stack: Stack) -> list[Path]:
    return sorted(stack.config.staging_dir.glob("vime-rollout-*/*"))


def mapped(stack: Stack) -> list[str]:
    """What of the staging directory this process still maps; memory goes back only when a deleted file is unmapped."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(stack.config.staging_dir) in line]


@pytest.mark.parametrize("where", ["check_manifest", "reserve", "unforeseen", "no room"])
async def test_a_prepare_whose_caller_gave_up_leaves_no_update_and_no_file(
    fake_stack: Stack, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    await fake_stack.publish(1, A)
    before = staged_files(fake_stack)
    go_on = threading.Event()
    reserve = StagingArea.reserve

    async def endless(_: Manifest) -> None:
        await asyncio.sleep(60)

    async def fail(_: Manifest) -> None:
        raise RuntimeError("a plain failure of the engine core")

    def slowly(self: StagingArea, manifest: Manifest) -> FileStaging:
        go_on.wait(5)
        return reserve(self, manifest)

    def full(self: StagingArea, manifest: Manifest) -> FileStaging:
        raise OSError(28, "No space left on device")

    rendezvous = Rendezvous("inline", "", 7, 1, 2)
    with monkeypatch.context() as patch:
        if where == "check_manifest":
            patch.setattr(fake_stack.engine, "check_manifest", endless)
        elif where == "unforeseen":
            patch.setattr(fake_stack.engine, "check_manifest", fail)
        else:
            patch.setattr(StagingArea, "reserve", slowly if where == "reserve" else full)
        preparing = asyncio.create_task(fake_stack.updater.prepare(manifest_of(2, B), rendezvous, 10))
        await asyncio.sleep(0.05)
        preparing.cancel()  # the deadline of the call
        asyncio.get_running_loop().call_later(0.05, go_on.set)
        with pytest.raises(EngineFailed if where in ("unforeseen", "no room") else asyncio.CancelledError):
            await preparing
    assert fake_stack.weights.name == "SERVING"
    assert len(staged_files(fake_stack)) <= len(before)
    await fake_stack.publish(2, B)
    assert fake_stack.weights.serving is not None
    assert fake_stack.weights.serving.version == version(2)


async def test_a_failed_transfer_gives_its_memory_back(fake_stack: Stack) -> None:
    await fake_stack.updater.prepare(manifest_of(2, B), Rendezvous("inline", "", 50, 1, 2), 0.2)
    assert staged_files(fake_stack)
    assert mapped(fake_stack)
    for _ in range(2):  # the outcome is kept
        with pytest.raises(TransferFailed):
            await fake_stack.updater.await_staged(version(2), 5)
    assert not staged_files(fake_stack)
    assert not mapped(fake_stack)
    await fake_stack.publish(2, B)


async def test_damaged_bytes_are_not_kept_either(fake_stack: Stack) -> None:
    damaged = {**B, "table.weight": B["table.weight"] + 1}
    with pytest.raises(Exception, match="table"):
        await fake_stack.stage(manifest_of(2, B), damaged)
    assert not staged_files(fake_stack)
    assert not mapped(fake_stack)


@pytest.mark.parametrize("failure", [EngineError("no answer"), RuntimeError("a plain failure of the core")])
async def test_a_pause_that_raises_keeps_the_old_version_serving(
    fake_stack: Stack, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    await fake_stack.publish(1, A)

    async def fail(_: PauseMode) -> None:
        raise failure

    with monkeypatch.context() as patch:
        patch.setattr(fake_stack.engine, "pause", fail)
        with pytest.raises(EngineFailed, match="did not stand still for version run/1/2"):
            await fake_stack.publish(2, B)
    assert fake_stack.weights.name == "SERVING"
    assert (await fake_stack.generate("r", PROMPT))[0].end.spans == (VersionSpan(0, version(1)),)
    await fake_stack.publish(2, B)
    assert (await fake_stack.generate("s", PROMPT))[0].end.spans == (VersionSpan(0, version(2)),)


async def test_an_engine_that_neither_stands_still_nor_goes_on_serves_nobody(
    fake_stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fake_stack.publish(1, A)
    slow(fake_stack)
    running = asyncio.create_task(fake_stack.generate("r", PROMPT, max_tokens=400))
    await until_running(fake_stack, "r/0")

    async def fail(*_: Any) -> None:
        raise RuntimeError("the core is confused")

    with monkeypatch.context() as patch:
        patch.setattr(fake_stack.engine, "pause", fail)
        patch.setattr(fake_stack.engine, "resume", fail)
        with pytest.raises(EngineFailed, match="confused"):
            await fake_stack.publish(2, B)
    assert fake_stack.weights.name == "DIRTY"
    with pytest.raises(Unavailable, match="DIRTY"):
        await fake_stack.generation.generate(request_of("s", PROMPT), 0.2)
    with pytest.raises(EngineFailed, match="weights are unknown"):
        await asyncio.wait_for(running, 5)
    await fake_stack.publish(3, B)
    await fake_stack.generate("t", PROMPT)


async def test_a_commit_that_waited_for_a_yield_is_refused(fake_stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    await fake_stack.publish(1, A)
    await fake_stack.stage(manifest_of(2, B), B)
    control = Control(fake_stack.engine, fake_stack.weights, fake_stack.traffic, fake_stack.updater)
    pause = fake_stack.engine.pause

    async def slowly(mode: PauseMode) -> None:
        await asyncio.sleep(0.1)
        await pause(mode)

    monkeypatch.setattr(fake_stack.engine, "pause", slowly)
    yielding = asyncio.create_task(control.give_device(version(1)))
    await asyncio.sleep(0.02)
    assert not fake_stack.updater.asleep
    with pytest.raises(FailedPrecondition, match="ReturnDevice first"):
        await fake_stack.updater.commit(version(2), [], 0, PauseMode.KEEP)
    await yielding
    await control.take_device(version(1))
    await fake_stack.updater.commit(version(2), [], 0, PauseMode.KEEP)
    assert fake_stack.weights.serving is not None
    assert fake_stack.weights.serving.version == version(2)


async def test_a_commit_whose_update_was_dropped_while_it_waited_is_refused(fake_stack: Stack) -> None:
    await fake_stack.stage(manifest_of(1, A), A)
    async with fake_stack.updater.exclusive():
        committing = asyncio.create_task(fake_stack.updater.commit(version(1), [], 0, PauseMode.KEEP))
        await asyncio.sleep(0.01)
        aborting = asyncio.create_task(fake_stack.updater.abort(version(1), "test"))
        await asyncio.sleep(0.01)
    with pytest.raises(FailedPrecondition, match="is not staged"):
        await committing
    await aborting
    assert fake_stack.weights.name == "EMPTY"
    await fake_stack.publish(1, A)


async def test_an_engine_that_fails_to_load_and_to_go_on_is_dirty_and_answers(
    fake_stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fake_stack.publish(1, A)

    async def fail(*_: Any) -> None:
        raise RuntimeError("gone")

    with monkeypatch.context() as patch:
        patch.setattr(fake_stack.engine, "load_weights", fail)
        patch.setattr(fake_stack.engine, "resume", fail)
        with pytest.raises(LoadFailed, match="gone"):
            await fake_stack.publish(2, B)
    assert fake_stack.weights.name == "DIRTY"
    with pytest.raises(Unavailable, match="DIRTY"):
        await fake_stack.generation.generate(request_of("s", PROMPT), 0.2)
