"""A group's content as values, for validation: sequences are borrowed, never copied."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from vime_buffer.values import ModelLimits, PromptRecord, Version


@dataclass(frozen=True, slots=True)
class Span:
    """The weights from `first_token` of the response on."""

    first_token: int
    version: Version


@dataclass(frozen=True, slots=True)
class RouteSegment:
    """Experts of a run of input tokens. `inline` is None where a payload handle stands for the bytes."""

    first_token: int
    rows: int
    version: Version
    source_known: bool
    dtype: str
    shape: tuple[int, ...]
    digest: str
    inline: bytes | None


@dataclass(frozen=True, slots=True)
class RouteTrace:
    """All segments of a sample."""

    segments: Sequence[RouteSegment]
    moe_layer_ids: Sequence[int]
    num_experts: int


@dataclass(frozen=True, slots=True)
class SampleContent:
    """One sample. `status`, `finish_reason` and `unscored_reason` are the contract's names; "" is unspecified."""

    group_id: str
    sample_index: int
    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    loss_mask: Sequence[bool]
    """Empty: all true."""
    logprobs: Sequence[float]
    spans: Sequence[Span]
    routes: RouteTrace | None
    finish_reason: str
    status: str
    reward: float | None
    unscored_reason: str
    trajectory_id: str
    engine_id: str = ""
    seed: int = 0
    reward_parts: Collection[str] = ()
    """Names of the parts."""

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens."""
        return len(self.prompt_ids)

    @property
    def response_tokens(self) -> int:
        """Number of response tokens."""
        return len(self.response_ids)

    @property
    def consumed_tokens(self) -> int:
        """Tokens that the model read: the last one sampled is never fed back."""
        return max(0, self.prompt_tokens + self.response_tokens - 1)

    @property
    def trainable(self) -> bool:
        """False for samples that infrastructure cut off and nothing scored: they enter no loss."""
        return self.reward is not None or self.status not in ("ABORTED", "FAILED")


@dataclass(frozen=True, slots=True)
class GroupContent:
    """A group as it was sent."""

    group_id: str
    attempt: int
    table: str
    prompt_id: str
    samples: Sequence[SampleContent]
    sampling: Mapping[str, object] = field(default_factory=dict)
    """What it says about how it was sampled, by the names of SamplingSettings; what is unset is not there."""
    prompt_differs: Callable[[PromptRecord], str] = lambda record: ""
    """The field in which its prompt is not the record's; "" if none is."""


@dataclass(frozen=True, slots=True)
class GroupRules:
    """What a table asks of its groups."""

    run_id: str
    num_samples: int
    require_routes: bool
    needs_logprobs: bool = True
    """False for `sft`, where nothing was sampled."""
    model: ModelLimits | None = None
    """What the model can have produced; None: nothing is known of it."""
    max_forks: int = 256
    max_reward_parts: int = 64
