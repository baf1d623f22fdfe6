"""Settings of the Megatron engine. Imports no torch: the service process reads them too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, model_validator

from vime_service.config import ConfigModel, Seconds

HIGHEST_LEARNING_RATE = 1.0
"""AdamW's steps are of the learning rate's size, whatever the gradient's: above 1 nothing is learned."""
LearningRate = Annotated[float, Field(gt=0, le=HIGHEST_LEARNING_RATE)]
Weight = Annotated[float, Field(ge=0, le=1e6)]
"""Weight of a term of a loss or reward; 0 leaves it out."""


class OptimizerConfig(ConfigModel):
    """AdamW and its learning-rate schedule.

    One schedule step is one *taken* optimizer step: skipped steps do not count.
    """

    lr: LearningRate = 5e-5
    """Peak learning rate, reached at the end of the warm-up."""

    min_lr: float = Field(default=0.0, ge=0, le=1)
    """Learning rate at and after `decay_steps` (linear and cosine only)."""

    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps of linear warm-up. Step i of them (from 1) runs at lr * i / warmup_steps."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up."""

    decay_steps: int | None = Field(default=None, gt=0)
    """Optimizer steps until `min_lr`, warm-up included. Needed by linear and cosine, refused by constant."""

    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment."""

    beta2: float = Field(default=0.99, ge=0, lt=1)
    """Decay of the second moment."""

    eps: float = Field(default=1e-8, gt=0, le=1)
    """Added to the root of the second moment."""

    weight_decay: float = Field(default=0.0, ge=0, le=10)
    """Decoupled weight decay; norms and biases are exempt, as in Megatron."""

    clip_grad: float = Field(default=1.0, ge=0, le=1e6)
    """Global gradient norm above which gradients are scaled down; 0 turns clipping off."""

    distributed: bool = True
    """Shard the optimizer's state over the data-parallel ranks (Megatron's DistributedOptimizer)."""

    def idle(self) -> Mapping[str, str]:
        """What a constant learning rate does not read."""
        return {"min_lr": "schedule = 'constant'"} if self.schedule == "constant" else {}

    @model_validator(mode="after")
    def _schedule_is_complete(self) -> OptimizerConfig:
        if self.schedule == "constant":
            if self.decay_steps is not None:
                raise ValueError(f"decay_steps = {self.decay_steps} has no meaning with schedule = 'constant'")
        elif self.decay_steps is None:
            raise ValueError(f"schedule = {self.schedule!r} needs decay_steps")
        elif self.decay_steps <= self.warmup_steps:
            raise ValueError(f"decay_steps = {self.decay_steps} must exceed warmup_steps = {self.warmup_steps}")
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr = {self.min_lr} exceeds lr = {self.lr}")
        return self


class ParallelConfig(ConfigModel):
    """Sizes of the model-parallel groups. What they leave of the world is data parallel."""

    tensor: int = Field(default=1, ge=1)
    """Tensor-parallel size."""

    pipeline: int = Field(default=1, ge=1)
    """Pipeline-parallel size."""

    expert: int = Field(default=1, ge=1)
    """Expert-parallel size."""

    context: int = Field(default=1, ge=1)
    """Context-parallel size."""

    @model_validator(mode="after")
    def _is_verified(self) -> ParallelConfig:
        wrong = [f"parallel.{name} = {size}" for name, size in self if size != 1]
        if wrong:
            raise ValueError(
                f"{', '.join(wrong)} is not supported yet; it must be 1 (data parallelism is free: trainer.world_size)"
            )
        return self


class TestHooks(ConfigModel):
    """Faults to inject on purpose. All off by default; a run with any of them on logs it at start."""

    __test__ = False  # not a test class, whatever pytest thinks of its name

    swap_kth_expert_fraction: float = Field(default=0.0, ge=0, le=1)
    """Share of tokens whose k-th expert is exchanged for the (k+1)-th in the trainer's OWN top-k.

    Shows that replay holds.
    """


class CriticConfig(ConfigModel):
    """The critic of PPO: its optimizer, and how it is trained on each batch."""

    lr: LearningRate = 1e-4
    """Learning rate, constant after `lr_warmup_steps`."""

    lr_warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps of linear warm-up of the learning rate."""

    beta2: float = Field(default=0.99, ge=0, lt=1)
    """Decay of the second moment."""

    weight_decay: float = Field(default=0.0, ge=0, le=10)
    """Decoupled weight decay."""

    clip_grad: float = Field(default=1.0, ge=0, le=1e6)
    """Global gradient norm above which gradients are scaled down; 0 turns clipping off."""

    value_clip: Weight = 0.2
    """How far a value may move from that of the start of the batch before its loss stops pulling; 0 turns that off. 0.2
    in the original, for rewards of order 1."""

    warmup_steps: int = Field(default=0, ge=0)
    """First train steps that train the critic alone; the policy is published unchanged."""

    epochs: int = Field(default=1, ge=1)
    """Passes over each batch."""

    mini_batches: int = Field(default=1, ge=1)
    """Optimizer steps of each pass."""

    @property
    def optimizer(self) -> OptimizerConfig:
        """The settings in the optimizer's form."""
        return OptimizerConfig(
            lr=self.lr,
            warmup_steps=self.lr_warmup_steps,
            beta2=self.beta2,
            weight_decay=self.weight_decay,
            clip_grad=self.clip_grad,
        )


class EngineConfig(ConfigModel):
    """Everything the engine of one rank needs to know besides the checkpoint it starts from."""

    device: Literal["cpu", "cuda"] = "cpu"
    """Where the model lives. `cpu` runs Megatron over gloo, `cuda` over NCCL."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights and activations. With bfloat16 the optimizer keeps float32 main weights."""

    parallel: ParallelConfig = ParallelConfig()
    """Model-parallel layout."""

    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer and schedule."""

    micro_batch_tokens: int = Field(default=8192, gt=0)
    """Upper limit of rows x padded length of a micro-batch. A longer single sample gets a micro-batch of its own."""

    recompute: bool = False
    """Recompute every layer in the backward pass instead of keeping its activations."""

    routing_replay: bool = True
    """Train MoE models on the routes of the rollout (R3). Samples without routes are refused while this is on."""

    keep_reference: bool = False
    """Keep a copy of the starting weights on the host, to score with as the reference policy of a KL term."""

    reference_refresh_interval: int = Field(default=0, ge=0)
    """Batches after which the policy becomes the reference; 0: the reference stays the starting model."""

    threads: int = Field(default=1, ge=1)
    """Intra-op threads of this rank. On CPU results are bit-identical only for one and the same number."""

    seed: int = 0
    """Seed of Megatron's and torch's generators, and of the cut into mini-batches. Unset: the run's."""

    collective_timeout_s: Seconds = 300.0
    """A collective that takes longer is an error: some rank died or hangs."""

    test_hooks: TestHooks = TestHooks()
    """Deliberate faults."""
