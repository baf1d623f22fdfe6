"""Recipes: what is right is resolved, what is wrong is one sentence that names the thing."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from vime_client.config_loading import ConfigError, to_toml
from vime_client.launcher.plan import load_plan, service_names, write_plan
from vime_client.recipe import Recipe, load_recipe
from vime_client.worker.config import worker_settings


def problems(recipe: Path, *overrides: str, old: str = "", new: str = "") -> str:
    recipe.write_text(recipe.read_text().replace(old, new))
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe, overrides)
    return str(caught.value)


def test_paths_are_taken_from_the_recipes_folder(recipe: Path) -> None:
    loaded = load_recipe(recipe)
    folder = recipe.parent
    assert loaded.model.path == folder / "model"
    assert loaded.tables["train"].source.path == folder / "train.jsonl"
    assert loaded.rewards.by_name == {"default": f"{folder}/reward.py:score", "strict": "grpc://127.0.0.1:9"}
    assert loaded.run_dir == (Path.cwd() / "runs" / "r").resolve()
    assert load_recipe(recipe, name="other").run.name == "other"


def test_the_resolved_recipe_is_a_recipe_that_means_the_same_anywhere(recipe: Path, tmp_path: Path) -> None:
    loaded = load_recipe(recipe, ["run.steps=7"])
    copy = tmp_path / "elsewhere" / "config.toml"
    copy.parent.mkdir()
    copy.write_text(to_toml(loaded))
    assert load_recipe(copy) == loaded


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("run.stepz=3", 'unknown key "run.stepz"; did you mean "run.steps"?'),
        ("worker.concurency=3", 'unknown key "worker.concurency"; did you mean "worker.concurrency"?'),
        ("modell.path='x'", 'unknown key "modell"; did you mean "model"?'),
        ("rewards.timout_s=3", 'timout_s is 3; did you mean "rewards.timeout_s"?'),
        ("run.steps=0", "run.steps"),
        ("run.name='a/b'", '"a/b" is no name of a folder'),
        ("worker.filter='nonzero_std'", None),
    ],
)
def test_a_wrong_setting_is_named_with_the_nearest(recipe: Path, override: str, says: str | None) -> None:
    if says is None:  # a filter that would drop everything
        said = problems(recipe, override, old="samples_per_prompt = 8", new="samples_per_prompt = 1")
        assert "would drop every group" in said
        assert "samples_per_prompt is 1" in said
    else:
        assert says in problems(recipe, override)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tables.train.lease_ttl", "inf"),
        ("tables.train.sampling.temperature", "nan"),
        ("tables.train.sampling.stops", "[[1.0], [-inf]]"),
        ("trainer.engine.optimizer.lr", "inf"),
        ("rollout.vllm.args.x", "nan"),
        ("router.queue_timeout_s", "inf"),
        ("buffer.x", "{y = nan}"),
    ],
)
def test_every_number_is_finite_also_where_a_service_reads_it(recipe: Path, key: str, value: str) -> None:
    said = problems(recipe, f"{key}={value}")
    assert said.startswith(f"--set: {key}")
    assert "should be a finite number, got " in said


def test_a_number_in_the_file_that_is_not_finite_has_its_line(recipe: Path) -> None:
    said = problems(recipe, old="[tables.train]", new="[tables.train]\nlease_ttl = inf")
    line = recipe.read_text().splitlines().index("lease_ttl = inf") + 1
    assert said == f"{recipe}:{line}: tables.train.lease_ttl: input should be a finite number, got inf (float)"


def test_a_table_that_only_an_override_names_is_told_with_those_of_the_file(recipe: Path) -> None:
    said = problems(recipe, "tables.evl.eval_interval=3")
    assert said == '--set: "tables.evl.source" is required; known: train, eval/heldout'
    assert 'did you mean "train"?' in problems(recipe, "tables.trai.eval_interval=3")


def test_an_unknown_table_has_a_line_and_a_nearest_name(recipe: Path) -> None:
    said = problems(recipe, old="[run]", new="[rolout.vllm]\ndtype = 'float32'\n[run]")
    line = recipe.read_text().splitlines().index("[rolout.vllm]") + 1
    assert said == f'{recipe}:{line}: unknown key "rolout"; did you mean "rollout"?'


def test_missing_files_are_named(recipe: Path) -> None:
    assert f"file {recipe.parent}/nothere.py does not exist" in problems(recipe, "rewards.default='nothere.py:score'")
    (recipe.parent / "train.jsonl").unlink()
    assert f"file {recipe.parent}/train.jsonl does not exist" in problems(recipe)
    (recipe.parent / "model" / "config.json").unlink()
    assert "holds no config.json" in problems(recipe)


def test_a_table_must_name_a_reward_that_exists(recipe: Path) -> None:
    assert 'no reward "strikt" in [rewards]; did you mean "strict"?' in problems(recipe, old='"strict"', new='"strikt"')


def test_a_missing_recipe_and_broken_toml_are_one_sentence(recipe: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothere\.toml does not exist"):
        load_recipe(recipe.parent / "nothere.toml")
    assert "is not valid TOML" in problems(recipe, old="[run]", new="[run")


def test_each_service_gets_its_own_section_and_the_addresses_of_the_others(recipe: Path, tmp_path: Path) -> None:
    loaded = load_recipe(recipe, ["launcher.engines=2", "worker.count=2", "buffer.segment_bytes=5000"])
    run_dir = tmp_path / "run"
    ports = {name: 20000 + i for i, name in enumerate(service_names(loaded))}
    plan = write_plan(loaded, recipe.parent, run_dir, "r-1", ports)
    assert load_plan(run_dir) == plan
    names = ["buffer", "router", "rollout-0", "rollout-1", "trainer", "worker-0", "worker-1"]
    assert [service.name for service in plan.services] == names

    def written(name: str) -> dict[str, Any]:
        return tomllib.loads((run_dir / "services" / f"{name}.toml").read_text())

    buffer = written("buffer")
    assert buffer["server"] == {"host": "127.0.0.1", "port": 20000}
    assert buffer["buffer"]["tables"]["train"]["source"]["path"] == str(recipe.parent / "train.jsonl")
    assert buffer["buffer"]["segment_bytes"] == 5000
    assert written("trainer")["trainer"]["engine"] == {"optimizer": {"lr": 1e-5}}
    assert written("trainer")["trainer"]["eval_tables"] == ["eval/heldout"]
    assert written("router")["router"] == {"queue_timeout_s": 10.0}
    rollout = written("rollout-1")["rollout"]
    assert rollout["engine_id"] == "rollout-1"
    assert rollout["router"] == {"address": "127.0.0.1:20001"}
    assert rollout["vllm"]["max_model_len"] == 64


def test_the_launcher_lays_no_device_over_the_services(recipe: Path, tmp_path: Path) -> None:
    """On CUDA an engine without compilation does not start: engine and ranks set what belongs to their device."""
    loaded = load_recipe(recipe)
    ports = {name: 20000 + i for i, name in enumerate(service_names(loaded))}
    env = write_plan(loaded, recipe.parent, tmp_path / "run", "r-1", ports).env
    assert not [name for name in env if name.startswith(("VLLM_", "OMP_", "TORCH"))]


def test_a_worker_knows_reward_routes_and_deadline_of_each_table(recipe: Path) -> None:
    settings = worker_settings(load_recipe(recipe), recipe.parent, "a:1", "b:2", "w")
    assert settings.tables["train"].generation_timeout_s == 20
    assert settings.tables["train"].require_routes
    assert settings.tables["eval/heldout"].reward == "strict"
    assert settings.tables["eval/heldout"].generation_timeout_s == 50


def test_the_recipe_model_describes_every_field() -> None:
    def undescribed(model: type[BaseModel], prefix: str = "") -> list[str]:
        found = []
        for name, field in model.model_fields.items():
            if not field.description:
                found.append(prefix + name)
            if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
                found += undescribed(field.annotation, f"{prefix}{name}.")
        return found

    assert undescribed(Recipe) == []
