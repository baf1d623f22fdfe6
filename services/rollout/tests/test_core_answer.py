"""Answers of the engine core come in time or are errors that name what did not come."""

from __future__ import annotations

import asyncio
import time

import pytest

from vime_rollout.config import VllmConfig
from vime_rollout.engine import EngineError, PauseMode
from vime_rollout.engines.vllm import VllmEngine


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
