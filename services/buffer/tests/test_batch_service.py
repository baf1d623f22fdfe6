"""BatchService over real gRPC: what a trainer sees."""

from __future__ import annotations

import grpc

from vime.buffer.v1 import batch_service_pb2 as batch_pb
from vime.buffer.v1 import prompt_service_pb2 as prompt_pb
from vime.buffer.v1 import table_service_pb2 as table_pb
from vime_buffer.testing import proto_group

from .wire import buffer, refused


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


async def test_lease_batch_answers_before_its_deadline_with_reason_and_counts(tmp_path):
    async with buffer(tmp_path, worker_silence_s=0.05) as call:
        await call.begin()
        nobody = await call.batch(1, timeout=2.0)
        assert nobody.blocked_by == prompt_pb.BLOCK_REASON_NO_WORKER
        await call.lease(1)
        busy = await call.batch(1, timeout=2.0)
        assert (busy.blocked_by, busy.counts["open"]) == (prompt_pb.BLOCK_REASON_GENERATING, 1)
        (held,) = busy.awaited
        assert (held.group_id, held.worker_id, held.HasField("leased_for")) == ("train/train:0:0", "w", True)


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
        for step, count in ((0, 3), (1, 0)):
            asked = table_pb.ListGroupsRequest(table="eval/heldout", eval_step=step)
            listed = (await call.tables.ListGroups(asked, timeout=5)).groups
            assert len(listed) == count
            if count:
                (message,) = await call.groups([row.group_id for row in listed])
                assert [group.samples[0].reward for group in message.groups] == [1.0] * 3


async def test_unusable_groups_leave_their_batch_and_people_can_see_them(tmp_path):
    async with buffer(tmp_path) as call:
        await call.begin()
        leases = (await call.lease()).leases
        groups = [proto_group(lease) for lease in leases]
        groups[0].samples[1].engine_id = "rollout-1"
        for lease, group in zip(leases, groups, strict=True):
            await call.insert(lease, group)
        (bad, good) = (await call.batch(1)).groups
        request = batch_pb.QuarantineGroupsRequest(incarnation=1, train_step=1)
        request.groups.add(group_id=bad.group_id, attempt=bad.attempt, detail="row 3 repeats expert 5")
        for _ in range(2):
            done = await call.batches.QuarantineGroups(request, timeout=10)
            assert (done.requeued, done.given_up) == (1, 0)
        listed = await call.tables.ListQuarantined(table_pb.ListQuarantinedRequest(), timeout=10)
        (row,) = listed.groups
        assert (row.group_id, row.attempt, row.prompt_id, row.train_step) == (bad.group_id, 0, "train:0:0", 1)
        assert (row.detail, row.worker_id, list(row.engine_ids)) == ("row 3 repeats expert 5", "w", ["rollout-1"])
        assert (row.bytes, row.kept) == (groups[0].ByteSize(), True)
        wanted = table_pb.GetQuarantinedRequest(group_id=bad.group_id)
        assert (await call.tables.GetQuarantined(wanted, timeout=10)).group == groups[0]
        info = (await call.tables.GetTable(table_pb.GetTableRequest(name="train"), timeout=10)).table
        assert dict(info.counts.groups_dropped) == {"unusable": 1}
        (lease,) = (await call.lease()).leases
        assert (lease.group_id, lease.attempt) == (bad.group_id, 1)
        await call.insert(lease)
        assert [group.group_id for group in (await call.batch(1)).groups] == [bad.group_id, good.group_id]


async def test_too_many_unusable_groups_in_a_row_end_the_run_but_are_not_served_again(tmp_path):
    train = {
        "source": {"path": str(tmp_path / "train.jsonl")},
        "sampling": {"max_tokens": 8},
        "groups_per_step": 2,
        "max_unusable_in_a_row": 1,
    }
    async with buffer(tmp_path, {"train": train}) as call:
        await call.begin()
        for lease in (await call.lease()).leases:
            await call.insert(lease)
        request = batch_pb.QuarantineGroupsRequest(incarnation=1, train_step=1)
        for group in (await call.batch(1)).groups:
            request.groups.add(group_id=group.group_id, detail=f"NaN in {group.group_id}")
        error = await refused(call.batches.QuarantineGroups(request, timeout=10))
        assert error.reason == "WRONG_STATE"
        assert "2 groups in a row (limit max_unusable_in_a_row 1); the last: train/train:0:1: NaN in" in error.message
        await call.begin()
        assert [lease.attempt for lease in (await call.lease()).leases] == [1, 1]
