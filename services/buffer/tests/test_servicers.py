"""The contract over real gRPC on a free port: what a worker, a trainer and a tool see."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from vime.buffer.v1 import batch_service_pb2 as batch_pb
from vime.buffer.v1 import batch_service_pb2_grpc as batch_grpc
from vime.buffer.v1 import prompt_service_pb2 as prompt_pb
from vime.buffer.v1 import prompt_service_pb2_grpc as prompt_grpc
from vime.buffer.v1 import table_service_pb2 as table_pb
from vime.buffer.v1 import table_service_pb2_grpc as table_grpc
from vime.common.v1 import trajectory_pb2 as trajectory_pb
from vime.common.v1 import weight_version_pb2 as version_pb
from vime_buffer.config import BufferSettings
from vime_buffer.convert import duration
from vime_buffer.testing import proto_group, write_prompts
from vime_buffer.wiring import registration
from vime_client.errors import RpcError
from vime_service.clock import ManualClock
from vime_service.server import serving
from vime_service.server_config import MAX_MESSAGE_BYTES, ServerConfig

RUN = "run"
OPTIONS = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES), ("grpc.max_send_message_length", MAX_MESSAGE_BYTES)]


class Caller:
    """The three services behind one channel; every call has a deadline."""

    def __init__(self, channel):
        self.prompts = prompt_grpc.PromptServiceStub(channel)
        self.batches = batch_grpc.BatchServiceStub(channel)
        self.tables = table_grpc.TableServiceStub(channel)

    async def begin(self, resume_step=0):
        opened = await self.batches.OpenIncarnation(
            batch_pb.OpenIncarnationRequest(run_id=RUN, resume_step=resume_step, recipe_digest="r"), timeout=10
        )
        self.incarnation = opened.incarnation
        await self.batches.AnnounceVersion(
            batch_pb.AnnounceVersionRequest(version=self.version(resume_step)), timeout=10
        )
        return opened

    def version(self, step):
        return version_pb.WeightVersion(run_id=RUN, incarnation=self.incarnation, step=step)

    async def lease(self, count=100, wait=0.0, timeout=10, tables=()):
        return await self.prompts.LeasePrompts(
            prompt_pb.LeasePromptsRequest(worker_id="w", max_prompts=count, wait=duration(wait), tables=tables),
            timeout=timeout,
        )

    async def insert(self, lease, group=None, drop_reason=""):
        request = prompt_pb.InsertGroupRequest(
            lease_id=lease.lease_id, group=group or proto_group(lease), drop_reason=drop_reason
        )
        return await self.prompts.InsertGroup(request, timeout=10)

    async def batch(self, step, timeout=10.0):
        return await self.batches.LeaseBatch(
            batch_pb.LeaseBatchRequest(incarnation=self.incarnation, train_step=step), timeout=timeout
        )

    async def complete(self, step, **fields):
        request = batch_pb.CompleteStepRequest(
            incarnation=self.incarnation,
            train_step=step,
            outcome=batch_pb.STEP_OUTCOME_TRAINED,
            published_version=self.version(step),
            **fields,
        )
        return await self.batches.CompleteStep(request, timeout=10)

    async def groups(self, ids):
        call = self.batches.GetGroups(batch_pb.GetGroupsRequest(group_ids=ids), timeout=20)
        return [message async for message in call]


@asynccontextmanager
async def buffer(folder, tables=None, clock=None, **settings):
    write_prompts(folder / "train.jsonl", 40)
    write_prompts(folder / "heldout.jsonl", 3)
    default = {
        "train": {
            "source": {"path": str(folder / "train.jsonl")},
            "sampling": {"max_tokens": 8},
            "samples_per_prompt": 2,
            "groups_per_step": 2,
        }
    }
    config = BufferSettings.model_validate(
        {"dir": folder / "ledger", "run_id": RUN, "seed": 5, "tables": tables or default, **settings}
    )
    async with (
        serving("buffer", "vime-buffer", ServerConfig(grace_seconds=0.5), registration(config, clock)) as service,
        grpc.aio.insecure_channel(service.address, options=OPTIONS) as channel,
    ):
        caller = Caller(channel)
        caller.service = service
        yield caller


async def refused(awaitable):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await awaitable
    return RpcError.from_aio(caught.value)


async def test_a_step_from_prompt_to_completion(tmp_path):
    async with buffer(tmp_path) as call:
        opened = await call.begin()
        assert (opened.incarnation, opened.last_ledger_step) == (1, 0)
        leases = (await call.lease()).leases
        assert [lease.group_id for lease in leases] == ["train/train:0:0", "train/train:0:1"]
        first = leases[0]
        assert first.prompt.text == "0 + 1 ="
        assert first.prompt.record_json == '{"prompt": "0 + 1 =", "answer": 1}'
        assert first.fence.at_least == call.version(0)
        assert (first.sampling.max_tokens, first.num_samples, len(first.seeds), first.ttl.seconds) == (8, 2, 2, 60)
        assert not first.HasField("eval_step")
        groups = [proto_group(lease) for lease in leases]
        for lease, group in zip(leases, groups, strict=True):
            assert not (await call.insert(lease, group)).already_present
        batch = await call.batch(1)
        assert [group.group_id for group in batch.groups] == [lease.group_id for lease in leases]
        assert batch.groups[0].sample_tokens == [7, 7]
        assert (batch.groups[0].tokens, batch.groups[0].staleness, batch.replayed) == (14, 0, False)
        assert (await call.batch(1)).replayed
        wanted = [lease.group_id for lease in reversed(leases)]
        (message,) = await call.groups(wanted)
        assert list(message.groups) == groups[::-1]  # in the order asked for, byte for byte
        await call.complete(1)
        info = (await call.tables.GetTable(table_pb.GetTableRequest(name="train"), timeout=10)).table
        assert info.policy_version == call.version(1)
        assert (info.last_leased_step, info.last_completed_step, info.counts.groups_consumed) == (1, 1, 2)
        gone = await call.batches.CheckpointCommitted(
            batch_pb.CheckpointCommittedRequest(incarnation=1, train_step=1, oldest_kept_step=1), timeout=10
        )
        assert (gone.retired_groups, gone.freed_bytes) == (2, sum(group.ByteSize() for group in groups))
        error = await refused(call.groups(wanted))
        assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "WRONG_STATE")


# ------------------------------------------------------------------ K26 on the wire


async def test_k26_the_same_bytes_again_are_present_other_bytes_exist_and_unknown_is_not_found(tmp_path):
    async with buffer(tmp_path) as call:
        await call.begin()
        lease, other = (await call.lease()).leases
        group = proto_group(lease)
        assert not (await call.insert(lease, group)).already_present
        assert (await call.insert(lease, group)).already_present
        changed = proto_group(lease)
        changed.samples[0].response_text = "another"
        error = await refused(call.insert(lease, changed))
        assert (error.code, error.reason) == (grpc.StatusCode.ALREADY_EXISTS, "ALREADY_EXISTS")
        stranger = proto_group(lease)
        stranger.group_id = "train/train:0:39"
        for sample in stranger.samples:
            sample.group_id = stranger.group_id
        error = await refused(call.insert(lease, stranger))
        assert (error.code, error.reason) == (grpc.StatusCode.NOT_FOUND, "NOT_FOUND")
        # attempt 0 after attempt 1 was issued
        await call.prompts.FailPrompt(prompt_pb.FailPromptRequest(lease_id=other.lease_id), timeout=10)
        again = (await call.lease()).leases[0]
        assert (again.group_id, again.attempt) == (other.group_id, 1)
        error = await refused(call.insert(other))
        assert (error.code, error.reason) == (grpc.StatusCode.ABORTED, "LEASE_LOST")
        assert error.metadata == {"group_id": other.group_id, "attempt": "0", "current": "1"}
        await call.insert(again)
        batch = await call.batch(1)
        assert sorted(group.group_id for group in batch.groups) == sorted([lease.group_id, other.group_id])


# ------------------------------------------------------------------ long polls


async def test_lease_prompts_waits_for_admission_and_wakes_at_once(tmp_path):
    async with buffer(tmp_path) as call:
        await call.begin()
        for lease in (await call.lease()).leases:
            await call.insert(lease)
        await call.batch(1)
        empty = await call.lease()
        assert (len(empty.leases), empty.blocked_by) == (0, prompt_pb.BLOCK_REASON_ADMISSION)
        assert (empty.counts["leased"], empty.counts["free_slots"]) == (2, 0)
        waiting = asyncio.create_task(call.lease(wait=20))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        before = time.monotonic()
        await call.complete(1)
        assert len((await waiting).leases) == 2
        assert time.monotonic() - before < 10


async def test_lease_batch_answers_before_its_deadline_with_reason_and_counts(tmp_path):
    async with buffer(tmp_path, worker_silence_s=0.05) as call:
        await call.begin()
        nobody = await call.batch(1, timeout=2.0)
        assert nobody.blocked_by == prompt_pb.BLOCK_REASON_NO_WORKER
        await call.lease(1)
        busy = await call.batch(1, timeout=2.0)
        assert (busy.blocked_by, busy.counts["open"]) == (prompt_pb.BLOCK_REASON_GENERATING, 1)


async def test_calls_that_are_cancelled_while_they_wait_leave_nothing_behind(tmp_path):
    async with buffer(tmp_path) as call:
        await call.begin()
        for lease in (await call.lease()).leases:
            await call.insert(lease)
        await call.batch(1)
        waiting = [asyncio.ensure_future(call.lease(wait=5)) for _ in range(20)]
        await asyncio.sleep(0.3)
        for one in waiting:
            one.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        while call.service.in_flight > 0:
            await asyncio.sleep(0.01)
        await call.complete(1)
        found = (await call.lease()).leases
        assert [(lease.group_id, lease.attempt) for lease in found] == [("train/train:0:2", 0), ("train/train:0:3", 0)]


async def test_polls_end_when_the_service_stops(tmp_path):
    async with buffer(tmp_path) as call:
        await call.begin()
        for lease in (await call.lease()).leases:
            await call.insert(lease)
        await call.batch(1)
        waiting = asyncio.create_task(refused(call.lease(wait=20)))
        await asyncio.sleep(0.1)
        before = time.monotonic()
        await call.service.close()
        error = await waiting
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        assert time.monotonic() - before < 10


async def test_a_lease_expires_without_any_call_and_is_extended_by_keep_alive(tmp_path):
    clock = ManualClock()
    async with buffer(tmp_path, clock=clock) as call:
        await call.begin()
        kept, lost = (await call.lease()).leases

        async def wait(seconds):  # as the sweep sees it pass: a jump would mean that the buffer stood still
            for _ in range(seconds * 2):
                clock.advance(0.5)
                await call.prompts.KeepAlive(prompt_pb.KeepAliveRequest(worker_id="w"), timeout=10)

        await wait(45)
        answer = await call.prompts.KeepAlive(
            prompt_pb.KeepAliveRequest(worker_id="w", lease_ids=[kept.lease_id, "train/x#0.0"]), timeout=10
        )
        assert (answer.ttl.seconds, list(answer.lost_lease_ids)) == (60, ["train/x#0.0"])
        await wait(14)
        waiting = asyncio.create_task(call.lease(wait=20))
        await asyncio.sleep(0.05)
        for _ in range(2):
            clock.advance(0.5)  # the sweep looks
            await asyncio.sleep(0.1)
        (again,) = (await waiting).leases
        assert (again.group_id, again.attempt) == (lost.group_id, 1)
        assert not (await call.insert(kept)).already_present


# ------------------------------------------------------------------ sizes (K19)


async def test_k19_a_long_sample_with_routes_passes_and_get_groups_stays_below_its_message_size(tmp_path):
    tables = {
        "train": {
            "source": {"path": str(tmp_path / "train.jsonl")},
            "sampling": {"max_tokens": 16384},
            "groups_per_step": 4,
            "require_routes": True,
        }
    }
    async with buffer(tmp_path, tables) as call:
        await call.begin()
        leases = (await call.lease()).leases
        long = proto_group(leases[0], response_tokens=16384, moe_layers=48, top_k=8, num_experts=512)
        assert long.ByteSize() > 12_582_912
        await call.insert(leases[0], long)
        for lease in leases[1:]:
            await call.insert(lease, proto_group(lease, response_tokens=4096, moe_layers=48, top_k=4))
        batch = await call.batch(1)
        messages = await call.groups([group.group_id for group in batch.groups])
        assert [group.group_id for message in messages for group in message.groups] == [
            g.group_id for g in batch.groups
        ]
        assert messages[0].groups[0] == long
        assert [len(message.groups) for message in messages] == [1, 2, 1]
        assert all(message.ByteSize() < 2 << 20 for message in messages[1:])


async def test_a_damaged_payload_is_named_and_made_again_by_the_next_incarnation(tmp_path):
    async with buffer(tmp_path) as call:
        await call.begin()
        leases = (await call.lease()).leases
        for lease in leases:
            await call.insert(lease)
        ids = [group.group_id for group in (await call.batch(1)).groups]
        path = tmp_path / "ledger" / "segments" / "segment-00000001.seg"
        data = bytearray(path.read_bytes())
        data[-3] ^= 1
        path.write_bytes(data)
        for _ in range(2):
            error = await refused(call.groups(ids))
            assert (error.code, error.reason) == (grpc.StatusCode.DATA_LOSS, "CORRUPTED")
            assert set(error.metadata) == {"segment", "offset"}
            assert error.metadata["segment"] == path.name
        assert len(await call.groups(ids[:1])) == 1  # its neighbour is fine
        await call.begin()
        (again,) = (await call.lease()).leases
        assert (again.group_id, again.attempt) == (ids[1], 1)
        await call.insert(again)
        assert [group.group_id for group in (await call.batch(1)).groups] == ids
        assert len(await call.groups(ids)) == 1


async def test_k19_above_the_cap_the_sender_is_told_size_and_cap(tmp_path):
    async with buffer(tmp_path, max_group_bytes=1000) as call:
        await call.begin()
        lease = (await call.lease()).leases[0]
        error = await refused(call.insert(lease, proto_group(lease, response_tokens=400)))
        assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "MESSAGE_TOO_LARGE")
        assert error.metadata["limit"] == "1000"
        assert error.retry_after is None  # waiting does not help
        assert not (await call.insert(lease)).already_present  # the lease lives on


# ------------------------------------------------------------------ errors


async def test_wrong_requests_name_field_and_reason(tmp_path):
    async with buffer(tmp_path) as call:
        await call.begin()
        lease = (await call.lease()).leases[0]
        group = proto_group(lease)
        del group.samples[0].rollout_logprobs[-1:]
        error = await refused(call.insert(lease, group))
        assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "LENGTH_MISMATCH")
        assert error.metadata == {"field": "samples[0].rollout_logprobs", "expected": "4", "actual": "3"}
        assert (await refused(call.lease(0))).metadata["field"] == "max_prompts"
        assert (await refused(call.lease(tables=["eval/none"]))).reason == "NOT_FOUND"
        assert (await refused(call.batch(7))).metadata == {"step": "7", "expected": "1"}
        stale = batch_pb.LeaseBatchRequest(incarnation=0, train_step=1)
        error = await refused(call.batches.LeaseBatch(stale, timeout=5))
        assert (error.code, error.reason) == (grpc.StatusCode.ABORTED, "STALE_INCARNATION")
        assert error.metadata == {"incarnation": "0", "current": "1"}
        error = await refused(call.batches.OpenIncarnation(batch_pb.OpenIncarnationRequest(run_id="other"), timeout=5))
        assert error.reason == "FLEET_OWNED"
        unspecified = batch_pb.CompleteStepRequest(incarnation=1, train_step=1)
        assert (await refused(call.batches.CompleteStep(unspecified, timeout=5))).metadata["field"] == "outcome"


async def test_k40_bytes_that_are_no_group_are_refused_and_run_nothing(tmp_path):
    """A pickle that would create a file is sent as a request and in a bytes field."""
    import os
    import pickle

    marker = tmp_path / "marker"

    class Bomb:
        def __reduce__(self):
            return os.system, (f"touch {marker}",)

    bomb = pickle.dumps(Bomb())
    async with buffer(tmp_path) as call:
        await call.begin()
        lease = (await call.lease()).leases[0]
        group = proto_group(lease, moe_layers=2, top_k=2)
        group.samples[0].routed_experts.segments[0].experts.inline = bomb
        assert (await refused(call.insert(lease, group))).code is grpc.StatusCode.INVALID_ARGUMENT
        async with grpc.aio.insecure_channel(call.service.address) as channel:
            raw = channel.unary_unary("/vime.buffer.v1.PromptService/InsertGroup")
            error = await refused(raw(bomb, timeout=5))
            assert error.code not in (grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE)
        assert not (await call.insert(lease)).already_present  # and the service goes on
    assert not marker.exists()


# ------------------------------------------------------------------ evals


async def test_an_eval_round_over_the_wire(tmp_path):
    tables = {
        "train": {
            "source": {"path": str(tmp_path / "train.jsonl")},
            "sampling": {"max_tokens": 8},
            "groups_per_step": 1,
        },
        "eval/heldout": {
            "source": {"path": str(tmp_path / "heldout.jsonl")},
            "sampling": {"max_tokens": 8, "temperature": 0},
            "samples_per_prompt": 2,
        },
    }
    async with buffer(tmp_path, tables) as call:
        await call.begin()
        held = await call.batch(1, timeout=2.0)
        assert (held.blocked_by, held.counts["eval_pending"]) == (prompt_pb.BLOCK_REASON_EVAL, 3)
        leases = (await call.lease(3)).leases
        assert {lease.table for lease in leases} == {"eval/heldout"}
        assert leases[0].fence.exactly == call.version(0)
        assert (leases[0].eval_step, leases[0].HasField("eval_step")) == (0, True)
        assert leases[0].sampling.HasField("temperature")
        for lease in leases:
            await call.insert(lease, proto_group(lease, rewards=[1.0, 0.0]))
        result = await call.batches.GetEvalRound(batch_pb.GetEvalRoundRequest(table="eval/heldout", step=0), timeout=5)
        assert (result.done, result.prompts, result.inserted, result.scored) == (True, 3, 3, 6)
        assert result.mean_reward == 0.5
        assert dict(result.pass_at_k) == {1: 0.5, 2: 1.0}
        assert result.version == call.version(0)
        (lease,) = (await call.lease()).leases
        assert lease.table == "train"


# ------------------------------------------------------------------ TableService


def table_config(folder, **fields):
    config = table_pb.TableConfig(
        name="eval/more",
        source=table_pb.PromptSource(path=str(folder / "heldout.jsonl"), name="more"),
        sampling=trajectory_pb.SamplingParams(max_tokens=4),
        samples_per_prompt=1,
    )
    config.MergeFrom(table_pb.TableConfig(**fields))
    return config


async def test_tables_are_made_listed_changed_and_made_again(tmp_path):
    async with buffer(tmp_path) as call:
        request = table_pb.CreateTableRequest(config=table_config(tmp_path))
        made = (await call.tables.CreateTable(request, timeout=10)).config
        assert (made.max_attempts, made.lease_ttl.seconds, made.eval_hold) == (3, 60, True)
        assert (await call.tables.CreateTable(request, timeout=10)).config == made
        other = table_pb.CreateTableRequest(config=table_config(tmp_path, samples_per_prompt=2))
        assert (await refused(call.tables.CreateTable(other, timeout=10))).reason == "ALREADY_EXISTS"
        made.eval_interval = 7
        changed = await call.tables.UpdateTable(table_pb.UpdateTableRequest(config=made), timeout=10)
        assert changed.table.config.eval_interval == 7
        made.samples_per_prompt = 9
        error = await refused(call.tables.UpdateTable(table_pb.UpdateTableRequest(config=made), timeout=10))
        assert (error.code, error.metadata["field"]) == (grpc.StatusCode.FAILED_PRECONDITION, "samples_per_prompt")
        page = await call.tables.ListTables(table_pb.ListTablesRequest(page_size=1), timeout=10)
        assert [info.config.name for info in page.tables] == ["eval/more"]
        rest = await call.tables.ListTables(
            table_pb.ListTablesRequest(page_size=1, page_token=page.next_page_token), timeout=10
        )
        assert [info.config.name for info in rest.tables] == ["train"]
        assert rest.next_page_token == ""


async def test_create_table_reads_no_file_outside_the_configured_folders(tmp_path):
    async with buffer(tmp_path) as call:
        for path in ("/etc/passwd", "../../etc/passwd", f"{tmp_path}/../../etc/passwd"):
            config = table_config(tmp_path)
            config.source.path = path
            error = await refused(call.tables.CreateTable(table_pb.CreateTableRequest(config=config), timeout=10))
            assert error.reason == "PERMISSION_DENIED", path
        (tmp_path / "link.jsonl").symlink_to("/etc/passwd")
        config.source.path = "link.jsonl"
        error = await refused(call.tables.CreateTable(table_pb.CreateTableRequest(config=config), timeout=10))
        assert error.reason == "PERMISSION_DENIED"


@pytest.mark.parametrize(
    ("fields", "reason", "values"),
    [
        ({"name": "train2"}, "INVALID_FIELD", ()),
        ({"groups_per_step": 4}, "INVALID_FIELD", ("4",)),
        ({"lease_ttl": Duration(seconds=5)}, "IMPOSSIBLE_CONFIG", ("5.0", "50.0")),
        ({"selector": 9}, "INVALID_FIELD", ()),
    ],
)
async def test_a_table_that_cannot_work_is_refused_by_name(tmp_path, fields, reason, values):
    async with buffer(tmp_path) as call:
        request = table_pb.CreateTableRequest(config=table_config(tmp_path, **fields))
        error = await refused(call.tables.CreateTable(request, timeout=10))
        assert error.reason == reason
        assert set(values) <= set(error.metadata.values())


async def test_groups_are_listed_by_page_and_deleted(tmp_path):
    async with buffer(tmp_path) as call:
        await call.begin()
        leases = (await call.lease()).leases
        await call.insert(leases[0])
        first = await call.tables.ListGroups(table_pb.ListGroupsRequest(table="train", page_size=1), timeout=10)
        (row,) = first.groups
        assert (row.group_id, row.state, row.admission) == (leases[0].group_id, table_pb.GROUP_STATE_STORED, 1)
        assert (row.mean_reward, row.oldest_version, row.HasField("train_step")) == (0.5, call.version(0), False)
        second = await call.tables.ListGroups(
            table_pb.ListGroupsRequest(table="train", page_size=1, page_token=first.next_page_token), timeout=10
        )
        assert [row.state for row in second.groups] == [table_pb.GROUP_STATE_OPEN]
        assert second.next_page_token == ""
        request = table_pb.DeleteGroupsRequest(table="train", group_ids=[leases[0].group_id])
        assert (await call.tables.DeleteGroups(request, timeout=10)).deleted == 1
        assert (await call.tables.DeleteGroups(request, timeout=10)).deleted == 1
        info = (await call.tables.GetTable(table_pb.GetTableRequest(name="train"), timeout=10)).table
        assert dict(info.counts.groups_dropped) == {"deleted": 1}
        request.group_ids[0] = leases[1].group_id
        assert (await refused(call.tables.DeleteGroups(request, timeout=10))).reason == "WRONG_STATE"


async def test_watch_shows_changes_and_ends_with_its_deadline(tmp_path):
    async with buffer(tmp_path) as call:
        await call.begin()
        seen = []

        async def watch():
            stream = call.tables.WatchTable(table_pb.WatchTableRequest(name="train"), timeout=2)
            seen.extend([message.table.counts.prompts_open async for message in stream])

        watching = asyncio.create_task(watch())
        await asyncio.sleep(0.2)
        await call.lease(1)
        await asyncio.sleep(0.2)
        await call.lease(1)
        await watching  # ends by itself, without an error
        assert seen == [0, 1, 2]


async def test_both_laws_are_metrics(tmp_path):
    from vime_service.telemetry import Telemetry, TelemetryConfig

    write_prompts(tmp_path / "train.jsonl", 4)
    config = BufferSettings.model_validate(
        {
            "dir": tmp_path / "ledger",
            "run_id": RUN,
            "tables": {
                "train": {
                    "source": {"path": str(tmp_path / "train.jsonl")},
                    "sampling": {"max_tokens": 8},
                    "groups_per_step": 2,
                }
            },
        }
    )
    telemetry = Telemetry("buffer", "0", TelemetryConfig())
    async with (
        serving("buffer", "vime-buffer", ServerConfig(), registration(config), telemetry=telemetry) as service,
        grpc.aio.insecure_channel(service.address) as channel,
    ):
        call = Caller(channel)
        await call.begin()
        lease, other = (await call.lease()).leases
        await call.insert(lease, proto_group(lease))
        await call.insert(other, proto_group(other), drop_reason="zero_std")
        values = await asyncio.to_thread(telemetry.metrics.snapshot)
    assert values["vime.buffer.groups{state=inserted,table=train}"] == 2
    assert values["vime.buffer.groups{state=stored,table=train}"] == 1
    assert values["vime.buffer.groups{reason=zero_std,state=dropped,table=train}"] == 1
    assert values["vime.buffer.prompts{state=drawn,table=train}"] == 2
    assert values["vime.buffer.broken_laws{table=train}"] == 0
