"""A run whose trainer is two ranks: it publishes, loses one of them, and reaches its last step."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

STEPS = 3


def process_of_rank(rank: int, pids: list[int]) -> int | None:
    """The one of `pids` that is this rank."""
    for pid in pids:
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:  # it ended while we looked
            continue
        if b"vime_trainer.rank" in line and f"RANK={rank}".encode() in environment:
            return pid
    return None


def test_a_run_on_two_ranks_publishes_and_goes_on_after_one_of_them_is_killed(
    runs_dir, run_command, run_processes, run_killer
):
    name = "two-ranks"
    folder = runs_dir / name
    settings = (
        "trainer.world_size=2",
        "trainer.engine.collective_timeout_s=60",
        f"run.steps={STEPS}",
        "trainer.checkpoint.interval=1",
        "tables.train.groups_per_step=4",
        "tables.train.samples_per_prompt=4",
        "tables.eval/heldout.source.limit=4",
    )
    log = runs_dir / f"{name}.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            run_command(runs_dir, name, settings), stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        deadline = time.monotonic() + 400
        while not (folder / "checkpoints" / "latest").exists():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        victim = process_of_rank(1, run_processes(folder))
        assert victim is not None
        os.kill(victim, signal.SIGKILL)
        assert process.wait(timeout=400) == 0, log.read_text()
    finally:
        process.kill()
        run_killer(folder)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "step" in record]
    assert {record["step"] for record in steps} == set(range(1, STEPS + 1))
    assert [record["incarnation"] for record in records if record.get("event") == "incarnation"] == [1, 2]
    for record in steps:
        assert record["train/canary_logprob_abs_diff"] <= 1e-4
        assert record["train/train_rollout_logprob_abs_diff_on_policy"] <= 1e-5
