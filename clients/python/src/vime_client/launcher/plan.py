"""What a run starts: services with their configuration files, written into the run folder."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel, Field

from vime_client.addresses import join_address
from vime_client.config_loading import ConfigModel
from vime_client.private_file import write_private
from vime_client.recipe import EVAL_PREFIX, LauncherSection, Recipe
from vime_client.redaction import STARS
from vime_client.worker.config import worker_settings
from vime_client.worker.demonstrations import SFT_TABLE

HOST = "127.0.0.1"
SUPERVISOR_PID = "{supervisor_pid}"
"""Stands in a service's arguments for the id of the process that starts it."""


class ServicePlan(ConfigModel):
    """One process to keep running."""

    name: str
    """`buffer`, `router`, `trainer`, `rollout-0`, `worker-0`, ..."""
    package: str
    """Python package that it is."""
    argv: list[str]
    """Program and arguments."""
    log: Path
    """File that gets its output."""
    address: str = ""
    """`host:port` of its gRPC server; empty if it has none."""
    sign_of_life: Path | None = None
    """File that it touches while it lives, where it has no server."""
    stop_stage: int = 0
    """Services of a lower stage are stopped first."""


class RunPlan(ConfigModel):
    """Everything the supervisor must know; `services/plan.json`."""

    run_id: str
    """Names the run in weight versions."""
    services: list[ServicePlan]
    """Processes, in the order of their start."""
    env: dict[str, str] = Field(default={})
    """Environment variables for them; what the user's environment sets already stays."""
    buffer: str = ""
    """Address of the buffer; empty if there is none."""
    router: str = ""
    """Address of the router."""
    trainer: str = ""
    """Address of the trainer; empty: the run has no end of its own."""
    engines: int = 0
    """Engines that must have registered before training starts."""
    limits: LauncherSection = LauncherSection()
    """How patient the supervisor is."""


_QUEUE_S = 10.0
"""How long a call waits in the router for an engine, at most."""
_STAGE = {"worker": 0, "trainer": 1, "rollout": 2, "router": 3, "buffer": 4}
# What depends on a device (threads, compilation) is set by the engine and the ranks themselves, who know theirs.
_ENV = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
}


def service_env(plan: RunPlan) -> dict[str, str]:
    """The environment of the services: the plan's, before it the user's. Neither they nor what they start (ranks,
    engine cores) take modules from the folder where `vime run` is called."""
    return {**plan.env, **os.environ, "PYTHONSAFEPATH": "1"}


def service_names(recipe: Recipe) -> list[str]:
    """Services with a port, in the order of their start."""
    return ["buffer", "router", *(f"rollout-{i}" for i in range(recipe.launcher.engines)), "trainer"]


def write_plan(recipe: Recipe, base_dir: Path, run_dir: Path, run_id: str, ports: Mapping[str, int]) -> RunPlan:
    """Write `services/*.toml` and `services/plan.json`, and give the plan.

    Args:
        recipe: the recipe.
        base_dir: folder of the recipe file.
        run_dir: the run's folder.
        run_id: names the run in weight versions.
        ports: a port for each of `service_names`.
    """
    folder = run_dir / "services"
    folder.mkdir(parents=True, exist_ok=True)
    (run_dir / "logs").mkdir(exist_ok=True)
    address = {name: join_address(HOST, port) for name, port in ports.items()}
    sections = _sections(recipe, run_dir, run_id, address)
    services = []
    for name in service_names(recipe):
        kind = name.partition("-")[0]
        _write_toml(folder / f"{name}.toml", _service_file(recipe, run_dir, name, ports[name], {kind: sections[name]}))
        services.append(_service(run_dir, name, f"vime_{kind}", address[name]))
    for index in range(recipe.worker.count):
        name = f"worker-{index}"
        settings = worker_settings(recipe, base_dir, address["buffer"], address["router"], name)
        alive = folder / f"{name}.alive"
        worker = {**_plain(settings), "sign_of_life": str(alive)}
        _write_toml(folder / f"{name}.toml", {"worker": worker, **_common(recipe, run_dir, name)})
        services.append(_service(run_dir, name, "vime_client.worker", "", alive))
    plan = RunPlan(
        run_id=run_id,
        services=services,
        # A resumed run's secrets are in the environment that it is resumed from, which goes before this one anyway.
        env={**_ENV, **{name: value for name, value in recipe.launcher.env.items() if value != STARS}},
        buffer=address["buffer"],
        router=address["router"],
        trainer=address["trainer"],
        engines=recipe.launcher.engines,
        limits=recipe.launcher.model_copy(update={"env": {}}),
    )
    save_plan(plan, run_dir)
    return plan


def save_plan(plan: RunPlan, run_dir: Path) -> None:
    """Write `services/plan.json`."""
    (run_dir / "services").mkdir(parents=True, exist_ok=True)
    write_private(run_dir / "services" / "plan.json", plan.model_dump_json(indent=1))


def load_plan(run_dir: Path) -> RunPlan:
    """Read `services/plan.json`.

    Raises:
        FileNotFoundError: there is none.
    """
    return RunPlan.model_validate_json((run_dir / "services" / "plan.json").read_text(encoding="utf-8"))


def _sections(recipe: Recipe, run_dir: Path, run_id: str, address: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """The own section of each service: what is computed here, then what the recipe says."""
    tables = {name: table.model_dump(mode="json", exclude_unset=True) for name, table in recipe.tables.items()}
    for name in ("train", SFT_TABLE):
        if name in tables:  # said once, under [trainer.publish]; the buffer must know it to refuse what would deadlock
            tables[name].setdefault("publish_interval", recipe.told("trainer", "publish", "interval", default=1))
    deadlines = [table.generation_deadline / 2 for table in recipe.tables.values()]
    model = str(recipe.model.path)
    sections: dict[str, dict[str, Any]] = {
        "buffer": {
            "dir": str(run_dir / "buffer"),
            "run_id": run_id,
            "seed": recipe.run.seed,
            "tables": tables,
            **recipe.buffer,
        },
        # Below the generation deadline: workers must be told "no engine" before their own deadline hides it.
        "router": {"queue_timeout_s": min(_QUEUE_S, *deadlines), **recipe.router},
        "trainer": {
            "run_id": run_id,
            "run_dir": str(run_dir),
            "buffer_address": address["buffer"],
            "router_address": address["router"],
            "model_path": model,
            **({} if recipe.model.teacher is None else {"teacher_path": str(recipe.model.teacher)}),
            "steps": recipe.run.steps,
            "seed": recipe.run.seed,
            "eval_tables": [name for name in recipe.tables if name.startswith(EVAL_PREFIX)],
            **recipe.trainer,
        },
    }
    for index in range(recipe.launcher.engines):
        name = f"rollout-{index}"
        computed = {
            "engine_id": name,
            "advertise_address": address[name],
            "router": {"address": address["router"]},
            "vllm": {"model": model, "seed": recipe.run.seed},
        }
        sections[name] = _merged(computed, recipe.rollout)
    return sections


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Both, table by table; `over` wins."""
    merged = dict(base)
    for key, value in over.items():
        inner = merged.get(key)
        merged[key] = _merged(inner, value) if isinstance(inner, Mapping) and isinstance(value, Mapping) else value
    return merged


def _service_file(recipe: Recipe, run_dir: Path, name: str, port: int, section: Mapping[str, Any]) -> dict[str, Any]:
    return {"server": {"host": HOST, "port": port}, **_common(recipe, run_dir, name), **section}


def _common(recipe: Recipe, run_dir: Path, name: str) -> dict[str, Any]:
    telemetry: dict[str, Any] = {}
    if recipe.telemetry.traces:
        telemetry["traces_file"] = str(run_dir / "traces.jsonl")
    if recipe.telemetry.otlp_endpoint:
        telemetry["otlp_endpoint"] = recipe.telemetry.otlp_endpoint
    return {"telemetry": telemetry, "log": {"file": str(run_dir / "logs" / f"{name}.jsonl")}}


def _service(run_dir: Path, name: str, package: str, address: str, alive: Path | None = None) -> ServicePlan:
    pid_key = "server.parent_pid" if address else "parent_pid"
    config = str(run_dir / "services" / f"{name}.toml")
    return ServicePlan(
        name=name,
        package=package,
        argv=[sys.executable, "-m", package, "--config", config, "--set", f"{pid_key}={SUPERVISOR_PID}"],
        log=run_dir / "logs" / f"{name}.log",
        address=address,
        sign_of_life=alive,
        stop_stage=_STAGE[name.partition("-")[0]],
    )


def _plain(settings: BaseModel) -> dict[str, Any]:
    """JSON types, without None: TOML has none."""
    plain: dict[str, Any] = json.loads(settings.model_dump_json(exclude_none=True))
    return plain


def _write_toml(path: Path, data: Mapping[str, Any]) -> None:
    write_private(path, tomli_w.dumps(data))
