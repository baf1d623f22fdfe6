"""One sample as the trainer sees it, checked once on the way in."""

import math
from dataclasses import dataclass, field

import torch

from vime_trainer.engine.errors import RoutingTraceError, SampleError
from vime_trainer.engine.shape import ModelShape

# Engines round; a probability may come out a hair above one.
LOGPROB_SLACK = 1e-4
_LOGPROBS = ("rollout_logprobs", "old_logprobs", "reference_logprobs", "teacher_logprobs")


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
    """float32 [response]: of the distribution that was sampled from."""
    loss_mask: torch.Tensor
    """bool [response]: tokens that are trained on."""
    advantages: torch.Tensor
    """float32 [response]. A scalar per sequence is given once per token; see `per_token`."""
    group_id: str
    """Prompt group; never inferred from position."""
    sample_index: int
    """Index within the group."""
    trajectory_id: str = ""
    """Samples of one trajectory share one weight in sequence-mean; empty: the sample is a trajectory of its own."""
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
        for label in ("loss_mask", "advantages", *_LOGPROBS, "values", "returns"):
            value: torch.Tensor | None = getattr(self, label)
            if value is not None and tuple(value.shape) != (wanted,):
                raise SampleError(f"{self.name}: {wanted} response tokens but {label} has shape {tuple(value.shape)}")
        for label in _LOGPROBS:
            self._check_logprobs(label, getattr(self, label))
        if not bool(torch.isfinite(self.advantages).all()):
            raise SampleError(f"{self.name}: advantages hold a value that is not finite")
        if self.routed_experts is not None:
            self._check_trace(self.routed_experts)

    def _check_logprobs(self, label: str, values: torch.Tensor | None) -> None:
        if values is None:
            return
        bad = ~torch.isfinite(values) | (values > LOGPROB_SLACK)
        if bool(bad.any()):
            at = int(bad.nonzero()[0])
            raise SampleError(f"{self.name}: {label}[{at}] = {float(values[at])} is not the logarithm of a probability")

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
