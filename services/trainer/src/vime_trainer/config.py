"""Settings of the trainer service: what a recipe's `[trainer]` section may say. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from vime_client.channel_settings import Credentials
from vime_client.config_loading import Key
from vime_service.config import ConfigModel, Seconds
from vime_service.devices import cuda_devices
from vime_service.server_config import ServiceConfig
from vime_trainer.algorithm_config import AlgorithmConfig, build_advantage, build_loss, needs_teacher
from vime_trainer.engine.config import EngineConfig
from vime_trainer.engine.shape import ModelShape
from vime_trainer.loop.publisher import PublishConfig


class CheckpointConfig(ConfigModel):
    """When checkpoints are written and how many stay."""

    interval: int = Field(default=20, ge=1)
    """Steps between checkpoints. The last step always writes one; the buffer may ask for one earlier."""

    keep_last: int = Field(default=2, ge=1)
    """Checkpoints kept. The one that the pointer names is never deleted."""

    export_hf: bool = False
    """Write an HF folder into every checkpoint. The last one of a run always has it."""


class MetricsConfig(ConfigModel):
    """What is measured beside the training itself."""

    no_replay_interval: int = Field(default=10, ge=0)
    """At the first step and every so many steps the batch is scored once more without replay, to show what R3 is worth;
    that costs a forward pass. 0: never."""

    sample_texts: int = Field(default=8, ge=0)
    """Samples per step that are written to samples.jsonl, and prompts per eval round, always the first ones of their
    table, whose answers are written to eval_samples.jsonl."""


class FaultConfig(ConfigModel):
    """How much trouble is borne before a run ends."""

    max_skipped_in_a_row: int = Field(default=5, ge=1)
    """Non-finite steps in a row that end the run."""

    max_restarts: int = Field(default=5, ge=0)
    """Times that died ranks are started again in one process life."""

    rank_start_timeout_s: Seconds = 180.0
    """Longest time that starting ranks may stand still: one that still imports is alive. Ten times as long in all."""

    max_given_up_share: float = Field(default=0.1, ge=0, le=1)
    """Share of the prompts that may be given up before a run that reached its end counts as incomplete."""

    command_timeout_s: Seconds = 1800.0
    """Longest time that one command of the ranks may take."""

    regenerate: bool = False
    """Where the ledger does not cover the step resumed from (the buffer's folder was lost, say), make the missing
    groups anew instead of ending the run. They are counted as re-queued prompts; the run is then no longer the same."""


class TrainerSettings(ConfigModel):
    """The `[trainer]` section."""

    run_id: str = Field(min_length=1)
    """Names the run in every weight version."""

    run_dir: Path
    """Run folder: metrics.jsonl, samples.jsonl, checkpoints/ and logs/ are written here."""

    model_path: Path
    """HF folder of the starting model."""

    teacher_path: Path | None = None
    """HF folder of the teacher of on-policy distillation, of the same shape as the starting model."""

    buffer_address: str
    """`host:port` of the buffer."""

    router_address: str
    """`host:port` of the router."""

    credentials: Credentials = Credentials()
    """How the trainer and its ranks show themselves to buffer, router and engines, and the ranks to the trainer."""

    steps: int = Field(ge=1)
    """Train steps in all, counted from the start of the run."""

    seed: int = 0
    """Seed of the run."""

    world_size: int = Field(default=1, ge=1)
    """Rank processes."""

    lease_wait_s: Seconds = 10.0
    """How long one LeaseBatch call waits before the loop looks after the fleet and asks again."""

    eval_tables: list[str] = Field(default_factory=list)
    """Tables whose rounds are reported as they end."""

    engine: EngineConfig = EngineConfig()
    """The Megatron engine of each rank."""

    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Advantage and loss."""

    publish: PublishConfig = PublishConfig()
    """Weight updates."""

    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints."""

    metrics: MetricsConfig = MetricsConfig()
    """What is measured."""

    faults: FaultConfig = FaultConfig()
    """Bounds."""

    @model_validator(mode="before")
    @classmethod
    def _one_seed(cls, given: Any) -> Any:
        """Here and not where it is read: the ranks read a dump, in which nothing is unset."""
        if isinstance(given, dict) and isinstance(engine := given.get("engine", {}), dict) and "seed" in given:
            return given | {"engine": {"seed": given["seed"]} | engine}
        return given

    @model_validator(mode="after")
    def _model_is_known(self) -> TrainerSettings:
        if not (self.model_path / "config.json").is_file():
            raise ValueError(f"model_path {self.model_path} holds no config.json")
        ModelShape.from_hf(self.model_path)
        return self

    @model_validator(mode="after")
    def _algorithm_is_whole(self) -> TrainerSettings:
        build_advantage(self.algorithm)
        if self.algorithm.objective != "sft":
            build_loss(self.algorithm)
        return self

    @model_validator(mode="after")
    def _teacher_is_used(self) -> TrainerSettings:
        coef, teacher = self.algorithm.opd_kl_coef, self.teacher_path
        if needs_teacher(self.algorithm) != (teacher is not None):
            has = "no teacher" if teacher is None else f"the teacher {teacher}"
            raise ValueError(f"algorithm.opd_kl_coef = {coef:g} with {has} (model.teacher): set both or none")
        if teacher is not None:
            own, other = ModelShape.from_hf(self.model_path), ModelShape.from_hf(teacher)
            differs = [f for f in ModelShape.model_fields if getattr(own, f) != getattr(other, f)]
            if differs:
                raise ValueError(f"the teacher {teacher} must have the policy's shape; differs: {', '.join(differs)}")
        return self

    @model_validator(mode="after")
    def _the_algorithm_decides_the_reference(self) -> TrainerSettings:
        chosen = {"keep_reference": False, "reference_refresh_interval": 0}
        set_here = [name for name, default in chosen.items() if getattr(self.engine, name) != default]
        if set_here:
            raise ValueError(
                f"engine.{set_here[0]} has no effect: algorithm.kl_coef and kl_loss_coef decide whether there is a "
                "reference, and algorithm.reference_refresh_interval when it is refreshed"
            )
        return self

    @property
    def table(self) -> str:
        """The table whose batches are trained."""
        return "sft" if self.algorithm.objective == "sft" else "train"


class TrainerConfig(ServiceConfig):
    """The whole configuration file of `python -m vime_trainer`."""

    trainer: TrainerSettings
    """The trainer."""

    def surroundings(self) -> Iterator[tuple[Key, str]]:
        """Devices that the ranks would not find."""
        if self.trainer.engine.device == "cuda":
            ranks, found = self.trainer.world_size, cuda_devices()
            if found == 0:
                yield ("trainer", "engine", "device"), '"cuda", and this machine shows no CUDA device'
            elif found is not None and ranks > found:
                yield (
                    ("trainer", "world_size"),
                    f"{ranks}: each rank needs a CUDA device, and there are {found} here",
                )
