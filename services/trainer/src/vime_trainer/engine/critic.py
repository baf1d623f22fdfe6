"""The critic of PPO: a second model of the same code with a value head, its own optimizer and its own routes.

A role inside the rank, not a process: it shares the policy's data-parallel layout and micro-batching. It starts from
the policy's HF weights with a head of zeros, so that its first values are 0 for every state.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from vime_trainer.algorithms.index import Index
from vime_trainer.algorithms.losses import LossOutput, ValueBatch, ValueLossConfig, value_loss
from vime_trainer.algorithms.reducers import denominators
from vime_trainer.engine import hf, model, optimizer_state
from vime_trainer.engine.backward import Accumulated, Updates, accumulate, connect, train_in_parts
from vime_trainer.engine.batch import MicroBatch, response_column, rows_of
from vime_trainer.engine.config import CriticConfig, EngineConfig
from vime_trainer.engine.distributed import GLOBAL
from vime_trainer.engine.errors import CheckpointError
from vime_trainer.engine.forward import Forward
from vime_trainer.engine.optimizer import OptimizerOutcome, Updater, build_optimizer
from vime_trainer.engine.sample import Sample
from vime_trainer.engine.shape import ModelShape
from vime_trainer.engine.trajectories import cut, global_trajectories

logger = logging.getLogger(__name__)

WEIGHTS = "critic.safetensors"


class ValueHead(nn.Module):
    """One number per position in place of the vocabulary; called as Megatron calls its output layer."""

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden_size, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(1, dtype=dtype))

    def forward(
        self, hidden: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, None]:
        """[length, batch, hidden] -> ([length, batch, 1], no separate bias). The other arguments have no meaning
        here."""
        return nn.functional.linear(hidden, self.weight, self.bias), None


def build_critic(path: Path, shape: ModelShape, config: EngineConfig, device: torch.device) -> nn.Module:
    """The policy's model with its HF weights, but for the head. On `device`, not yet wrapped.

    Raises WeightMapError for weights that do not fit.
    """
    module: Any = model.build_model(shape, config, device)
    source = hf.Checkpoint(path)
    hf.load(module, shape, source)
    hf.assert_round_trip(module, shape, source)
    module.output_layer = ValueHead(shape.hidden_size, model.DTYPES[config.dtype]).to(device)
    # A tied head would hand its weight to the output layer; this one has its own.
    module.share_embeddings_and_output_weights = False
    built: nn.Module = module
    return built


class Critic:
    """Values of states, and the training of them. Every method is collective; samples are this rank's own."""

    def __init__(
        self,
        path: Path,
        shape: ModelShape,
        config: EngineConfig,
        settings: CriticConfig,
        device: torch.device,
    ) -> None:
        config = config.model_copy(update={"optimizer": settings.optimizer})
        self._settings, self._seed = settings, config.seed
        self._module = build_critic(path, shape, config, device)
        wrapped = model.wrap_model(self._module, config)
        self._updater = Updater(build_optimizer(wrapped, config), config)
        # No replay: the routes of the rollout are the policy's; the critic chooses its own experts.
        self._forward = Forward(wrapped, shape, None, device, config.micro_batch_tokens)
        connect(self._forward, self._updater)
        self._batches = 0

    @property
    def batches(self) -> int:
        """Batches trained since the beginning of the run, checkpoints included; skipped ones do not count."""
        return self._batches

    @property
    def warming_up(self) -> bool:
        """True while the critic alone is to be trained."""
        return self._batches < self._settings.warmup_steps

    def values(self, samples: Sequence[Sample]) -> list[torch.Tensor]:
        """V of the state before each response token is sampled: float32 [response] per sample, in order.

        One that is not finite makes the step that learns from it one that is skipped.
        """
        return self._forward.per_response(samples, False, lambda _, output: output[..., 0].float())

    def train(self, samples: Sequence[Sample], config: ValueLossConfig) -> Updates:
        """Fit the values to the samples' `returns`, clipped around their `values` (those of before this call), in
        `epochs` passes of `mini_batches` optimizer steps.

        A step whose loss or gradient is not finite changes nothing and is counted. Raises ValueError for a sample
        without values or returns.
        """
        trajectories = global_trajectories(samples, GLOBAL, self._forward.device)

        def train(part: list[int]) -> tuple[Accumulated, OptimizerOutcome]:
            chosen = [samples[i] for i in part]
            mini = _MiniBatch(
                self._forward.device, chosen, trajectories.rows(rows_of(part, self._forward.device)), config
            )
            made = accumulate(self._forward, self._updater, chosen, mini.share, replay=False)
            return made, self._updater.apply(made.loss, empty=mini.empty)

        parts: list[list[int]] = []
        for epoch in range(self._settings.epochs):
            seed = f"critic/{self._seed}/{self._updater.steps_taken}/{epoch}"
            parts += cut(samples, trajectories, self._settings.mini_batches, seed, GLOBAL)
        updates = train_in_parts(samples, parts, train, self._forward.device)
        self._batches += not updates.skipped
        return updates

    # ------------------------------------------------------------------ checkpoints, see checkpoint.Part

    name = "critic"

    def facts(self) -> dict[str, Any]:
        """Where its schedule and warm-up stand."""
        return {"optimizer_steps": self._updater.steps_taken, "batches": self._batches}

    def write(self, work: Path, rank: int) -> None:
        """Weights (rank 0) and this rank's pieces of the optimizer."""
        if rank == 0:
            weights = {n: p.detach().cpu().clone() for n, p in self._module.named_parameters()}
            bad = optimizer_state.finite(weights)
            if bad is not None:
                raise CheckpointError(f"the critic's {bad} holds a value that is not finite; it is not saved")
            save_file(weights, work / WEIGHTS, metadata={"format": "pt"})
        pieces = optimizer_state.dump(self._updater.optimizer, self._module, rank)
        save_file(pieces, work / f"critic_optimizer.rank{rank:05d}.safetensors")

    def restore(self, path: Path, facts: dict[str, Any] | None) -> None:
        """Everything as it was saved. Raises CheckpointError if the checkpoint holds no critic, or another one."""
        if facts is None:
            raise CheckpointError(
                f"{path} holds no critic: it was written by a run without one, so that no PPO run can go on from it"
            )
        saved, own = load_file(path / WEIGHTS), dict(self._module.named_parameters())
        if saved.keys() != own.keys():
            raise CheckpointError(f"{path / WEIGHTS}: other parameters, {sorted(saved.keys() ^ own.keys())[:4]}")
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(saved[name])
        files = sorted(path.glob("critic_optimizer.rank*.safetensors"))
        optimizer_state.restore(self._updater.optimizer, self._module, files)
        self._updater.resume_at(int(facts["optimizer_steps"]))
        self._batches = int(facts["batches"])


class _MiniBatch:
    """The value loss of one mini-batch, micro-batch by micro-batch."""

    def __init__(
        self, device: torch.device, samples: Sequence[Sample], trajectories: Index, config: ValueLossConfig
    ) -> None:
        self._device, self._samples, self._config = device, samples, config
        mask = response_column([s.loss_mask.bool() for s in samples], device)
        self._counts = denominators(mask, trajectories, GLOBAL)
        self.empty = self._counts.empty

    def share(self, micro: MicroBatch, output: torch.Tensor) -> LossOutput:
        """See `backward.Share`."""
        chosen = [self._samples[i] for i in micro.rows]
        batch = ValueBatch(
            values_BT=micro.response(output[..., 0].float()),
            old_values_BT=response_column([_given(s, "values") for s in chosen], self._device),
            returns_BT=response_column([_given(s, "returns") for s in chosen], self._device),
            loss_mask_BT=response_column([s.loss_mask.bool() for s in chosen], self._device),
        )
        return value_loss(batch, self._config, self._counts.rows(rows_of(micro.rows, self._device)))


def _given(sample: Sample, field: str) -> torch.Tensor:
    found: torch.Tensor | None = getattr(sample, field)
    if found is None:
        raise ValueError(f"{sample.name}: the critic is trained on {field}, which are not given")
    return found
