"""The one class that a rank process calls: a Megatron model with its optimizer, replay and export, and its roles."""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from vime_trainer.engine import cpu, distributed, hf, hooks, model
from vime_trainer.engine.checkpoint import Checkpointer
from vime_trainer.engine.config import HIGHEST_LEARNING_RATE, CriticConfig, EngineConfig
from vime_trainer.engine.critic import Critic
from vime_trainer.engine.errors import EngineError, UnsupportedModelError
from vime_trainer.engine.forward import Forward
from vime_trainer.engine.objective import Loss, SupervisedLoss
from vime_trainer.engine.optimizer import Updater, build_optimizer
from vime_trainer.engine.reference import FrozenWeights, ReferenceWeights
from vime_trainer.engine.replay import RoutingReplay, check_trace
from vime_trainer.engine.sample import Sample
from vime_trainer.engine.sft import Demonstration, as_samples
from vime_trainer.engine.shape import ModelShape
from vime_trainer.engine.step import StepResult, Trainer
from vime_trainer.engine.store import Committed, Store

logger = logging.getLogger(__name__)


class Engine:
    """One rank's share of the trainer. Every method but `model_shape`, `lr` and `check` is collective: all ranks call
    it, in one order.

    A rank may hold any number of samples, also none. Samples are this rank's own; results are too unless they say
    otherwise.
    """

    def __init__(
        self, path: Path, config: EngineConfig, critic: CriticConfig | None = None, teacher: Path | None = None
    ) -> None:
        cpu.install()  # before megatron builds anything; does nothing where CUDA exists
        self._path, self._config = path, config
        self._shape = ModelShape.from_hf(path)
        self._device = distributed.initialize(config)
        source = hf.Checkpoint(path)
        module = model.build_model(self._shape, config, self._device)
        hf.load(module, self._shape, source)
        hf.assert_round_trip(module, self._shape, source)
        self._module = module
        if config.test_hooks.swap_kth_expert_fraction:
            logger.warning(
                "TEST HOOK: swapping the k-th expert of %.3f of the tokens", config.test_hooks.swap_kth_expert_fraction
            )
            hooks.install_swap(module, config.test_hooks.swap_kth_expert_fraction, config.seed)
        wrapped = model.wrap_model(module, config)
        self._teacher = None if teacher is None else self._frozen(teacher, source)
        interval = config.reference_refresh_interval
        self._reference = ReferenceWeights(module, interval) if config.keep_reference else None
        self._updater = Updater(build_optimizer(wrapped, config), config)
        replay = RoutingReplay(module, self._shape, config.recompute) if self._shape.is_moe else None
        self._forward = Forward(wrapped, self._shape, replay, self._device, config.micro_batch_tokens)
        self._trainer = Trainer(self._forward, self._updater, config.seed)
        # After the policy: what it draws for its head must not change the policy's numbers.
        self.critic = None if critic is None else Critic(path, self._shape, config, critic, self._device)
        parts = [part for part in (self.critic, self._reference) if part is not None]
        self._checkpointer = Checkpointer(module, self._shape, self._updater, self._device, parts)

    @classmethod
    def from_hf(
        cls,
        path: str | Path,
        config: EngineConfig,
        critic: CriticConfig | None = None,
        teacher: str | Path | None = None,
    ) -> "Engine":
        """Build the model of an HF directory, load its weights and check that they export back bit for bit.

        `critic` adds a critic that starts from the same weights. `teacher` is an HF directory of the same shape, kept
        frozen to score with. Joins the process group first, see `distributed.initialize`. Raises
        UnsupportedModelError, UnsupportedLayoutError or WeightMapError.
        """
        return cls(Path(path), config, critic, None if teacher is None else Path(teacher))

    @property
    def model_shape(self) -> ModelShape:
        """The model's sizes; `moe_layers` is the layer axis of routing traces."""
        return self._shape

    @property
    def dtype(self) -> str:
        """Type that it computes in."""
        return self._config.dtype

    @property
    def replays(self) -> bool:
        """Whether training replays routes (R3): a MoE model with `routing_replay` on."""
        return self._shape.is_moe and self._config.routing_replay

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps taken since the beginning of the run, checkpoints included."""
        return self._updater.steps_taken

    @property
    def lr(self) -> float:
        """Learning rate of the next optimizer step."""
        return self._updater.lr

    def train_step(
        self, samples: Sequence[Sample], loss: Loss, *, mini_batches: int = 1, lr: float | None = None
    ) -> StepResult:
        """Train on one batch in `mini_batches` optimizer steps; `objective.PolicyLoss(config)` is the usual `loss`.

        The seed cuts the global batch into mini-batches, the same on any number of ranks. `loss` gets each micro-batch
        with the denominators of the global mini-batch. Where samples lack `old_logprobs`, they are those of the weights
        before this call. `lr` replaces the schedule's rate, this once. A step whose loss or gradient is not finite
        changes nothing and is counted. Raises SampleError, RoutingTraceError or (for a rate that is none) EngineError
        before anything is run.
        """
        if lr is not None and not 0 <= lr <= HIGHEST_LEARNING_RATE:  # NaN is in no range
            raise EngineError(f"learning rate {lr:g} is not in [0, {HIGHEST_LEARNING_RATE:g}]")
        self.check(samples)
        result = self._trainer.train(samples, loss, mini_batches=mini_batches, replay=self.replays, lr=lr)
        if self._reference is not None and not result.skipped:
            self._reference.batch_trained()
        return result

    def check(self, samples: Sequence[Sample]) -> None:
        """Raise SampleError or RoutingTraceError for what `train_step` would refuse. Not collective."""
        self._check(samples, self.replays)

    def sft_step(self, demonstrations: Sequence[Demonstration]) -> StepResult:
        """One optimizer step on demonstrations, token mean over the global batch. Routes are the model's own."""
        samples = as_samples(demonstrations, distributed.data_parallel_rank(), distributed.data_parallel_size())
        self._check(samples, needs_trace=False)
        return self._trainer.train(samples, SupervisedLoss(), mini_batches=1, replay=False)

    def score(
        self,
        samples: Sequence[Sample],
        replay: bool = True,
        weights: Literal["current", "reference", "teacher"] = "current",
    ) -> list[torch.Tensor]:
        """Log-probabilities of the response tokens, float32 [response] per sample, in order. Forward only.

        `replay` uses the samples' routes (MoE only); without it the model routes by itself. `weights`: of the policy
        as it is, of the reference policy (needs `keep_reference`) or of the teacher.
        """
        replay = replay and self._shape.is_moe
        self._check(samples, replay)
        if weights == "current":
            return self._forward.score(samples, replay)
        frozen = self._reference if weights == "reference" else self._teacher
        if frozen is None:
            raise ValueError(f"there is no {weights} policy: the engine was built without one")
        with frozen.in_use():
            return self._forward.score(samples, replay)

    @torch.no_grad()
    def next_token_logits(self, token_ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Logits after each prefix, for small evaluations: ids int64 [batch, width] right-padded, lengths [batch] ->
        [batch, vocab]."""
        wrapped = self._forward.model
        wrapped.eval()
        ids = token_ids.to(self._device)
        positions = torch.arange(ids.size(1), device=self._device).expand_as(ids)
        logits: torch.Tensor = wrapped(ids, positions, None)
        return logits[torch.arange(ids.size(0)), lengths.to(self._device) - 1].float()

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(HF name, tensor) of every weight in one fixed order; a tensor is valid until the next training step."""
        return hf.export(self._module, self._shape)

    def save_hf(self, out: str | Path) -> None:
        """Write a complete HF directory (rank 0 writes, all wait). `out` must not exist."""
        distributed.rank_0_alone(
            f"write {out}",
            lambda: hf.write_hf_directory(Path(out), self._path, self.export(), self._config.dtype),
        )

    def save_checkpoint(self, root: str | Path, step: int, state: dict[str, Any], keep_last: int = 2) -> Committed:
        """Commit weights, optimizer, schedule, generators and `state` (JSON, rank 0's) as the latest checkpoint of
        `root`.

        Keeps the last `keep_last`. A failure leaves the former one the latest and raises CheckpointError where it
        happened and PeerFailed elsewhere.
        """
        return self._checkpointer.save(Store(Path(root), keep_last), step, state)

    def load_checkpoint(self, root: str | Path) -> dict[str, Any] | None:
        """Restore the latest checkpoint of `root` and return its state; None if there is none. Bit for bit what was
        saved.

        Raises CheckpointError for a damaged checkpoint or one of another model.
        """
        return self._checkpointer.load(Store(Path(root), keep_last=1))

    def _frozen(self, path: Path, own: hf.Checkpoint) -> FrozenWeights:
        """Weights of another HF directory of this shape; the model holds its own again afterwards."""
        shape = ModelShape.from_hf(path)
        if shape != self._shape:
            differs = [f for f in ModelShape.model_fields if getattr(shape, f) != getattr(self._shape, f)]
            raise UnsupportedModelError(f"{path} must have the policy's shape; it differs in {', '.join(differs)}")
        hf.load(self._module, shape, hf.Checkpoint(path))
        frozen = FrozenWeights(self._module)
        hf.load(self._module, self._shape, own)
        return frozen

    def _check(self, samples: Sequence[Sample], needs_trace: bool) -> None:
        for sample in samples:
            sample.check_against(self._shape, needs_trace)
            if needs_trace and sample.routed_experts is not None:
                check_trace(sample.name, sample.routed_experts, sample.consumed, self._shape)
