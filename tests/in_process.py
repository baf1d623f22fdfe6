"""The four real services in this process over loopback; the engine has no model and the trainer no ranks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vime_buffer.config import BufferConfig
from vime_buffer.testing import write_prompts
from vime_rollout.config import RolloutConfig
from vime_router.config import RouterConfig
from vime_service import ServerConfig, Service, serving
from vime_service.server_config import ServiceConfig
from vime_trainer.config import TrainerConfig
from vime_trainer.loop.ports import RankDied
from vime_trainer.ranks.processes import RankProcesses

RUN = "run"
MODEL = Path(__file__).parents[1] / "recipes" / "addition" / "model"
KINDS = ("buffer", "router", "rollout", "trainer")
_QUICK = {"grace_seconds": 0.1}


class NoRanks(RankProcesses):
    """Ranks that cannot be started: the service around them is real."""

    def __init__(self) -> None:
        """No processes, now and later."""
        super().__init__(Path(), 1, Path())

    async def start(self, launch: int, environment: Mapping[str, str]) -> None:
        """Always fails."""
        raise RankDied("there are no ranks here")


def settings_of(kind: str, folder: Path, *, buffer: str = "127.0.0.1:1", router: str = "127.0.0.1:1") -> dict[str, Any]:
    """The least that the configuration file of a service must say, as a table of TOML."""
    if kind == "buffer":
        prompts = folder / "prompts.jsonl"
        if not prompts.exists():
            write_prompts(prompts, 50)
        table = {
            "source": {"path": str(prompts)},
            "sampling": {"max_tokens": 8},
            "samples_per_prompt": 2,
            "groups_per_step": 2,
        }
        return {"buffer": {"dir": str(folder / "ledger"), "run_id": RUN, "tables": {"train": table}}}
    if kind == "router":
        return {"router": {"heartbeat_period_s": 0.2, "queue_timeout_s": 3.0}}
    if kind == "rollout":
        rollout = {
            "engine": "fake",
            "engine_id": "e0",
            "serve_initial": True,
            "router": {"address": router} if router != "127.0.0.1:1" else {},
            "updates": {"staging_dir": str(folder), "payload_dir": str(folder)},
        }
        return {"rollout": rollout}
    trainer = {
        "run_id": RUN,
        "run_dir": str(folder / "run"),
        "model_path": str(MODEL),
        "buffer_address": buffer,
        "router_address": router,
        "steps": 2,
        "faults": {"max_restarts": 0},
    }
    return {"trainer": trainer}


def model_of(kind: str) -> type[ServiceConfig]:
    """The configuration class of a service."""
    models: dict[str, type[ServiceConfig]] = {
        "buffer": BufferConfig,
        "router": RouterConfig,
        "rollout": RolloutConfig,
        "trainer": TrainerConfig,
    }
    return models[kind]


def service(
    kind: str,
    folder: Path,
    server: ServerConfig | None = None,
    own: Mapping[str, Any] | None = None,
    **addresses: str,
) -> AbstractAsyncContextManager[Service]:
    """Run one service with its real wiring inside the block.

    Args:
        kind: one of `KINDS`.
        folder: where it keeps what it writes.
        server: its `[server]`; loopback without credentials if unset.
        own: more of its own section.
        addresses: `buffer` and `router`, for those that call them.
    """
    settings = settings_of(kind, folder, **addresses)
    for name, value in (own or {}).items():
        known = settings[kind].get(name)
        settings[kind][name] = {**known, **value} if isinstance(known, dict) else value
    config: Any = model_of(kind).model_validate(settings)
    server = server or ServerConfig.model_validate(_QUICK)
    register, start = _wiring(kind, config)
    return serving(kind, f"vime-{kind}", server, register, start)


def _wiring(kind: str, config: Any) -> tuple[Any, Any]:
    if kind == "buffer":
        from vime_buffer.wiring import registration

        return registration(config.buffer), None
    if kind == "router":
        from vime_router.wiring import Router

        return Router(config.router).register, None
    if kind == "rollout":
        from vime_rollout.wiring import Rollout

        rollout = Rollout(config.rollout)
        return rollout.register, rollout.start
    from vime_trainer.wiring import Wiring

    return Wiring(config, NoRanks()).register, None


@dataclass(frozen=True)
class System:
    """All four, running and knowing each other."""

    folder: Path
    services: Mapping[str, Service]

    def address(self, kind: str) -> str:
        """Where a service listens."""
        return self.services[kind].address


@asynccontextmanager
async def system(folder: Path) -> AsyncIterator[System]:
    """All four services inside the block."""
    async with AsyncExitStack() as stack:
        running: dict[str, Service] = {}
        for kind in KINDS:
            known = {name: running[name].address for name in ("buffer", "router") if name in running}
            running[kind] = await stack.enter_async_context(service(kind, folder, **known))
        yield System(folder, running)
