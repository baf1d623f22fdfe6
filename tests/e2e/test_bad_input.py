"""Whatever is wrong ends in one clear sentence that names it, with a non-zero exit, before anything is started."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ADDITION = ROOT / "recipes" / "addition"

pytestmark = [pytest.mark.timeout(300)]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A copy of the main recipe that a test may spoil."""
    folder = tmp_path / "recipe"
    shutil.copytree(ADDITION, folder)
    return folder / "grpo.toml"


def refused(run_vime, tmp_path: Path, recipe: Path, *words: str, settings: tuple[str, ...] = ()) -> None:
    run = run_vime(tmp_path, "bad", settings, recipe=recipe, timeout=120)
    assert run.exit_code != 0, run.output
    assert "Traceback" not in run.output, run.output
    for word in words:
        assert word in run.output, run.output


def test_a_missing_recipe(run_vime, tmp_path):
    refused(run_vime, tmp_path, tmp_path / "none.toml", "none.toml")


def test_an_unknown_key_names_the_nearest(run_vime, tmp_path, recipe):
    recipe.write_text(recipe.read_text().replace("max_staleness", "max_stalenes"))
    refused(run_vime, tmp_path, recipe, "max_stalenes", "max_staleness")


def test_an_unknown_key_of_the_trainer_is_named_by_the_trainer(run_vime, tmp_path, recipe):
    recipe.write_text(recipe.read_text().replace("warmup_steps", "warmup_step"))
    refused(run_vime, tmp_path, recipe, "warmup_step", "warmup_steps")


def test_a_missing_data_file(run_vime, tmp_path, recipe):
    (recipe.parent / "train.jsonl").unlink()
    refused(run_vime, tmp_path, recipe, "train.jsonl")


def test_a_bad_line_of_the_data_is_named_by_its_number(run_vime, tmp_path, recipe):
    data = recipe.parent / "train.jsonl"
    lines = data.read_text().splitlines()
    lines[6] = '{"prompt": 3'
    data.write_text("\n".join(lines))
    refused(run_vime, tmp_path, recipe, "train.jsonl", "line 7")


def test_a_model_of_an_unknown_architecture(run_vime, tmp_path, recipe):
    config = recipe.parent / "model" / "config.json"
    config.write_text(config.read_text().replace("Qwen3MoeForCausalLM", "MambaForCausalLM"))
    refused(run_vime, tmp_path, recipe, "MambaForCausalLM", "Qwen3")


def test_a_missing_reward_function(run_vime, tmp_path, recipe):
    recipe.write_text(recipe.read_text().replace("reward.py:score", "reward.py:scores"))
    refused(run_vime, tmp_path, recipe, "scores")


def test_a_batch_that_must_deadlock_is_refused_with_both_numbers(run_vime, tmp_path, recipe):
    refused(run_vime, tmp_path, recipe, "publish", "3", "0", settings=("trainer.publish.interval=3",))


def test_a_busy_port_is_named(run_vime, tmp_path, recipe):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused(run_vime, tmp_path, recipe, str(port), settings=(f"launcher.ports.router={port}",))
