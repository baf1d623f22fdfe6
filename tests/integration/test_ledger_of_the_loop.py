"""The buffer as the trainer's loop sees it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.in_process import MODEL, RUN, service

from vime.buffer.v1.prompt_service_pb2 import PromptLease
from vime.common.v1 import trajectory_pb2
from vime.common.v1.trajectory_pb2 import Sample, TrajectoryGroup
from vime.common.v1.weight_version_pb2 import VersionSpan
from vime_client.buffer import BufferClient
from vime_client.channel import ChannelSettings, open_channel
from vime_client.errors import RpcError
from vime_trainer.adapters.ledger import GrpcLedger
from vime_trainer.engine.shape import ModelShape
from vime_trainer.loop.ports import Unusable
from vime_trainer.loop.versions import Version

EVAL = "eval/x"


async def test_a_lost_ledger_is_named_with_its_remedy_which_makes_the_groups_anew(tmp_path: Path) -> None:
    """A checkpoint of step 5 meets a buffer that knows nothing."""
    async with service("buffer", tmp_path) as buffer, open_channel(buffer.address, ChannelSettings()) as channel:
        with pytest.raises(RpcError, match=r"5.*trainer\.faults\.regenerate = true") as caught:
            await GrpcLedger(channel).open_incarnation(RUN, 5, 1, "r")
        assert caught.value.reason == "RESUME_OUT_OF_RANGE"
        opened = await GrpcLedger(channel, regenerate=True).open_incarnation(RUN, 5, 1, "r")
    assert opened.incarnation == 2


def tables(folder: Path) -> dict[str, Any]:
    """A train table of two groups a step, and an eval table."""
    common = {"source": {"path": str(folder / "prompts.jsonl")}, "sampling": {"max_tokens": 8}}
    return {
        "train": common | {"samples_per_prompt": 2, "groups_per_step": 2, "max_unusable_in_a_row": 3},
        EVAL: common | {"samples_per_prompt": 1, "eval_interval": 1},
    }


def answer(lease: PromptLease, token: int = 9) -> TrajectoryGroup:
    """A group as a worker makes it of a lease."""
    version = lease.fence.exactly if lease.fence.HasField("exactly") else lease.fence.at_least
    samples = [
        Sample(
            group_id=lease.group_id,
            sample_index=i,
            seed=lease.seeds[i],
            prompt_token_ids=[5, 6],
            response_token_ids=[8, token],
            rollout_logprobs=[-1.0, -1.0],
            version_spans=[VersionSpan(first_token=0, weight_version=version)],
            status=trajectory_pb2.SAMPLE_STATUS_COMPLETED,
            finish_reason=trajectory_pb2.FINISH_REASON_STOP,
            response_text=f"to {lease.prompt.text}",
            reward=float(i),
            reward_parts={"right": float(i)},
        )
        for i in range(lease.num_samples)
    ]
    return TrajectoryGroup(
        group_id=lease.group_id,
        attempt=lease.attempt,
        table=lease.table,
        prompt=lease.prompt,
        sampling=lease.sampling,
        samples=samples,
    )


async def leases(client: BufferClient, table: str, count: int) -> list[PromptLease]:
    """That many prompts of a table."""
    found = list((await client.draw("w", count, 0.0, [table])).leases)
    assert len(found) == count
    return found


async def fill(client: BufferClient, table: str, count: int) -> None:
    """Answer `count` prompts of a table."""
    for lease in await leases(client, table, count):
        await client.insert(lease.lease_id, answer(lease))


async def test_unusable_groups_are_made_again_answers_of_evals_are_read_and_the_harvest_is_counted(
    tmp_path: Path,
) -> None:
    from vime_buffer.testing import write_prompts

    write_prompts(tmp_path / "prompts.jsonl", 5)
    own = {"tables": tables(tmp_path)}
    async with (
        service("buffer", tmp_path, own=own) as buffer,
        open_channel(buffer.address, ChannelSettings()) as channel,
        BufferClient(buffer.address) as client,
    ):
        ledger = GrpcLedger(channel, model=ModelShape.from_hf(MODEL))
        incarnation = (await ledger.open_incarnation(RUN, 0, 0, "r")).incarnation
        assert await ledger.announce(Version(RUN, incarnation, 0)) == [EVAL]
        await fill(client, EVAL, 5)
        answers = await ledger.eval_answers(EVAL, 0, 3)
        assert [a["prompt_id"].rpartition(":")[2] for a in answers] == ["0", "1", "2"]
        assert [a["response"] for a in answers] == [f"to {a['prompt']}" for a in answers]
        assert (answers[0]["reward"], answers[0]["parts"]) == (0.0, {"right": 0.0})

        first, second = await leases(client, "train", 2)
        with pytest.raises(RpcError, match="4000000"):  # outside of the model that the trainer described
            await client.insert(first.lease_id, answer(first, token=4_000_000))
        for lease in (first, second):
            await client.insert(lease.lease_id, answer(lease))
        batch = await ledger.lease_batch(incarnation, 1, 1.0)
        bad = batch.groups[0]
        await ledger.quarantine(incarnation, 1, [Unusable(bad.group_id, bad.attempt, "routes by handle" + "!" * 900)])
        assert not (await ledger.lease_batch(incarnation, 1, 0.1)).groups
        await fill(client, "train", 1)
        again = await ledger.lease_batch(incarnation, 1, 1.0)
        assert [g.group_id for g in again.groups] == [g.group_id for g in batch.groups]
        assert [g.attempt for g in again.groups] == [bad.attempt + 1, batch.groups[1].attempt]
        (kept,) = await client.quarantined()
        assert kept.group_id == bad.group_id
        found = await ledger.harvest()
        assert (found.made, found.given_up, found.stored, found.groups_per_step) == (2, {}, 0, 2)
        for attempt in (1, 2):
            await ledger.quarantine(incarnation, 1, [Unusable(bad.group_id, attempt, "again")])
            if attempt == 1:
                await fill(client, "train", 1)
                await ledger.lease_batch(incarnation, 1, 1.0)
        found = await ledger.harvest()
        assert (found.made, found.given_up) == (1, {"unusable": 1})
