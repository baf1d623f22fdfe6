"""Answers of the engine core come in time or are errors that name what did not come."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
import torch

from vime_rollout.config import VllmConfig
from vime_rollout.engine import EngineError, PauseMode
from vime_rollout.engines.vllm import VllmEngine

from .conftest import manifest_of


class FrozenCore:
    """An engine core that was stopped: it takes every call and answers none."""

    async def _never(self, *args: object, **options: object) -> None:
        await asyncio.Event().wait()

    resume_generation = pause_generation = wake_up = reset_prefix_cache = check_health = collective_rpc = _never


@pytest.fixture
def frozen() -> VllmEngine:
    engine = VllmEngine(VllmConfig(model="m", rpc_timeout_seconds=0.1))
    engine._llm = FrozenCore()
    return engine


@pytest.mark.parametrize("call", ["resume", "wake", "drop_prefix_cache", "check_health"])
async def test_a_frozen_engine_core_ends_no_call_but_its_time_does(frozen: VllmEngine, call: str) -> None:
    began = time.monotonic()
    with pytest.raises(EngineError, match=r"took longer than 0\.1 s"):
        await getattr(frozen, call)()
    assert time.monotonic() - began < 10.0


@pytest.mark.parametrize("mode", [PauseMode.ABORT, PauseMode.KEEP])
async def test_a_pause_of_a_frozen_engine_core_ends_in_time(frozen: VllmEngine, mode: PauseMode) -> None:
    with pytest.raises(EngineError, match=r"pause_generation took longer than 0\.1 s"):
        await frozen.pause(mode)


async def test_waiting_for_running_samples_is_bounded_by_the_caller_alone(frozen: VllmEngine) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await frozen.pause(PauseMode.WAIT)


class FailingCore:
    """An engine core that answers every call with a failure of its own, as vLLM reports them: a plain Exception."""

    async def _fail(self, *args: object, **options: object) -> None:
        raise Exception("Call to pause_scheduler method failed: no such block")

    resume_generation = pause_generation = wake_up = sleep = reset_prefix_cache = check_health = collective_rpc = _fail


@pytest.mark.parametrize("call", ["resume", "wake", "sleep", "drop_prefix_cache", "check_health"])
async def test_a_failure_that_the_core_reports_is_an_engine_error_that_names_it(call: str) -> None:
    engine = VllmEngine(VllmConfig(model="m", enable_sleep_mode=True))
    engine._llm = FailingCore()
    with pytest.raises(EngineError, match="failed: Exception: Call to pause_scheduler method failed: no such block"):
        await getattr(engine, call)()


async def test_a_load_has_the_updaters_bound_and_no_shorter_one(frozen: VllmEngine) -> None:
    weights = {"w": torch.ones(2)}
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):  # longer than `rpc_timeout_seconds`
            await frozen.load_weights(manifest_of(1, weights), Path("staged"))
