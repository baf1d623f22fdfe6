"""An engine core that lives and answers nothing ends the service; one that is only busy does not."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vime_rollout.config import VllmConfig
from vime_rollout.engine import EngineDied, EngineError
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


class LoadingCore(Core):
    """A core that does one thing after the other: whoever asks during a load waits for its end."""

    def __init__(self, loads_for: float) -> None:
        super().__init__(0)
        self._loads_for = loads_for
        self._one = asyncio.Lock()

    async def is_sleeping(self) -> bool:
        async with self._one:
            return await super().is_sleeping()

    async def _work(self) -> list[object]:
        async with self._one:
            await asyncio.sleep(self._loads_for)
        return [0]

    async def _long(self, *args: object, **options: object) -> list[object]:
        return await asyncio.shield(self._work())  # a caller that leaves stops nothing in another process

    collective_rpc = sleep = wake_up = _long  # type: ignore[assignment]  # one method stands for three


@pytest.mark.parametrize("method", ["_rpc", "sleep", "wake"])
@pytest.mark.parametrize("how", ["cancelled", "expired"])
async def test_a_call_whose_caller_left_keeps_the_core_busy(method: str, how: str) -> None:
    bound = 0.1 if how == "expired" else 60.0
    engine = VllmEngine(
        VllmConfig(model="m", frozen_after_seconds=0.2, rpc_timeout_seconds=bound, enable_sleep_mode=True)
    )
    engine._llm = LoadingCore(1.0)
    call = asyncio.create_task(getattr(engine, method)(*(["vime_load"] if method == "_rpc" else [])))
    await asyncio.sleep(0.05)
    if how == "cancelled":
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    await beats(engine, 0.8)  # the call itself goes on
    await beats(engine, 0.6)  # and ends, and the core answers again
    if how == "expired":
        with pytest.raises(EngineError, match=r"took longer than 0\.1 s"):
            await call


async def test_a_core_that_never_ends_a_call_is_excused_for_so_long_and_no_longer() -> None:
    engine = VllmEngine(
        VllmConfig(model="m", frozen_after_seconds=0.2, rpc_timeout_seconds=0.1, abandoned_after_seconds=0.5)
    )
    engine._llm = LoadingCore(60)
    began = time.monotonic()
    with pytest.raises(EngineError, match="took longer"):
        await engine._rpc("vime_load")
    with pytest.raises(EngineDied):
        await beats(engine, 10)
    assert 0.8 <= time.monotonic() - began < 5
    engine._watch.stop()


async def test_a_core_that_stood_still_with_us_has_its_time_anew() -> None:
    asked: list[asyncio.Event] = []

    async def ask() -> None:
        asked.append(asyncio.Event())
        await asked[-1].wait()

    watch = CoreWatch(ask, 0.5)
    watch.check()
    await asyncio.sleep(0.02)
    time.sleep(0.7)  # both were stopped
    for _ in range(12):  # and the core needs more than a beat to go on
        watch.check()
        await asyncio.sleep(0.02)
    asked[0].set()
    await asyncio.sleep(0.02)
    watch.check()
    watch.stop()


def test_a_frozen_core_ends_the_service_within_its_bound(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SERVICE], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "the engine died: the engine core has answered nothing for 0.5 s" in done.stdout + done.stderr
