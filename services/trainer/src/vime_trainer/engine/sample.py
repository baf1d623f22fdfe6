"""One sample as the trainer sees it, checked once on the way in."""

import math
from collections.abc import Hashable
from dataclasses import dataclass, field

import torch

from vime_trainer.algorithms.index import trajectory_key
from vime_trainer.engine.errors import RoutingTraceError, SampleError
from vime_trainer.engine.shape import ModelShape

# Engines round; a probability may come out a hair above one.
LOGPROB_SLACK = 1e-4
_COLUMNS = ("rollout_logprobs", "loss_mask", "advantages", "old_logprobs", "reference_logprobs", "teacher_logprobs",
            "values", "returns")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A prompt with its sampled response. All per-token tensors are 1-D and as long as the response.

    Construction raises SampleError (or RoutingTraceError) naming the sample, the field and both numbers.
    """

    prompt_token_ids: torch.Tensor
    """int64 [prompt]."""
    response_token_ids: torch.Tensor
    """int64 [response], exactly the sampled ids."""
    rollout_logprobs: torch.Tensor
    """float32 [response]: of the distribution that was sampled from; anything where the mask is False."""
    loss_mask: torch.Tensor
    """bool [response]: tokens that are trained on."""
    advantages: torch.Tensor
    """float32 [response]. A scalar per sequence is given once per token; see `per_token`."""
    group_id: str
    """Prompt group; never inferred from position."""
    sample_index: int
    """Index within the group."""
    trajectory_id: str = ""
    """Samples of a group that forked from one trajectory share it, and one weight in sequence-mean; empty: the sample
    is a trajectory of its own."""
    group_place: int = 0
    """Place of the group in the global batch; tells groups apart, whatever their ids."""
    temperature: float = 1.0
    """Temperature of the sampling; the trainer divides its logits by the same."""
    routed_experts: torch.Tensor | None = None
    """uint8 or uint16 [prompt + response - 1, moe_layers, top_k]: row t belongs to input token t. None: no trace."""
    old_logprobs: torch.Tensor | None = None
    """float32 [response]: the trainer's own at the start of the batch; None: not computed."""
    reference_logprobs: torch.Tensor | None = None
    """float32 [response]: of the reference policy; None: no KL term."""
    teacher_logprobs: torch.Tensor | None = None
    """float32 [response]: of the teacher, for on-policy distillation; None: there is none."""
    values: torch.Tensor | None = None
    """float32 [response]: the critic's value of the state before each token, at the start of the batch."""
    returns: torch.Tensor | None = None
    """float32 [response]: what the critic is to learn."""
    weight_versions: tuple[int, ...] = field(default=())
    """Steps of the weight versions that generated the response, in order."""

    def __post_init__(self) -> None:
        if self.prompt_token_ids.numel() == 0:
            raise SampleError(f"{self.name}: the prompt is empty")
        if self.response_token_ids.numel() == 0:
            raise SampleError(f"{self.name}: the response is empty")
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise SampleError(f"{self.name}: temperature {self.temperature} gives no distribution to train on")
        wanted = self.response_token_ids.numel()
        for label in _COLUMNS:
            value: torch.Tensor | None = getattr(self, label)
            if value is not None and tuple(value.shape) != (wanted,):
                raise SampleError(f"{self.name}: {wanted} response tokens but {label} has shape {tuple(value.shape)}")
        self._check_logprobs()
        if self.routed_experts is not None:
            self._check_trace(self.routed_experts)

    def _check_logprobs(self) -> None:
        """The engine's alone: whatever else is not finite was computed here, and makes the step one that is skipped and
        counted. What is masked reaches nothing, so anything may stand there."""
        values = self.rollout_logprobs
        bad = (~torch.isfinite(values) | (values > LOGPROB_SLACK)) & self.loss_mask.bool()
        if bool(bad.any()):
            at = int(bad.nonzero()[0])
            raise SampleError(
                f"{self.name}: rollout_logprobs[{at}] = {float(values[at])} is not the logarithm of a probability"
            )

    def _check_trace(self, trace: torch.Tensor) -> None:
        if trace.dim() != 3:
            raise RoutingTraceError(
                f"{self.name}: a routing trace is [rows, moe_layers, top_k], not {tuple(trace.shape)}"
            )
        if trace.size(0) != self.consumed:
            raise RoutingTraceError(f"{self.name}: {self.consumed} consumed tokens but {trace.size(0)} routing rows")

    @property
    def name(self) -> str:
        """group/index, for messages."""
        return f"sample {self.group_id}/{self.sample_index}"

    @property
    def trajectory(self) -> tuple[int, str, Hashable]:
        """What the samples of one trajectory share, and no others."""
        return trajectory_key(self.group_place, self.trajectory_id, self.sample_index)

    @property
    def consumed(self) -> int:
        """Tokens that the model consumes: all but the last, whose successor was never sampled."""
        return self.prompt_token_ids.numel() + self.response_token_ids.numel() - 1

    def check_against(self, shape: ModelShape, needs_trace: bool) -> None:
        """Check ids, length and trace against the model. Raises SampleError or RoutingTraceError."""
        ids = torch.cat([self.prompt_token_ids, self.response_token_ids])
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= shape.vocab_size:
            raise SampleError(f"{self.name}: token ids {low}..{high} leave the vocabulary of {shape.vocab_size}")
        if self.consumed > shape.max_position_embeddings:
            raise SampleError(
                f"{self.name}: {self.consumed} tokens exceed the model's {shape.max_position_embeddings} positions"
            )
        if needs_trace and self.routed_experts is None:
            raise RoutingTraceError(
                f"{self.name}: routing replay is on, but the sample has 0 of {self.consumed} routing rows"
            )


def per_token(value: float, length: int) -> torch.Tensor:
    """One number for every token of a response: float32 [length]."""
    return torch.full((length,), value, dtype=torch.float32)
