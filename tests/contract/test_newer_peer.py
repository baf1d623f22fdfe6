"""A peer with newer contracts: fields and enum values unknown today are survived, and nothing is guessed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.contract.kept_contracts import TOMORROWS_VALUE, Contracts, call_of, fill, mark, path_of
from tests.contract.test_old_client import ONCE, finished, served
from tests.in_process import KINDS, RUN, System, service

from vime.common.v1.error_reason_pb2 import ErrorReason
from vime.common.v1.trajectory_pb2 import SamplingParams
from vime_client.buffer import BufferClient
from vime_client.channel import open_channel
from vime_client.driver.progress import Progress
from vime_client.errors import RpcError, rpc_errors
from vime_client.generation import GenerationClient
from vime_client.launcher.probes import Probe
from vime_client.trainer import TrainerClient
from vime_client.worker.group import BadGeneration, build_group
from vime_trainer.adapters.fleet import GrpcFleet
from vime_trainer.adapters.ledger import GrpcLedger
from vime_trainer.adapters.protos import enum_name
from vime_trainer.loop.publisher import PublishConfig
from vime_trainer.loop.versions import Version

UNKNOWN = TOMORROWS_VALUE
SERVED_BY = {
    "vime.buffer.v1.": "buffer",
    "vime.router.v1.": "router",
    "vime.rollout.v1.": "rollout",
    "vime.trainer.v1.": "trainer",
    "vime.common.v1.": "buffer",
}


class Buffer:
    """Tomorrow's worker and trainer at today's buffer."""

    def __init__(self, new: Contracts, channel: grpc.aio.Channel) -> None:
        self.new = new
        self.prompts = new.stub(channel, "vime.buffer.v1.PromptService")
        self.batches = new.stub(channel, "vime.buffer.v1.BatchService")
        self.tables = new.stub(channel, "vime.buffer.v1.TableService")

    async def begin(self) -> int:
        opened = await self.batches.OpenIncarnation(run_id=RUN, recipe_digest="r")
        version = self.new.message("vime.common.v1.WeightVersion")(run_id=RUN, incarnation=opened.incarnation)
        await self.batches.AnnounceVersion(version=version)
        return int(opened.incarnation)

    async def leases(self, count: int) -> Any:
        return (await self.prompts.LeasePrompts(worker_id="w", max_prompts=count)).leases


@asynccontextmanager
async def buffer_of(new: Contracts, folder: Path) -> AsyncIterator[Buffer]:
    async with service("buffer", folder) as running, open_channel(running.address, ONCE) as channel:
        yield Buffer(new, channel)


# ------------------------------------------------------------------ unknown fields


async def test_a_stored_group_keeps_what_only_a_newer_program_understands(new: Contracts, tmp_path: Path) -> None:
    sent: list[Message] = []
    async with buffer_of(new, tmp_path) as buffer:
        incarnation = await buffer.begin()
        for number, lease in enumerate(await buffer.leases(2)):
            group = finished(new, lease)
            mark(group, f"news of group {number}")
            sent.append(group)
            await buffer.prompts.InsertGroup(lease_id=lease.lease_id, group=group)
            again = await buffer.prompts.InsertGroup(lease_id=lease.lease_id, group=group)
            assert again.already_present  # the same bytes, unknown fields included
        summaries = (await buffer.batches.LeaseBatch(incarnation=incarnation, train_step=1)).groups
    async with buffer_of(new, tmp_path) as buffer:  # from the files of the ledger
        calls = buffer.batches.GetGroups(group_ids=[summary.group_id for summary in summaries])
        got = [group async for answer in calls for group in answer.groups]
    assert got == sent
    assert [g.SerializeToString(deterministic=True) for g in got] == [
        g.SerializeToString(deterministic=True) for g in sent
    ]
    assert got[1].samples[1].version_spans[0].weight_version.of_tomorrow == "news of group 1"


async def test_a_group_that_differs_only_in_an_unknown_field_is_another_group(new: Contracts, tmp_path: Path) -> None:
    async with buffer_of(new, tmp_path) as buffer:
        await buffer.begin()
        (lease,) = await buffer.leases(1)
        for text, code in (("one", None), ("two", grpc.StatusCode.ALREADY_EXISTS)):
            group = finished(new, lease)
            mark(group, text)
            try:
                await buffer.prompts.InsertGroup(lease_id=lease.lease_id, group=group)
                assert code is None
            except grpc.aio.AioRpcError as error:
                assert error.code() is code  # noqa: PT017  one of the two is refused


async def test_every_call_with_every_field_set_and_news_in_all_of_them_is_answered_or_refused_with_a_reason(
    new: Contracts, system: System
) -> None:
    answers: dict[str, str] = {}
    for descriptor in new.services():
        kind = next((kind for package, kind in SERVED_BY.items() if descriptor.full_name.startswith(package)), None)
        if kind is None:  # PluginService: the user's own
            continue
        async with open_channel(system.address(kind), ONCE) as channel:
            for method in descriptor.methods:
                request = new.message(method.input_type.full_name)()
                fill(request)
                answers[path_of(method)] = await _outcome(call_of(channel, method), request, method.server_streaming)
    assert len(answers) == 55, sorted(answers)
    # A watch of a loop that is not started says nothing until its caller's time is over.
    assert answers.pop("/vime.trainer.v1.TrainerService/Watch") == "DEADLINE_EXCEEDED"
    allowed = {"OK", *ErrorReason.keys()} - {"ERROR_REASON_INTERNAL", "ERROR_REASON_UNSPECIFIED"}
    assert {path: answer for path, answer in answers.items() if answer not in allowed} == {}
    assert sum(answer == "OK" for answer in answers.values()) >= 8, answers
    for kind in KINDS:
        async with open_channel(system.address(kind), ONCE) as channel:
            request = health_pb2.HealthCheckRequest(service="ready")
            answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=5)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        assert system.services[kind].failure is None


async def _outcome(call: Any, request: Message, streaming: bool) -> str:
    """ "OK", or the reason of the refusal as the enum names it."""
    try:
        with rpc_errors():
            if streaming:
                async for _ in call(request, timeout=2.0):
                    break
            else:
                await call(request, timeout=2.0)
    except RpcError as error:
        return f"ERROR_REASON_{error.reason}" if error.reason else error.code.name
    return "OK"


# ------------------------------------------------------------------ unknown enum values in requests


def _finish(sample: Any) -> None:
    sample.finish_reason = UNKNOWN


def _status(sample: Any) -> None:
    sample.status = UNKNOWN


def _unscored(sample: Any) -> None:
    sample.ClearField("reward")
    sample.unscored_reason = UNKNOWN


def _routes(**changes: int) -> Callable[[Any], None]:
    def change(sample: Any) -> None:
        segment = sample.routed_experts.segments.add(rows=6, source=1)
        segment.weight_version.CopyFrom(sample.version_spans[0].weight_version)
        segment.experts.dtype = 1
        segment.experts.shape.extend([6, 1, 1])
        segment.experts.inline = bytes(6)
        segment.source = changes.get("source", 1)
        segment.experts.dtype = changes.get("dtype", 1)
        sample.routed_experts.moe_layer_ids.append(0)
        sample.routed_experts.num_experts = 8

    return change


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (_finish, "samples[0].finish_reason"),
        (_status, "samples[0].status"),
        (_unscored, "samples[0].unscored_reason"),
        (_routes(source=UNKNOWN), "samples[0].routed_experts.segments[0].source"),
        (_routes(dtype=UNKNOWN), "samples[0].routed_experts.segments[0].experts.dtype"),
    ],
)
async def test_a_sample_with_a_value_of_tomorrow_is_refused_by_name_and_can_be_sent_again(
    new: Contracts, tmp_path: Path, change: Callable[[Any], None], field: str
) -> None:
    async with buffer_of(new, tmp_path) as buffer:
        await buffer.begin()
        (lease,) = await buffer.leases(1)
        group = finished(new, lease)
        change(group.samples[0])
        with pytest.raises(RpcError) as caught, rpc_errors():
            await buffer.prompts.InsertGroup(lease_id=lease.lease_id, group=group)
        assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.metadata["field"] == field
        await buffer.prompts.InsertGroup(lease_id=lease.lease_id, group=finished(new, lease))


async def test_a_failure_class_of_tomorrow_gives_the_prompt_back_as_unspecified(new: Contracts, tmp_path: Path) -> None:
    async with buffer_of(new, tmp_path) as buffer:
        await buffer.begin()
        (lease,) = await buffer.leases(1)
        answer = await buffer.prompts.FailPrompt(lease_id=lease.lease_id, failure=UNKNOWN)
        assert not answer.given_up
        counts = (await buffer.tables.GetTable(name="train")).table.counts
        assert (counts.prompts_requeued, counts.prompts_open) == (1, 0)
        (again,) = await buffer.leases(1)
        assert (again.group_id, again.attempt) == (lease.group_id, lease.attempt + 1)


async def test_an_outcome_a_selector_and_a_state_of_tomorrow_are_refused_and_change_nothing(
    new: Contracts, tmp_path: Path
) -> None:
    async with buffer_of(new, tmp_path) as buffer:
        incarnation = await buffer.begin()
        for lease in await buffer.leases(2):
            await buffer.prompts.InsertGroup(lease_id=lease.lease_id, group=finished(new, lease))
        await buffer.batches.LeaseBatch(incarnation=incarnation, train_step=1)
        before = (await buffer.tables.GetTable(name="train")).table
        config = new.message("vime.buffer.v1.TableConfig")()
        config.CopyFrom(before.config)
        config.selector = UNKNOWN
        refused = [
            buffer.batches.CompleteStep(incarnation=incarnation, train_step=1, outcome=UNKNOWN),
            buffer.tables.UpdateTable(config=config),
            buffer.tables.ListGroups(table="train", state=UNKNOWN),
        ]
        for call in refused:
            with pytest.raises(RpcError, match=str(UNKNOWN)) as caught, rpc_errors():
                await call
            assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
        assert (await buffer.tables.GetTable(name="train")).table == before


async def test_a_pause_mode_and_a_transport_of_tomorrow_are_refused_and_the_engine_goes_on(
    new: Contracts, tmp_path: Path
) -> None:
    version = new.message("vime.common.v1.WeightVersion")(run_id=RUN, incarnation=1, step=1)
    async with service("rollout", tmp_path) as running, open_channel(running.address, ONCE) as channel:
        engine = new.stub(channel, "vime.rollout.v1.EngineService")
        with pytest.raises(RpcError, match="mode 77 is not known here") as caught, rpc_errors():
            await engine.Pause(caller_version=version, mode=UNKNOWN)
        assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(RpcError, match="pause_mode 77 is not known here"), rpc_errors():
            await engine.CommitUpdate(weight_version=version, pause_mode=UNKNOWN)
        rendezvous = new.message("vime.bulk.v1.Rendezvous")(transport=UNKNOWN, address="127.0.0.1:1")
        with pytest.raises(RpcError, match="transport '77' is not there") as caught, rpc_errors():
            await engine.PrepareUpdate(rendezvous=rendezvous)
        assert caught.value.code is grpc.StatusCode.UNIMPLEMENTED
        assert (await engine.GetEngine()).status.state == 3  # SERVING


async def test_an_engine_in_a_state_of_tomorrow_is_listed_and_gets_no_call(new: Contracts, tmp_path: Path) -> None:
    version = new.message("vime.common.v1.WeightVersion")(run_id=RUN, incarnation=1, step=1)
    async with service("router", tmp_path) as running, open_channel(running.address, ONCE) as channel:
        router = new.stub(channel, "vime.router.v1.RouterService")
        info = new.message("vime.common.v1.EngineInfo")(
            engine_id="n", boot_id="b", address="127.0.0.1:1", model_id="m", updatable=True, of_tomorrow="news"
        )
        status = new.message("vime.common.v1.EngineStatus")(info=info, state=UNKNOWN, weight_version=version)
        await router.Heartbeat(status=status)
        (engine,) = (await router.ListEngines()).engines
        assert (engine.status.state, engine.status.info.of_tomorrow) == (UNKNOWN, "news")  # passed on as it came
        generation = new.stub(channel, "vime.rollout.v1.GenerationService")
        sampling = new.message("vime.common.v1.SamplingParams")(max_tokens=1)
        with pytest.raises(RpcError) as caught, rpc_errors():
            await generation.Generate(request_id="r", prompt_token_ids=[1], seeds=[1], sampling=sampling, timeout=0.5)
        assert caught.value.code in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
        (engine,) = (await router.ListEngines()).engines
        assert engine.requests == 0

        members = await GrpcFleet(channel, PublishConfig(), ONCE).members(Version(RUN, 1, 1))
        assert [(member.engine_id, member.usable) for member in members] == [("n", False)]


# ------------------------------------------------------------------ unknown enum values in answers


def _full(new: Contracts, package: str) -> Callable[[str, Any], Any]:
    """A server that answers everything with every field set and every enum unknown."""

    def answer(method: str, request: Any) -> Any:
        response = new.message(f"{package}.{method}Response")()
        fill(response)
        return [response] if method in ("Watch", "GenerateStream", "GetGroups", "WatchTable") else response

    return answer


async def test_a_worker_takes_leases_and_reasons_of_a_newer_buffer(new: Contracts) -> None:
    handler = new.server("vime.buffer.v1.PromptService", _full(new, "vime.buffer.v1"))
    async with served(handler) as address, BufferClient(address) as buffer:
        answer = await buffer.draw("w", 1, 0.1)
        assert answer.blocked_by == UNKNOWN
        assert answer.leases[0].lease_id == "news"
        assert (await buffer.keep_alive("w", ["l"], 5.0)).lost_lease_ids == ["news"]


async def test_a_worker_makes_no_sample_of_a_finish_reason_it_does_not_know(new: Contracts) -> None:
    def answer(method: str, request: Any) -> Any:
        response = _full(new, "vime.rollout.v1")(method, request)
        response.samples[0].sample_index = 0
        return response

    leases = new.message("vime.buffer.v1.LeasePromptsResponse")()
    fill(leases)
    from vime.buffer.v1.prompt_service_pb2 import PromptLease

    lease = PromptLease.FromString(leases.leases[0].SerializeToString())
    async with (
        served(new.server("vime.rollout.v1.GenerationService", answer)) as address,
        GenerationClient(address) as engine,
    ):
        generated = await engine.generate([1], SamplingParams(max_tokens=1), [1], timeout_s=5)
        with pytest.raises(BadGeneration, match="has finish reason 77, which this client does not know"):
            build_group(lease, [1], generated)


async def test_a_trainer_goes_on_waiting_for_a_buffer_that_is_blocked_by_news(new: Contracts) -> None:
    def answer(method: str, request: Any) -> Any:
        return new.message(f"vime.buffer.v1.{method}Response")(blocked_by=UNKNOWN, counts={"news": 3})

    handler = new.server("vime.buffer.v1.BatchService", answer)
    async with served(handler) as address, open_channel(address, ONCE) as channel:
        batch = await GrpcLedger(channel).lease_batch(1, 1, 1.0)
    assert (batch.groups, batch.ended, batch.blocked_by, batch.counts) == ([], False, "77", {"news": 3})


async def test_a_driver_skips_events_and_states_of_a_newer_trainer(new: Contracts) -> None:
    def answer(method: str, request: Any) -> Any:
        if method == "Watch":
            event = new.message("vime.trainer.v1.WatchResponse")
            status = new.message("vime.trainer.v1.TrainerStatus")(state=UNKNOWN, activity="something new")
            return [event(sequence=1, of_tomorrow="another kind of event"), event(sequence=2, status=status)]
        return _full(new, "vime.trainer.v1")(method, request)

    handler = new.server("vime.trainer.v1.TrainerService", answer)
    async with served(handler) as address, TrainerClient(address) as trainer:
        assert (await trainer.status()).state == UNKNOWN
        progress = Progress("p", 3)
        lines = [progress.take(event) async for event in trainer.watch()]
    assert (lines, progress.activity, progress.num_steps) == (["", ""], "something new", 3)


async def test_a_launcher_counts_engines_whose_health_has_a_new_name(new: Contracts) -> None:
    handler = new.server("vime.router.v1.RouterService", _full(new, "vime.router.v1"))
    async with served(handler) as address:
        probe = Probe(address)
        assert await probe.engines(5.0) == 1
        await probe.close()


async def test_an_error_reason_of_tomorrow_is_an_error_with_its_code(new: Contracts) -> None:
    from vime_client.testing.server import refuse

    class Refusing(grpc.GenericRpcHandler):
        def service(self, details: Any) -> Any:
            async def handle(request: bytes, context: Any) -> bytes:
                await refuse(context, grpc.StatusCode.FAILED_PRECONDITION, "not on Sundays", "SUNDAY", {"day": "7"})

            return grpc.unary_unary_rpc_method_handler(handle)

    async with served(Refusing()) as address, BufferClient(address) as buffer:
        with pytest.raises(RpcError, match="not on Sundays") as caught:
            await buffer.draw("w", 1, 0.1)
    assert type(caught.value) is RpcError
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "SUNDAY")


def test_no_enum_value_of_any_contract_stops_a_log_line(new: Contracts) -> None:
    for enum in Contracts.today().enums():
        module = __import__(enum.file.name.removesuffix(".proto").replace("/", ".") + "_pb2", fromlist=["_"])
        wrapper = getattr(module, enum.name)
        assert enum_name(wrapper, UNKNOWN) == "77"
        assert (
            enum_name(wrapper, 1)
            == enum.values_by_number[1]
            .name.removeprefix(enum.values_by_number[0].name.removesuffix("UNSPECIFIED"))
            .lower()
        )
