"""The rollout worker against a buffer and an engine in memory, over the real contracts."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from vime.buffer.v1 import prompt_service_pb2 as buffer_pb
from vime.common.v1 import trajectory_pb2 as pb
from vime.common.v1 import weight_version_pb2
from vime.rollout.v1 import generation_service_pb2
from vime_client.buffer import BufferClient
from vime_client.generation import GenerationClient
from vime_client.rewards.values import Score
from vime_client.testing import FakeBuffer, FakeEngine, serving
from vime_client.testing.engine import Reply
from vime_client.testing.server import refuse
from vime_client.worker.config import WorkerSettings, WorkerTable
from vime_client.worker.filters import KeepAll
from vime_client.worker.leases import HeldLeases
from vime_client.worker.maker import GroupMaker
from vime_client.worker.worker import Worker, run_worker

from .conftest import wait_until

REWARD = """
import os, time

def score(text, record, sample_index):
    if record.get("raise_at") == sample_index:
        raise ConnectionError("grader is down")
    if record.get("always_raise"):
        raise ConnectionError("grader is down")
    return record.get("rewards", [1.0] * 8)[sample_index]

def surrogate(text, sample_index):
    if sample_index == 0:
        raise ValueError("\\ud83d" * 100_000)
    if sample_index == 1:
        return 1.0, {"\\ud83d": 1.0}
    return 1.0

def only_surrogates(text):
    raise ValueError("\\ud83d")

def fast(text):
    return 1.0

def keep_first(samples, rewards, record):
    return (rewards[0] == 1.0, "first_wrong")

def broken_filter(samples):
    raise KeyError("oops")
"""


@asynccontextmanager
async def working(
    tmp_path: Path, buffer: FakeBuffer, engine: FakeEngine, **changes: object
) -> AsyncIterator[asyncio.Task[Counter[str]]]:
    """A worker that runs inside the block; it must end cleanly after it."""
    (tmp_path / "reward.py").write_text(REWARD)
    async with serving(buffer, engine) as address:
        settings = WorkerSettings.model_validate(
            {
                "worker_id": "w0",
                "buffer_address": address,
                "router_address": address,
                "base_dir": tmp_path,
                "rewards": {"default": "reward.py:score"},
                "reward_processes": 1,
                "lease_wait_s": 0.3,
                **changes,
            }
        )
        stop = asyncio.Event()
        task = asyncio.create_task(run_worker(settings, stop))
        try:
            yield task
        finally:
            stop.set()
            await asyncio.wait_for(task, 10)


async def test_groups_carry_exactly_what_was_generated_with_seeds_fence_and_rewards(tmp_path: Path) -> None:
    version = weight_version_pb2.WeightVersion(run_id="fake", incarnation=1, step=4)
    fence = weight_version_pb2.Fence(at_least=version)
    buffer = FakeBuffer([{"prompt": "12+34=", "rewards": [0, 1, 0.5, 1]}], fence=fence)
    engine = FakeEngine(step=5)
    tables = {"train": {"require_routes": True}}
    async with working(tmp_path, buffer, engine, tables=tables):
        await buffer.settled(1)
    request = engine.requests[0]
    assert request.seeds == [0, 1, 2, 3]
    assert request.fence == fence
    assert request.return_routes
    assert request.return_text
    assert not request.allow_inexact_sampling
    (group,) = buffer.groups
    assert [sample.reward for sample in group.samples] == [0, 1, 0.5, 1]
    assert [sample.sample_index for sample in group.samples] == [0, 1, 2, 3]
    assert [sample.seed for sample in group.samples] == [0, 1, 2, 3]
    sample = group.samples[0]
    assert bytes(sample.prompt_token_ids).decode() == bytes(sample.response_token_ids).decode() == "12+34="
    assert list(sample.rollout_logprobs) == [-1.0] * 6
    assert sample.version_spans[0].weight_version.step == 5
    assert sample.status == pb.SAMPLE_STATUS_COMPLETED
    assert (group.table, group.attempt, group.prompt.prompt_id) == ("train", 0, "fake:0:0")


async def test_a_truncated_sample_keeps_its_ids_and_says_so(tmp_path: Path) -> None:
    buffer = FakeBuffer([{"prompt": "a very long prompt"}], max_tokens=3)
    async with working(tmp_path, buffer, FakeEngine()):
        await buffer.settled(1)
    sample = buffer.groups[0].samples[0]
    assert sample.response_text == "a v"
    assert (sample.status, sample.finish_reason) == (pb.SAMPLE_STATUS_TRUNCATED, pb.FINISH_REASON_LENGTH)


async def test_k10_a_raising_reward_leaves_one_sample_unscored_and_is_never_a_zero(tmp_path: Path) -> None:
    buffer = FakeBuffer([{"prompt": "x", "rewards": [1, 0, 1, 1], "raise_at": 3}])
    async with working(tmp_path, buffer, FakeEngine()) as task:
        await buffer.settled(1)
    samples = buffer.groups[0].samples
    assert [s.reward if s.HasField("reward") else None for s in samples] == [1, 0, 1, None]
    assert samples[3].unscored_reason == pb.UNSCORED_REASON_RAISED
    assert "grader is down" in samples[3].unscored_detail
    assert task.result()["unscored_raised"] == 1


async def test_k10_an_aborted_sample_is_generated_again_and_never_inserted(tmp_path: Path) -> None:
    def aborts_once(request: generation_service_pb2.GenerateRequest) -> Sequence[Reply]:
        first = len(engine.requests) == 1
        reason = pb.FINISH_REASON_ABORT if first else pb.FINISH_REASON_STOP
        return [Reply("ok"), Reply("ok"), Reply("half" if first else "ok", reason), Reply("ok")]

    engine = FakeEngine(aborts_once)
    buffer = FakeBuffer([{"prompt": "x"}])
    async with working(tmp_path, buffer, engine):
        await buffer.settled(1)
    assert [s.response_text for s in buffer.groups[0].samples] == ["ok"] * 4
    assert len(engine.requests) == 2
    assert engine.requests[0].seeds == engine.requests[1].seeds
    assert engine.requests[0].request_id != engine.requests[1].request_id


async def test_k10_a_prompt_whose_samples_always_abort_is_given_back_with_its_class(tmp_path: Path) -> None:
    engine = FakeEngine(lambda request: [Reply("x", pb.FINISH_REASON_ABORT)] * len(request.seeds))
    buffer = FakeBuffer([{"prompt": "x"}], max_attempts=2)
    async with working(tmp_path, buffer, engine) as task:
        await buffer.settled(1)
    assert not buffer.groups
    assert {failure for _, failure, _ in buffer.failures} == {buffer_pb.FAILURE_CLASS_GENERATION}
    assert len(engine.requests) == 6  # three tries of each attempt
    assert buffer.given_up == ["train-0"]
    assert len(buffer.failures) == 2
    assert sum(n for kind, n in task.result().items() if kind.startswith("failed_")) == 2


async def test_a_prompt_that_no_reward_could_score_is_given_back_as_reward_failure(tmp_path: Path) -> None:
    buffer = FakeBuffer([{"prompt": "x", "always_raise": True}], max_attempts=2)
    async with working(tmp_path, buffer, FakeEngine()):
        await buffer.settled(1)
    assert [failure for _, failure, _ in buffer.failures] == [buffer_pb.FAILURE_CLASS_REWARD] * 2
    assert "grader is down" in buffer.failures[0][2]


@pytest.mark.parametrize("reason", ["NO_ENGINE", "FENCE_NOT_MET"])
async def test_an_outage_of_the_fleet_uses_up_no_attempt_of_a_prompt(tmp_path: Path, reason: str) -> None:
    code = grpc.StatusCode.UNAVAILABLE if reason == "NO_ENGINE" else grpc.StatusCode.FAILED_PRECONDITION
    engine = FakeEngine()
    engine.refuse(code, reason, times=4)
    buffer = FakeBuffer([{"prompt": "x"}], ttl_s=0.6)
    # Shorter than the outage: it bounds one generation, not the wait for an engine.
    async with working(tmp_path, buffer, engine, tables={"train": {"generation_timeout_s": 0.5}}):
        await buffer.settled(1, 20)
    assert [group.attempt for group in buffer.groups] == [0]
    assert not buffer.failures
    assert len(engine.requests) == 5


async def test_a_fleet_that_stays_away_gives_the_prompt_back(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.refuse(grpc.StatusCode.UNAVAILABLE, "NO_ENGINE", times=1000)
    buffer = FakeBuffer([{"prompt": "x"}], max_attempts=1)
    async with working(tmp_path, buffer, engine, engines_away_s=0.8):
        await buffer.settled(1)
    assert buffer.failures[0][1] == buffer_pb.FAILURE_CLASS_GENERATION
    assert "NO_ENGINE" in buffer.failures[0][2]


async def test_a_prompt_that_an_engine_refuses_is_not_tried_again_there(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.refuse(grpc.StatusCode.INVALID_ARGUMENT, "PROMPT_TOO_LONG", times=1)
    buffer = FakeBuffer([{"prompt": "x"}], max_attempts=1)
    async with working(tmp_path, buffer, engine):
        await buffer.settled(1)
    assert len(engine.requests) == 1
    assert "PROMPT_TOO_LONG" in buffer.failures[0][2]


@pytest.mark.parametrize("code", [grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE])
async def test_a_prompt_that_can_never_be_generated_is_told_as_such_with_the_engines_sentence(
    tmp_path: Path, code: grpc.StatusCode
) -> None:
    engine = FakeEngine()
    engine.refuse(code, "PROMPT_TOO_LONG", times=1)
    buffer = FakeBuffer([{"prompt": "x"}], max_attempts=3)
    async with working(tmp_path, buffer, engine) as task:
        await buffer.settled(1)
    assert buffer.failures[0][1] == buffer_pb.FAILURE_CLASS_INVALID
    assert "refused as asked" in buffer.failures[0][2]
    assert (len(engine.requests), task.result()) == (1, {"failed_invalid": 1})


async def test_a_backend_that_answers_unknown_is_a_failed_generation_with_its_words(tmp_path: Path) -> None:
    async def breaks(request: generation_service_pb2.GenerateRequest) -> Sequence[Reply]:
        raise RuntimeError("no kernel for head size 24")

    buffer = FakeBuffer([{"prompt": "x"}], max_attempts=1)
    async with working(tmp_path, buffer, FakeEngine(breaks)):
        await buffer.settled(1)
    assert buffer.failures[0][1] == buffer_pb.FAILURE_CLASS_GENERATION
    assert "no kernel for head size 24 [UNKNOWN]" in buffer.failures[0][2].replace("'>", "")


async def test_an_engine_that_takes_no_more_calls_at_once_is_asked_again(tmp_path: Path) -> None:
    """gRPC's own refusal, as of `maximum_concurrent_rpcs`: a code, and no reason of ours."""
    engine = FakeEngine()
    engine.refuse(grpc.StatusCode.RESOURCE_EXHAUSTED, "", times=2)
    buffer = FakeBuffer([{"prompt": "x"}], max_attempts=1)
    async with working(tmp_path, buffer, engine):
        await buffer.settled(1)
    assert (len(buffer.groups), len(engine.requests)) == (1, 3)


async def test_a_generation_that_hangs_ends_at_its_deadline_and_is_cancelled_on_the_engine(tmp_path: Path) -> None:
    async def hang(request: generation_service_pb2.GenerateRequest) -> Sequence[Reply]:
        await asyncio.sleep(60)
        return []

    engine = FakeEngine(hang)
    buffer = FakeBuffer([{"prompt": "x"}], max_attempts=1)
    async with working(tmp_path, buffer, engine, tables={"train": {"generation_timeout_s": 0.4}}):
        await buffer.settled(1)
    assert buffer.failures[0][1] == buffer_pb.FAILURE_CLASS_TIMEOUT
    assert len(engine.cancelled) == 1


@pytest.mark.parametrize(
    ("replies", "says"),
    [
        ([Reply("a")], "1 of 4 samples"),
        ([Reply("a", pb.FINISH_REASON_UNSPECIFIED)] * 4, "finish reason"),
    ],
)
async def test_an_answer_that_does_not_fit_the_request_never_becomes_a_group(
    tmp_path: Path, replies: list[Reply], says: str
) -> None:
    buffer = FakeBuffer([{"prompt": "x"}], max_attempts=1)
    async with working(tmp_path, buffer, FakeEngine(lambda _: replies)):
        await buffer.settled(1)
    assert buffer.failures[0][1] == buffer_pb.FAILURE_CLASS_GENERATION
    assert says in buffer.failures[0][2]


async def test_eval_prompts_come_first_and_are_never_filtered(tmp_path: Path) -> None:
    buffer = FakeBuffer([{"prompt": "t", "rewards": [1, 1, 1, 1]}])
    buffer.add({"prompt": "e", "rewards": [1, 1, 1, 1]}, "eval/heldout")
    engine = FakeEngine()
    async with working(tmp_path, buffer, engine, filter="nonzero_std", concurrency=1):
        await buffer.settled(2)
    assert [group.table for group in buffer.groups] == ["eval/heldout"]
    assert buffer.dropped == [("train-0", "zero_std")]
    assert engine.requests[0].allow_inexact_sampling
    assert not engine.requests[1].allow_inexact_sampling


async def test_a_users_filter_drops_with_its_reason_and_its_fault_is_no_drop(tmp_path: Path) -> None:
    buffer = FakeBuffer([{"prompt": "a", "rewards": [1, 0, 0, 0]}, {"prompt": "b", "rewards": [0, 1, 1, 1]}])
    async with working(tmp_path, buffer, FakeEngine(), filter="reward.py:keep_first"):
        await buffer.settled(2)
    assert [group.group_id for group in buffer.groups] == ["train-0"]
    assert buffer.dropped == [("train-1", "first_wrong")]
    buffer = FakeBuffer([{"prompt": "a"}], max_attempts=1)
    async with working(tmp_path, buffer, FakeEngine(), filter="reward.py:broken_filter"):
        await buffer.settled(1)
    assert buffer.failures[0][1] == buffer_pb.FAILURE_CLASS_USER_CODE


async def test_leases_are_kept_alive_while_generation_takes_longer_than_they_live(tmp_path: Path) -> None:
    async def slow(request: generation_service_pb2.GenerateRequest) -> Sequence[Reply]:
        await asyncio.sleep(1.2)
        return [Reply("x")] * len(request.seeds)

    buffer = FakeBuffer([{"prompt": "x"}], ttl_s=0.4)
    async with working(tmp_path, buffer, FakeEngine(slow)):
        await buffer.settled(1)
    assert buffer.groups[0].attempt == 0
    assert buffer.keep_alives >= 3


async def test_leases_that_come_late_in_a_period_delay_no_beat() -> None:
    period, beats = 1.0, []

    class Hears(BufferClient):
        async def keep_alive(
            self, worker_id: str, lease_ids: Sequence[str], timeout_s: float
        ) -> buffer_pb.KeepAliveResponse:
            beats.append(time.monotonic())
            return buffer_pb.KeepAliveResponse()

    async with Hears("127.0.0.1:1") as buffer:
        leases = HeldLeases(buffer, "me")
        work = [asyncio.create_task(asyncio.sleep(60)) for _ in range(4)]
        ttl = Duration(seconds=3)
        leases.hold(buffer_pb.PromptLease(lease_id="0", ttl=ttl), work[0])
        beating = asyncio.create_task(leases.keep_alive())
        for number in range(1, 4):
            seen = len(beats)
            await wait_until(lambda seen=seen: len(beats) > seen, 5)
            await asyncio.sleep(beats[-1] + 0.9 * period - time.monotonic())
            leases.hold(buffer_pb.PromptLease(lease_id=str(number), ttl=ttl), work[number])
        await asyncio.sleep(1.2 * period)
        for task in (beating, *work):
            task.cancel()
    gaps = [after - before for before, after in itertools.pairwise(beats)]
    assert len(gaps) >= 3
    assert max(gaps) < 1.5 * period


async def test_a_lost_lease_is_dropped_and_its_generation_cancelled(tmp_path: Path) -> None:
    async def slow_at_first(request: generation_service_pb2.GenerateRequest) -> Sequence[Reply]:
        if len(engine.requests) == 1:
            await asyncio.sleep(60)
        return [Reply("x")] * len(request.seeds)

    engine = FakeEngine(slow_at_first)
    buffer = FakeBuffer([{"prompt": "x"}], ttl_s=0.3)
    async with working(tmp_path, buffer, engine) as task:
        await wait_until(lambda: engine.requests)
        buffer.expire("train-0")
        await buffer.settled(1)
        await wait_until(lambda: engine.cancelled)  # at once, not when the worker stops
    assert [group.attempt for group in buffer.groups] == [1]
    assert not buffer.failures
    assert task.result() == {"inserted": 1, "lost": 1}


async def test_stopping_gives_leases_back_at_once(tmp_path: Path) -> None:
    async def hang(request: generation_service_pb2.GenerateRequest) -> Sequence[Reply]:
        await asyncio.sleep(60)
        return []

    engine = FakeEngine(hang)
    buffer = FakeBuffer([{"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"}])
    async with working(tmp_path, buffer, engine):
        await wait_until(lambda: len(engine.requests) == 3)
        start = time.monotonic()
    assert time.monotonic() - start < 20
    assert [failure for _, failure, _ in buffer.failures] == [buffer_pb.FAILURE_CLASS_SHUTDOWN] * 3
    assert len(engine.cancelled) == 3


async def test_a_buffer_that_restarts_is_waited_for_and_the_group_still_arrives(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    buffer = FakeBuffer([{"prompt": "x"}])
    generated = asyncio.Event()
    go_on = asyncio.Event()

    async def wait(request: generation_service_pb2.GenerateRequest) -> Sequence[Reply]:
        generated.set()
        await go_on.wait()
        return [Reply("x")] * len(request.seeds)

    async with serving(FakeEngine(wait)) as engine_address:
        async with serving(buffer) as address:
            port = int(address.rpartition(":")[2])
            settings = WorkerSettings(
                buffer_address=address,
                router_address=engine_address,
                base_dir=tmp_path,
                rewards={"default": "reward.py:score"},
                reward_processes=1,
                lease_wait_s=0.3,
            )
            stop = asyncio.Event()
            task = asyncio.create_task(run_worker(settings, stop))
            await asyncio.wait_for(generated.wait(), 10)
        go_on.set()
        await asyncio.sleep(0.7)
        async with serving(buffer, port=port):
            await buffer.settled(1)
            stop.set()
            await asyncio.wait_for(task, 10)
    assert buffer.groups[0].attempt == 0


async def test_a_worker_asks_again_under_the_same_id_until_it_is_answered(tmp_path: Path) -> None:
    """The answer that got lost may have granted leases; under another id they would lie idle until they end."""

    asked: list[str] = []

    class Forgetful(FakeBuffer):
        async def LeasePrompts(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
            asked.append(request.request_id)
            if len(asked) <= 2:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
            return await super().LeasePrompts(request, context)

    buffer = Forgetful([{"prompt": "x"}])
    async with working(tmp_path, buffer, FakeEngine()):
        await buffer.settled(1)
        await wait_until(lambda: len(asked) >= 5)
    first, second, third, *later = asked
    assert first == second == third != ""
    assert len({first, *later}) == 1 + len(later)


@pytest.mark.parametrize("kept", [True, False], ids=["inserted", "dropped"])
async def test_a_group_whose_insert_was_never_answered_is_counted_as_what_became_of_it(
    tmp_path: Path, kept: bool
) -> None:
    class LosesAnswers(FakeBuffer):
        async def InsertGroup(self, request: buffer_pb.InsertGroupRequest, context: Any) -> Any:
            await super().InsertGroup(request, context)
            await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

        async def FailPrompt(self, request: buffer_pb.FailPromptRequest, context: Any) -> Any:
            told.set()
            return await super().FailPrompt(request, context)

    told = asyncio.Event()
    buffer = LosesAnswers([{"prompt": "x", "rewards": [1, 0, 0, 0] if kept else [1] * 4}])
    async with working(tmp_path, buffer, FakeEngine(), insert_timeout_s=0.3, filter="nonzero_std") as task:
        await asyncio.wait_for(told.wait(), 20)
        await asyncio.sleep(0.2)
    assert task.result() == {"inserted" if kept else "dropped": 1}
    assert not buffer.failures


async def test_what_a_reward_says_in_invalid_text_is_quoted_and_ends_no_worker(tmp_path: Path) -> None:
    buffer = FakeBuffer([{"prompt": "x"}])
    async with working(tmp_path, buffer, FakeEngine(), rewards={"default": "reward.py:surrogate"}) as task:
        await buffer.settled(1)
    first, second, third, _ = buffer.groups[0].samples
    assert first.unscored_detail.startswith("ValueError: \\ud83d")
    assert len(first.unscored_detail) < 400
    assert (second.unscored_reason, third.reward) == (pb.UNSCORED_REASON_RAISED, 1.0)
    assert "name of a part" in second.unscored_detail
    assert task.result() == {"inserted": 1, "unscored_raised": 2}
    buffer = FakeBuffer([{"prompt": "x"}], max_attempts=2)
    async with working(tmp_path, buffer, FakeEngine(), rewards={"default": "reward.py:only_surrogates"}):
        await buffer.settled(1)
    assert [failure for _, failure, _ in buffer.failures] == [buffer_pb.FAILURE_CLASS_REWARD] * 2
    assert "ValueError: \\ud83d" in buffer.failures[0][2]


async def test_what_nobody_foresaw_costs_its_own_lease_and_the_worker_goes_on(tmp_path: Path) -> None:
    class Unforeseen(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    class Breaks:
        async def score(self, prompt: pb.Prompt, samples: Sequence[pb.Sample], table: str) -> list[Score]:
            if prompt.text == "good":
                return [Score(1.0)] * len(samples)
            raise Unforeseen if prompt.text == "silent" else ValueError("\ud83d " * 1000)

    buffer = FakeBuffer([{"prompt": "bad"}, {"prompt": "silent"}, {"prompt": "good"}], max_attempts=1)
    async with serving(buffer, FakeEngine()) as address, BufferClient(address) as client:
        settings = WorkerSettings(buffer_address=address, router_address=address, base_dir=tmp_path, rewards={})
        async with GenerationClient(address) as engine:
            maker = GroupMaker(settings, engine, {"default": Breaks()}, KeepAll())
            worker, stop = Worker(settings, client, maker), asyncio.Event()
            task = asyncio.create_task(worker.run(stop))
            await buffer.settled(3)
            stop.set()
            counts = await asyncio.wait_for(task, 10)
    assert counts == {"inserted": 1, "failed_user_code": 2}
    told = {group: detail for group, failure, detail in buffer.failures if failure == buffer_pb.FAILURE_CLASS_USER_CODE}
    assert told["train-0"].startswith("ValueError: \\ud83d \\ud83d")
    assert len(told["train-0"]) <= 300
    assert told["train-1"] == "Unforeseen (its message raises RuntimeError)"


async def test_leases_above_the_cap_of_a_message_are_asked_for_in_smaller_numbers(tmp_path: Path) -> None:
    """32 records of 3 MB are 96 MB, the cap is 64 MiB; this buffer fills its answers by count alone."""
    records = [{"prompt": "x", "pad": "." * 3_000_000} for _ in range(32)]
    buffer = FakeBuffer(records, samples_per_prompt=1, ttl_s=2.0)
    async with working(tmp_path, buffer, FakeEngine(), rewards={"default": "reward.py:fast"}, reward_processes=2):
        await buffer.settled(32, 120)
    assert len({group.group_id for group in buffer.groups}) == 32
    assert not buffer.given_up


async def test_a_group_above_the_cap_is_given_back_with_both_numbers(tmp_path: Path) -> None:
    class Full(FakeBuffer):
        async def InsertGroup(self, request: buffer_pb.InsertGroupRequest, context: Any) -> Any:
            message = "SERVER: Received message larger than max (70000000 vs. 67108864)"
            await refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, message, "")

    buffer = Full([{"prompt": "x"}], max_attempts=1)
    async with working(tmp_path, buffer, FakeEngine()):
        await buffer.settled(1)
    assert buffer.failures[0][1] == buffer_pb.FAILURE_CLASS_GENERATION
    assert "70000000 vs. 67108864" in buffer.failures[0][2]


@pytest.mark.parametrize("code", ["RESOURCE_EXHAUSTED", "UNKNOWN", "INTERNAL", "UNIMPLEMENTED", "CANCELLED"])
async def test_a_finished_group_outlasts_refusals_that_tell_no_reason(tmp_path: Path, code: str) -> None:
    class Behind(FakeBuffer):
        refused = 0

        async def InsertGroup(self, request: buffer_pb.InsertGroupRequest, context: Any) -> Any:
            self.refused += 1
            if self.refused <= 2:
                await context.abort(grpc.StatusCode[code], "not now")
            return await super().InsertGroup(request, context)

    buffer, engine = Behind([{"prompt": "x"}], max_attempts=1), FakeEngine()
    async with working(tmp_path, buffer, engine) as task:
        await buffer.settled(1)
    assert (len(engine.requests), len(buffer.groups), buffer.failures) == (1, 1, [])
    assert task.result() == {"inserted": 1}


async def test_every_sample_is_inserted_once_over_many_prompts(tmp_path: Path) -> None:
    buffer = FakeBuffer([{"prompt": f"p{i}"} for i in range(100)], samples_per_prompt=2)
    async with working(tmp_path, buffer, FakeEngine(), concurrency=16):
        await buffer.settled(100, 30)
    ids = [group.group_id for group in buffer.groups]
    assert len(set(ids)) == len(ids) == 100


def test_unknown_tables_have_defaults() -> None:
    settings = WorkerSettings(buffer_address="a:1", router_address="a:1", base_dir=Path(), rewards={})
    assert settings.table("other") == WorkerTable()
