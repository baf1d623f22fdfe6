"""TableService and metrics over real gRPC: what tools and people see."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from vime.buffer.v1 import table_service_pb2 as table_pb
from vime.common.v1 import trajectory_pb2 as trajectory_pb
from vime_buffer.config import BufferSettings
from vime_buffer.metrics import register_metrics
from vime_buffer.testing import proto_group, write_prompts
from vime_buffer.wiring import registration
from vime_service.server import serving
from vime_service.server_config import ServerConfig

from .wire import RUN, Caller, buffer, refused


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


def test_the_gauges_of_one_collection_share_one_look():
    looks, gauges, now = [], [], [0.0]

    class Metrics:
        def observe(self, name, question, read):
            gauges.append(read)

    def look():
        looks.append(now[0])
        return []

    register_metrics(Metrics(), look, lambda: now[0])
    for moment in (0.0, 1.0):
        now[0] = moment
        assert [list(read()) for read in gauges] == [[]] * 5
    assert looks == [0.0, 1.0]
