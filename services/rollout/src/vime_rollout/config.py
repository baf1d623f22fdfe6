"""Settings of the rollout service. Light on purpose: `--help` and `--dry-run` read this module and nothing heavy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from vime_client.channel_settings import TlsClientConfig
from vime_client.config_loading import ConfigModel, Key, Seconds, SecondsOrNone
from vime_service.server_config import ServiceConfig


class VllmConfig(ConfigModel):
    """The vLLM engine."""

    model: str = ""
    """Directory of a Hugging Face model, or its name on a hub."""
    model_id: str = ""
    """Name it is served under. Unset: the last part of `model`."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What the installed vLLM was built for; `auto` looks which distribution is installed."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Element type of the weights; must be the trainer's (`trainer.engine.dtype`). `auto`: as in the model's config,
    but bfloat16 of a model in float32."""
    max_model_len: int | None = Field(default=None, gt=1)
    """Longest prompt + response. Unset: the model's own."""
    max_num_seqs: int = Field(default=64, gt=0)
    """Requests that run at once."""
    max_num_batched_tokens: int | None = Field(default=None, gt=0)
    """Tokens per step; longer prompts are prefilled in chunks. Unset: vLLM's default."""
    tensor_parallel_size: int = Field(default=1, gt=0)
    """Devices the model is split over."""
    gpu_memory_utilization: float = Field(default=0.85, gt=0, le=1)
    """Share of device memory for weights and KV (CUDA)."""
    kv_cache_tokens: int = Field(default=16384, gt=0)
    """Tokens of KV cache on CPU."""
    cpu_threads: int = Field(default=1, gt=0)
    """OpenMP threads of the engine on CPU."""
    enforce_eager: bool | None = None
    """No CUDA graphs, no compilation. Unset: true on CPU, false on CUDA."""
    return_routes: bool | None = None
    """Return routing traces. Unset: if the model is a mixture of experts."""
    load_format: Literal["auto", "dummy"] = "auto"
    """`dummy` starts with random weights: for engines that serve only after a first update."""
    enable_sleep_mode: bool = False
    """Allow YieldDevice and ReturnDevice (CUDA)."""
    seed: int = 0
    """Seed of everything that has none of its own."""
    args: dict[str, Any] = Field(default={})
    """Further fields of vLLM's AsyncEngineArgs, by name; they win over those above."""
    env: dict[str, str] = Field(default={})
    """Environment variables for the engine; they win over those of the process."""
    start_timeout_seconds: Seconds = 600.0
    """How long loading the model may take."""
    rpc_timeout_seconds: Seconds = 120.0
    """How long a call into the engine's workers may take. A load has `updates.load_timeout_seconds` instead."""
    frozen_after_seconds: Seconds = 60.0
    """How long the engine core may answer nothing before it counts as dead and the service ends. It answers between two
    steps: give it more than the longest prefill of `max_num_batched_tokens` takes."""
    abandoned_after_seconds: Seconds = 600.0
    """How long a load, a sleep or a wake whose caller gave up may go on before the engine core must answer again."""

    def idle(self) -> Mapping[str, str]:
        """What the device does not read."""
        names = {"cpu": ("gpu_memory_utilization", "enable_sleep_mode"), "cuda": ("kv_cache_tokens", "cpu_threads")}
        return dict.fromkeys(names.get(self.device, ()), f"device = '{self.device}'")


class FakeConfig(ConfigModel):
    """The fake engine, for tests and for trying the service without vLLM."""

    layers: int = Field(default=2, ge=0)
    """MoE layers; 0 is a dense model."""
    experts: int = Field(default=8, gt=0)
    """Experts per layer."""
    top_k: int = Field(default=2, gt=0)
    """Experts per token."""
    step_seconds: SecondsOrNone = 0.0
    """Time one token takes."""
    max_model_len: int = Field(default=512, gt=1)
    """Longest prompt + response."""
    seed: int = 0
    """Makes the initial weights."""


class UpdateConfig(ConfigModel):
    """Weight updates."""

    staging_dir: Path = Path("/dev/shm")
    """Directory for staged weights; the engine's worker maps the file, so memory-backed is best."""
    keep_staging: bool = True
    """Keep the staging memory of one version for the next: faster, and holds the model's size in `staging_dir`."""
    payload_dir: Path | None = None
    """Root of the payload store that PullUpdate reads from. Unset: PullUpdate is refused."""
    transfer_timeout_seconds: Seconds = 60.0
    """How long a transfer may take where the caller names no time."""
    bucket_timeout_seconds: Seconds = 20.0
    """How long one bucket may take before the group counts as broken."""
    pause_timeout_seconds: Seconds = 60.0
    """How long the engine may take to stand still; past it the old version goes on."""
    load_timeout_seconds: Seconds = 120.0
    """How long loading may take; past it the engine is DIRTY."""
    canary_timeout_seconds: Seconds = 60.0
    """How long scoring the canary may take; past it the engine is DIRTY."""


class RouterLink(ConfigModel):
    """The router that this engine reports to."""

    address: str = ""
    """`host:port` of the router. Unset: the engine reports to nobody."""
    period_seconds: Seconds = 1.0
    """Time between heartbeats until the router names another."""
    timeout_seconds: Seconds = 2.0
    """Deadline of one heartbeat."""
    token_file: Path | None = None
    """File with the token that the router grants this engine."""
    tls: TlsClientConfig | None = None
    """How to check the router's certificate. Unset: plaintext."""


class RolloutSettings(ConfigModel):
    """One engine."""

    engine_id: str = "rollout-0"
    """Unique among the engines of a fleet, and stable over restarts of the same slot."""
    advertise_address: str = ""
    """`host:port` as others reach this service. Unset: the address it listens on."""
    engine: Literal["vllm", "fake"] = "vllm"
    """Which engine runs."""
    updatable: bool = True
    """Take weight updates. False for teachers and judges: they serve what they loaded."""
    serve_initial: bool = False
    """Serve the loaded weights, as no version, until the first update. Always so where `updatable` is false."""
    vllm: VllmConfig = VllmConfig()
    """The vLLM engine."""
    fake: FakeConfig = FakeConfig()
    """The fake engine."""
    updates: UpdateConfig = UpdateConfig()
    """Weight updates."""
    router: RouterLink = RouterLink()
    """Where heartbeats go."""
    pause_expiry_seconds: Seconds = 120.0
    """When a pause whose owner vanished is lifted, where the caller names no time."""

    def idle(self) -> Mapping[str, str]:
        """What another engine reads."""
        return {"fake": "engine = 'vllm'"} if self.engine == "vllm" else {}

    @model_validator(mode="after")
    def _there_is_a_model(self) -> RolloutSettings:
        if self.engine == "vllm" and not self.vllm.model:
            raise ValueError("vllm.model is not set: which model shall the engine serve?")
        return self


class RolloutConfig(ServiceConfig):
    """The whole configuration file of `python -m vime_rollout`."""

    rollout: RolloutSettings
    """The engine."""

    def surroundings(self) -> Iterator[tuple[Key, str]]:
        """Limits of the installed vLLM, the model's and this machine's."""
        from vime_rollout.engine_limits import engine_problems  # it reads these settings

        if self.rollout.engine == "vllm":
            for key, sentence in engine_problems(self.rollout.vllm):
                yield ("rollout", "vllm", *key), sentence
