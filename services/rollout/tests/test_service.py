"""The service as a process over gRPC, with the fake engine."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio
import xxhash
from google.protobuf.duration_pb2 import Duration

from vime.bulk.v1 import manifest_pb2
from vime.common.v1 import engine_pb2, trajectory_pb2, weight_version_pb2
from vime.rollout.v1 import engine_service_pb2 as engine_pb
from vime.rollout.v1 import generation_service_pb2 as pb
from vime.router.v1 import router_service_pb2, router_service_pb2_grpc
from vime_client.errors import RpcError, rpc_errors
from vime_rollout.engines.fake import make_weights
from vime_service.bulk.wire import manifest_to_proto, version_to_proto

from .conftest import manifest_of, version
from .service_process import Running, alive, children_of, service

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPT = list(range(20))
A, B = make_weights(0), make_weights(1)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    """One service for the tests that leave it serving."""
    settings = ("rollout.engine=fake", "rollout.fake.step_seconds=0.001")
    async with service(tmp_path_factory.mktemp("service"), *settings) as made:
        await made.publish(1, A)
        yield made


async def failure(call: Any) -> RpcError:
    with pytest.raises(RpcError) as caught, rpc_errors():
        await call
    return caught.value


async def test_a_whole_update_over_gloo_and_then_generation_with_everything_asked_for(tmp_path: Path) -> None:
    async with service(tmp_path / "s", "rollout.engine=fake") as fresh:
        assert (await failure(fresh.generate("r", PROMPT))).code is grpc.StatusCode.UNAVAILABLE
        done = await fresh.publish(1, A)
        assert done.parameters == 2
        status = (await fresh.engine.GetEngine(engine_pb.GetEngineRequest(), timeout=5)).status
        assert status.state == engine_pb2.ENGINE_STATE_SERVING
        assert status.weight_version == version_to_proto(version(1))
        assert status.manifest_digest == manifest_of(1, A).digest.hex()
        assert status.info.address == fresh.address
        answer = await fresh.generate("r", PROMPT, (1, 2), return_routes=True, return_text=True)
        assert [sample.sample_index for sample in answer.samples] == [0, 1]
        for sample in answer.samples:
            assert len(sample.response_token_ids) == len(sample.rollout_logprobs) == 8
            assert sample.finish_reason == trajectory_pb2.FINISH_REASON_LENGTH
            assert sample.text
            (span,) = sample.version_spans
            assert (span.first_token, span.weight_version) == (0, version_to_proto(version(1)))
            (segment,) = sample.routed_experts.segments
            assert (segment.first_token, segment.rows) == (0, 27)
            assert list(segment.experts.shape) == [27, 2, 2]
            assert segment.experts.digest == xxhash.xxh3_128_hexdigest(segment.experts.inline)
            assert list(sample.routed_experts.moe_layer_ids) == [1, 2]
            assert sample.routed_experts.num_experts == 8
        assert fresh.terminate() == 0
    assert [p.name for p in (tmp_path / "s").iterdir()] == ["log"]


async def test_a_stream_carries_the_same_sample_in_pieces(running: Running) -> None:
    whole = (await running.generate("w", PROMPT, max_tokens=100, return_routes=True)).samples[0]
    sampling = trajectory_pb2.SamplingParams(max_tokens=100, ignore_eos=True)
    request = pb.GenerateRequest(
        request_id="s", prompt_token_ids=PROMPT, seeds=[1], sampling=sampling, return_routes=True
    )
    call = running.generation.GenerateStream(pb.GenerateStreamRequest(generate=request), timeout=20)
    pieces = [piece async for piece in call]
    assert len(pieces) > 1
    assert [t for piece in pieces for t in piece.response_token_ids] == list(whole.response_token_ids)
    assert [x for piece in pieces for x in piece.rollout_logprobs] == list(whole.rollout_logprobs)
    assert pieces[-1].end.routed_experts == whole.routed_experts
    assert pieces[-1].end.version_spans == whole.version_spans
    assert not any(piece.HasField("end") for piece in pieces[:-1])


async def test_scores_render_and_decode(running: Running) -> None:
    sample = (await running.generate("r", PROMPT)).samples[0]
    ids = PROMPT + list(sample.response_token_ids)
    request = pb.ScoreRequest(sequences=[trajectory_pb2.TokenIds(ids=ids)], return_routes=True)
    (score,) = (await running.generation.Score(request, timeout=10)).scores
    assert np.allclose(score.logprobs[len(PROMPT) - 1 :], sample.rollout_logprobs, atol=1e-5)
    assert score.weight_version.step >= 1
    assert sum(segment.rows for segment in score.routed_experts.segments) == len(ids) - 1
    chat = trajectory_pb2.Chat(messages=[trajectory_pb2.ChatMessage(role="user", content="hé")])
    rendered = await running.generation.Render(pb.RenderRequest(chat=chat), timeout=5)
    texts = pb.DecodeRequest(sequences=[trajectory_pb2.TokenIds(ids=rendered.prompt_token_ids)])
    (text,) = (await running.generation.Decode(texts, timeout=5)).texts
    assert text == "<|bos|>user:hé<|end|>assistant:"
    assert len(rendered.template_digest) == 32
    assert (await running.generation.Render(pb.RenderRequest(text="x"), timeout=5)).template_digest == "text"


async def test_a_text_that_no_context_holds_is_refused_before_it_is_tokenized(running: Running) -> None:
    text = "x" * 513
    chat = trajectory_pb2.Chat(messages=[trajectory_pb2.ChatMessage(role="user", content=text)])
    for request in (pb.RenderRequest(text=text), pb.RenderRequest(chat=chat)):
        error = await failure(running.generation.Render(request, timeout=5))
        assert (error.reason, error.metadata["characters"]) == ("PROMPT_TOO_LONG", "513")
    assert len((await running.generation.Render(pb.RenderRequest(text=text[1:]), timeout=5)).prompt_token_ids) == 513


async def test_every_refusal_has_its_code_and_reason_and_numbers(running: Running) -> None:
    fence = weight_version_pb2.Fence(exactly=version_to_proto(version(99)))
    cases = [
        ({"fence": fence}, "FENCE_NOT_MET", "FAILED_PRECONDITION", {"serving": "run/1/"}),
        ({"prompt": [1] * 512}, "PROMPT_TOO_LONG", "INVALID_ARGUMENT", {"max_model_len": "512"}),
        ({"sampling": {"top_p": 0.5}}, "INEXACT_SAMPLING", "INVALID_ARGUMENT", {"field": "top_p"}),
        ({"prompt": [999]}, "INVALID_FIELD", "INVALID_ARGUMENT", {"vocab_size": "260"}),
        ({"model_id": "other"}, "NOT_FOUND", "NOT_FOUND", {"name": "other"}),
        ({"adapter_id": "x"}, "NOT_IMPLEMENTED", "UNIMPLEMENTED", {"rpc": "Generate"}),
        *(
            ({"sampling": {"extra_json": text}}, "INVALID_FIELD", "INVALID_ARGUMENT", {"field": "sampling.extra_json"})
            for text in (
                "[1]",
                '{"min_p": NaN}',
                '{"include_stop_str_in_output": "yes"}',
                '{"bad_words": ' + "[" * 100_000 + "]" * 100_000 + "}",
                '{"bad_words": ' + "[" * 70 + "]" * 70 + "}",
            )
        ),
    ]
    for fields, reason, code, metadata in cases:
        options: dict[str, Any] = dict(fields)
        error = await failure(running.generate("r", options.pop("prompt", PROMPT), **options))
        assert (error.reason, error.code.name) == (reason, code), fields
        assert error.domain == "rollout.vime"
        for key, value in metadata.items():
            assert value in error.metadata[key]
    deep = "[" * 100_000 + "]" * 100_000
    call = trajectory_pb2.ChatMessage(role="assistant", tool_calls_json=deep)
    for field, chat in (
        ("chat.tools_json", trajectory_pb2.Chat(tools_json=deep)),
        ("chat.template_kwargs_json", trajectory_pb2.Chat(template_kwargs_json=f'{{"a": {deep}}}')),
        ("chat.messages.tool_calls_json", trajectory_pb2.Chat(messages=[call])),
    ):
        error = await failure(running.generation.Render(pb.RenderRequest(chat=chat), timeout=5))
        assert (error.reason, error.metadata["field"]) == ("INVALID_FIELD", field)
    long = pb.ScoreRequest(sequences=[trajectory_pb2.TokenIds(ids=PROMPT)], temperature=0.5)
    assert (await failure(running.generation.Score(long, timeout=5))).metadata["field"] == "temperature"


async def test_an_answer_that_could_not_pass_is_refused_before_anything_is_generated(tmp_path: Path) -> None:
    settings = ("rollout.engine=fake", "server.max_message_bytes=65536", "rollout.serve_initial=true")
    async with service(tmp_path / "s", *settings) as fresh:
        seeds = tuple(range(16))
        call = fresh.generate("r", PROMPT, seeds, max_tokens=480, return_routes=True)
        error = await failure(call)
        assert (error.code.name, error.metadata["limit"]) == ("INVALID_ARGUMENT", "65536")
        assert int(error.metadata["needed"]) > 16 * 480 * 13
        status = (await fresh.engine.GetEngine(engine_pb.GetEngineRequest(), timeout=5)).status
        assert status.load.generated_tokens == 0
        answer = await fresh.generate("r", PROMPT, seeds, max_tokens=80, return_routes=True)
        assert len(answer.samples) == 16
        score = pb.ScoreRequest(sequences=[trajectory_pb2.TokenIds(ids=PROMPT * 20)] * 40, return_routes=True)
        assert (await failure(fresh.generation.Score(score, timeout=5))).metadata["field"] == "sequences"


async def test_control_calls_of_another_run_or_a_lower_incarnation_are_refused(running: Running) -> None:
    other = engine_pb.PauseRequest(caller_version=version_to_proto(version(1, run="other")))
    assert (await failure(running.engine.Pause(other, timeout=5))).reason == "FLEET_OWNED"
    await running.publish(50, A, incarnation=2)
    stale = engine_pb.PauseRequest(caller_version=version_to_proto(version(60)))
    error = await failure(running.engine.Pause(stale, timeout=5))
    assert (error.code.name, error.reason) == ("ABORTED", "STALE_INCARNATION")
    assert (await failure(running.publish(60, B))).reason == "STALE_INCARNATION"
    assert (await running.generate("r", PROMPT)).samples[0].version_spans[0].weight_version.incarnation == 2


async def test_a_pause_whose_owner_vanished_is_lifted_and_reported(running: Running) -> None:
    caller = version_to_proto(version(51, incarnation=2))
    pause = engine_pb.PauseRequest(caller_version=caller, expires_after=Duration(nanos=500_000_000))
    for _ in range(2):
        await running.engine.Pause(pause, timeout=5)
    status = (await running.engine.GetEngine(engine_pb.GetEngineRequest(), timeout=5)).status
    assert status.state == engine_pb2.ENGINE_STATE_PAUSED
    started = time.monotonic()
    await running.generate("r", PROMPT)
    assert 0.2 < time.monotonic() - started < 15
    status = (await running.engine.GetEngine(engine_pb.GetEngineRequest(), timeout=5)).status
    assert status.state == engine_pb2.ENGINE_STATE_SERVING
    assert "was lifted after 0.5 s without a Resume" in status.detail
    for _ in range(2):
        await running.engine.Resume(engine_pb.ResumeRequest(caller_version=caller), timeout=5)


async def test_a_pause_that_aborts_answers_all_32_callers_within_two_seconds(running: Running) -> None:
    calls = [asyncio.create_task(running.generate(f"p{i}", PROMPT, max_tokens=490)) for i in range(32)]
    await running.until_running(32)
    caller = version_to_proto(version(51, incarnation=2))
    answer = await running.engine.Pause(engine_pb.PauseRequest(caller_version=caller), timeout=5)
    assert answer.aborted == 32
    samples = [a.samples[0] for a in await asyncio.wait_for(asyncio.gather(*calls), 2)]
    assert {sample.finish_reason for sample in samples} == {trajectory_pb2.FINISH_REASON_ABORT}
    assert all(0 < len(s.response_token_ids) == len(s.rollout_logprobs) for s in samples)
    await running.engine.Resume(engine_pb.ResumeRequest(caller_version=caller), timeout=5)


async def test_abort_and_cancel_end_a_request_on_the_engine(running: Running) -> None:
    call = asyncio.create_task(running.generate("a", PROMPT, (1, 2), max_tokens=480))
    await running.until_running(2)
    assert (await running.generation.Abort(pb.AbortRequest(request_id="a"), timeout=5)).aborted == 2
    assert (await call).samples[1].finish_reason == trajectory_pb2.FINISH_REASON_ABORT
    call = asyncio.create_task(running.generate("c", PROMPT, max_tokens=480))
    await running.until_running(1)
    call.cancel()
    async with asyncio.timeout(5):
        while (await running.generation.Abort(pb.AbortRequest(request_id="c"), timeout=5)).aborted:
            await asyncio.sleep(0.01)
    await running.generate("c", PROMPT)


async def test_a_pickle_in_any_bytes_or_text_field_is_never_run(running: Running, tmp_path: Path) -> None:
    marker = tmp_path / "marker"

    class Bomb:
        def __reduce__(self) -> Any:
            return (os.system, (f"touch {marker}",))

    text = pickle.dumps(Bomb(), protocol=0).decode()
    manifest = manifest_to_proto(manifest_of(70, A, 2))
    for field in ("digest", "digest_algorithm"):
        broken = manifest_pb2.Manifest.FromString(manifest.SerializeToString())
        setattr(broken, field, text)
        rendezvous = manifest_pb2.Rendezvous(transport=1, address="127.0.0.1:1", generation=70, rank=1, world_size=2)
        request = engine_pb.PrepareUpdateRequest(manifest=broken, rendezvous=rendezvous)
        assert (await failure(running.engine.PrepareUpdate(request, timeout=5))).code.name == "INVALID_ARGUMENT"
    for sampling in ({"extra_json": text}, {"stop": [text]}):
        request_id = f"k{len(sampling)}"
        call = running.generate(request_id, PROMPT, sampling=sampling)
        if "stop" in sampling:
            await call
        else:
            assert (await failure(call)).code.name == "INVALID_ARGUMENT"
    assert not marker.exists()


async def test_a_manifest_that_claims_a_tensor_of_2_to_the_40_elements_is_refused(running: Running) -> None:
    manifest = manifest_to_proto(manifest_of(71, A, 2))
    manifest.tensors[0].shape[:] = [1 << 20, 1 << 20]
    rendezvous = manifest_pb2.Rendezvous(transport=1, address="127.0.0.1:1", generation=71, rank=1, world_size=2)
    request = engine_pb.PrepareUpdateRequest(manifest=manifest, rendezvous=rendezvous)
    error = await failure(running.engine.PrepareUpdate(request, timeout=5))
    assert error.code.name == "INVALID_ARGUMENT"
    assert "the limit is" in error.message


class Router(router_service_pb2_grpc.RouterServiceServicer):
    """Takes heartbeats, and can be silent."""

    def __init__(self) -> None:
        self.beats: list[router_service_pb2.HeartbeatRequest] = []

    async def Heartbeat(self, request: Any, context: Any) -> router_service_pb2.HeartbeatResponse:
        self.beats.append(request)
        return router_service_pb2.HeartbeatResponse(period=Duration(nanos=50_000_000))


async def test_heartbeats_tell_what_serves_and_outlive_a_router_that_restarts(tmp_path: Path) -> None:
    async def start(router: Router, port: int) -> tuple[grpc.aio.Server, int]:
        server = grpc.aio.server()
        router_service_pb2_grpc.add_RouterServiceServicer_to_server(router, server)
        port = server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        return server, port

    async def heard(router: Router, state: int) -> router_service_pb2.HeartbeatRequest:
        async with asyncio.timeout(15):
            while not router.beats or router.beats[-1].status.state != state:
                await asyncio.sleep(0.02)
        return router.beats[-1]

    first, second = Router(), Router()
    server, port = await start(first, 0)
    settings = ("rollout.engine=fake", f"rollout.router.address=127.0.0.1:{port}", "rollout.engine_id=slot-7")
    async with service(tmp_path / "s", *settings) as fresh:
        beat = await heard(first, engine_pb2.ENGINE_STATE_EMPTY)
        assert (beat.status.info.engine_id, beat.status.info.address) == ("slot-7", fresh.address)
        assert not beat.HasField("highest_seen")
        await fresh.publish(1, A)
        beat = await heard(first, engine_pb2.ENGINE_STATE_SERVING)
        assert beat.status.weight_version == version_to_proto(version(1))
        assert beat.highest_seen == version_to_proto(version(1))
        assert len({b.status.info.boot_id for b in first.beats}) == 1
        await server.stop(None)
        server, _ = await start(second, port)
        await heard(second, engine_pb2.ENGINE_STATE_SERVING)
        fresh.process.terminate()
        await heard(second, engine_pb2.ENGINE_STATE_DRAINING)
        assert await asyncio.to_thread(fresh.process.wait, 15) == 0
    await server.stop(None)


@pytest.mark.parametrize("second", [None, signal.SIGTERM])
async def test_sigterm_ends_it_within_the_grace_period_and_callers_get_unavailable(
    tmp_path: Path, second: signal.Signals | None
) -> None:
    settings = ("rollout.engine=fake", "rollout.fake.step_seconds=0.05", "server.grace_seconds=1")
    async with service(tmp_path / "s", *settings) as fresh:
        await fresh.publish(1, A)
        call = asyncio.create_task(fresh.generate("r", PROMPT, max_tokens=480))
        await fresh.until_running(1)
        started = time.monotonic()
        fresh.process.terminate()
        if second is not None:
            await asyncio.sleep(0.5)
            fresh.process.send_signal(second)
        assert (await failure(call)).code is grpc.StatusCode.UNAVAILABLE
        assert await asyncio.to_thread(fresh.process.wait, 15) == 0
        assert time.monotonic() - started < 15
        assert not alive(children_of(fresh.process.pid))


async def test_help_and_dry_run_answer_without_torch_or_vllm() -> None:
    code = (
        "import sys; sys.argv = ['x', '--dry-run', '--set', 'rollout.engine=fake']\n"
        "from vime_rollout.__main__ import main\n"
        "assert main() == 0\n"
        "heavy = {'torch', 'vllm', 'transformers', 'grpc', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert 'engine = "fake"' in done.stdout
    no_model = [sys.executable, "-m", "vime_rollout", "--dry-run", "--set", "rollout.engine=vllm"]
    wrong = subprocess.run(no_model, capture_output=True, text=True, timeout=60, check=False)
    assert wrong.returncode == 2
    assert "vllm.model is not set" in wrong.stderr
