"""PromptService over real gRPC: what a worker sees."""

from __future__ import annotations

import asyncio
import math
import time

import grpc
import pytest

from vime.buffer.v1 import batch_service_pb2 as batch_pb
from vime.buffer.v1 import prompt_service_pb2 as prompt_pb
from vime.buffer.v1 import table_service_pb2 as table_pb
from vime.common.v1.engine_pb2 import ModelDescription
from vime_buffer.digests import payload_digest
from vime_buffer.testing import proto_group
from vime_service.clock import ManualClock

from .wire import buffer, refused


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


async def test_k19_above_the_cap_the_sender_is_told_size_and_cap(tmp_path):
    async with buffer(tmp_path, max_group_bytes=1000) as call:
        await call.begin()
        lease = (await call.lease()).leases[0]
        error = await refused(call.insert(lease, proto_group(lease, response_tokens=400)))
        assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "MESSAGE_TOO_LARGE")
        assert error.metadata["limit"] == "1000"
        assert error.retry_after is None  # waiting does not help
        assert not (await call.insert(lease)).already_present  # the lease lives on


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


async def test_a_reason_to_drop_is_a_short_word_of_its_own(tmp_path):
    async with buffer(tmp_path) as call:
        await call.begin()
        lease = (await call.lease()).leases[0]
        for reason in ("deleted", "Zero std", "x" * 65, "zero-std", "é", "a\n"):
            error = await refused(call.insert(lease, drop_reason=reason))
            assert (error.reason, error.metadata["field"]) == ("INVALID_FIELD", "drop_reason"), reason
        assert not (await call.insert(lease, drop_reason="x" * 64)).already_present


async def test_a_repeated_request_gets_the_same_leases(tmp_path):
    async with buffer(tmp_path) as call:
        await call.begin()
        request = prompt_pb.LeasePromptsRequest(worker_id="w", max_prompts=9, request_id="one")
        first = await call.prompts.LeasePrompts(request, timeout=10)
        assert len(first.leases) == 2
        assert await call.prompts.LeasePrompts(request, timeout=10) == first
        unnamed = prompt_pb.LeasePromptsRequest(worker_id="w", max_prompts=9)
        assert (await call.prompts.LeasePrompts(unnamed, timeout=10)).blocked_by == prompt_pb.BLOCK_REASON_ADMISSION
        info = (await call.tables.GetTable(table_pb.GetTableRequest(name="train"), timeout=10)).table
        assert info.counts.prompts_drawn == 2


async def test_a_lease_that_never_was_is_not_found_whatever_its_name(tmp_path):
    async with buffer(tmp_path) as call:
        await call.begin()
        lease = (await call.lease()).leases[0]
        for wrong in ("", "#", f"{lease.group_id}#².x", f"{lease.group_id}#{'9' * 5000}.x"):
            request = prompt_pb.FailPromptRequest(lease_id=wrong)
            assert (await refused(call.prompts.FailPrompt(request, timeout=10))).reason == "NOT_FOUND"


async def test_the_lease_says_what_is_wanted(tmp_path):
    train = {**TRAIN, "source": {"path": str(tmp_path / "train.jsonl")}, "require_routes": True}
    async with buffer(tmp_path, {"train": {**train, "generation_deadline": 12.5}}) as call:
        await call.begin()
        lease = (await call.lease()).leases[0]
        assert lease.require_routes
        assert lease.generation_deadline.ToTimedelta().total_seconds() == 12.5


TRAIN = {"sampling": {"max_tokens": 8, "temperature": 0.7}, "samples_per_prompt": 2, "groups_per_step": 2}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda g: setattr(g.sampling, "temperature", 5), "group.sampling.temperature"),
        (lambda g: setattr(g.sampling, "temperature", 0), "group.sampling.temperature"),
        (lambda g: setattr(g.sampling, "temperature", math.nan), "group.sampling.temperature"),
        (lambda g: setattr(g.sampling, "temperature", 1e-38), "group.sampling.temperature"),
        (lambda g: g.ClearField("sampling"), "group.sampling.temperature"),
        (lambda g: setattr(g.sampling, "top_p", 0.9), "group.sampling.top_p"),
        (lambda g: setattr(g.sampling, "max_tokens", 9), "group.sampling.max_tokens"),
        (lambda g: g.sampling.stop.append("x"), "group.sampling.stop"),
        (lambda g: setattr(g.samples[1], "seed", 3), "samples.seed"),
        (lambda g: setattr(g.prompt, "record_json", '{"answer": 99}'), "group.prompt.record_json"),
        (lambda g: setattr(g.prompt, "text", "say yes"), "group.prompt.text"),
        (lambda g: g.prompt.token_ids.ids.append(1), "group.prompt.token_ids"),
        (lambda g: g.samples[1].prompt_token_ids.append(1), "samples[1].prompt_token_ids"),
        (lambda g: g.samples[0].rollout_logprobs.__setitem__(0, -3e38), "samples[0].rollout_logprobs"),
        (lambda g: setattr(g.samples[0], "reward", 1e200), "samples[0].reward"),
        (lambda g: g.samples[0].reward_parts.update({str(n): 0.0 for n in range(100_000)}), "samples[0].reward_parts"),
    ],
)
async def test_a_group_is_held_to_its_lease_and_the_lease_lives_on(tmp_path, change, field):
    async with buffer(tmp_path, {"train": {**TRAIN, "source": {"path": str(tmp_path / "train.jsonl")}}}) as call:
        await call.begin()
        lease = (await call.lease()).leases[0]
        group = proto_group(lease)
        change(group)
        error = await refused(call.insert(lease, group))
        assert (error.code, error.metadata["field"]) == (grpc.StatusCode.INVALID_ARGUMENT, field)
        assert not (await call.insert(lease)).already_present


async def test_a_demonstration_was_not_sampled_and_need_not_say_how(tmp_path):
    async with buffer(tmp_path, {"sft": {**TRAIN, "source": {"path": str(tmp_path / "train.jsonl")}}}) as call:
        await call.begin()
        lease = (await call.lease()).leases[0]
        group = proto_group(lease)
        group.ClearField("sampling")
        for sample in group.samples:
            sample.seed = 0
        assert not (await call.insert(lease, group)).already_present


async def test_token_ids_of_the_record_are_the_prompt(tmp_path):
    (tmp_path / "ids.jsonl").write_text('{"prompt": [1, 2, 3]}\n{"prompt": [1, 2, 4]}\n')
    async with buffer(tmp_path, {"train": {**TRAIN, "source": {"path": str(tmp_path / "ids.jsonl")}}}) as call:
        await call.begin()
        first, second = (await call.lease()).leases
        assert not (await call.insert(first)).already_present
        error = await refused(call.insert(second))  # its samples begin with 1, 2, 3
        assert error.metadata["field"] == "samples[0].prompt_token_ids"


async def test_a_group_is_held_to_the_sampling_of_its_lease_not_to_that_of_the_table_now(tmp_path):
    train = {**TRAIN, "source": {"path": str(tmp_path / "train.jsonl")}}
    async with buffer(tmp_path, {"train": train}) as call:
        await call.begin()
        lease, other = (await call.lease()).leases
        config = (await call.tables.GetTable(table_pb.GetTableRequest(name="train"), timeout=10)).table.config
        config.sampling.temperature = 0.9
        await call.tables.UpdateTable(table_pb.UpdateTableRequest(config=config), timeout=10)
        assert not (await call.insert(lease)).already_present
        group = proto_group(other)
        group.sampling.temperature = 0.9
        assert "temperature" in (await refused(call.insert(other, group))).message
        bare = proto_group(other)  # a client that sends back no more of the prompt than its id
        bare.prompt.Clear()
        bare.prompt.prompt_id = other.prompt.prompt_id
        assert not (await call.insert(other, bare)).already_present


@pytest.mark.parametrize("poison", ["token", "expert", "repeat", "handle", "layers", "stranger"])
async def test_what_the_trained_model_cannot_have_produced_is_refused_and_a_healthy_group_follows(tmp_path, poison):
    train = {**TRAIN, "source": {"path": str(tmp_path / "train.jsonl")}, "require_routes": True}
    async with buffer(tmp_path, {"train": train}) as call:
        model = ModelDescription(
            vocab_size=100, max_model_len=64, moe_layer_ids=[0, 1], num_experts=8, experts_per_token=2
        )
        opened = batch_pb.OpenIncarnationRequest(run_id="run", recipe_digest="r", model=model)
        call.incarnation = (await call.batches.OpenIncarnation(opened, timeout=10)).incarnation
        await call.batches.AnnounceVersion(batch_pb.AnnounceVersionRequest(version=call.version(0)), timeout=10)
        lease = (await call.lease()).leases[0]
        group = proto_group(lease, moe_layers=2)
        sample = group.samples[1]
        experts = sample.routed_experts.segments[0].experts
        if poison == "token":
            sample.response_token_ids[2] = 100
        elif poison in ("expert", "repeat"):
            experts.inline = experts.inline[:-1] + (b"\x08" if poison == "expert" else b"\x00")
            experts.digest = payload_digest(experts.inline).hex()
        elif poison == "handle":
            experts.handle.key = "http://evil"
        elif poison == "layers":
            sample.routed_experts.moe_layer_ids[:] = [1, 2]
        else:
            sample.group_id = "train/train:0:7"
        error = await refused(call.insert(lease, group))
        assert error.code is grpc.StatusCode.INVALID_ARGUMENT
        assert error.metadata["field"].startswith("samples[1].")
        await call.insert(lease, proto_group(lease, moe_layers=2))
