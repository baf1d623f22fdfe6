"""A run that is killed goes on as if nothing had happened."""

from __future__ import annotations

import hashlib
import subprocess
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

SMALL = (
    "tables.train.groups_per_step=4",
    "tables.train.samples_per_prompt=4",
    "tables.eval/heldout.source.limit=8",
)


def weights(folder: Path) -> str:
    """Digest of the newest checkpoint's weights."""
    latest = (folder / "checkpoints" / "latest").read_text().strip()
    return hashlib.sha256((folder / "checkpoints" / latest / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.parametrize("steps", [4, pytest.param(20, marks=pytest.mark.slow)])  # two minutes: make test-all
def test_killing_everything_after_a_checkpoint_and_resuming_gives_bit_identical_weights(
    runs_dir, run_vime, run_command, run_processes, run_killer, steps
):
    settings = (f"run.steps={steps}", f"trainer.checkpoint.interval={steps // 2}", *SMALL)
    undisturbed = run_vime(runs_dir, f"whole-{steps}", settings)
    assert undisturbed.exit_code == 0, undisturbed.output

    name = f"killed-{steps}"
    folder = runs_dir / name
    log = (runs_dir / f"{name}.log").open("w")
    process = subprocess.Popen(
        run_command(runs_dir, name, settings), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )
    pointer = folder / "checkpoints" / "latest"
    deadline = time.monotonic() + 400
    # Its step's line of metrics.jsonl follows the pointer by milliseconds, and is lost by a death between the two.
    while not pointer.exists() or f'"step": {steps // 2},' not in (folder / "metrics.jsonl").read_text():
        assert process.poll() is None, (runs_dir / f"{name}.log").read_text()
        assert time.monotonic() < deadline, "no checkpoint within 400 s"
        time.sleep(0.05)
    process.kill()  # first the driver: it would start a launcher that died anew
    process.wait(timeout=30)
    run_killer(folder)

    resumed = run_vime(runs_dir, name, settings, "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert weights(folder) == weights(undisturbed.folder)
    versions = [record["version"] for record in resumed.steps]
    assert len(versions) == len(set(versions)), "a version was used twice"
    assert {record["step"] for record in resumed.steps} == set(range(1, steps + 1))
    assert not run_processes(folder), "processes outlived their run"
