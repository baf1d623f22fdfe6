"""The real router over real rollout services (their fake engine, no vLLM), in one process over loopback."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from vime.common.v1.tensor_pb2 import PayloadHandle
from vime.common.v1.trajectory_pb2 import RoutingSource, SamplingParams
from vime.common.v1.weight_version_pb2 import Fence
from vime.rollout.v1.engine_service_pb2 import PullUpdateRequest
from vime.rollout.v1.engine_service_pb2_grpc import EngineServiceStub
from vime.rollout.v1.generation_service_pb2 import GenerateRequest, GenerateStreamRequest, RenderRequest
from vime.rollout.v1.generation_service_pb2_grpc import GenerationServiceStub
from vime_client.channel import ChannelSettings, open_channel
from vime_rollout.config import FakeConfig, RolloutSettings, RouterLink, UpdateConfig
from vime_rollout.engines.fake import EOS, make_weights
from vime_rollout.wiring import Rollout
from vime_router.config import RouterSection
from vime_router.wiring import Router
from vime_service import ServerConfig, serving
from vime_service.bulk import Manifest, VersionKey
from vime_service.bulk.layout import BucketLayout
from vime_service.bulk.wire import manifest_to_proto, version_to_proto

PERIOD = 30.0
"""So long that nothing in these tests can be due to the next regular heartbeat."""
PROMPT = list(range(20))


@dataclass
class System:
    """A router and two engines; `stop(engine_id)` stops one."""

    folder: Path
    client: Any = None
    engines: dict[str, Any] = field(default_factory=dict)
    stacks: dict[str, AsyncExitStack] = field(default_factory=dict)

    step_seconds: float = 0.005

    async def start_engine(self, engine_id: str, router: str) -> None:
        stack = self.stacks[engine_id] = AsyncExitStack()
        settings = RolloutSettings(
            engine_id=engine_id,
            engine="fake",
            fake=FakeConfig(step_seconds=self.step_seconds),
            updates=UpdateConfig(staging_dir=self.folder / engine_id, payload_dir=self.folder),
            router=RouterLink(address=router),
        )
        rollout = Rollout(settings)
        server = ServerConfig(grace_seconds=0.1)
        service = await stack.enter_async_context(
            serving("rollout", "vime-rollout", server, rollout.register, rollout.start)
        )
        channel = await stack.enter_async_context(open_channel(service.address, ChannelSettings(max_attempts=1)))
        self.engines[engine_id] = EngineServiceStub(channel)

    async def stop(self, engine_id: str) -> None:
        await self.stacks.pop(engine_id).aclose()

    async def publish(self, step: int, *engine_ids: str, weights: dict[str, torch.Tensor] | None = None) -> VersionKey:
        """The engines load version `step` from the payload store."""
        weights, version = weights or make_weights(step), VersionKey("run", 1, step)
        manifest = Manifest.of(version, weights.items(), BucketLayout(64 << 10))
        file = self.folder / f"{step}.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, file)
        payload = PayloadHandle(scheme="file", key=file.name, nbytes=file.stat().st_size)
        request = PullUpdateRequest(manifest=manifest_to_proto(manifest), payload=payload)
        for engine_id in engine_ids:
            await self.engines[engine_id].PullUpdate(request, timeout=20)
        return version

    def request(self, tokens: int, **fields: Any) -> GenerateRequest:
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
        return GenerateRequest(request_id="r", prompt_token_ids=PROMPT, seeds=[7], sampling=sampling, **fields)


@pytest.fixture
async def system(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[System]:
    made = System(tmp_path, step_seconds=getattr(request, "param", 0.005))
    router = Router(RouterSection(heartbeat_period_s=PERIOD, queue_timeout_s=20))
    async with (
        serving("router", "vime-router", ServerConfig(grace_seconds=0.1), router.register) as service,
        open_channel(service.address, ChannelSettings(max_attempts=1)) as channel,
    ):
        made.client = GenerationServiceStub(channel)
        try:
            for engine_id in ("e0", "e1"):
                await made.start_engine(engine_id, service.address)
            yield made
        finally:
            for engine_id in list(made.stacks):
                await made.stop(engine_id)


async def test_a_request_fenced_to_new_weights_waits_for_the_commit_and_not_for_a_heartbeat(system: System) -> None:
    await system.publish(1, "e0", "e1")
    fence = Fence(at_least=version_to_proto(VersionKey("run", 1, 2)))
    call = asyncio.ensure_future(system.client.Generate(system.request(4, fence=fence), timeout=10))
    await asyncio.sleep(0.3)
    assert not call.done()
    await system.publish(2, "e0")
    since = time.monotonic()
    response = await call
    assert response.engine_id == "e0"
    assert response.samples[0].version_spans[0].weight_version.step == 2
    assert time.monotonic() - since < 8


async def test_a_stream_whose_engine_stops_ends_on_the_other_with_true_spans_and_all_routes(system: System) -> None:
    await system.publish(1, "e0", "e1")
    await system.publish(2, "e1")
    tokens = 120
    request = system.request(tokens, return_routes=True, session_id="s")
    ids: list[int] = []
    engines: list[str] = []
    end = None
    async for piece in system.client.GenerateStream(GenerateStreamRequest(generate=request), timeout=30):
        assert piece.first_token == len(ids)
        ids += piece.response_token_ids
        engines.append(piece.engine_id)
        if piece.HasField("end"):
            end = piece.end
        if len(engines) == 2:
            await system.stop(engines[0])
    assert end is not None
    assert len(ids) == tokens
    first, second = dict.fromkeys(engines)
    border = sum(1 for _ in ids[: end.version_spans[1].first_token])
    steps = {"e0": 1, "e1": 2}
    assert [span.weight_version.step for span in end.version_spans] == [steps[first], steps[second]]
    segments = end.routed_experts.segments
    assert segments[0].source == RoutingSource.ROUTING_SOURCE_PREFILLED
    assert sum(segment.rows for segment in segments) == len(PROMPT) + tokens - 1
    assert sum(s.rows for s in segments if s.source == RoutingSource.ROUTING_SOURCE_PREFILLED) == len(PROMPT) + border


@pytest.mark.parametrize("system", [0.15], indirect=True)  # a piece for every token
@pytest.mark.parametrize(
    ("stop", "tokens", "text"), [("zzz", 13, "😀b中文c"), ("文c!!", 13, "😀b中文c"), ("b中", 8, "😀")]
)
async def test_text_and_stop_strings_are_those_of_the_whole_response_when_its_engine_dies(
    system: System, stop: str, tokens: int, text: str
) -> None:
    """After 6 or 7 tokens, in the middle of a character: its bytes, and a stop string's beginning, were held back."""
    ids = [PROMPT[-1], *"😀b中文c".encode(), EOS]
    weights = make_weights(1)
    weights["table.weight"] = torch.zeros_like(weights["table.weight"])
    for token, after in pairwise(ids):
        weights["table.weight"][token, after] = 100.0
    await system.publish(1, "e0", "e1", weights=weights)
    sampling = SamplingParams(max_tokens=20, stop=[stop])
    request = GenerateRequest(request_id="r", prompt_token_ids=PROMPT, seeds=[7], sampling=sampling, return_text=True)
    got, said, engines = list[int](), "", list[str]()
    async for piece in system.client.GenerateStream(GenerateStreamRequest(generate=request), timeout=30):
        got += piece.response_token_ids
        said += piece.text
        engines.append(piece.engine_id)
        if len(got) >= 6 and len(system.stacks) == 2:
            await system.stop(engines[0])
    assert len(set(engines)) == 2
    assert (got, said) == (ids[1 : tokens + 1], text)


async def test_an_engine_without_published_weights_renders_but_does_not_generate(system: System) -> None:
    rendered = await system.client.Render(RenderRequest(text="hi"), timeout=5)
    assert list(rendered.prompt_token_ids)[1:] == list(b"hi")
    await system.publish(1, "e1")
    response = await system.client.Generate(system.request(4), timeout=10)
    assert response.engine_id == "e1"
