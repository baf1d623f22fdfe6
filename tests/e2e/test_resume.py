"""A run that is killed goes on as if nothing had happened."""

from __future__ import annotations

import hashlib
import subprocess
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

SETTINGS = (
    "run.steps=4",
    "trainer.checkpoint.interval=2",
    "tables.train.groups_per_step=4",
    "tables.train.samples_per_prompt=4",
    "tables.eval/heldout.source.limit=8",
)


def weights(folder: Path) -> str:
    """Digest of the newest checkpoint's weights."""
    latest = (folder / "checkpoints" / "latest").read_text().strip()
    return hashlib.sha256((folder / "checkpoints" / latest / "model.safetensors").read_bytes()).hexdigest()


def test_killing_everything_after_a_checkpoint_and_resuming_gives_bit_identical_weights(
    runs_dir, run_vime, run_command, run_processes, run_killer
):
    undisturbed = run_vime(runs_dir, "whole", SETTINGS)
    assert undisturbed.exit_code == 0, undisturbed.output

    folder = runs_dir / "killed"
    log = (runs_dir / "killed.log").open("w")
    process = subprocess.Popen(
        run_command(runs_dir, "killed", SETTINGS), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )
    pointer = folder / "checkpoints" / "latest"
    deadline = time.monotonic() + 400
    while not pointer.exists():
        assert process.poll() is None, (runs_dir / "killed.log").read_text()
        assert time.monotonic() < deadline, "no checkpoint within 400 s"
        time.sleep(0.05)
    process.kill()  # first the driver: it would start a launcher that died anew
    process.wait(timeout=30)
    run_killer(folder)

    resumed = run_vime(runs_dir, "killed", SETTINGS, "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert weights(folder) == weights(undisturbed.folder)
    versions = [record["version"] for record in resumed.steps]
    assert len(versions) == len(set(versions)), "a version was used twice"
    assert {record["step"] for record in resumed.steps} == {1, 2, 3, 4}
    assert not run_processes(folder), "processes outlived their run"
