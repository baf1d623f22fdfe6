"""A client of earlier contracts against the services of today, and clients of today against its servers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from safetensors.torch import save_file
from tests.contract.breaking import newest_image
from tests.contract.kept_contracts import IMAGES, Contracts, path_of
from tests.in_process import RUN, System

from vime.buffer.v1 import prompt_service_pb2
from vime.common.v1.trajectory_pb2 import SamplingParams
from vime.rollout.v1.generation_service_pb2 import GenerateRequest, ScoreRequest
from vime_client.buffer import BufferClient
from vime_client.channel import ChannelSettings, open_channel
from vime_client.errors import RpcError, rpc_errors
from vime_client.generation import GenerationClient
from vime_client.trainer import TrainerClient
from vime_client.worker.group import build_group
from vime_rollout.engines.fake import make_weights
from vime_service.bulk import Manifest, VersionKey
from vime_service.bulk.layout import BucketLayout
from vime_service.bulk.wire import manifest_to_proto
from vime_trainer.adapters.ledger import GrpcLedger
from vime_trainer.loop.versions import Version

ONCE = ChannelSettings(max_attempts=1)


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[grpc.aio.Channel]:
    """A channel as an old program would have opened it."""
    async with grpc.aio.insecure_channel(address) as channel:
        yield channel


def finished(old: Contracts, lease: Any, tokens: int = 4) -> Any:
    """The group of a lease, in the messages of the old contracts."""
    common = "vime.common.v1."
    samples = [
        old.message(common + "Sample")(
            group_id=lease.group_id,
            sample_index=index,
            prompt_token_ids=[1, 2, 3],
            response_token_ids=[5] * tokens,
            rollout_logprobs=[-0.5] * tokens,
            version_spans=[old.message(common + "VersionSpan")(weight_version=lease.fence.at_least)],
            finish_reason=1,
            status=1,
            reward=float(index),
            seed=lease.seeds[index],
        )
        for index in range(lease.num_samples)
    ]
    return old.message(common + "TrajectoryGroup")(
        group_id=lease.group_id,
        attempt=lease.attempt,
        table=lease.table,
        prompt=lease.prompt,
        sampling=lease.sampling,
        samples=samples,
    )


# ------------------------------------------------------------------ the images


def test_every_kept_image_decodes_and_all_its_calls_are_still_served(old: Contracts) -> None:
    today = Contracts.today()
    served = {path_of(m): m for service in today.services() for m in service.methods}
    for service in old.services():
        for method in service.methods:
            now = served.get(path_of(method))
            assert now is not None, f"{path_of(method)} is gone: drop the images that have it, or bring it back"
            assert (now.input_type.full_name, now.output_type.full_name, now.server_streaming) == (
                method.input_type.full_name,
                method.output_type.full_name,
                method.server_streaming,
            )


def test_release_candidates_gate_nothing_and_a_release_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert [path.stem for path in IMAGES][:1] == ["0.1.0-rc1"]
    monkeypatch.setattr("tests.contract.breaking.ROOT", tmp_path)
    folder = tmp_path / "protos" / "released"
    folder.mkdir(parents=True)
    for name in ("0.1.0-rc1", "0.9.0-rc3"):
        (folder / f"{name}.binpb").touch()
    assert newest_image() is None
    for name in ("0.2.0", "0.10.0", "0.11.0-rc1"):
        (folder / f"{name}.binpb").touch()
    assert newest_image() == folder / "0.10.0.binpb"


# ------------------------------------------------------------------ old client, today's services


async def test_an_old_worker_and_an_old_trainer_take_a_step_through_todays_buffer(
    old: Contracts, system: System
) -> None:
    async with connected(system.address("buffer")) as channel:
        prompts, batches, tables = (
            old.stub(channel, f"vime.buffer.v1.{name}Service") for name in ("Prompt", "Batch", "Table")
        )
        config = (await tables.GetTable(name="train")).table.config
        config.name = "unscored"
        made = await tables.CreateTable(config=config)
        assert (made.config.name, made.config.groups_per_step) == ("unscored", 2)

        opened = await batches.OpenIncarnation(run_id=RUN, recipe_digest="r")
        version = old.message("vime.common.v1.WeightVersion")(run_id=RUN, incarnation=opened.incarnation)
        await batches.AnnounceVersion(version=version)
        leases = (await prompts.LeasePrompts(worker_id="old", max_prompts=2, tables=["train"])).leases
        groups = [finished(old, lease) for lease in leases]
        for lease, group in zip(leases, groups, strict=True):
            assert not (await prompts.KeepAlive(lease_ids=[lease.lease_id])).lost_lease_ids
            assert not (await prompts.InsertGroup(lease_id=lease.lease_id, group=group)).already_present
            assert (await prompts.InsertGroup(lease_id=lease.lease_id, group=group)).already_present

        batch = await batches.LeaseBatch(incarnation=opened.incarnation, train_step=1)
        ids = [summary.group_id for summary in batch.groups]
        assert ids == [group.group_id for group in groups]
        got = [group async for answer in batches.GetGroups(group_ids=ids) for group in answer.groups]
        assert got == groups
        version.step = 1
        await batches.CompleteStep(
            incarnation=opened.incarnation, train_step=1, outcome=1, published_version=version, table="train"
        )
        retired = await batches.CheckpointCommitted(incarnation=opened.incarnation, train_step=1, oldest_kept_step=1)
        assert retired.retired_groups == 2
        counts = (await tables.GetTable(name="train")).table.counts
        assert (counts.groups_retired, counts.prompts_inserted, counts.prompts_open) == (2, 2, 0)


async def test_an_old_trainer_is_told_why_in_details_it_can_read(old: Contracts, system: System) -> None:
    async with connected(system.address("buffer")) as channel:
        batches = old.stub(channel, "vime.buffer.v1.BatchService")
        for _ in range(2):
            opened = await batches.OpenIncarnation(run_id=RUN, recipe_digest="r")
        with pytest.raises(RpcError) as caught, rpc_errors():
            await batches.LeaseBatch(incarnation=opened.incarnation - 1, train_step=1)
        assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.ABORTED, "STALE_INCARNATION")
        reasons = old.message("vime.common.v1.EngineStatus").DESCRIPTOR.file.pool.FindEnumTypeByName(
            "vime.common.v1.ErrorReason"
        )
        assert f"ERROR_REASON_{caught.value.reason}" in reasons.values_by_name


async def test_an_old_trainer_publishes_and_an_old_worker_generates(old: Contracts, system: System) -> None:
    version = VersionKey(RUN, 1, 3)
    weights = make_weights(3)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, system.folder / "w.safetensors")
    manifest = old.message("vime.bulk.v1.Manifest").FromString(
        manifest_to_proto(Manifest.of(version, weights.items(), BucketLayout(64 << 10))).SerializeToString()
    )
    size = (system.folder / "w.safetensors").stat().st_size
    payload = old.message("vime.common.v1.PayloadHandle")(scheme="file", key="w.safetensors", nbytes=size)
    async with connected(system.address("rollout")) as engine, connected(system.address("router")) as router:
        engines = old.stub(engine, "vime.rollout.v1.EngineService")
        assert not (await engines.GetEngine()).status.HasField("weight_version")
        pulled = await engines.PullUpdate(manifest=manifest, payload=payload)
        assert pulled.status.weight_version.step == 3

        generation = old.stub(router, "vime.rollout.v1.GenerationService")
        ids = list((await generation.Render(text="17 + 4 =")).prompt_token_ids)
        fence = old.message("vime.common.v1.Fence")(exactly=pulled.status.weight_version)
        sampling = old.message("vime.common.v1.SamplingParams")(max_tokens=6, ignore_eos=True)
        request = old.message("vime.rollout.v1.GenerateRequest")(
            request_id="r", prompt_token_ids=ids, sampling=sampling, seeds=[1, 2], fence=fence, return_routes=True
        )
        answer = await generation.Generate(request)
        assert [len(sample.response_token_ids) for sample in answer.samples] == [6, 6]
        assert all(len(sample.rollout_logprobs) == 6 for sample in answer.samples)
        rows = sum(segment.rows for segment in answer.samples[0].routed_experts.segments)
        assert rows == len(ids) + 6 - 1
        pieces = [piece async for piece in generation.GenerateStream(generate=request)]
        streamed = [token for piece in pieces if piece.sample_index == 0 for token in piece.response_token_ids]
        assert streamed == list(answer.samples[0].response_token_ids)
        token_ids = old.message("vime.common.v1.TokenIds")(ids=ids + streamed)
        scored = await generation.Score(request_id="s", sequences=[token_ids], fence=fence)
        assert scored.scores[0].logprobs[-6:] == pytest.approx(answer.samples[0].rollout_logprobs, abs=1e-5)


async def test_an_old_publish_that_cannot_be_is_refused_with_its_reason(old: Contracts, system: System) -> None:
    async with connected(system.address("rollout")) as channel:
        engines = old.stub(channel, "vime.rollout.v1.EngineService")
        version = old.message("vime.common.v1.WeightVersion")(run_id=RUN, incarnation=1, step=1)
        meta = old.message("vime.bulk.v1.TensorMeta")(name="w", dtype=7, shape=[1 << 40], digest="00" * 16)
        manifest = old.message("vime.bulk.v1.Manifest")(weight_version=version, tensors=[meta], bucket_bytes=1 << 20)
        rendezvous = old.message("vime.bulk.v1.Rendezvous")(transport=1, address="127.0.0.1:1", world_size=2, rank=1)
        with pytest.raises(RpcError) as caught, rpc_errors():
            await engines.PrepareUpdate(manifest=manifest, rendezvous=rendezvous)
        assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
        assert (await engines.GetEngine()).status.state == 3  # SERVING, as before


async def test_an_old_engine_joins_todays_router_and_an_old_trainer_lists_it(old: Contracts, system: System) -> None:
    async with connected(system.address("router")) as channel:
        router = old.stub(channel, "vime.router.v1.RouterService")
        version = old.message("vime.common.v1.WeightVersion")(run_id=RUN, incarnation=1, step=1)
        info = old.message("vime.common.v1.EngineInfo")(
            engine_id="old", boot_id="b", address="127.0.0.1:1", model_id="m", updatable=True
        )
        status = old.message("vime.common.v1.EngineStatus")(info=info, state=3, weight_version=version)
        answer = await router.Heartbeat(status=status, highest_seen=version)
        assert answer.period.ToTimedelta().total_seconds() == pytest.approx(0.2)
        listed = await router.ListMembers(caller_version=version)
        assert "old" in [member.info.engine_id for member in listed.members]
        engines = (await router.ListEngines()).engines
        assert {engine.status.info.engine_id: engine.health for engine in engines}["old"] == 1  # ALIVE


async def test_an_old_driver_watches_todays_trainer(old: Contracts, system: System) -> None:
    async with connected(system.address("trainer")) as channel:
        trainer = old.stub(channel, "vime.trainer.v1.TrainerService")
        status = (await trainer.GetStatus()).status
        assert (status.state, status.num_steps) == (2, 2)  # IDLE
        assert (await trainer.Start(num_steps=2)).status.run_id == RUN
        states = [event.status.state async for event in trainer.Watch() if event.HasField("status")]
        assert states[-1] == 5  # FAILED: there are no ranks here
        info = await old.stub(channel, "vime.common.v1.ServerInfoService").GetServerInfo()
        assert info.service == "trainer"


# ------------------------------------------------------------------ today's clients, old servers


@asynccontextmanager
async def served(*handlers: grpc.GenericRpcHandler) -> AsyncIterator[str]:
    """A server of these services; its address."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(handlers)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def test_todays_worker_draws_from_and_inserts_into_an_old_buffer(old: Contracts) -> None:
    inserted: list[Any] = []

    def answer(method: str, request: Any) -> Any:
        if method == "LeasePrompts":
            prompt = old.message("vime.common.v1.Prompt")(prompt_id="p", text="1 + 1 =")
            lease = old.message("vime.buffer.v1.PromptLease")(
                lease_id="l", table="train", prompt=prompt, group_id="g", attempt=1, num_samples=1, seeds=[9]
            )
            lease.ttl.FromSeconds(5)
            return old.message("vime.buffer.v1.LeasePromptsResponse")(leases=[lease])
        if method == "InsertGroup":
            inserted.append(request)
        return old.message(f"vime.buffer.v1.{method}Response")()

    async with served(old.server("vime.buffer.v1.PromptService", answer)) as address, BufferClient(address) as buffer:
        (leased,) = await buffer.lease_prompts("w", 1, 0.1)
        async with leased:
            generated = GenerationAnswers(old).generate()
            await leased.insert(build_group(leased.lease, [1, 2, 3], generated))
        await buffer.fail("l", prompt_service_pb2.FAILURE_CLASS_TIMEOUT)
    (request,) = inserted
    assert (request.lease_id, request.group.group_id) == ("l", "g")
    assert list(request.group.samples[0].response_token_ids) == [4, 5]
    assert request.group.samples[0].seed == 9


class GenerationAnswers:
    """What an old engine says."""

    def __init__(self, old: Contracts) -> None:
        self._old = old

    def generate(self) -> Any:
        """As today's program reads the answer of an old engine."""
        from vime.rollout.v1.generation_service_pb2 import GenerateResponse

        return GenerateResponse.FromString(self("Generate", None).SerializeToString())

    def __call__(self, method: str, request: Any) -> Any:
        old = self._old
        version = old.message("vime.common.v1.WeightVersion")(run_id=RUN, incarnation=1, step=1)
        span = old.message("vime.common.v1.VersionSpan")(weight_version=version)
        sample = {"response_token_ids": [4, 5], "rollout_logprobs": [-1.0, -2.0]}
        made = old.message("vime.rollout.v1.GeneratedSample")(**sample, finish_reason=1, version_spans=[span])
        if method == "Generate":
            return old.message("vime.rollout.v1.GenerateResponse")(samples=[made], engine_id="e")
        if method == "GenerateStream":
            piece = old.message("vime.rollout.v1.GenerateStreamResponse")
            return [piece(**sample), piece(first_token=2, end=made)]
        if method == "Score":
            score = old.message("vime.rollout.v1.SequenceScore")(logprobs=[-1.0], weight_version=version)
            return old.message("vime.rollout.v1.ScoreResponse")(scores=[score])
        if method == "Render":
            return old.message("vime.rollout.v1.RenderResponse")(prompt_token_ids=[len(request.text)])
        return old.message(f"vime.rollout.v1.{method}Response")()


async def test_todays_generation_client_reads_an_old_engine(old: Contracts) -> None:
    handler = old.server("vime.rollout.v1.GenerationService", GenerationAnswers(old))
    async with served(handler) as address, GenerationClient(address) as engine:
        assert await engine.render("four") == [4]
        answer = await engine.generate([1], SamplingParams(max_tokens=2), [3], timeout_s=5)
        assert list(answer.samples[0].response_token_ids) == [4, 5]
        pieces = [piece async for piece in engine.stream(GenerateRequest(), timeout_s=5)]
        assert [list(piece.response_token_ids) for piece in pieces] == [[4, 5], []]
        assert pieces[1].end.version_spans[0].weight_version.step == 1
        assert (await engine.score(ScoreRequest(), timeout_s=5)).scores[0].logprobs == [-1.0]


async def test_todays_trainer_steps_through_an_old_buffer(old: Contracts) -> None:
    def answer(method: str, request: Any) -> Any:
        fields: dict[str, Any] = {}
        if method == "OpenIncarnation":
            fields = {"incarnation": request.highest_known + 1, "last_ledger_step": 4}
        if method == "LeaseBatch" and request.train_step == 1:
            group = old.message("vime.buffer.v1.GroupSummary")(group_id="g", samples=2, tokens=9)
            fields = {"groups": [group], "replayed": True}
        elif method == "LeaseBatch":
            fields = {"blocked_by": 3}
        return old.message(f"vime.buffer.v1.{method}Response")(**fields)

    async with (
        served(old.server("vime.buffer.v1.BatchService", answer)) as address,
        open_channel(address, ONCE) as channel,
    ):
        ledger = GrpcLedger(channel)
        opened = await ledger.open_incarnation(RUN, 0, 6, "r")
        assert (opened.incarnation, opened.last_ledger_step) == (7, 4)
        batch = await ledger.lease_batch(7, 1, 1.0)
        assert ([group.group_id for group in batch.groups], batch.replayed) == (["g"], True)
        await ledger.complete_step(7, 1, trained=True, published=Version(RUN, 7, 1), final=False)
        assert (await ledger.lease_batch(7, 2, 1.0)).ended


async def test_todays_driver_watches_an_old_trainer(old: Contracts) -> None:
    def answer(method: str, request: Any) -> Any:
        status = old.message("vime.trainer.v1.TrainerStatus")(state=3, run_id=RUN, train_step=5)
        if method == "Watch":
            event = old.message("vime.trainer.v1.WatchResponse")
            report = old.message("vime.trainer.v1.StepReport")(train_step=6, metrics={"rollout/raw_reward": 0.5})
            return [event(sequence=1, status=status), event(sequence=2, step=report)]
        return old.message(f"vime.trainer.v1.{method}Response")(status=status)

    async with (
        served(old.server("vime.trainer.v1.TrainerService", answer)) as address,
        TrainerClient(address) as client,
    ):
        assert (await client.status()).train_step == 5
        events = [event async for event in client.watch()]
        assert events[1].step.metrics["rollout/raw_reward"] == 0.5
