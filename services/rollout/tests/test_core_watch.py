"""An engine core that lives and answers nothing ends the service; one that is only busy does not."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vime_rollout.config import VllmConfig
from vime_rollout.engine import EngineDied
from vime_rollout.engines.core_watch import CoreWatch
from vime_rollout.engines.vllm import VllmEngine

SERVICE = """
import asyncio, sys
from vime_rollout import wiring
from vime_rollout.__main__ import main
from vime_rollout.engines.core_watch import CoreWatch
from vime_rollout.engines.fake import FakeEngine

class Frozen(FakeEngine):
    async def start(self):
        self.watch = CoreWatch(asyncio.Event().wait, 0.5)

    async def check_health(self):
        self.watch.check()

wiring.make_engine = lambda config: Frozen()
sys.argv = ["vime-rollout", "--set", "rollout.engine=fake", "--set", "rollout.router.period_seconds=0.1"]
sys.exit(main())
"""


class Core:
    """What AsyncLLM says of a core: it has not ended, and it answers once it is let."""

    def __init__(self, delay: float) -> None:
        self.delay = delay
        self.asked = 0

    async def check_health(self) -> None:
        """Only whether it has ended, as vLLM does."""

    async def is_sleeping(self) -> bool:
        self.asked += 1
        await asyncio.sleep(self.delay)
        return False

    async def collective_rpc(self, method: str, args: tuple[object, ...]) -> list[object]:
        await asyncio.sleep(0.5)
        return []


def engine_of(core: Core, seconds: float = 0.2) -> VllmEngine:
    engine = VllmEngine(VllmConfig(model="m", frozen_after_seconds=seconds))
    engine._llm = core
    return engine


async def beats(engine: VllmEngine, seconds: float) -> None:
    """What the heartbeat does."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        await engine.check_health()
        await asyncio.sleep(0.02)


async def test_a_frozen_core_counts_as_dead_within_its_bound() -> None:
    began = time.monotonic()
    with pytest.raises(EngineDied, match=r"the engine core has answered nothing for 0\.2 s"):
        await beats(engine_of(Core(60)), 10)
    assert 0.2 < time.monotonic() - began < 5


async def test_a_core_in_a_long_step_answers_late_and_lives() -> None:
    core = Core(0.3)
    await beats(engine_of(core, 2.0), 1.0)
    assert core.asked >= 2


async def test_a_core_that_loads_has_the_time_of_the_load() -> None:
    engine = engine_of(Core(0.6))
    await engine.check_health()
    loading = asyncio.create_task(engine._rpc("vime_load"))
    await asyncio.sleep(0)
    await beats(engine, 0.4)
    await loading


async def test_a_question_that_fails_is_an_answer() -> None:
    async def fail() -> None:
        raise RuntimeError("what is this?")

    watch = CoreWatch(fail, 0.1)
    for _ in range(20):
        watch.check()
        await asyncio.sleep(0.02)


async def test_a_service_that_stood_still_itself_blames_nobody() -> None:
    core = Core(0.01)
    engine = engine_of(core)
    await engine.check_health()
    await asyncio.sleep(0)
    time.sleep(0.4)
    await engine.check_health()
    await asyncio.sleep(0.02)
    await beats(engine, 0.2)


def test_a_frozen_core_ends_the_service_within_its_bound(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SERVICE], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "the engine died: the engine core has answered nothing for 0.5 s" in done.stdout + done.stderr
