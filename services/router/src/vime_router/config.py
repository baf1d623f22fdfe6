"""Configuration of the router."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from vime_client.channel import MAX_MESSAGE_BYTES, ChannelSettings, TlsClientConfig
from vime_router.directory import Ages
from vime_router.forward import ForwardLimits
from vime_router.policies import Policy, RoundRobin, RoundRobinConfig, StickyLeastLoaded, StickyLeastLoadedConfig
from vime_service.config import ConfigModel, Seconds
from vime_service.server_config import ServiceConfig


class EngineChannelConfig(ConfigModel):
    """How the router reaches the engines. The channels never repeat calls: the router does, on another engine."""

    tls: TlsClientConfig | None = None
    """Set where engines serve TLS; unset means plaintext."""
    token_file: Path | None = None
    """File that holds the bearer token for the engines."""
    token_env: str | None = None
    """Environment variable that holds the token; `token_file` wins."""
    keepalive_s: Seconds = 20.0
    """A ping after this much silence finds a connection that is half open."""
    max_message_bytes: int = Field(default=MAX_MESSAGE_BYTES, gt=0)
    """Largest message sent to or taken from an engine."""

    def settings(self) -> ChannelSettings:
        """The settings of an engine's channel."""
        return ChannelSettings(
            max_attempts=1,
            # A restarted engine at the same address must not wait for a long back-off.
            initial_backoff_s=0.1,
            max_backoff_s=0.5,
            keepalive_s=self.keepalive_s,
            max_message_bytes=self.max_message_bytes,
            tls=self.tls,
            token_file=self.token_file,
            token_env=self.token_env,
        )


def _by_name(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


PolicyConfig = Annotated[
    StickyLeastLoadedConfig | RoundRobinConfig, Field(discriminator="name"), BeforeValidator(_by_name)
]


class RouterSection(ConfigModel):
    """What is the router's own."""

    policy: PolicyConfig = StickyLeastLoadedConfig()
    """`"sticky_least_loaded"`, `"round_robin"`, or a table with the policy's name and its settings."""
    heartbeat_period_s: Seconds = 1.0
    """How often engines are told to send heartbeats."""
    suspect_after_periods: float = Field(default=3.0, ge=1, le=1e6)
    """Periods without a heartbeat after which an engine gets no new calls."""
    dead_after_periods: float = Field(default=10.0, ge=1, le=1e6)
    """Periods without a heartbeat after which an engine is dead and its calls go elsewhere."""
    forget_after_periods: float = Field(default=600.0, ge=1, le=1e6)
    """Periods without a heartbeat after which a dead engine is no longer listed."""
    queue_timeout_s: Seconds = 60.0
    """How long a call may wait for an engine that passes its fence, within its own deadline."""
    max_waiting: int = Field(default=4096, ge=1)
    """Calls that may wait for an engine at once; more get RESOURCE_EXHAUSTED."""
    max_attempts: int = Field(default=3, ge=1)
    """Engines asked for one call before it fails with ENGINE_FAILED."""
    breaker_failures: int = Field(default=3, ge=1)
    """Faults of an engine in a row that stop calls to it."""
    breaker_pause_s: Seconds = 5.0
    """Pause before one call tries such an engine again."""
    engines: EngineChannelConfig = EngineChannelConfig()
    """How engines are reached."""

    @model_validator(mode="after")
    def _in_order(self) -> RouterSection:
        order = (self.suspect_after_periods, self.dead_after_periods, self.forget_after_periods)
        if not order[0] <= order[1] <= order[2]:
            raise ValueError(
                "suspect_after_periods, dead_after_periods and forget_after_periods must not fall, "
                f"they are {order[0]:g}, {order[1]:g}, {order[2]:g}"
            )
        return self

    def ages(self) -> Ages:
        """The periods as seconds."""
        period = self.heartbeat_period_s
        return Ages(
            suspect=self.suspect_after_periods * period,
            dead=self.dead_after_periods * period,
            forget=self.forget_after_periods * period,
            # A shorter stop makes no engine suspect by itself; pardoning it, too, would keep the dead alive.
            deaf=max(1.0, self.suspect_after_periods - 1.0) * period,
        )

    def limits(self) -> ForwardLimits:
        """The bounds of one call's way."""
        return ForwardLimits(self.queue_timeout_s, self.max_waiting, self.max_attempts)

    def new_policy(self) -> Policy:
        """The policy, with nothing remembered."""
        if isinstance(self.policy, RoundRobinConfig):
            return RoundRobin()
        return StickyLeastLoaded(self.policy)


class RouterConfig(ServiceConfig):
    """The router's file."""

    router: RouterSection = RouterSection()
    """What is the router's own."""
