"""Settings of one rollout worker. The launcher writes them from a recipe; `vime worker` makes them in memory."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from pydantic import Field

from vime_client.channel_settings import Credentials
from vime_client.config_loading import ConfigModel, Seconds
from vime_client.logs import LogConfig
from vime_client.recipe import Recipe
from vime_client.telemetry import TelemetryConfig
from vime_client.worker.demonstrations import DemonstrationSection


def default_worker_id() -> str:
    """Host and process id: unique for the worker's life."""
    return f"{socket.gethostname()}-{os.getpid()}"


class WorkerTable(ConfigModel):
    """What a worker must know about a table beyond what its leases say."""

    reward: str = "default"
    """Name of the table's reward."""
    source: Path | None = None
    """JSONL file of its records, where this machine has it: the rewards are checked against it before the start."""
    prompt_key: str = "prompt"
    """Key of the prompt in them."""
    required_keys: list[str] = Field(default=[])
    """Keys that they all have: one without is the buffer's to refuse, or to skip."""
    limit: int = Field(default=0, ge=0)
    """How many of them are used, from the start; 0: all."""
    require_routes: bool = False
    """Ask the engine for routing traces."""
    generation_timeout_s: Seconds = 50.0
    """Longest that generating one group may take, from the call to its answer."""


class WorkerSettings(ConfigModel):
    """The `[worker]` section."""

    worker_id: str = Field(default_factory=default_worker_id)
    """Names the worker in the buffer's counts and logs."""
    buffer_address: str
    """`host:port` of the buffer."""
    router_address: str
    """`host:port` of the router, or of one engine."""
    credentials: Credentials = Credentials()
    """How the worker shows itself to buffer and router."""
    base_dir: Path
    """Folder that relative reward files are taken from."""
    rewards: dict[str, str]
    """Rewards by name."""
    reward_timeout_s: Seconds = 10.0
    """How long one reward may take."""
    reward_processes: int = Field(default=4, ge=1)
    """Processes that run rewards."""
    filter: str = ""
    """Which finished groups of train tables are kept."""
    demonstration: DemonstrationSection = DemonstrationSection()
    """Where demonstrations stand in the records of table `sft`."""
    concurrency: int = Field(default=32, ge=1)
    """Prompts in hand at once."""
    tables: dict[str, WorkerTable] = Field(default={})
    """Tables by name."""
    lease_wait_s: Seconds = 5.0
    """How long one LeasePrompts call may wait for admission."""
    insert_timeout_s: Seconds = 120.0
    """How long a finished group is offered to a buffer that is away or full."""
    buffer_away_s: Seconds = 300.0
    """How long the buffer may be away before the worker gives up."""
    engines_away_s: Seconds = 600.0
    """How long a lease is held while no engine can take it; then it is given back."""
    sign_of_life: Path | None = None
    """File that is touched every second while the worker's loop turns; unset: none."""
    stop_timeout_s: Seconds = 5.0
    """How long giving leases back may take when the worker stops."""

    def table(self, name: str) -> WorkerTable:
        """Settings of a table; defaults for one that the recipe does not name."""
        return self.tables.get(name, WorkerTable())


class WorkerConfig(ConfigModel):
    """The configuration file of `python -m vime_client.worker`."""

    worker: WorkerSettings
    """The worker."""
    parent_pid: int | None = None
    """Process that started this one; when it is gone, the worker stops too."""
    log: LogConfig = LogConfig()
    """Where its log lines go."""
    telemetry: TelemetryConfig = TelemetryConfig()
    """Where its spans go."""


def worker_settings(
    recipe: Recipe, base_dir: Path, buffer_address: str, router_address: str, worker_id: str | None = None
) -> WorkerSettings:
    """The settings of a worker of `recipe`, whose file lies in `base_dir`."""
    tables = {
        name: WorkerTable(
            reward=table.reward or "default",
            source=table.source.path,
            prompt_key=table.source.prompt_key,
            required_keys=table.source.required_keys,
            limit=table.source.limit,
            require_routes=table.require_routes,
            generation_timeout_s=table.generation_deadline,
        )
        for name, table in recipe.tables.items()
    }
    return WorkerSettings(
        worker_id=worker_id or default_worker_id(),
        buffer_address=buffer_address,
        router_address=router_address,
        credentials=recipe.worker.credentials,
        base_dir=base_dir,
        rewards=recipe.rewards.by_name,
        reward_timeout_s=recipe.rewards.timeout_s,
        reward_processes=recipe.rewards.processes,
        filter=recipe.worker.filter,
        demonstration=recipe.worker.demonstration,
        concurrency=recipe.worker.concurrency,
        tables=tables,
    )
