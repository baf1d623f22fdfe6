"""What only the real engine can show: Hugging Face's numbers, real loads, and refusals that name real parameters."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from vime_rollout.config import UpdateConfig, VllmConfig
from vime_rollout.engine import EngineDied, EngineError, PauseMode, WeightsBroken, WeightsRefused
from vime_rollout.engines.core_watch import CoreWatch
from vime_rollout.engines.vllm import VllmEngine
from vime_rollout.sampling_options import OPTIONS
from vime_rollout.updates import CanaryPrompt
from vime_rollout.weights import ANY_WEIGHTS
from vime_service.bulk import FileStaging
from vime_service.bulk.buckets import unpack

from .conftest import Stack, TinyModel, make_model, manifest_of, version
from .test_engine_contract import prompt_of

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
QKV = "model.layers.0.self_attn.qkv_proj.weight"


@pytest_asyncio.fixture(loop_scope="session")
async def stack(
    vllm_engine: VllmEngine, session_update_config: UpdateConfig, model_a: TinyModel
) -> AsyncIterator[Stack]:
    """The real engine, serving model A as step 1."""
    made = Stack(vllm_engine, session_update_config)
    await made.publish(1, model_a.weights)
    yield made
    await made.updater.close()


def canary_of(model: TinyModel) -> list[CanaryPrompt]:
    prompts = [prompt_of(30, start) for start in (1, 2, 3, 4)]
    return [CanaryPrompt(ids, model.logprobs(ids).tolist()) for ids in prompts]


async def greedy(stack: Stack) -> list[int]:
    return list((await stack.generate("g", prompt_of(50), max_tokens=20, temperature=0.0))[0].token_ids)


def greedy_of(model: TinyModel) -> list[int]:
    ids = prompt_of(50)
    for _ in range(20):
        with torch.no_grad():
            ids = [*ids, int(model.reference(torch.tensor([ids])).logits[0, -1].argmax())]
    return ids[50:]


async def test_it_says_what_it_is(vllm_engine: VllmEngine) -> None:
    description = vllm_engine.description
    assert description.architecture == "Qwen3MoeForCausalLM"
    assert description.moe_layer_ids == (0, 2)  # layer 1 is dense
    assert (description.num_experts, description.experts_per_token) == (8, 2)
    assert description.eos_token_ids == (256, 258)
    assert (description.dtype, description.vocab_size, description.max_model_len) == ("float32", 320, 512)
    assert description.engine_version.startswith("vllm ")


@pytest.mark.parametrize("length", [2, 65, 300, 512])  # the last fills the context
async def test_scores_and_routes_are_those_of_hugging_face(stack: Stack, model_a: TinyModel, length: int) -> None:
    ids = prompt_of(length)
    score, _ = await stack.generation.score(ids, True, ANY_WEIGHTS, 10)
    assert np.abs(score.logprobs - model_a.logprobs(ids)).max() < 1e-4
    assert score.routes is not None
    assert np.array_equal(score.routes, model_a.routes(ids))


async def test_generated_logprobs_and_routes_are_those_of_hugging_face_on_the_same_ids(
    stack: Stack, model_a: TinyModel
) -> None:
    prompt = prompt_of(100)
    for sample in await stack.generate("r", prompt, [1, 2, 3, 4], max_tokens=40, return_routes=True):
        ids = prompt + list(sample.token_ids)
        assert np.abs(np.asarray(sample.logprobs) - model_a.logprobs(ids)[99:]).max() < 1e-4
        assert np.array_equal(sample.end.routes[0].experts, model_a.routes(ids))


async def test_a_seeded_prompt_longer_than_one_chunk_is_served_and_repeats_itself(stack: Stack) -> None:
    first, second = await stack.generate("r", prompt_of(200), [7, 7], max_tokens=12)
    assert list(first.token_ids) == list(second.token_ids)


async def test_after_an_update_it_is_a_fresh_engine_with_those_weights_and_after_another_it_is_the_old_one(
    stack: Stack, model_a: TinyModel, model_b: TinyModel
) -> None:
    for step, model in ((2, model_b), (3, model_a), (4, model_b)):
        done = await stack.publish(step, model.weights, canary_of(model))
        assert done.canary_difference is not None
        assert done.canary_difference < 1e-5
        assert done.parameters == 29
        assert await greedy(stack) == greedy_of(model)
        ids = prompt_of(300)
        score, _ = await stack.generation.score(ids, True, ANY_WEIGHTS, 10)
        assert np.abs(score.logprobs - model.logprobs(ids)).max() < 1e-4
        assert score.routes is not None
        assert np.array_equal(score.routes, model.routes(ids))


async def test_no_cached_prefix_outlives_its_weights(stack: Stack, model_b: TinyModel) -> None:
    prompt = prompt_of(150)
    (before,) = await stack.generate("a", prompt, return_routes=True)
    await stack.publish(2, model_b.weights)
    (after,) = await stack.generate("b", prompt, return_routes=True)
    assert after.end.cached_tokens == 0
    ids = prompt + list(after.token_ids)
    assert np.array_equal(after.end.routes[0].experts, model_b.routes(ids))
    assert not np.array_equal(after.end.routes[0].experts[:150], before.end.routes[0].experts[:150])


async def test_samples_kept_through_an_update_have_the_logprobs_and_routes_of_each_version(
    stack: Stack, model_a: TinyModel, model_b: TinyModel
) -> None:
    prompt = prompt_of(100)
    call = asyncio.create_task(stack.generate("r", prompt, [1, 2, 3], max_tokens=250, return_routes=True))
    async with asyncio.timeout(20):
        while min((stack.engine.progress().get(f"r/{i}", 0) for i in range(3)), default=0) < 5:
            await asyncio.sleep(0.002)
    await stack.publish(2, model_b.weights, canary_of(model_b))
    for sample in await call:
        assert [span.version for span in sample.end.spans] == [version(1), version(2)]
        switch = sample.end.spans[1].first_token
        assert 5 <= switch < 250
        ids = prompt + list(sample.token_ids)
        ours = np.asarray(sample.logprobs)
        assert np.abs(ours[:switch] - model_a.logprobs(ids)[99:][:switch]).max() < 1e-4
        # Their KV is computed again by the new weights: no token is made of both.
        assert np.abs(ours[switch:] - model_b.logprobs(ids)[99:][switch:]).max() < 1e-4
        old, new = sample.end.routes
        assert (old.version, len(old.experts)) == (version(1), 100 + switch - 1)
        assert (new.version, new.first_token) == (version(2), 100 + switch - 1)
        assert np.array_equal(old.experts, model_a.routes(ids)[: len(old.experts)])
        assert np.array_equal(new.experts, model_b.routes(ids)[new.first_token :])


async def test_seeds_are_equal_again_on_weights_that_came_back(
    stack: Stack, model_a: TinyModel, model_b: TinyModel
) -> None:
    (first,) = await stack.generate("a", prompt_of(40), [3], max_tokens=30)
    await stack.publish(2, model_b.weights)
    await stack.publish(3, model_a.weights)
    (again,) = await stack.generate("b", prompt_of(40), [3], max_tokens=30)
    assert list(again.token_ids) == list(first.token_ids)
    assert list(again.logprobs) == list(first.logprobs)


WRONG = [
    ("missing", {Q_PROJ: None}, f"missing: {Q_PROJ}", f"parameter {QKV} is missing 8192 of 16384 elements"),
    ("extra", {"lm_head.bias": torch.ones(3)}, "not expected: lm_head.bias", "lm_head.bias"),
    ("misshaped", {Q_PROJ: torch.ones(256, 64)}, f"{Q_PROJ} is [256, 64], expected [128, 64]", f"{Q_PROJ} has 16384"),
    (
        "wrong dtype",
        {"model.norm.weight": torch.ones(64, dtype=torch.bfloat16)},
        "model.norm.weight is bfloat16, expected float32",
        "model.norm.weight is bfloat16, parameter model.norm.weight is float32",
    ),
]


@pytest.mark.parametrize(("change", "by_checkpoint", "by_trial"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
async def test_wrong_tensors_are_refused_by_name_against_the_checkpoint_and_by_a_trial_load(
    stack: Stack,
    model_b: TinyModel,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, torch.Tensor | None],
    by_checkpoint: str,
    by_trial: str,
) -> None:
    before = await greedy(stack)
    weights = {name: tensor for name, tensor in {**model_b.weights, **change}.items() if tensor is not None}
    manifest = manifest_of(9, weights)
    with pytest.raises(WeightsRefused) as caught:
        await stack.engine.check_manifest(manifest)
    assert by_checkpoint in str(caught.value)
    monkeypatch.setattr(stack.engine, "_expected", None)  # as after a start without a checkpoint
    with pytest.raises(WeightsRefused) as caught:
        await stack.engine.check_manifest(manifest)
    assert by_trial in str(caught.value)
    assert await greedy(stack) == before


async def test_a_trial_load_accepts_the_whole_model(
    stack: Stack, model_b: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack.engine, "_expected", None)
    await stack.engine.check_manifest(manifest_of(9, model_b.weights))


async def load_unchecked(stack: Stack, weights: dict[str, torch.Tensor], names: Sequence[str] = ()) -> None:
    """Load past `check_manifest`, as if a check had missed something."""
    manifest = manifest_of(9, weights)
    staging = FileStaging(stack.config.staging_dir / "unchecked", manifest.plan.total_bytes)
    try:
        for name, view in unpack(manifest, staging.buffer).items():
            view.copy_(weights[name])
        await stack.engine.pause(PauseMode.KEEP)
        await stack.engine.load_weights(manifest, staging.path)
    finally:
        staging.close()
        await stack.engine.resume()


async def test_a_load_that_leaves_a_parameter_out_is_noticed_and_a_whole_one_repairs_it(
    stack: Stack, model_b: TinyModel
) -> None:
    partial = {name: tensor for name, tensor in model_b.weights.items() if name != Q_PROJ}
    with pytest.raises(WeightsBroken, match=r"qkv_proj\.weight is missing 8192 of 16384 elements"):
        await load_unchecked(stack, partial)
    await stack.publish(2, model_b.weights, canary_of(model_b))
    assert await greedy(stack) == greedy_of(model_b)


async def test_a_load_that_fails_in_the_middle_is_noticed_and_a_whole_one_repairs_it(
    stack: Stack, model_b: TinyModel
) -> None:
    broken = {**model_b.weights, "model.layers.2.mlp.gate.weight": torch.ones(9, 64)}
    with pytest.raises(WeightsBroken, match=r"model\.layers\.2\.mlp\.gate\.weight: "):
        await load_unchecked(stack, broken)
    await stack.publish(2, model_b.weights, canary_of(model_b))
    assert await greedy(stack) == greedy_of(model_b)


async def test_a_swapped_pair_of_experts_passes_every_digest_and_fails_the_canary(
    stack: Stack, model_b: TinyModel
) -> None:
    first, second = (f"model.layers.0.mlp.experts.{i}.down_proj.weight" for i in (0, 1))
    swapped = {**model_b.weights, first: model_b.weights[second], second: model_b.weights[first]}
    with pytest.raises(Exception, match="of the canary"):
        await stack.publish(2, swapped, canary_of(model_b))
    assert stack.weights.name == "DIRTY"
    await stack.publish(3, model_b.weights, canary_of(model_b))


async def test_every_option_that_is_allowed_works(stack: Stack) -> None:
    """Of the type and in the range that is checked, vLLM's core takes it; others hung it, and with it everybody."""
    given: dict[str, Any] = {
        "skip_special_tokens": True,
        "include_stop_str_in_output": True,
        "min_tokens": 6,
        "min_p": 0.1,
        "presence_penalty": -2,
        "frequency_penalty": 2,
        "repetition_penalty": 10,
        "logit_bias": {"45": 100, "319": -100},
        "allowed_token_ids": [46],
        "bad_words": ["a b", "c"],
    }
    assert given.keys() == OPTIONS.keys()
    ids = {}
    for name, value in given.items():
        options: dict[str, Any] = {"max_tokens": 6, "temperature": 0.0, "extra": {name: value}}
        (sample,) = await stack.generate(name, prompt_of(20), require_exact_logprobs=False, **options)
        ids[name] = list(sample.token_ids)
    assert ids["logit_bias"] == [45] * 6
    assert ids["allowed_token_ids"] == [46] * 6


@pytest.mark.timeout(400)
async def test_a_model_that_the_kernels_cannot_run_stops_the_start_with_vllms_own_cause(tmp_path: Path) -> None:
    """It loads, and dies at its first forward pass: it was ready, and the end said "see stack trace (above)"."""
    make_model(tmp_path / "odd", 0, head_dim=24)
    engine = VllmEngine(VllmConfig(model=str(tmp_path / "odd"), dtype="float32", max_model_len=64, kv_cache_tokens=256))
    with pytest.raises(
        EngineError, match=r"cannot run .*RuntimeError: Unsupported CPU attention .*head_dim=24"
    ) as told:
        await engine.start()
    assert "\n" not in str(told.value)
    await engine.stop()


async def test_a_core_that_is_stopped_is_found_and_one_that_goes_on_is_forgiven(
    vllm_engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    (core,) = vllm_engine._llm.engine_core.resources.engine_manager.processes
    monkeypatch.setattr(vllm_engine, "_watch", CoreWatch(vllm_engine._llm.is_sleeping, 1.0))

    async def beats() -> None:
        while True:
            await vllm_engine.check_health()
            await asyncio.sleep(0.1)

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(beats(), 2.5)
    os.kill(core.pid, signal.SIGSTOP)
    try:
        with pytest.raises(EngineDied, match="answered nothing for 1 s"):
            await asyncio.wait_for(beats(), 20)
    finally:
        os.kill(core.pid, signal.SIGCONT)
    await asyncio.sleep(0.5)
    await vllm_engine.check_health()
