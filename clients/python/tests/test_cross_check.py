"""What no service sees by itself is told before anything starts, all of it together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vime_client.launcher.cross_check import cross_problems
from vime_client.recipe import load_recipe

DENSE = {"architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 64, "dtype": "bfloat16"}
MOE = {**DENSE, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8}
FLOAT32 = ("rollout.vllm.dtype=float32",)
SFT = ("trainer.algorithm.objective=sft", "tables={sft={source={path='train.jsonl'},groups_per_step=2}}")


def problems(recipe: Path, *overrides: str, model: dict[str, Any] | None = None) -> list[str]:
    (recipe.parent / "model" / "config.json").write_text(json.dumps(MOE if model is None else model))
    loaded = load_recipe(recipe, [*FLOAT32, *overrides])
    return [".".join(map(str, key)) + ": " + sentence for key, sentence in cross_problems(loaded)]


def test_a_recipe_that_can_work_is_not_judged(recipe: Path) -> None:
    assert problems(recipe) == []
    assert problems(recipe, model={}) == []


@pytest.mark.parametrize(
    ("overrides", "model", "words"),
    [
        (("trainer.world_size=3",), MOE, "tables.train.groups_per_step: 2 is below trainer.world_size = 3"),
        (("trainer.algorithm.mini_batches=17",), MOE, "trainer.algorithm.mini_batches: 17 is above the 16 samples"),
        (("trainer.algorithm.critic.mini_batches=17",), MOE, "critic.mini_batches: 17 is above the 16 samples"),
        (
            ("tables.train.samples_per_prompt=1",),
            MOE,
            'samples_per_prompt: 1 with trainer.algorithm.estimator = "grpo"',
        ),
        (
            ("tables.train.samples_per_prompt=1", "trainer.algorithm.estimator=rloo"),
            MOE,
            'estimator = "rloo" trains nothing',
        ),
        (
            ("trainer.algorithm.overlong={max_length=12,cache=4}",),
            MOE,
            "max_length = 12 with cache = 4 punishes no response: tables.train.sampling.max_tokens = 8",
        ),
        ((), DENSE, "tables.train.require_routes: true, and the model"),
        (
            ("tables.train.require_routes=false",),
            MOE,
            "train.require_routes: must be true: the model is a mixture",
        ),
        (("rollout.vllm.return_routes=false",), MOE, "true with rollout.vllm.return_routes = false"),
        (
            ("tables.train.sampling.max_tokens=64",),
            MOE,
            "64 leaves no room for a prompt: rollout.vllm.max_model_len is 64",
        ),
        (("rollout.vllm.max_model_len=8",), MOE, "8 leaves no room for a prompt: rollout.vllm.max_model_len is 8"),
        (("rollout.vllm.args.max_model_len=8",), MOE, "rollout.vllm.args.max_model_len is 8"),
        (("rollout.vllm.dtype=bfloat16",), MOE, "the engine would hold bfloat16 and the trainer float32"),
        (("trainer.engine.dtype=bfloat16",), MOE, "the engine would hold float32 and the trainer bfloat16"),
        (("rollout.vllm.dtype=auto",), MOE, 'bfloat16 ("auto", of a model in bfloat16) and the trainer float32'),
        (("rollout.vllm.dtype=auto",), {**MOE, "dtype": "float32"}, 'bfloat16 ("auto", of a model in float32)'),
        ((*SFT, "tables.sft.require_routes=true"), MOE, "demonstrations are not generated"),
    ],
)
def test_what_cannot_work_or_does_nothing_is_told(recipe: Path, overrides: Any, model: Any, words: str) -> None:
    (found,) = problems(recipe, *overrides, model=model)
    assert words in found


@pytest.mark.parametrize(
    "overrides",
    [
        ("rollout.vllm.dtype=auto", "trainer.engine.dtype=bfloat16"),
        ("tables.train.require_routes=false", "trainer.engine.routing_replay=false"),
        ("tables.train.samples_per_prompt=1", "trainer.algorithm.estimator=reinforce_plus_plus"),
        ("rollout.engine=fake", "rollout.vllm.dtype=bfloat16"),
        SFT,
    ],
)
def test_what_belongs_together_is_accepted(recipe: Path, overrides: tuple[str, ...]) -> None:
    assert problems(recipe, *overrides) == []


def test_positions_that_are_stretched_bound_no_response(recipe: Path) -> None:
    long = ("rollout.vllm={dtype='float32'}", "tables.train.sampling.max_tokens=64")
    (found,) = problems(recipe, *long, model=MOE)
    assert "64 leaves no room for a prompt: the model's max_position_embeddings is 64" in found
    assert problems(recipe, *long, model={**MOE, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}) == []
    assert problems(recipe, *long, model={**MOE, "rope_parameters": {"rope_type": "yarn"}}) == []


def test_all_of_it_is_told_together(recipe: Path) -> None:
    found = problems(recipe, "trainer.world_size=4", "rollout.vllm.max_model_len=8", "trainer.engine.dtype=bfloat16")
    assert len(found) == 3


def test_text_needs_a_tokenizer_and_token_ids_need_none(recipe: Path) -> None:
    (recipe.parent / "model" / "tokenizer.json").unlink()
    (found,) = problems(recipe)
    assert "holds no tokenizer (tokenizer.json, tokenizer_config.json), and prompts of table train are text" in found
    (recipe.parent / "train.jsonl").write_text('\n{"prompt": [1, 2, 3]}\n')
    assert problems(recipe) == []


def test_values_of_other_types_are_left_to_their_service(recipe: Path) -> None:
    odd = ("trainer.world_size='x'", "trainer.publish=3", "rollout.vllm.args=3", "trainer.algorithm=1")
    assert problems(recipe, *odd, model={**MOE, "max_position_embeddings": None}) == []
