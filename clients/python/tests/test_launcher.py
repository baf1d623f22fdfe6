"""The supervisor with tiny services: restarts, limits, reasons, and an end that leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from vime.trainer.v1 import trainer_service_pb2 as pb
from vime_client.causes import cause_in, cause_of_end
from vime_client.clock import ManualClock, MonotonicClock
from vime_client.launcher import client, keeper, patience, supervisor
from vime_client.launcher.client import LauncherError, is_running, start_supervisor, stop_supervisor
from vime_client.launcher.loop_watch import LoopEnd, watch_loop
from vime_client.launcher.plan import ServicePlan, load_plan
from vime_client.launcher.ports import PortBusy, all_free, choose_ports
from vime_client.launcher.process import _children
from vime_client.launcher.restarts import Restarts
from vime_client.launcher.state import RunState, hold, read_state
from vime_client.testing import FakeTrainer, serving
from vime_client.testing.server import refuse

from .conftest import FLEET, alive, dummy, make_plan, processes_of, wait_until


def state_of(run_dir: Path) -> RunState:
    state = read_state(run_dir)
    assert state is not None
    return state


@asynccontextmanager
async def supervised(run_dir: Path) -> AsyncIterator[Path]:
    await start_supervisor(run_dir)
    try:
        yield run_dir
    finally:
        await stop_supervisor(run_dir, 10)
        assert not is_running(run_dir)
        await wait_until(lambda: processes_of(run_dir) == [])  # a killed process takes a moment to go


async def test_a_died_service_is_started_again_and_its_death_is_counted(tmp_path: Path) -> None:
    make_plan(tmp_path, [dummy(tmp_path, "a"), dummy(tmp_path, "b")])
    async with supervised(tmp_path):
        await wait_until(lambda: state_of(tmp_path).phase == "running")
        first = state_of(tmp_path).services["a"].pid
        os.kill(first, signal.SIGKILL)
        await wait_until(lambda: state_of(tmp_path).services["a"].pid not in (0, first))
        service = state_of(tmp_path).services["a"]
        assert (service.deaths, service.last_end) == (1, "signal SIGKILL")
        assert state_of(tmp_path).services["b"].deaths == 0


async def test_a_service_that_dies_five_times_ends_the_run_with_its_name_and_reason(tmp_path: Path) -> None:
    make_plan(tmp_path, [dummy(tmp_path, "good"), dummy(tmp_path, "trainer", "dies")], restart_limit=5)
    async with supervised(tmp_path):
        await wait_until(lambda: state_of(tmp_path).phase == "failed")
        state = state_of(tmp_path)
        assert state.failed_service == "trainer"
        assert state.services["trainer"].deaths == 5
        expected = 'service "trainer" died 5 times, the last time with exit code 7: RuntimeError: no more memory'
        assert state.reason.startswith(expected)


async def test_wrong_settings_are_not_tried_again(tmp_path: Path) -> None:
    make_plan(tmp_path, [dummy(tmp_path, "buffer", "config")])
    async with supervised(tmp_path):
        await wait_until(lambda: state_of(tmp_path).phase == "failed")
        state = state_of(tmp_path)
        assert state.services["buffer"].deaths == 1
        assert state.reason == 'service "buffer" refuses its settings or data: unknown key a.b'


async def test_a_program_that_does_not_exist_is_named(tmp_path: Path) -> None:
    missing = ServicePlan(name="x", package="x", argv=["/no/such/program"], log=tmp_path / "logs" / "x.log")
    make_plan(tmp_path, [missing], restart_limit=2)
    async with supervised(tmp_path):
        await wait_until(lambda: state_of(tmp_path).phase == "failed")
        assert "/no/such/program" in state_of(tmp_path).reason or "No such file" in state_of(tmp_path).reason


async def test_a_frozen_service_is_killed_and_started_again(tmp_path: Path) -> None:
    make_plan(tmp_path, [dummy(tmp_path, "a")], hang_timeout_s=1.0)
    async with supervised(tmp_path):
        await wait_until(lambda: state_of(tmp_path).phase == "running")
        first = state_of(tmp_path).services["a"].pid
        time.sleep(0.6)
        os.kill(first, signal.SIGSTOP)
        await wait_until(lambda: state_of(tmp_path).services["a"].pid not in (0, first), 10)


async def test_a_restart_that_hangs_is_killed_and_counted(tmp_path: Path) -> None:
    make_plan(tmp_path, [dummy(tmp_path, "a", "hangs_again")], hang_timeout_s=0.5, ready_timeout_s=1.0, restart_limit=9)
    async with supervised(tmp_path):
        await wait_until(lambda: state_of(tmp_path).phase == "running")
        await wait_until(lambda: state_of(tmp_path).services["a"].ready)
        os.kill(state_of(tmp_path).services["a"].pid, signal.SIGKILL)
        await wait_until(lambda: state_of(tmp_path).services["a"].deaths >= 3, 20)
        assert state_of(tmp_path).services["a"].last_end == "signal SIGKILL"


async def test_stopping_ends_a_service_that_ignores_sigterm_and_what_it_started(tmp_path: Path) -> None:
    services = [dummy(tmp_path, "stubborn", "stubborn"), dummy(tmp_path, "parent", "grandchild", 1)]
    make_plan(tmp_path, services, stop_timeout_s=1.5)
    await start_supervisor(tmp_path)
    log = tmp_path / "logs" / "parent.log"
    await wait_until(lambda: log.exists() and "grandchild" in log.read_text())
    await wait_until(lambda: "up" in (tmp_path / "logs" / "stubborn.log").read_text())
    grandchild = int(log.read_text().split("grandchild ")[1].split()[0])
    assert alive(grandchild)
    start = time.monotonic()
    await stop_supervisor(tmp_path, 30)
    assert time.monotonic() - start < 20
    await wait_until(lambda: not alive(grandchild) and not processes_of(tmp_path))
    assert state_of(tmp_path).phase == "stopped"


async def test_k38_killing_the_supervisor_takes_every_service_with_it(tmp_path: Path) -> None:
    make_plan(tmp_path, [dummy(tmp_path, "a"), dummy(tmp_path, "b", "stubborn")])
    await start_supervisor(tmp_path)
    await wait_until(lambda: state_of(tmp_path).phase == "running")
    os.kill(state_of(tmp_path).pid, signal.SIGKILL)
    await wait_until(lambda: not processes_of(tmp_path))
    assert not is_running(tmp_path)


async def test_k38_a_second_sigterm_does_not_cut_the_stop_short(tmp_path: Path) -> None:
    make_plan(tmp_path, [dummy(tmp_path, "a"), dummy(tmp_path, "b", "stubborn")], stop_timeout_s=2.0)
    await start_supervisor(tmp_path)
    await wait_until(lambda: "up" in (tmp_path / "logs" / "b.log").read_text())
    pid = state_of(tmp_path).pid
    os.kill(pid, signal.SIGTERM)
    time.sleep(0.5)
    os.kill(pid, signal.SIGTERM)
    await wait_until(lambda: not is_running(tmp_path))
    assert state_of(tmp_path).phase == "stopped"
    await wait_until(lambda: not processes_of(tmp_path))


async def test_a_launcher_that_is_too_slow_is_not_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_plan(tmp_path, [dummy(tmp_path, "a")])
    monkeypatch.setattr(client, "_START_S", 0.0)  # nothing imports Python that fast
    with pytest.raises(LauncherError, match="did not start"):
        await start_supervisor(tmp_path)
    assert processes_of(tmp_path) == []
    assert not is_running(tmp_path)


async def test_a_run_has_one_supervisor(tmp_path: Path) -> None:
    make_plan(tmp_path, [dummy(tmp_path, "a")])
    async with supervised(tmp_path):
        second = subprocess.run(
            [sys.executable, "-m", "vime_client.launcher", str(tmp_path)], capture_output=True, text=True, timeout=20
        )
        assert second.returncode == 1
        assert "has a supervisor already" in second.stderr


class Busy(FakeTrainer):
    """A trainer whose loop may not be started yet."""

    def __init__(self, code: grpc.StatusCode, reason: str, times: int) -> None:
        super().__init__()
        self._code, self._reason, self.left = code, reason, times

    async def Start(self, request: pb.StartRequest, context: Any) -> pb.StartResponse:
        if self.left:
            self.left -= 1
            await refuse(context, self._code, "person drives single steps", self._reason)
        self.finish()
        self.status.train_step = self.status.num_steps
        return await super().Start(request, context)


async def watched(trainer: FakeTrainer, run_dir: Path, **limits: object) -> tuple[LoopEnd, list[str]]:
    said: list[str] = []
    async with serving(trainer) as address:
        plan = make_plan(run_dir, [], address, **limits)
        end = await asyncio.wait_for(watch_loop(plan, said.append, MonotonicClock()), 30)
    return end, said


async def test_a_trainer_that_refuses_to_start_is_quoted_and_not_asked_for_ever(tmp_path: Path) -> None:
    held = grpc.StatusCode.FAILED_PRECONDITION, "MODE_HELD"
    end, said = await watched(Busy(*held, times=999), tmp_path, ready_timeout_s=1.0)
    assert said[0] == "the trainer refuses: person drives single steps"
    assert end == LoopEnd(
        "failed", "the trainer refuses for 1 s (launcher.ready_timeout_s): person drives single steps"
    )
    end, said = await watched(Busy(*held, times=2), tmp_path, ready_timeout_s=20.0)
    assert end == LoopEnd("finished")


async def test_a_trainer_that_is_away_is_waited_for_longer(tmp_path: Path) -> None:
    away = Busy(grpc.StatusCode.UNAVAILABLE, "NOT_READY", times=5)
    end, said = await watched(away, tmp_path, ready_timeout_s=1.0)
    assert end == LoopEnd("finished")
    assert said[0] == "the trainer does not answer: person drives single steps"


async def test_training_that_somebody_stopped_is_not_finished_and_data_that_ended_is(tmp_path: Path) -> None:
    ends = {
        "stopped": LoopEnd("stopped", "training was stopped after step 4 of 10"),
        "data": LoopEnd("finished", "the data ended after step 4 of 10"),
    }
    for name, expected in ends.items():
        trainer = FakeTrainer(num_steps=10)
        trainer.report(4)
        trainer.finish(stopped=name == "stopped", detail=expected.reason if name == "data" else "")
        (tmp_path / name).mkdir()
        end, _ = await watched(trainer, tmp_path / name)
        assert end == expected


def fleet(run_dir: Path, steps: int, end: str, port: int) -> ServicePlan:
    script = run_dir / "fleet.py"
    script.write_text(FLEET)
    return ServicePlan(
        name="trainer",
        package="fleet",
        argv=[sys.executable, str(script), str(steps), str(port), end],
        log=run_dir / "logs" / "trainer.log",
        address=f"127.0.0.1:{port}",
    )


async def test_training_is_started_when_all_is_ready_and_its_end_ends_the_run(tmp_path: Path) -> None:
    (port,) = choose_ports(["trainer"], {}).values()
    make_plan(tmp_path, [fleet(tmp_path, 3, "finishes", port)], f"127.0.0.1:{port}")
    await start_supervisor(tmp_path)
    await wait_until(lambda: state_of(tmp_path).phase == "finished", 20)
    # Nobody drives: it writes the report itself and leaves.
    await wait_until(lambda: not is_running(tmp_path), 60)
    await wait_until(lambda: not processes_of(tmp_path))
    assert state_of(tmp_path).ended > state_of(tmp_path).started
    assert (tmp_path / "report.html").exists()
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 3


async def test_a_driver_that_does_not_answer_costs_nobody_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_plan(tmp_path, [dummy(tmp_path, "a")])
    monkeypatch.setattr(supervisor, "_DRIVER_S", 0.1)
    stop = asyncio.Event()
    with hold(tmp_path, "driver"):
        await supervisor.Supervisor(load_plan(tmp_path), tmp_path).hand_over(stop)
    assert (tmp_path / "report.html").exists()
    (tmp_path / "report.html").unlink()
    stop.set()  # a driver that stops us writes it itself
    with hold(tmp_path, "driver"):
        await supervisor.Supervisor(load_plan(tmp_path), tmp_path).hand_over(stop)
    assert not (tmp_path / "report.html").exists()


async def test_failed_training_is_the_reason_of_the_run(tmp_path: Path) -> None:
    (port,) = choose_ports(["trainer"], {}).values()
    make_plan(tmp_path, [fleet(tmp_path, 2, "fails", port)], f"127.0.0.1:{port}")
    await start_supervisor(tmp_path)
    await wait_until(lambda: state_of(tmp_path).phase == "failed", 20)
    assert state_of(tmp_path).reason == "training failed after step 2: loss is not a number 5 times in a row"
    await stop_supervisor(tmp_path, 10)


async def test_a_restarted_trainer_is_started_again(tmp_path: Path) -> None:
    (port,) = choose_ports(["trainer"], {}).values()
    make_plan(tmp_path, [fleet(tmp_path, 5, "finishes", port)], f"127.0.0.1:{port}")
    await start_supervisor(tmp_path)
    await wait_until(lambda: state_of(tmp_path).phase == "running", 20)
    os.kill(state_of(tmp_path).services["trainer"].pid, signal.SIGKILL)
    await wait_until(lambda: state_of(tmp_path).phase == "finished", 20)
    await stop_supervisor(tmp_path, 10)


async def test_services_that_never_become_ready_end_the_run_by_name(tmp_path: Path) -> None:
    (port,) = choose_ports(["buffer"], {}).values()
    deaf = dummy(tmp_path, "buffer").model_copy(update={"address": f"127.0.0.1:{port}"})
    make_plan(tmp_path, [deaf], ready_timeout_s=1.0)
    async with supervised(tmp_path):
        await wait_until(lambda: state_of(tmp_path).phase == "failed")
        limit = "nothing was done for 1 s (launcher.ready_timeout_s = 1)"
        assert state_of(tmp_path).reason == f"the run does not become ready: it waits for buffer, and {limit}"


def test_patience_counts_what_is_done_and_not_how_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, spent = ManualClock(), [5.0]
    monkeypatch.setattr(patience, "_effort", lambda _: spent[0])
    waits = patience.Patience(180.0, clock)
    for _ in range(100):  # at load 20: a twentieth of a processor
        clock.advance(10)
        spent[0] += 0.5
        assert not waits.is_over([1])
    for _ in range(18):  # it only polls
        clock.advance(10)
        spent[0] += 0.1
        assert not waits.is_over([1])
    clock.advance(10)
    assert waits.is_over([1])
    assert waits.why() == "nothing was done for 180 s"
    endless = patience.Patience(180.0, clock)
    for _ in range(180):
        clock.advance(10)
        spent[0] += 10
        assert not endless.is_over([1])
    clock.advance(10)
    spent[0] += 10
    assert endless.is_over([1])
    assert endless.why() == "it took longer than 1800 s"


def test_what_a_process_and_its_children_do_is_seen() -> None:
    name = b"caf\xc3"  # a name of 15 bytes at most, cut within a character
    named = f"import ctypes, time\nctypes.CDLL(None).prctl(15, {name!r}, 0, 0, 0)\n"
    code = named + "while time.process_time() < 0.7: pass\nprint('done', flush=True)\ninput()"
    script = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "done\n"
        seen = patience._effort([process.pid])
        assert len(list(_children(process.pid))) == 1
        process.communicate("\n")
    assert seen >= 0.7
    assert patience._effort([process.pid]) == 0.0


async def test_one_probe_missed_after_a_long_and_quiet_start_kills_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = dummy(tmp_path, "a")
    make_plan(tmp_path, [service], ready_timeout_s=180.0)
    clock, answers, killed = ManualClock(), iter([*[True] * 200, False, True]), list[str]()
    monkeypatch.setattr(patience, "_effort", lambda _: 0.0)
    kept = keeper.Keeper(service, load_plan(tmp_path), {}, clock)

    async def alive() -> bool:
        return next(answers)

    async def ready() -> bool:
        return False

    monkeypatch.setattr(kept, "_questions", lambda: (alive, ready))
    process = SimpleNamespace(pid=1, kill=lambda: killed.append("killed"))
    watch = asyncio.create_task(kept._watch_for_silence(process))  # type: ignore[arg-type]
    for _ in range(202):
        await asyncio.sleep(0)
        clock.advance(2.0)
        await asyncio.sleep(0)
    watch.cancel()
    assert next(answers, None) is None
    assert killed == []


def test_a_busy_port_is_named_with_its_service() -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen(1)
        port = busy.getsockname()[1]
        with pytest.raises(PortBusy, match=rf'service "buffer" cannot listen: port {port} \(launcher.ports.buffer\)'):
            choose_ports(["buffer"], {"buffer": port})
        assert not all_free([port])
    chosen = choose_ports([str(i) for i in range(50)], {})
    assert len(set(chosen.values())) == 50


def test_back_off_doubles_and_old_deaths_are_forgiven() -> None:
    restarts = Restarts(limit=3, window_s=100, backoff_s=1)
    assert restarts.died(0) == 1
    assert restarts.died(10) == 2
    assert restarts.died(150) == 1  # the first two are older than the window
    assert restarts.died(160) == 2
    assert restarts.died(170) is None
    assert restarts.total == 5
    assert Restarts(limit=0, window_s=100, backoff_s=1).died(0) is None


ENGINE = """
(EngineCore_DP0 pid=7) ERROR 12-01 03:00:00 [core.py:842] EngineCore failed to start.
(EngineCore_DP0 pid=7) ERROR 12-01 03:00:00 [core.py:842] Traceback (most recent call last):
(EngineCore_DP0 pid=7) ERROR 12-01 03:00:00 [core.py:842]   File "x.py", line 1, in f
(EngineCore_DP0 pid=7) ERROR 12-01 03:00:00 [core.py:842] ValueError: Head size 24 is not supported by CPU attention
Traceback (most recent call last):
  File "y.py", line 1, in g
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
vime-rollout: vLLM cannot run: see stack trace (above) for the root cause
[rank0]:[W1201 03:00:00 ProcessGroup.cpp:1] Warning: WARNING: destroy_process_group() was not called
"""
STACKS = """
Traceback (most recent call last):
  File "x.py", line 1, in f
KeyError: 'head_dim'

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "x.py", line 1, in f
pydantic_core.ValidationError: 1 validation error for VllmConfig
  Value error, head_dim is missing [type=value_error]
"""
GROUP = """
  + Exception Group Traceback (most recent call last):
  |   File "x.py", line 1, in f
  | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "x.py", line 1, in g
    | ValueError: inner
    +------------------------------------
03:00:00 INFO    buffer: 3 samples were served
"""


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        ("start\nValueError: bad shape\nbye", "ValueError: bad shape"),
        ("one\ntwo", "two"),
        ("", "it wrote nothing"),
        (ENGINE, "ValueError: Head size 24 is not supported by CPU attention"),
        (STACKS, "pydantic_core.ValidationError: 1 validation error for VllmConfig Value error, head_dim is missing "),
        (GROUP, "ValueError: inner"),
        ("vime-buffer: train.jsonl: line 7: bad\n03:00:00 WARNING buffer: x", "train.jsonl: line 7: bad"),
        ("03:00:00 ERROR   worker: no tokens  (a=1)\nhook failed, ignored", "no tokens  (a=1)"),
        ("OSError: http://user:PASS@host:1 is away", "OSError: http://[redacted]@host:1 is away"),
    ],
)
def test_the_cause_of_an_end_is_its_own_last_word_on_it(log: str, cause: str) -> None:
    assert cause_in(log.splitlines()).startswith(cause)


def test_what_was_killed_says_nothing_of_its_end(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "Traceback (most recent call last):\nValueError: long ago\nFutureWarning: x is old\n"
        "03:00:00 INFO    rollout: samples were aborted by an update\n"
    )
    assert cause_of_end(log, -signal.SIGKILL).startswith("killed from outside")
    assert cause_of_end(log, -signal.SIGSEGV) == "its log says nothing of it"
    log.write_text("FutureWarning: x\nFatal Python error: Segmentation fault\n  File x\n")
    assert cause_of_end(log, -signal.SIGSEGV) == "Fatal Python error: Segmentation fault"
    assert cause_of_end(log, 1, start=log.stat().st_size) == "it wrote nothing"


async def test_a_failure_names_the_service_that_died_before_it_and_its_log(tmp_path: Path) -> None:
    (port,) = choose_ports(["trainer"], {}).values()
    engine = dummy(tmp_path, "rollout-0", "dies")
    trainer = fleet(tmp_path, 1, "fails", port)
    make_plan(tmp_path, [trainer, engine], f"127.0.0.1:{port}", restart_limit=99, restart_backoff_s=0.3)
    async with supervised(tmp_path):
        await wait_until(lambda: state_of(tmp_path).phase == "failed", 30)
        state = state_of(tmp_path)
        assert state.reason.startswith("training failed after step 1: loss is not a number 5 times in a row; service ")
        said = 'service "rollout-0" died before it (exit code 7: RuntimeError: no more memory of tensors)'
        assert state.reason.endswith(said)
        assert (state.failed_service, state.log) == ("rollout-0", str(engine.log))


async def test_data_that_no_restart_mends_ends_the_run_at_once(tmp_path: Path) -> None:
    make_plan(tmp_path, [dummy(tmp_path, "buffer", "config_again")], restart_limit=5)
    async with supervised(tmp_path):
        await wait_until(lambda: state_of(tmp_path).phase == "failed")
        assert state_of(tmp_path).services["buffer"].deaths == 2  # the first was of another kind
        assert state_of(tmp_path).reason == 'service "buffer" refuses its settings or data: train.jsonl: line 7: bad'


async def test_a_launcher_on_a_full_disk_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_plan(tmp_path, [dummy(tmp_path, "a")])
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "launcher.log").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device"):
        await start_supervisor(tmp_path)
    (tmp_path / "logs" / "launcher.log").unlink()
    (tmp_path / "logs" / "launcher.jsonl").mkdir()  # what it cannot write kills it before its first word
    with pytest.raises(LauncherError, match=r"did not start \(exit code 1\): IsADirectoryError: .*launcher.log"):
        await start_supervisor(tmp_path)
    monkeypatch.setattr(client, "_FULL_BYTES", 2**80)
    with pytest.raises(LauncherError, match="no space is left on the disk of"):
        await start_supervisor(tmp_path)
