"""Which finished groups are worth training on (dynamic sampling). Filters look at raw rewards, before any shaping."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from vime.common.v1 import trajectory_pb2 as pb
from vime.plugin.v1 import plugin_service_pb2, plugin_service_pb2_grpc
from vime_client.channel import ChannelSettings, open_channel
from vime_client.errors import rpc_errors
from vime_client.rewards.functions import FunctionError, FunctionSpec
from vime_client.rewards.pool import RewardPool
from vime_client.rewards.reward import is_plugin, prompt_arguments, sample_arguments

NONZERO_STD = "nonzero_std"
"""Name of the filter that every recipe may use."""


class GroupFilter(Protocol):
    """Says for a group why it is to be dropped, or "" to keep it."""

    async def drop_reason(self, group: pb.TrajectoryGroup) -> str:
        """A short word for metrics, or "".

        Raises:
            FunctionError: the user's filter failed.
            RpcError: the plug-in failed.
        """
        ...


class KeepAll:
    """Keeps every group."""

    async def drop_reason(self, group: pb.TrajectoryGroup) -> str:
        """Always ""."""
        return ""


class NonzeroStd:
    """Drops groups whose scored samples all have the same reward: their advantages are 0 (DAPO, arXiv 2503.14476)."""

    async def drop_reason(self, group: pb.TrajectoryGroup) -> str:
        """`zero_std`, or ""."""
        rewards = {sample.reward for sample in group.samples if sample.HasField("reward")}
        return "zero_std" if len(rewards) <= 1 else ""


class FunctionFilter:
    """A user's function of `samples` (each with its `reward`, None if unscored), `rewards`, `record`, `prompt`."""

    def __init__(self, pool: RewardPool, spec: FunctionSpec) -> None:
        self._pool = pool
        self._spec = spec

    async def drop_reason(self, group: pb.TrajectoryGroup) -> str:
        """The user's reason, or the function's name where it gives none."""
        rewards = [sample.reward if sample.HasField("reward") else None for sample in group.samples]
        samples = [
            {**sample_arguments(sample), "reward": reward}
            for sample, reward in zip(group.samples, rewards, strict=True)
        ]
        common = {**prompt_arguments(group.prompt, group.table), "rewards": rewards}
        keep, reason = await self._pool.decide(self._spec, common, group.prompt.record_json, samples)
        return "" if keep else reason or self._spec.name


class PluginFilter:
    """A vime.plugin.v1 server."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._address = urlsplit(url).netloc
        self._channel = open_channel(self._address, ChannelSettings(timeout_s=timeout_s))
        self._stub = plugin_service_pb2_grpc.PluginServiceStub(self._channel)

    async def drop_reason(self, group: pb.TrajectoryGroup) -> str:
        """The server's reason, or "plugin" where it gives none."""
        with rpc_errors(f"plugin {self._address}"):
            answer = await self._stub.DecideGroups(
                plugin_service_pb2.DecideGroupsRequest(groups=[group]), timeout=self._timeout_s
            )
        if len(answer.decisions) != 1:
            raise FunctionError(f"plugin {self._address} returned {len(answer.decisions)} decisions for 1 group")
        decision = answer.decisions[0]
        return "" if decision.keep else decision.reason or "plugin"

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()


def make_filter(text: str, pool: RewardPool, base: Path, timeout_s: float) -> GroupFilter:
    """The filter that a recipe names.

    Raises:
        FunctionError: the text names no filter.
    """
    if not text:
        return KeepAll()
    if text == NONZERO_STD:
        return NonzeroStd()
    if is_plugin(text):
        return PluginFilter(text, timeout_s)
    return FunctionFilter(pool, FunctionSpec.parse(text, base))
