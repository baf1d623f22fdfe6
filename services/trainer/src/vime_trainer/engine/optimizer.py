"""Megatron's optimizer and its learning-rate schedule, with skipping of non-finite steps."""

import math
from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from vime_trainer.engine.config import EngineConfig
from vime_trainer.engine.distributed import all_reduce_max
from vime_trainer.engine.model import DTYPES

# Megatron wants a horizon even for a constant rate; nothing reads it then.
_NO_HORIZON = 2**62


@dataclass(frozen=True)
class OptimizerOutcome:
    """What became of one set of gradients."""

    grad_norm: float
    """Global L2 norm before clipping; may be NaN or infinite."""
    lr: float
    """Learning rate that was (or would have been) used."""
    skipped: bool
    """Nothing was changed: no weight, no moment, no schedule."""
    empty: bool = False
    """Skipped because there was no token to train on."""


def build_optimizer(model: DistributedDataParallel, config: EngineConfig) -> MegatronOptimizer:
    """AdamW over the wrapped model; shards its state over the data-parallel ranks if so configured."""
    settings = config.optimizer
    dtype = DTYPES[config.dtype]
    return get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            min_lr=settings.min_lr,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.beta1,
            adam_beta2=settings.beta2,
            adam_eps=settings.eps,
            clip_grad=settings.clip_grad,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=settings.distributed,
        ),
        [model],
    )


class Updater:
    """Takes an optimizer step if the gradients are finite on every rank; else leaves everything as it was."""

    def __init__(self, optimizer: MegatronOptimizer, config: EngineConfig) -> None:
        settings = config.optimizer
        self.optimizer = optimizer
        self.schedule = OptimizerParamScheduler(
            optimizer,
            init_lr=0.0,
            max_lr=settings.lr,
            min_lr=settings.min_lr if settings.schedule != "constant" else 0.0,
            lr_warmup_steps=settings.warmup_steps,
            lr_decay_steps=settings.decay_steps or _NO_HORIZON,
            lr_decay_style=settings.schedule,
            start_wd=settings.weight_decay,
            end_wd=settings.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )
        # The schedule's position is that of the step to come: the first step of a warm-up must not run at rate 0.
        self.schedule.step(1)

    @property
    def steps_taken(self) -> int:
        """Optimizer steps since the beginning; skipped ones do not count."""
        return int(self.schedule.num_steps) - 1

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return float(self.optimizer.param_groups[0]["lr"])

    def resume_at(self, steps_taken: int) -> None:
        """Put the schedule where it is after `steps_taken` optimizer steps."""
        self.schedule.num_steps = 0
        self.schedule.step(steps_taken + 1)

    def apply(self, loss: float, empty: bool = False, lr: float | None = None) -> OptimizerOutcome:
        """Use the reduced gradients in the model's buffers. Skips if `loss` (any rank's) or the gradient norm is not
        finite.

        Skips too if the batch was `empty`: no token is trained, but zero gradients would still move the moments.
        Megatron's clipping would multiply by NaN and write it into the weights, so the norm is looked at first. `lr`
        replaces the schedule's rate in this step alone.
        """
        lr = self.lr if lr is None else lr
        found_inf = bool(self.optimizer.prepare_grads())
        norm = float(self.optimizer.get_grad_norm())
        bad = empty or found_inf or not (math.isfinite(norm) and math.isfinite(loss))
        anywhere = all_reduce_max(torch.tensor([float(bad)], device=_device_of(self.optimizer)))
        if bool(anywhere.item()):
            return OptimizerOutcome(norm, lr, skipped=True, empty=empty)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.schedule.step(1)  # sets the rate of the next step, whatever this one's was
        return OptimizerOutcome(norm, lr, skipped=False)


def _device_of(optimizer: MegatronOptimizer) -> torch.device:
    parameters = optimizer.get_parameters() if hasattr(optimizer, "get_parameters") else []
    return parameters[0].device if parameters else torch.device("cpu")
