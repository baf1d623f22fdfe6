"""vime's Python SDK: clients of the four services, rewards, the rollout worker, the launcher and the run report.

Names are loaded when they are first used, so that `vime --help` and the services' own `--help` answer at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vime_client.buffer import BufferClient, LeasedPrompt
    from vime_client.channel import ChannelSettings, TlsClientConfig, open_channel
    from vime_client.config_loading import ConfigError, ConfigModel, load_config
    from vime_client.errors import FenceNotMet, LeaseLost, RpcError, StaleIncarnation
    from vime_client.generation import GenerationClient
    from vime_client.recipe import Recipe, load_recipe
    from vime_client.rewards.pool import RewardPool
    from vime_client.rewards.values import Score
    from vime_client.trainer import TrainerClient

_HOME = {
    "BufferClient": "buffer",
    "ChannelSettings": "channel",
    "ConfigError": "config_loading",
    "ConfigModel": "config_loading",
    "FenceNotMet": "errors",
    "GenerationClient": "generation",
    "LeaseLost": "errors",
    "LeasedPrompt": "buffer",
    "Recipe": "recipe",
    "RewardPool": "rewards.pool",
    "RpcError": "errors",
    "Score": "rewards.values",
    "StaleIncarnation": "errors",
    "TlsClientConfig": "channel",
    "TrainerClient": "trainer",
    "load_config": "config_loading",
    "load_recipe": "recipe",
    "open_channel": "channel",
}

__all__ = [
    "BufferClient",
    "ChannelSettings",
    "ConfigError",
    "ConfigModel",
    "FenceNotMet",
    "GenerationClient",
    "LeaseLost",
    "LeasedPrompt",
    "Recipe",
    "RewardPool",
    "RpcError",
    "Score",
    "StaleIncarnation",
    "TlsClientConfig",
    "TrainerClient",
    "load_config",
    "load_recipe",
    "open_channel",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
