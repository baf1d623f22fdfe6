"""The recipe's digest: what decides numbers is in it, what only bounds or reports is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from vime_trainer.config import TrainerSettings
from vime_trainer.recipe_digest import recipe_digest


@pytest.fixture
def digest(tmp_path: Path, model_path: Path):
    def make(**settings: object) -> str:
        fixed = {"run_id": "run", "run_dir": tmp_path, "model_path": model_path, "steps": 4}
        fixed |= {"buffer_address": "127.0.0.1:1", "router_address": "127.0.0.1:2"}
        return recipe_digest(TrainerSettings.model_validate(fixed | settings))

    return make


@pytest.mark.parametrize(
    "settings",
    [
        {"steps": 9},
        {"publish": {"engines_timeout_s": 600}},
        {"publish": {"min_engines": 2}},
        {"eval_tables": ["eval/x"]},
    ],
)
def test_more_steps_longer_waits_and_other_reports_keep_the_recorded_batches(digest, settings):
    assert digest(**settings) == digest()


def test_the_engines_seed_is_the_runs_also_for_ranks_that_read_the_dump(tmp_path: Path, model_path: Path) -> None:
    given = {"run_id": "run", "run_dir": tmp_path, "model_path": model_path, "steps": 4, "seed": 5}
    given |= {"buffer_address": "127.0.0.1:1", "router_address": "127.0.0.1:2"}
    for engine, seed in (({}, 5), ({"seed": 0}, 0)):
        settings = TrainerSettings.model_validate(given | {"engine": engine})
        assert TrainerSettings.model_validate(settings.model_dump(mode="json", exclude_none=True)).engine.seed == seed


@pytest.mark.parametrize("settings", [{"seed": 1}, {"publish": {"interval": 2}}, {"algorithm": {"kl_loss_coef": 0.1}}])
def test_what_decides_numbers_makes_another_recipe(digest, settings):
    assert digest(**settings) != digest()
