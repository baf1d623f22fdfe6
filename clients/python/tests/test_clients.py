"""The clients for loops of one's own, and rewards and filters that are servers, against twins in memory."""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest

from vime.buffer.v1 import prompt_service_pb2 as buffer_pb
from vime.common.v1 import trajectory_pb2 as pb
from vime.plugin.v1 import plugin_service_pb2 as plugin_pb
from vime.plugin.v1 import plugin_service_pb2_grpc
from vime.trainer.v1 import trainer_service_pb2 as trainer_pb
from vime.trainer.v1 import trainer_service_pb2_grpc
from vime_client import BufferClient, GenerationClient, LeaseLost, RpcError, TrainerClient
from vime_client.channel import SENT_ONCE, ChannelSettings
from vime_client.launcher.ports import choose_ports
from vime_client.rewards.functions import FunctionError
from vime_client.rewards.reward import PluginReward
from vime_client.testing import FakeBuffer, FakeEngine, FakeTrainer, serving
from vime_client.worker.filters import NonzeroStd, PluginFilter
from vime_client.worker.group import build_group

from .conftest import wait_until


async def test_a_loop_of_ones_own_draws_generates_and_inserts() -> None:
    buffer, engine = FakeBuffer([{"prompt": "1+1="}], samples_per_prompt=2), FakeEngine()
    async with (
        serving(buffer, engine) as address,
        BufferClient(address) as client,
        GenerationClient(address) as generation,
    ):
        (leased,) = await client.lease_prompts("me", 4, 1.0)
        async with leased:
            ids = await generation.render(leased.lease.prompt.text)
            answer = await generation.generate(ids, leased.lease.sampling, leased.lease.seeds, timeout_s=5)
            group = build_group(leased.lease, ids, answer)
            for sample in group.samples:
                sample.reward = 1.0
            await leased.insert(group)
        assert await generation.decode([ids]) == ["1+1="]
        assert await client.lease_prompts("me", 4, 0.1) == []
        assert set(await client.tables()) == {"train"}
    assert [g.group_id for g in buffer.groups] == ["train-0"]
    assert not buffer.failures


async def test_k26_an_insert_is_idempotent_and_late_or_unknown_groups_are_refused() -> None:
    buffer = FakeBuffer([{"prompt": "x"}], samples_per_prompt=1)
    async with serving(buffer) as address, BufferClient(address) as client:
        (leased,) = await client.lease_prompts("me", 1, 1.0)
        group = pb.TrajectoryGroup(group_id=leased.lease.group_id, attempt=0, samples=[pb.Sample(reward=1.0)])
        await client.insert(leased.lease.lease_id, group)
        assert (await client.insert(leased.lease.lease_id, group)).already_present
        group.samples[0].reward = 0.5
        with pytest.raises(RpcError, match="ALREADY_EXISTS"):
            await client.insert(leased.lease.lease_id, group)
        with pytest.raises(RpcError, match="NOT_FOUND"):
            await client.insert("x", pb.TrajectoryGroup(group_id="unknown"))
        second = buffer.add({"prompt": "y"})
        (late,) = await client.lease_prompts("me", 1, 1.0)
        buffer.expire(second)
        with pytest.raises(LeaseLost):
            await client.insert(late.lease.lease_id, pb.TrajectoryGroup(group_id=second, attempt=0))
    assert len(buffer.groups) == 1


async def test_a_block_that_raises_gives_its_lease_back() -> None:
    buffer = FakeBuffer([{"prompt": "x"}, {"prompt": "y"}])
    async with serving(buffer) as address, BufferClient(address) as client:
        first, second = await client.lease_prompts("me", 2, 1.0)
        with pytest.raises(ZeroDivisionError):
            async with first:
                raise ZeroDivisionError("oops")
        with pytest.raises(asyncio.CancelledError):
            async with second:
                raise asyncio.CancelledError
    failures = [(failure, detail) for _, failure, detail in buffer.failures]
    assert failures[0] == (buffer_pb.FAILURE_CLASS_USER_CODE, "ZeroDivisionError: oops")
    assert failures[1][0] == buffer_pb.FAILURE_CLASS_SHUTDOWN


class AnswersFail(FakeBuffer):
    """A buffer that answers FailPrompt so."""

    def __init__(self, code: grpc.StatusCode) -> None:
        super().__init__([{"prompt": "x"}], ttl_s=0.3)
        self._code = code

    async def FailPrompt(self, request: Any, context: Any) -> Any:
        await context.abort(self._code, "as told")


@pytest.mark.parametrize("code", ["NOT_FOUND", "FAILED_PRECONDITION", "UNAVAILABLE", "INTERNAL", "DEADLINE_EXCEEDED"])
async def test_an_error_in_a_block_comes_out_whatever_the_buffer_says_to_its_lease(code: str) -> None:
    once = ChannelSettings(max_attempts=1)
    async with serving(AnswersFail(grpc.StatusCode[code])) as address, BufferClient(address, once) as client:
        (leased,) = await client.lease_prompts("me", 1, 1.0)
        with pytest.raises(ZeroDivisionError):
            async with leased:
                raise ZeroDivisionError("oops")


async def test_a_cancel_that_comes_while_a_block_ends_is_not_swallowed() -> None:
    class Hangs(FakeBuffer):
        async def KeepAlive(self, request: Any, context: Any) -> Any:
            await asyncio.sleep(60)

    buffer = Hangs([{"prompt": "x"}], samples_per_prompt=1, ttl_s=0.3)
    async with serving(buffer) as address, BufferClient(address) as client:
        (leased,) = await client.lease_prompts("me", 1, 1.0)

        async def work() -> None:
            async with leased:
                await leased.insert(pb.TrajectoryGroup(group_id=leased.lease.group_id, samples=[pb.Sample(reward=1.0)]))
                await asyncio.sleep(0.15)  # a beat is under way
                task.cancel()  # delivered at the next await, which is that of the end of the block

            await asyncio.sleep(60)

        task = asyncio.create_task(work())
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 5)


async def test_a_lease_is_kept_alive_in_its_block_and_knows_when_it_is_lost() -> None:
    buffer = FakeBuffer([{"prompt": "x"}], ttl_s=1.5)
    async with serving(buffer) as address, BufferClient(address) as client:
        (leased,) = await client.lease_prompts("me", 1, 1.0)
        async with leased:
            await asyncio.sleep(2.5)
            assert not leased.lost
            buffer.expire(leased.lease.group_id)
            await wait_until(lambda: leased.lost)
    assert not buffer.failures


async def test_the_trainers_events_are_watched_from_where_one_left_off() -> None:
    trainer = FakeTrainer(num_steps=2)
    async with serving(trainer) as address, TrainerClient(address) as client:
        assert (await client.start()).state == trainer_pb.TRAINER_STATE_RUNNING
        trainer.report(1, rollout__raw_reward=0.5)
        trainer.report(2, rollout__raw_reward=0.6)
        trainer.finish()
        events = [event async for event in client.watch()]
        assert [event.WhichOneof("event") for event in events] == ["status", "step", "step", "status"]
        assert [event.sequence async for event in client.watch(after_sequence=2)] == [3, 4]
        assert (await client.status()).state == trainer_pb.TRAINER_STATE_FINISHED


class LosesAnswers(trainer_service_pb2_grpc.TrainerServiceServicer):
    """A trainer that does what it is told and dies before it says so."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def add_to(self, server: grpc.aio.Server) -> None:
        for method in ("GetStatus", *(method for _, method in SENT_ONCE if method != "AcquireMode")):
            setattr(self, method, functools.partial(self._lose, method))
        trainer_service_pb2_grpc.add_TrainerServiceServicer_to_server(self, server)

    async def AcquireMode(self, request: Any, context: Any) -> trainer_pb.AcquireModeResponse:
        self.calls["AcquireMode"] += 1
        return trainer_pb.AcquireModeResponse(mode_lease_id="m")

    async def _lose(self, method: str, request: Any, context: Any) -> None:
        self.calls[method] += 1
        await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")


async def test_a_step_is_never_sent_twice() -> None:
    trainer = LosesAnswers()
    async with serving(trainer) as address, TrainerClient(address) as client:
        async with AsyncExitStack() as stack:
            steps = await stack.enter_async_context(client.mode("me"))
            for call in (steps.train([]), steps.publish(), steps.save_checkpoint()):
                with pytest.raises(RpcError, match="gone"):
                    await call
            with pytest.raises(RpcError, match="ReleaseMode: gone"):
                await stack.aclose()
        with pytest.raises(RpcError, match="GetStatus: gone"):
            await client.status()
    assert trainer.calls == {**{method: 1 for _, method in SENT_ONCE}, "GetStatus": 5}


async def test_a_call_that_is_sent_once_waits_for_a_trainer_that_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    port = choose_ports(["trainer"], {})["trainer"]
    trainer = LosesAnswers()
    async with TrainerClient(f"127.0.0.1:{port}") as client:
        stack = AsyncExitStack()
        entering = asyncio.create_task(stack.enter_async_context(client.mode("me")))
        await asyncio.sleep(0.5)  # the connection is refused by now
        async with serving(trainer, port=port):
            steps = await entering
            with pytest.raises(RpcError, match="gone"):
                await steps.train([])
        await asyncio.sleep(0.1)
        publishing = asyncio.create_task(steps.publish())
        await asyncio.sleep(0.5)
        async with serving(trainer, port=port):
            with pytest.raises(RpcError, match="gone"):
                await publishing
        assert trainer.calls == {"AcquireMode": 1, "TrainStep": 1, "Publish": 1}
        monkeypatch.setattr("vime_client.trainer.CONNECT_SECONDS", 0.5)
        for call in (
            steps.save_checkpoint(),
            stack.aclose(),
        ):  # nobody comes back: why, and soon
            with pytest.raises(RpcError) as caught:
                await asyncio.wait_for(call, 10)
            assert caught.value.code is grpc.StatusCode.UNAVAILABLE
            assert "onnect" in caught.value.message


async def test_a_channel_that_repeats_nothing_waits_for_nobody() -> None:
    port = choose_ports(["trainer"], {})["trainer"]
    async with TrainerClient(f"127.0.0.1:{port}", ChannelSettings(max_attempts=1)) as client:
        with pytest.raises(RpcError):
            await asyncio.wait_for(client.mode("me").__aenter__(), 5)


async def test_an_error_under_the_mode_lease_is_not_hidden_by_its_return() -> None:
    async with serving(LosesAnswers()) as address, TrainerClient(address) as client:
        with pytest.raises(ZeroDivisionError):
            async with client.mode("me"):
                raise ZeroDivisionError


def test_what_is_sent_once_is_what_the_contract_has() -> None:
    methods = trainer_pb.DESCRIPTOR.services_by_name["TrainerService"]
    assert {service for service, _ in SENT_ONCE} == {methods.full_name}
    assert {method for _, method in SENT_ONCE} <= set(methods.methods_by_name)


class Plugin(plugin_service_pb2_grpc.PluginServiceServicer):
    """A reward server that answers with what the test wants."""

    def __init__(
        self, scores: Sequence[plugin_pb.SampleScore], delay_s: float = 0.0, keep: bool = True, decisions: int = 1
    ) -> None:
        self._scores, self._delay_s, self._keep, self._decisions = scores, delay_s, keep, decisions

    def add_to(self, server: grpc.aio.Server) -> None:
        plugin_service_pb2_grpc.add_PluginServiceServicer_to_server(self, server)

    async def ScoreSamples(self, request: Any, context: Any) -> plugin_pb.ScoreSamplesResponse:
        await asyncio.sleep(self._delay_s)
        return plugin_pb.ScoreSamplesResponse(scores=self._scores)

    async def DecideGroups(self, request: Any, context: Any) -> plugin_pb.DecideGroupsResponse:
        decision = plugin_pb.GroupDecision(keep=self._keep, reason="" if self._keep else "dull")
        return plugin_pb.DecideGroupsResponse(decisions=[decision] * self._decisions)


SAMPLES = [pb.Sample(sample_index=i, response_text=str(i)) for i in range(3)]


async def test_a_reward_server_scores_and_its_odd_answers_stay_unscored() -> None:
    scores = [
        plugin_pb.SampleScore(reward=0.5, parts={"format": 1.0}),
        plugin_pb.SampleScore(reward=float("nan")),
        plugin_pb.SampleScore(unscored_reason=pb.UNSCORED_REASON_TIMEOUT, detail="judge is slow"),
    ]
    async with serving(Plugin(scores)) as address:
        reward = PluginReward(f"grpc://{address}", 5.0)
        first, second, third = await reward.score(pb.Prompt(), SAMPLES, "train")
        await reward.close()
    assert (first.reward, dict(first.parts)) == (0.5, {"format": 1.0})
    assert (second.reward, second.unscored) == (None, "NOT_FINITE")
    assert (third.unscored, third.detail) == ("TIMEOUT", "judge is slow")


async def test_what_a_reward_server_says_at_length_is_cut_or_left_unscored() -> None:
    scores = [
        plugin_pb.SampleScore(reward=1.0, parts={"a": float("inf"), "b": 0.5}, detail="long " * 1_000_000),
        plugin_pb.SampleScore(reward=1.0, parts={str(i): 1.0 for i in range(100_000)}),
        plugin_pb.SampleScore(detail="x" * 10_000_000),
    ]
    async with serving(Plugin(scores)) as address:
        reward = PluginReward(f"grpc://{address}", 20.0)
        first, second, third = await reward.score(pb.Prompt(), SAMPLES, "train")
        await reward.close()
    assert (first.reward, dict(first.parts), len(first.detail)) == (1.0, {"b": 0.5}, 300)
    assert (second.unscored, second.detail) == ("RAISED", "the reward has 100000 parts, at most 64 are taken")
    assert (third.unscored, len(third.detail)) == ("RAISED", 300)


async def test_a_reward_server_that_answers_short_late_or_not_at_all_shifts_nothing() -> None:
    one = plugin_pb.SampleScore(reward=1.0)
    async with serving(Plugin([one, one])) as address:
        short = await PluginReward(f"grpc://{address}", 5.0).score(pb.Prompt(), SAMPLES, "train")
    assert [score.reward for score in short] == [None] * 3
    assert "2 scores for 3 samples" in short[0].detail
    async with serving(Plugin([one] * 3, delay_s=5)) as address:
        late = await PluginReward(f"grpc://{address}", 0.2).score(pb.Prompt(), SAMPLES, "train")
    assert {score.unscored for score in late} == {"TIMEOUT"}
    gone = await PluginReward("grpc://127.0.0.1:1", 2.0).score(pb.Prompt(), SAMPLES, "train")
    assert {score.unscored for score in gone} <= {"CRASHED", "TIMEOUT"}


async def test_filters_look_at_raw_rewards_and_unscored_samples_do_not_count() -> None:
    def group(*rewards: float | None) -> pb.TrajectoryGroup:
        return pb.TrajectoryGroup(samples=[pb.Sample(reward=reward) for reward in rewards])

    assert await NonzeroStd().drop_reason(group(1, 0, None)) == ""
    assert await NonzeroStd().drop_reason(group(1, 1, None)) == "zero_std"
    assert await NonzeroStd().drop_reason(group(1, None, None)) == "zero_std"
    async with serving(Plugin([], keep=False)) as address:
        assert await PluginFilter(f"grpc://{address}", 2.0).drop_reason(group(1)) == "dull"
    for decisions in (0, 2):
        async with serving(Plugin([], decisions=decisions)) as address:
            with pytest.raises(FunctionError, match=f"returned {decisions} decisions for 1 group"):
                await PluginFilter(f"grpc://{address}", 2.0).drop_reason(group(1))
