"""What no service can see by itself: settings of several services, the model and the data, held against each other.

Read from the recipe as it was written, before anything starts; what a service refuses by itself is not judged here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from vime_client.config_loading import Key
from vime_client.model_config import has_experts, longest_context, read_model
from vime_client.recipe import Recipe, TableSection
from vime_client.worker.demonstrations import SFT_TABLE

GROUP_RELATIVE = frozenset({"grpo", "dr_grpo", "gspo", "cispo", "rloo", "reinforce_plus_plus_baseline"})
"""Estimators that compare the samples of a group: of a single one they make advantage 0."""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
)
_DEFAULT_ESTIMATOR = "grpo"

Problem = tuple[Key, str]


def cross_problems(recipe: Recipe) -> Iterator[Problem]:
    """What cannot work or does nothing in the recipe as a whole: the key to change, and a sentence."""
    model = read_model(recipe.model.path)
    yield from _batches(recipe)
    yield from _routes(recipe, model)
    yield from _lengths(recipe, model)
    yield from _dtypes(recipe, model)
    yield from _tokenizer(recipe)


def _batches(recipe: Recipe) -> Iterator[Problem]:
    """Batches against ranks, mini-batches, estimator and punishments."""
    supervised = recipe.told("trainer", "algorithm", "objective") == "sft"
    name = SFT_TABLE if supervised else "train"
    table = recipe.tables.get(name)
    if table is None:
        return
    groups, samples = _int(_extra(table, "groups_per_step")), table.samples_per_prompt
    ranks = _int(recipe.told("trainer", "world_size")) or 1
    if groups and groups < ranks:
        yield (
            ("tables", name, "groups_per_step"),
            f"{groups} is below trainer.world_size = {ranks}: a rank would have no group to train",
        )
    for key in (("algorithm", "mini_batches"), ("algorithm", "critic", "mini_batches")):
        parts = _int(recipe.told("trainer", *key))
        if groups and parts and parts > groups * samples:
            yield (
                ("trainer", *key),
                f"{parts} is above the {groups * samples} samples of a batch (groups_per_step = {groups}, "
                f"samples_per_prompt = {samples} of table {name}): a mini-batch would be empty",
            )
    if supervised:
        return
    estimator = recipe.told("trainer", "algorithm", "estimator", default=_DEFAULT_ESTIMATOR)
    if samples == 1 and estimator in GROUP_RELATIVE:
        yield (
            ("tables", name, "samples_per_prompt"),
            f'1 with trainer.algorithm.estimator = "{estimator}" trains nothing: it compares the samples of a group, '
            "and the advantage of a single one is 0; set samples_per_prompt to 2 or more, or another estimator",
        )
    budget = _int(_sampling(table, "max_tokens"))
    longest, cache = (_int(recipe.told("trainer", "algorithm", "overlong", part)) for part in ("max_length", "cache"))
    if budget and longest and cache and budget <= longest - cache:
        yield (
            ("trainer", "algorithm", "overlong"),
            f"max_length = {longest} with cache = {cache} punishes no response: tables.{name}.sampling.max_tokens = "
            f"{budget} lets none exceed {longest - cache} tokens",
        )


def _routes(recipe: Recipe, model: dict[str, Any]) -> Iterator[Problem]:
    """Routing traces: the table asks for them, the engine returns them, the trainer replays them."""
    if not model.get("architectures"):
        return
    moe = has_experts(model)
    returned = recipe.told("rollout", "vllm", "return_routes")
    for name, table in recipe.tables.items():
        key: Key = ("tables", name, "require_routes")
        if table.require_routes and not moe:
            yield key, f"true, and the model {recipe.model.path} is dense: there are no routing traces; leave it out"
        elif table.require_routes and name == SFT_TABLE:
            yield key, "true, and demonstrations are not generated: they have no routing traces; leave it out"
        elif table.require_routes and returned is False:
            yield key, "true with rollout.vllm.return_routes = false: the engine would return no routing traces"
    replays = recipe.told("trainer", "engine", "routing_replay", default=True)
    if moe and replays is True and "train" in recipe.tables and not recipe.tables["train"].require_routes:
        yield (
            ("tables", "train", "require_routes"),
            "must be true: the model is a mixture of experts and trainer.engine.routing_replay is on, which trains no "
            "sample without routing traces (or set trainer.engine.routing_replay = false)",
        )


def _lengths(recipe: Recipe, model: dict[str, Any]) -> Iterator[Problem]:
    """Response budgets against the engine's context."""
    context, source = _int(recipe.told("rollout", "vllm", "args", "max_model_len")), "rollout.vllm.args.max_model_len"
    if context is None:
        context, source = _int(recipe.told("rollout", "vllm", "max_model_len")), "rollout.vllm.max_model_len"
    if context is None:
        context, source = longest_context(model), "the model's max_position_embeddings"
    for name, table in recipe.tables.items():
        budget = _int(_sampling(table, "max_tokens"))
        if budget and context and budget >= context:
            yield (
                ("tables", name, "sampling", "max_tokens"),
                f"{budget} leaves no room for a prompt: {source} is {context}, for prompt and response together",
            )


def _dtypes(recipe: Recipe, model: dict[str, Any]) -> Iterator[Problem]:
    """Weights go to the engine in the trainer's type, and the engine takes its own only."""
    if recipe.told("rollout", "engine") == "fake":
        return
    trainer = recipe.told("trainer", "engine", "dtype", default="float32")
    wanted = recipe.told("rollout", "vllm", "args", "dtype") or recipe.told("rollout", "vllm", "dtype", default="auto")
    engine, why = wanted, ""
    if wanted == "auto":
        own = model.get("dtype") or model.get("torch_dtype")
        if not isinstance(own, str):
            return
        engine = "bfloat16" if own == "float32" else own  # vLLM's rule: float32 is halved unless it is asked for
        why = f' ("auto", of a model in {own})'
    if isinstance(trainer, str) and isinstance(engine, str) and trainer != engine:
        yield (
            ("rollout", "vllm", "dtype"),
            f"the engine would hold {engine}{why} and the trainer {trainer} (trainer.engine.dtype), and weights are "
            "sent as the trainer holds them: set both to one type",
        )


def _tokenizer(recipe: Recipe) -> Iterator[Problem]:
    """Text needs a tokenizer; token ids need none."""
    folder = recipe.model.path
    if recipe.told("rollout", "engine", default="vllm") != "vllm" or recipe.told(
        "rollout", "vllm", "args", "tokenizer"
    ):
        return
    if any((folder / name).is_file() for name in TOKENIZER_FILES):
        return
    for name, table in recipe.tables.items():
        if not _is_ids(_first_prompt(table)):
            yield (
                ("model", "path"),
                f"{folder} holds no tokenizer ({', '.join(TOKENIZER_FILES[:2])}), and prompts of table {name} are text",
            )
            return


# ------------------------------------------------------------------ reading


def _extra(table: TableSection, name: str) -> Any:
    return (table.model_extra or {}).get(name)


def _sampling(table: TableSection, name: str) -> Any:
    sampling = _extra(table, "sampling")
    return sampling.get(name) if isinstance(sampling, dict) else None


def _int(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _first_prompt(table: TableSection) -> Any:
    """The prompt of the first record; None where there is none that can be read, which the buffer says."""
    try:
        with table.source.path.open(encoding="utf-8") as file:
            record = json.loads(next((line for line in file if line.strip()), "null"))
    except (OSError, ValueError):
        return None
    return record.get(table.source.prompt_key) if isinstance(record, dict) else None


def _is_ids(prompt: Any) -> bool:
    return prompt is None or (isinstance(prompt, list) and all(_int(token) is not None for token in prompt))
