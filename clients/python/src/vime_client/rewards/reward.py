"""Rewards by name, as a worker uses them: a function in the pool, or a plug-in server in any language."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import grpc

from vime.common.v1 import trajectory_pb2 as pb
from vime.plugin.v1 import plugin_service_pb2, plugin_service_pb2_grpc
from vime_client.channel import ChannelSettings, open_channel
from vime_client.errors import RpcError, rpc_errors
from vime_client.rewards.functions import FunctionError, FunctionSpec
from vime_client.rewards.pool import RewardPool
from vime_client.rewards.values import Score, Unscored, scored, unscored

_FINISH = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length", pb.FINISH_REASON_ABORT: "abort"}


class Reward(Protocol):
    """Scores samples of one prompt."""

    async def score(self, prompt: pb.Prompt, samples: Sequence[pb.Sample], table: str) -> list[Score]:
        """One score per sample, in their order. Never raises for what a user's code does."""
        ...


class FunctionReward:
    """A user's function, run in the pool."""

    def __init__(self, pool: RewardPool, spec: FunctionSpec) -> None:
        self._pool = pool
        self._spec = spec

    async def score(self, prompt: pb.Prompt, samples: Sequence[pb.Sample], table: str) -> list[Score]:
        """One score per sample, in their order."""
        common = prompt_arguments(prompt, table)
        return await self._pool.score(self._spec, common, prompt.record_json, [sample_arguments(s) for s in samples])


class PluginReward:
    """A vime.plugin.v1 server, named `grpc://host:port` or `grpc://host:port/reward`."""

    def __init__(self, url: str, timeout_s: float) -> None:
        parts = urlsplit(url)
        self._reward = parts.path.strip("/")
        self._timeout_s = timeout_s
        self._channel = open_channel(parts.netloc, ChannelSettings(timeout_s=timeout_s))
        self._stub = plugin_service_pb2_grpc.PluginServiceStub(self._channel)
        self.address = parts.netloc

    async def score(self, prompt: pb.Prompt, samples: Sequence[pb.Sample], table: str) -> list[Score]:
        """One score per sample, in their order; a failed call or another count leaves them all unscored."""
        start = time.monotonic()
        try:
            scores = await self.ask(prompt, samples)
        except RpcError as error:
            late = error.code is grpc.StatusCode.DEADLINE_EXCEEDED
            down = error.code is grpc.StatusCode.UNAVAILABLE
            reason: Unscored = "TIMEOUT" if late else "CRASHED" if down else "RAISED"
            return [unscored(reason, str(error), time.monotonic() - start)] * len(samples)
        except FunctionError as error:
            return [unscored("RAISED", str(error), time.monotonic() - start)] * len(samples)
        seconds = (time.monotonic() - start) / max(1, len(samples))
        return [_from_plugin(score, seconds) for score in scores]

    async def ask(self, prompt: pb.Prompt, samples: Sequence[pb.Sample]) -> Sequence[plugin_service_pb2.SampleScore]:
        """The server's answer, one score per sample.

        Raises:
            RpcError: the call failed.
            FunctionError: there is another number of scores.
        """
        request = plugin_service_pb2.ScoreSamplesRequest(prompt=prompt, samples=samples, reward=self._reward)
        with rpc_errors(f"plugin {self.address}"):
            answer = await self._stub.ScoreSamples(request, timeout=self._timeout_s)
        if len(answer.scores) != len(samples):
            raise FunctionError(
                f"plugin {self.address} returned {len(answer.scores)} scores for {len(samples)} samples"
            )
        return answer.scores

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()


def is_plugin(text: str) -> bool:
    """True if a recipe's reward or filter names a plug-in server."""
    return text.startswith("grpc://")


def make_reward(text: str, pool: RewardPool, base: Path, timeout_s: float) -> FunctionReward | PluginReward:
    """The reward that a recipe names; relative paths are taken from `base`.

    Raises:
        FunctionError: the text is neither `grpc://host:port` nor `file.py:function` nor `module:function`.
    """
    return PluginReward(text, timeout_s) if is_plugin(text) else FunctionReward(pool, FunctionSpec.parse(text, base))


def prompt_arguments(prompt: pb.Prompt, table: str) -> dict[str, Any]:
    """What all samples of a prompt share: prompt (text, messages or ids), prompt_id, table, metadata."""
    shown: str | list[Any]
    match prompt.WhichOneof("input"):
        case "text":
            shown = prompt.text
        case "chat":
            shown = [chat_message(message) for message in prompt.chat.messages]
        case _:
            shown = list(prompt.token_ids.ids)
    metadata = {"source": prompt.source, "index": prompt.index, "epoch": prompt.epoch, "table": table}
    return {"prompt": shown, "prompt_id": prompt.prompt_id, "table": table, "metadata": metadata}


def chat_message(message: pb.ChatMessage) -> dict[str, Any]:
    """A message as people write it: {"role": ..., "content": ...}, with tool calls only where there are some."""
    shown: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_call_id:
        shown["tool_call_id"] = message.tool_call_id
    if message.tool_calls_json:
        shown["tool_calls"] = json.loads(message.tool_calls_json)
    return shown


def sample_arguments(sample: pb.Sample) -> dict[str, Any]:
    """What belongs to one sample: text, token_ids, finish_reason, sample_index, group_id, logprobs."""
    return {
        "text": sample.response_text,
        "token_ids": list(sample.response_token_ids),
        "prompt_token_ids": list(sample.prompt_token_ids),
        "logprobs": list(sample.rollout_logprobs),
        "finish_reason": _FINISH.get(sample.finish_reason, "unknown"),
        "sample_index": sample.sample_index,
        "group_id": sample.group_id,
    }


def apply_score(sample: pb.Sample, score: Score) -> None:
    """Write a score into a sample."""
    if score.unscored is None and score.reward is not None:
        sample.reward = score.reward
        sample.unscored_reason = pb.UNSCORED_REASON_UNSPECIFIED
    else:
        sample.unscored_reason = pb.UnscoredReason.Value(f"UNSCORED_REASON_{score.unscored}")
    sample.unscored_detail = score.detail
    sample.reward_parts.update(score.parts)
    sample.reward_time.FromNanoseconds(int(score.seconds * 1e9))


def _from_plugin(score: plugin_service_pb2.SampleScore, seconds: float) -> Score:
    if not score.HasField("reward"):
        known: Mapping[int, Unscored] = {
            pb.UNSCORED_REASON_TIMEOUT: "TIMEOUT",
            pb.UNSCORED_REASON_CRASHED: "CRASHED",
            pb.UNSCORED_REASON_NOT_FINITE: "NOT_FINITE",
            pb.UNSCORED_REASON_NOT_A_NUMBER: "NOT_A_NUMBER",
        }
        return unscored(
            known.get(score.unscored_reason, "RAISED"), score.detail or "the plug-in gave no reward", seconds
        )
    parts = {name: part for name, part in score.parts.items() if math.isfinite(part)}
    return scored(score.reward, parts, score.detail, seconds)
