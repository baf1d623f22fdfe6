"""Helpers of several test files."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from vime_client.launcher.plan import RunPlan, ServicePlan, save_plan
from vime_client.recipe import LauncherSection


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Logs that hold invalid text on purpose are captured; pytest-xdist ends the whole run over such a report."""
    report = yield
    report.sections = [(name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections]
    return report


# A service as small as can be: it touches its sign of life, and does what its argument says.
SERVICE = """
import os, signal, subprocess, sys, time
what, alive = sys.argv[1], sys.argv[2]
if what == "config":
    sys.stderr.write("vime-dummy: unknown key a.b\\n")
    sys.exit(2)
if what == "config_again":
    if os.path.exists(alive):
        sys.stderr.write("vime-buffer: train.jsonl: line 7: bad\\n")
        sys.exit(2)
    open(alive, "w").close()
    sys.exit(3)
if what == "dies":
    print("RuntimeError: no more memory of tensors")
    sys.exit(7)
if what == "grandchild":
    child = subprocess.Popen(["sleep", "300"], start_new_session=True)
    print("grandchild", child.pid, flush=True)
if what == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if what == "once" and not os.path.exists(alive + ".once"):
    open(alive + ".once", "w").close()
    sys.exit(3)
if what == "hangs_again":
    if os.path.exists(alive):
        time.sleep(300)
print("up", os.getpid(), flush=True)
while True:
    open(alive, "a").close()
    os.utime(alive)
    time.sleep(0.05)
"""

# The four services as one process: a trainer that makes a step a second, a buffer, health.
FLEET = """
import asyncio, json, sys
from pathlib import Path
from vime_client.testing import FakeBuffer, FakeTrainer, serving
steps, port, end = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]

async def main():
    trainer, buffer = FakeTrainer(num_steps=steps), FakeBuffer()
    async with serving(trainer, buffer, port=port):
        while not trainer.starts:
            await asyncio.sleep(0.02)
        for step in range(1, steps + 1):
            trainer.report(step, rollout__raw_reward=step / steps, perf__step_time=0.1)
            with Path(__file__).with_name("metrics.jsonl").open("a") as metrics:
                print(json.dumps({"step": step, "rollout/raw_reward": step / steps}), file=metrics)
            await asyncio.sleep(0.1)
        if end == "fails":
            from vime.trainer.v1 import trainer_service_pb2
            trainer.finish(trainer_service_pb2.TRAINER_STATE_FAILED, "loss is not a number 5 times in a row")
        elif end == "incomplete":
            from vime.trainer.v1 import trainer_service_pb2
            trainer.finish(trainer_service_pb2.TRAINER_STATE_INCOMPLETE, "16 of 48 prompts were given up")
        elif end == "finishes":
            trainer.finish()
        await asyncio.sleep(300)

asyncio.run(main())
"""


def dummy(run_dir: Path, name: str, what: str = "stays", stage: int = 0) -> ServicePlan:
    """A service that does `what`."""
    run_dir.mkdir(parents=True, exist_ok=True)
    script = run_dir / "dummy.py"
    script.write_text(SERVICE)
    alive = run_dir / f"{name}.alive"
    return ServicePlan(
        name=name,
        package="dummy",
        argv=[sys.executable, str(script), what, str(alive)],
        log=run_dir / "logs" / f"{name}.log",
        sign_of_life=alive,
        stop_stage=stage,
    )


def make_plan(run_dir: Path, services: list[ServicePlan], trainer: str = "", **limits: object) -> RunPlan:
    """A plan of these services, written where the supervisor finds it."""
    defaults = {"restart_backoff_s": 0.05, "stop_timeout_s": 3.0, "ready_timeout_s": 20.0}
    section = LauncherSection.model_validate({**defaults, **limits})
    plan = RunPlan(run_id="r", services=services, trainer=trainer, buffer=trainer, limits=section)
    save_plan(plan, run_dir)
    return plan


def alive(pid: int) -> bool:
    """True if the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def processes_of(run_dir: Path) -> list[int]:
    """Processes whose command line names the run folder, but this one."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes().decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        pid = int(entry.parent.name)
        if str(run_dir) in line and pid != os.getpid() and alive(pid):
            found.append(pid)
    return found


async def wait_until(condition: Callable[[], object], seconds: float = 10.0, what: str = "") -> None:
    """Wait for a condition, at most `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not reached in {seconds} s: {what or condition}"
        await asyncio.sleep(0.05)


RECIPE = """
[run]
name = "r"
steps = 5

[model]
path = "model"

[tables.train]
source = { path = "train.jsonl", shuffle = true }
samples_per_prompt = 8
groups_per_step = 2
generation_deadline = 20
require_routes = true
sampling = { max_tokens = 8 }

[tables."eval/heldout"]
source = { path = "train.jsonl" }
reward = "strict"

[rewards]
default = "reward.py:score"
strict = "grpc://127.0.0.1:9"

[trainer.engine.optimizer]
lr = 1e-5

[rollout.vllm]
max_model_len = 64
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": 2}\n')
    (tmp_path / "reward.py").write_text("def score(text):\n    return 1\n")
    (tmp_path / "recipe.toml").write_text(RECIPE)
    return tmp_path / "recipe.toml"
