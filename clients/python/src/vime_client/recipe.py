"""The recipe: one TOML file that says everything about a run.

Sections `[buffer]`, `[tables.*]`, `[router]`, `[rollout]` and `[trainer]` belong to the services and are passed on;
each service checks its own before anything starts. Relative paths are relative to the recipe file, but `run.dir` to
the current folder.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from vime_client.channel_settings import Credentials
from vime_client.config_loading import ConfigError, ConfigModel, Seconds, SecondsOrNone, load_config
from vime_client.worker.demonstrations import SFT_TABLE, DemonstrationSection

EVAL_PREFIX = "eval/"


def _from_recipe(path: Path, info: ValidationInfo) -> Path:
    base = (info.context or {}).get("base_dir", Path.cwd())
    return Path(os.path.normpath(Path(base).absolute() / path))


def _function_from_recipe(text: str, info: ValidationInfo) -> str:
    place, colon, function = text.rpartition(":")
    if not colon or not place.endswith(".py"):
        return text
    return f"{_from_recipe(Path(place), info)}:{function}"


RecipePath = Annotated[Path, AfterValidator(_from_recipe)]
"""A path; relative ones are taken from the recipe's folder."""
FunctionName = Annotated[str, AfterValidator(_function_from_recipe)]
"""`file.py:function` with its path as `RecipePath`, `module:function` or `grpc://host:port`."""


class RunSection(ConfigModel):
    """What the run is called and how long it is."""

    name: str
    """Name of the run and of its folder; letters, digits, `-`, `_` and `.`."""
    seed: int = Field(default=0, ge=0)
    """Seed of everything that is drawn: data order, sampling, initial noise."""
    steps: int = Field(ge=1)
    """Train steps in all."""
    dir: Path = Path("runs")
    """Where run folders are made; relative to the current folder."""

    @field_validator("name")
    @classmethod
    def _name_is_a_folder(cls, name: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            raise ValueError(f'"{name}" is no name of a folder: use letters, digits, "-", "_" and "."')
        return name


class ModelSection(ConfigModel):
    """The starting model."""

    path: RecipePath
    """Hugging Face folder: config.json, safetensors, tokenizer."""

    teacher: RecipePath | None = None
    """Hugging Face folder of the teacher of on-policy distillation, of the same shape as the starting model."""

    @field_validator("path", "teacher")
    @classmethod
    def _is_a_model(cls, path: Path | None) -> Path | None:
        if path is not None and not (path / "config.json").is_file():
            raise ValueError(f"{path} holds no config.json" if path.is_dir() else f"folder {path} does not exist")
        return path


class SourceSection(ConfigModel):
    """Where a table's prompts come from. Its other keys are the buffer's (vime.buffer.v1.PromptSource)."""

    model_config = ConfigDict(extra="allow")

    path: RecipePath
    """JSONL file of prompts."""
    prompt_key: str = "prompt"
    """Key of the record that holds the prompt."""
    required_keys: list[str] = Field(default=[])
    """Keys that every record must have."""
    limit: int = Field(default=0, ge=0)
    """Use at most this many records, from the start; 0: all."""

    @field_validator("path")
    @classmethod
    def _exists(cls, path: Path) -> Path:
        if not path.is_file():
            raise ValueError(f"file {path} does not exist")
        return path


class TableSection(ConfigModel):
    """One table. Its other keys are the buffer's (vime.buffer.v1.TableConfig)."""

    model_config = ConfigDict(extra="allow")

    source: SourceSection
    """Where its prompts come from."""
    samples_per_prompt: int = Field(default=1, ge=1)
    """Samples of a group."""
    reward: str = ""
    """Name of its reward in `[rewards]`; empty: `default`."""
    require_routes: bool = False
    """Groups must have routing traces."""

    generation_deadline: Seconds = Field(default=50.0, le=86400)
    """Longest that one generation may take, in seconds. The default is that of vime.buffer.v1.TableConfig."""


class RewardsSection(ConfigModel):
    """Rewards by name: `file.py:function`, `module:function` or `grpc://host:port`."""

    model_config = ConfigDict(extra="allow")

    default: FunctionName
    """The reward of tables that name none."""
    timeout_s: Seconds = 10.0
    """How long one call may take; then its process is killed and the sample stays unscored."""
    processes: int = Field(default=4, ge=1)
    """Processes that run rewards, per worker."""

    @model_validator(mode="after")
    def _rewards_are_names(self, info: ValidationInfo) -> RewardsSection:
        extra = self.model_extra or {}
        for name, value in extra.items():
            if isinstance(value, str):
                extra[name] = _function_from_recipe(value, info)
            else:
                near = difflib.get_close_matches(name, ["timeout_s", "processes", "default"], n=1)
                hint = f'; did you mean "rewards.{near[0]}"?' if near else ""
                raise ValueError(f'a reward must be text such as "reward.py:score", but {name} is {value!r}{hint}')
        return self

    @property
    def by_name(self) -> dict[str, str]:
        """All rewards."""
        return {"default": self.default, **{k: str(v) for k, v in (self.model_extra or {}).items()}}


class WorkerSection(ConfigModel):
    """Rollout workers: they draw prompts, generate and score."""

    count: int = Field(default=1, ge=0)
    """Workers that `vime run` starts; more may join from anywhere with `vime worker`."""
    concurrency: int = Field(default=32, ge=1)
    """Prompts that a worker has in hand at once."""
    credentials: Credentials = Credentials()
    """How workers show themselves to buffer and router, where those ask."""
    demonstration: DemonstrationSection = DemonstrationSection()
    """Where demonstrations stand in the records of table `sft`."""
    filter: FunctionName = ""
    """Which finished groups of train tables are kept: empty for all, `nonzero_std`, `file.py:function`, `grpc://...`."""


class LauncherSection(ConfigModel):
    """What `vime run` starts, and how patient it is."""

    engines: int = Field(default=1, ge=0)
    """Rollout services, each with one vLLM engine."""
    restart_limit: int = Field(default=5, ge=0)
    """Deaths of one service within `restart_window_s` that end the run."""
    restart_window_s: Seconds = 600.0
    """Deaths longer ago than this are forgiven."""
    restart_backoff_s: SecondsOrNone = 0.5
    """Wait before the first restart; doubles with every death, up to 15 s."""
    ready_timeout_s: Seconds = 180.0
    """How long services that start, or check their settings, may do nothing: neither compute nor read. Ten times as
    long is the most that they may take. An engine bounds its own start (`rollout.vllm.start_timeout_seconds`)."""
    hang_timeout_s: Seconds = 60.0
    """A service that was alive and gives no sign of life for so long is killed and started again."""
    stop_timeout_s: Seconds = 20.0
    """How long services may take to end after SIGTERM; then they are killed."""
    ports: dict[str, Annotated[int, Field(ge=1, le=65535)]] = Field(default={})
    """Fixed ports by service (`buffer`, `router`, `trainer`, `rollout-0`); others are chosen among the free ones."""
    env: dict[str, str] = Field(default={})
    """More environment variables for the services."""


class TelemetrySection(ConfigModel):
    """Where spans go."""

    traces: bool = True
    """Write spans to traces.jsonl in the run folder."""
    otlp_endpoint: str = ""
    """OTLP/gRPC collector, such as `http://localhost:4317`; empty: none."""


class Recipe(ConfigModel):
    """Everything about a run."""

    run: RunSection
    """Name and length."""
    model: ModelSection
    """The starting model."""
    tables: dict[str, TableSection]
    """Tables by name: `train`, and `eval/<name>` for evaluations."""
    rewards: RewardsSection
    """Rewards by name."""
    worker: WorkerSection = WorkerSection()
    """Rollout workers."""
    launcher: LauncherSection = LauncherSection()
    """Processes."""
    trainer: dict[str, Any] = Field(default={})
    """Sections of vime_trainer: engine, optimizer, algorithm, publish, checkpoint, metrics."""
    rollout: dict[str, Any] = Field(default={})
    """Settings of vime_rollout."""
    router: dict[str, Any] = Field(default={})
    """Settings of vime_router."""
    buffer: dict[str, Any] = Field(default={})
    """Settings of vime_buffer beside its tables."""
    telemetry: TelemetrySection = TelemetrySection()
    """Traces."""

    @model_validator(mode="after")
    def _names_fit(self) -> Recipe:
        if not self.tables:
            raise ValueError('tables: a run needs a table "train"')
        self._check_demonstrations()
        known = self.rewards.by_name
        for name, table in self.tables.items():
            if table.reward and table.reward not in known:
                near = difflib.get_close_matches(table.reward, known, n=1)
                hint = f'did you mean "{near[0]}"?' if near else f"there are: {', '.join(known)}"
                raise ValueError(f'tables."{name}".reward: no reward "{table.reward}" in [rewards]; {hint}')
            if (
                self.worker.filter == "nonzero_std"
                and not name.startswith(EVAL_PREFIX)
                and table.samples_per_prompt < 2
            ):
                raise ValueError(
                    f'worker.filter "nonzero_std" would drop every group of table "{name}": '
                    f"samples_per_prompt is {table.samples_per_prompt}, it needs at least 2"
                )
        return self

    def _check_demonstrations(self) -> None:
        supervised = self.told("trainer", "algorithm", "objective") == "sft"
        table = self.tables.get(SFT_TABLE)
        if supervised != (table is not None):
            raise ValueError(
                f'table "{SFT_TABLE}" and trainer.algorithm.objective = "sft" belong together; '
                f"the recipe has only the {'objective' if supervised else 'table'}"
            )
        if table is not None and table.samples_per_prompt != 1:
            raise ValueError(
                f'tables."{SFT_TABLE}".samples_per_prompt is {table.samples_per_prompt}: a record has one demonstration'
            )

    def told(self, section: Literal["trainer", "rollout", "router", "buffer"], *keys: str, default: Any = None) -> Any:
        """What the recipe says to a service, as it was written: no value and no type was checked by the service yet."""
        found: Any = getattr(self, section)
        for key in keys:
            found = found.get(key) if isinstance(found, dict) else None
        return default if found is None else found

    @property
    def run_dir(self) -> Path:
        """The run's folder, absolute."""
        return (Path.cwd() / self.run.dir / self.run.name).resolve()


def load_recipe(path: Path, overrides: Sequence[str] = (), name: str | None = None) -> Recipe:
    """Read and check a recipe; `name` replaces `run.name`.

    Raises:
        ConfigError: a sentence for each thing that is wrong.
    """
    if path.is_dir():
        raise ConfigError([f"{path} is a folder; a recipe is a TOML file"])
    recipe = load_config(Recipe, path, [*overrides, *([f'run.name="{name}"'] if name else [])])
    _check_functions(recipe, path)
    return recipe


def _check_functions(recipe: Recipe, path: Path) -> None:
    """Files of rewards and filter exist. What is in them is checked by the worker, which runs them apart."""
    named: Mapping[str, str] = {f"rewards.{k}": v for k, v in recipe.rewards.by_name.items()}
    problems = []
    for key, value in {**named, "worker.filter": recipe.worker.filter}.items():
        if value in ("", "nonzero_std") or value.startswith("grpc://"):
            continue
        place, colon, function = value.rpartition(":")
        if not colon or not function.isidentifier():
            problems.append(f'{path}: {key}: "{value}" must have the form file.py:function or module:function')
        elif place.endswith(".py") and not Path(place).is_file():
            problems.append(f"{path}: {key}: file {place} does not exist")
    if problems:
        raise ConfigError(problems)
