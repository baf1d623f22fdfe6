"""Every recipe that we ship is accepted by the launcher and by every service that it starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vime_buffer.config import BufferConfig
from vime_client.config_loading import ConfigError, load_config
from vime_client.driver.record import defaults_of
from vime_client.launcher.cross_check import GROUP_RELATIVE, cross_problems
from vime_client.launcher.plan import RunPlan, service_names, write_plan
from vime_client.launcher.preflight import preflight
from vime_client.recipe import load_recipe
from vime_client.worker.config import WorkerConfig
from vime_rollout.config import RolloutConfig
from vime_router.config import RouterConfig
from vime_trainer.algorithm_config import AlgorithmConfig
from vime_trainer.config import TrainerConfig

RECIPES = Path(__file__).parents[2] / "recipes"
ALL = sorted(RECIPES.rglob("*.toml"))
FAMILY = ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "reinforce_pp", "rloo", "ppo", "sft", "opd"]
KINDS: dict[str, Any] = {
    "buffer": BufferConfig,
    "router": RouterConfig,
    "rollout": RolloutConfig,
    "trainer": TrainerConfig,
    "worker": WorkerConfig,
}


def planned(path: Path, folder: Path) -> RunPlan:
    """What `vime run` would start, written into `folder`."""
    recipe = load_recipe(path)
    ports = {name: 40000 + i for i, name in enumerate(service_names(recipe))}
    return write_plan(recipe, path.parent, folder, recipe.run.name, ports)


def algorithm_of(path: Path, folder: Path) -> AlgorithmConfig:
    planned(path, folder)
    loaded: TrainerConfig = load_config(TrainerConfig, folder / "services" / "trainer.toml")
    return loaded.trainer.algorithm


def test_there_is_a_recipe_for_every_member_of_the_family() -> None:
    assert {path.stem for path in (RECIPES / "addition").glob("*.toml")} >= set(FAMILY)


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_every_service_accepts_its_part_of_the_recipe(path: Path, tmp_path: Path) -> None:
    plan = planned(path, tmp_path)
    assert len(plan.services) >= 5
    for service in plan.services:
        kind = service.name.partition("-")[0]
        model = KINDS[kind]
        load_config(model, tmp_path / "services" / f"{service.name}.toml", check=model.surroundings)
    assert list(cross_problems(load_recipe(path))) == []


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_a_recipe_says_how_it_is_started(path: Path) -> None:
    assert f"vime run {path.relative_to(RECIPES.parent)}" in path.read_text(), "the head comment names the command"


def test_runs_of_different_recipes_do_not_share_a_folder() -> None:
    names = [load_recipe(path).run.name for path in ALL]
    assert len(set(names)) == len(names)


def test_the_recipes_differ_in_what_their_papers_say(tmp_path: Path) -> None:
    chosen = {name: algorithm_of(RECIPES / "addition" / f"{name}.toml", tmp_path / name) for name in FAMILY}
    assert (chosen["dr_grpo"].estimator, chosen["dr_grpo"].reducer) == ("dr_grpo", "fixed_length")
    assert (chosen["dapo"].eps_clip_high, chosen["dapo"].reducer) == (0.28, "token_mean")
    assert chosen["dapo"].overlong is not None
    assert load_recipe(RECIPES / "addition" / "dapo.toml").worker.filter == "nonzero_std"
    assert (chosen["gspo"].objective, chosen["gspo"].eps_clip) == ("gspo", 3e-4)
    assert (chosen["cispo"].objective, chosen["cispo"].eps_clip) == ("cispo", 1.0)
    assert chosen["reinforce_pp"].kl_coef > 0
    assert chosen["ppo"].critic is not None
    assert chosen["sft"].objective == "sft"
    assert chosen["opd"].opd_kl_coef > 0


@pytest.mark.engine
def test_vime_run_dry_run_checks_a_recipe_whole(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "vime_client.cli", "run", str(RECIPES / "addition" / "opd.toml"), "--dry-run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr
    assert 'estimator = "opd"' in done.stdout
    assert done.stderr.endswith("nothing is wrong\n")
    refused = subprocess.run(
        [*command, "--set", "trainer.algorithm.opd_kl_coef=0"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert refused.returncode == 2
    assert "has nothing to learn from; set opd_kl_coef" in refused.stderr.replace("\n", " ")


async def test_what_the_data_lacks_is_told_before_anything_starts(tmp_path: Path) -> None:
    train, held = tmp_path / "train.jsonl", tmp_path / "heldout.jsonl"
    train.write_text(
        '{"prompt": "1 + 1 =", "answer": 2}\n{"prompt": "\\ud83d", "answer": 3}\n{"prompt": 4, "answer": 3}\n'
    )
    held.write_text("")
    path = RECIPES / "addition" / "grpo.toml"
    sources = {"train": train, "eval/heldout": held}
    recipe = load_recipe(path, [f'tables.{name}.source.path="{file}"' for name, file in sources.items()])
    ports = {name: 40000 + i for i, name in enumerate(service_names(recipe))}
    plan = write_plan(recipe, path.parent, tmp_path / "run", "run", ports)
    plan = plan.model_copy(update={"services": [service for service in plan.services if service.name == "buffer"]})
    with pytest.raises(ConfigError) as caught:
        await preflight(plan, path, print)
    assert list(caught.value.problems) == [
        f'{path}: [buffer] table "train": {train} line 2 (byte 35): '
        "key 'prompt' holds \\ud83d, half of a surrogate pair: no text can carry it",
        f'{path}: [buffer] table "train": {train} line 3 (byte 69): '
        '"prompt" must be text, a list of messages or a list of token ids, not a number',
        f'{path}: [buffer] table "eval/heldout": prompt source {held} has no records',
    ]
    train.write_text('{"prompt": "1 + 1 =", "answer": 2}\n')
    held.write_text('nonsense\n{"prompt": "2 + 1 =", "answer": 3}\n')
    lenient = tmp_path / "run" / "services" / "buffer.toml"
    lenient.write_text(lenient.read_text().replace(f'path = "{held}"', f'path = "{held}"\nlenient = true'))
    said = defaults_of(plan, await preflight(plan, path, print))
    assert f"# buffer: {held}: bad lines that are skipped: {{'json': 1}}" in said


def test_all_that_is_wrong_with_a_recipe_is_told_together_with_its_lines(tmp_path: Path) -> None:
    """Of two services, of the recipe as a whole and of the command line, in one dry run."""
    source = RECIPES / "addition" / "grpo.toml"
    recipe = source.with_name("grpo.toml").read_text().replace("warmup_steps = 5", "warmup_step = 5")
    for name in ("model", "train.jsonl", "heldout.jsonl", "reward.py"):
        recipe = recipe.replace(f'"{name}', f'"{source.parent}/{name}')
    path = tmp_path / "bad.toml"
    path.write_text(recipe)
    wrong = {
        "trainer.engine.parallel.tensor=2": "--set: trainer.engine.parallel: parallel.tensor = 2 is not supported yet",
        "trainer.engine.optimizer.lr='2e-4'": "--set: trainer.engine.optimizer.lr: input should be a valid number",
        "trainer.world_size=17": "groups_per_step: 16 is below trainer.world_size = 17",
        "rollout.vllm.args.enable_prefix_cachin=true": 'did you mean "enable_prefix_caching"?',
        "router.policy=sticky": "--set: router.policy: unknown name",
        "router.queue_timeout_s=true": "--set: router.queue_timeout_s: input should be a valid number, got True (bool)",
        "trainer.engine.dtype=bfloat16": "the engine would hold float32 and the trainer bfloat16",
        "tables.train.lease_ttl=true": "--set: tables.train.lease_ttl: input should be a valid number, got True (bool)",
    }
    sets = [argument for setting in wrong for argument in ("--set", setting)]
    command = [sys.executable, "-m", "vime_client.cli", "run", str(path), "--dry-run", *sets]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=170, check=False)
    line = next(number for number, text in enumerate(recipe.splitlines(), 1) if text.startswith("warmup_step "))
    assert done.returncode == 2
    for words in [*wrong.values(), f'{path}:{line}: unknown key "trainer.engine.optimizer.warmup_step"']:
        assert words in done.stderr, done.stderr


def test_the_estimators_that_need_several_samples_are_those_that_give_one_alone_nothing() -> None:
    from torch import ones, tensor

    from vime_trainer.algorithms import ESTIMATORS, AdvantageConfig, AdvantageInputs, compute_advantages, index_of

    def trains(estimator: str) -> bool:
        inputs = AdvantageInputs(tensor([1.0, 0.0]), ones(2, 2), index_of("gh"), **values)
        made = compute_advantages(inputs, AdvantageConfig(estimator, whiten=False))
        return bool(made.advantages_BT.any())

    values: dict[str, Any] = {"values_BT": ones(2, 2) / 2}
    assert {name for name in ESTIMATORS if not trains(name)} - {"opd"} == GROUP_RELATIVE
