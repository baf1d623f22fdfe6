"""Short real runs through `vime run`: all four services, real vLLM and real Megatron, on CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
VIME = Path(sys.executable).with_name("vime")
RECIPE = ROOT / "recipes" / "addition" / "grpo.toml"
# Small enough for CI, large enough that every path is taken: two eval rounds, four updates.
SHORT = (
    "run.steps=3",
    "tables.train.groups_per_step=4",
    "tables.train.samples_per_prompt=4",
    "tables.eval/heldout.source.limit=16",
)


@dataclass(frozen=True)
class Run:
    """A finished run: its folder and what it printed."""

    folder: Path
    output: str
    exit_code: int

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [record for record in self.lines("metrics.jsonl") if "step" in record]


def command(folder: Path, name: str, settings: Sequence[str], *flags: str, recipe: Path = RECIPE) -> list[str]:
    sets = [part for setting in (f"run.dir={folder}", *settings) for part in ("--set", setting)]
    return [str(VIME), "run", str(recipe), "--name", name, *flags, *sets]


def vime_run(
    folder: Path, name: str, settings: Sequence[str] = (), *flags: str, recipe: Path = RECIPE, timeout: float = 480
) -> Run:
    """Run to the end."""
    try:
        done = subprocess.run(
            command(folder, name, settings, *flags, recipe=recipe),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            env=os.environ | {"NO_COLOR": "1", "COLUMNS": "160"},
        )
    except subprocess.TimeoutExpired:
        kill_run(folder / name)  # its supervisor outlives a killed driver, as it should
        raise
    return Run(folder / name, done.stdout + done.stderr, done.returncode)


def processes_of(folder: Path) -> list[int]:
    """Processes whose command line names the run folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:  # it ended while we looked
                continue
            if str(folder).encode() in line:
                found.append(int(entry.name))
    return found


def kill_run(folder: Path) -> None:
    """SIGKILL for every process of a run that has no driver any more, until none is left."""
    deadline = time.monotonic() + 30
    while pids := processes_of(folder):
        assert time.monotonic() < deadline, f"processes {pids} outlive SIGKILL"
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.05)


@pytest.fixture(scope="session")
def runs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="session")
def short_run(runs_dir: Path) -> Run:
    """Three steps at k = 0."""
    run = vime_run(runs_dir, "k0", SHORT)
    assert run.exit_code == 0, run.output
    return run


@pytest.fixture(scope="session")
def swapped_run(runs_dir: Path) -> Run:
    """Three steps at k = 1 with the trainer's own top-k disturbed on 5 % of the tokens."""
    settings = (
        *SHORT,
        "tables.train.max_staleness=1",
        "trainer.engine.test_hooks.swap_kth_expert_fraction=0.05",
        # The canary has no routes to replay: it would, rightly, refuse a trainer that routes otherwise.
        "trainer.publish.canary_prompts=0",
        "trainer.metrics.no_replay_interval=1",
    )
    run = vime_run(runs_dir, "k1-swapped", settings)
    assert run.exit_code == 0, run.output
    return run


@pytest.fixture
def run_vime():
    return vime_run


@pytest.fixture
def run_command():
    return command


@pytest.fixture
def run_processes():
    return processes_of


@pytest.fixture
def run_killer():
    return kill_run
