"""One bad thing does not end a run: a foreign worker inserts what no model can have made, before and after a kill."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.chaos.poison import KINDS, Poisoner, forget_the_model, quarantined, read_plan, spoil_data
from tests.e2e.conftest import RECIPE

from vime_client.buffer import BufferClient

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
BAD_LINES = 4
STORED_WITHOUT_A_MODEL = ["more experts", "other layers", "token outside the vocabulary"]
"""What only the trainer finds, where the ledger was not told of the model."""
ALWAYS_REFUSED = sorted(set(KINDS) - set(STORED_WITHOUT_A_MODEL))
SETTINGS = (
    "run.steps=40",
    "trainer.checkpoint.interval=5",
    "tables.train.groups_per_step=4",
    "tables.train.samples_per_prompt=4",
    "tables.train.max_attempts=100",
    "tables.train.source.lenient=true",
    "tables.eval/heldout.source.limit=8",
    "worker.concurrency=3",  # below groups_per_step, so that the foreign worker gets its share
)


def wait(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come within {seconds:g} s"
        time.sleep(0.2)


def steps(folder: Path) -> int:
    """Step records written so far, those of lost steps included."""
    file = folder / "metrics.jsonl"
    return file.read_text().count('"step":') if file.exists() else 0


async def poison(poisoner: Poisoner, plan: dict[str, str], kinds: list[str], dice: random.Random) -> None:
    for kind in kinds:
        while not await poisoner.insert(plan, dice, kind):
            assert poisoner.lost < 5, vars(poisoner)


async def skipped_records(plan: dict[str, str]) -> dict[str, int]:
    async with BufferClient(plan["buffer"]) as buffer:
        return dict((await buffer.tables())["train"].skipped_records)


def test_no_poison_ends_a_run_before_or_after_a_kill_and_each_is_counted_with_its_reason(
    tmp_path, run_command, run_killer
):
    recipe = shutil.copytree(RECIPE.parent, tmp_path / "recipe") / RECIPE.name
    dice = random.Random(7)
    spoil_data(recipe.parent / "train.jsonl", BAD_LINES, dice)
    folder, poisoner = tmp_path / "poisoned", Poisoner()
    log = (tmp_path / "log").open("w")
    command = run_command(tmp_path, "poisoned", SETTINGS, recipe=recipe)
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        wait(lambda: steps(folder) > 0, 300, "the first step")
        plan = read_plan(folder)
        asyncio.run(poison(poisoner, plan, ALWAYS_REFUSED, dice))
        assert sum(asyncio.run(skipped_records(plan)).values()) == BAD_LINES
        assert not poisoner.accepted
        forget_the_model(folder)
        asyncio.run(poison(poisoner, plan, STORED_WITHOUT_A_MODEL, dice))
    finally:
        process.kill()
        process.wait(timeout=30)
        run_killer(folder)

    before = steps(folder)
    process = subprocess.Popen([*command, "--resume"], stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        wait(lambda: steps(folder) > before, 300, "a step after the resume")
        asyncio.run(poison(poisoner, read_plan(folder), STORED_WITHOUT_A_MODEL, dice))
        assert process.wait(timeout=400) == 0, (tmp_path / "log").read_text()
    finally:
        process.kill()
        process.wait(timeout=30)
        run_killer(folder)

    assert {name.partition(":")[0] for name in poisoner.refused} == set(KINDS)
    assert sorted(poisoner.accepted.values()) == STORED_WITHOUT_A_MODEL, vars(poisoner)
    assert quarantined(folder).keys() == poisoner.accepted.keys()
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [r for r in records if "step" in r][-1]["buffer/groups_dropped"] == len(STORED_WITHOUT_A_MODEL)
