"""The service as a process with the real engine: an update from another process, tied weights, and no orphans."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch

from vime.common.v1 import engine_pb2, trajectory_pb2
from vime.rollout.v1 import engine_service_pb2 as engine_pb
from vime.rollout.v1 import generation_service_pb2 as pb
from vime_client.errors import RpcError, rpc_errors

from .conftest import TinyModel, tiny_model
from .service_process import Running, alive, children_of, service
from .test_engine_contract import prompt_of

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]

EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return tiny_model(tmp_path_factory.mktemp("models") / "tied", 5, tied=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tied: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    settings = [
        f"rollout.vllm.model={tied.path}",
        "rollout.vllm.dtype=float32",
        "rollout.vllm.max_model_len=256",
        "rollout.vllm.kv_cache_tokens=4096",
    ]
    async with service(tmp_path_factory.mktemp("service") / "s", *settings, ready_s=300) as made:
        yield made


async def score(running: Running, ids: list[int]) -> np.ndarray:
    request = pb.ScoreRequest(sequences=[trajectory_pb2.TokenIds(ids=ids)])
    return np.asarray((await running.generation.Score(request, timeout=30)).scores[0].logprobs)


async def test_it_is_live_and_known_before_it_serves(running: Running) -> None:
    status = (await running.engine.GetEngine(engine_pb.GetEngineRequest(), timeout=5)).status
    assert status.state == engine_pb2.ENGINE_STATE_EMPTY
    assert list(status.info.moe_layer_ids) == [0, 2]
    with pytest.raises(RpcError, match="no weights are published yet"), rpc_errors():
        await running.generate("r", prompt_of(5))


async def test_a_tied_head_follows_its_embedding_and_a_head_of_its_own_is_refused(
    running: Running, tied: TinyModel
) -> None:
    assert "lm_head.weight" not in tied.weights
    ids = prompt_of(60)
    await running.publish(1, tied.weights)
    assert np.abs(await score(running, ids) - tied.logprobs(ids)).max() < 1e-4
    scaled = {**tied.weights, EMBEDDING: tied.weights[EMBEDDING] * 1.5}
    await running.publish(2, scaled)
    with torch.no_grad():
        tied.reference.get_input_embeddings().weight.mul_(1.5)
    assert np.abs(await score(running, ids) - tied.logprobs(ids)).max() < 1e-4
    with pytest.raises(RpcError, match=r"not expected: lm_head\.weight") as caught, rpc_errors():
        await running.publish(3, {**scaled, "lm_head.weight": scaled[EMBEDDING]})
    assert caught.value.reason == "MANIFEST_REFUSED"
    await running.publish(3, tied.weights)
    with torch.no_grad():
        tied.reference.get_input_embeddings().weight.div_(1.5)


async def test_text_comes_back_beside_the_ids(running: Running, tied: TinyModel) -> None:
    rendered = await running.generation.Render(
        pb.RenderRequest(
            chat=trajectory_pb2.Chat(messages=[trajectory_pb2.ChatMessage(role="user", content="2 + 3?")])
        ),
        timeout=10,
    )
    texts = pb.DecodeRequest(sequences=[trajectory_pb2.TokenIds(ids=rendered.prompt_token_ids)])
    (prompt,) = (await running.generation.Decode(texts, timeout=10)).texts
    assert prompt == "<|im_start|>user\n2 + 3?<|im_end|>\n<|im_start|>assistant\n"
    answer = await running.generate("t", list(rendered.prompt_token_ids), return_text=True)
    ids = trajectory_pb2.TokenIds(ids=answer.samples[0].response_token_ids)
    (text,) = (await running.generation.Decode(pb.DecodeRequest(sequences=[ids]), timeout=10)).texts
    assert answer.samples[0].text == text


async def test_killed_under_load_with_weights_staged_it_leaves_no_process_and_no_file(
    running: Running, tied: TinyModel
) -> None:
    """Last in this module: the service does not outlive it."""
    calls = [asyncio.create_task(running.generate(f"k{i}", prompt_of(40), max_tokens=200)) for i in range(8)]
    await running.until_running(8)
    children = children_of(running.process.pid)
    assert children
    staged = Path(running.directory) / f"vime-rollout-{running.process.pid}"
    assert staged.is_dir()
    running.kill()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(result, Exception) for result in results)
    started = time.monotonic()
    while alive(children) and time.monotonic() - started < 10:
        await asyncio.sleep(0.1)
    assert not alive(children)
    assert not staged.exists()
