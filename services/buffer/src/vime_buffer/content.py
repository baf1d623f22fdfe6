"""A group's content as values, for validation: sequences are borrowed, never copied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vime_buffer.values import Version


@dataclass(frozen=True, slots=True)
class Span:
    """The weights from `first_token` of the response on."""

    first_token: int
    version: Version


@dataclass(frozen=True, slots=True)
class RouteSegment:
    """Experts of a run of input tokens. `inline` is None where a payload handle carries the bytes."""

    first_token: int
    rows: int
    version: Version
    source_known: bool
    dtype: str
    shape: tuple[int, ...]
    digest: str
    inline: bytes | None
    handle_bytes: int = 0
    handle_key: str = ""


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
    prompt_tokens: int
    response_tokens: int
    loss_mask_length: int
    logprobs: Sequence[float]
    spans: Sequence[Span]
    routes: RouteTrace | None
    finish_reason: str
    status: str
    reward: float | None
    unscored_reason: str
    trajectory_id: str
    engine_id: str = ""

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


@dataclass(frozen=True, slots=True)
class GroupRules:
    """What a table asks of its groups."""

    run_id: str
    num_samples: int
    require_routes: bool
    needs_logprobs: bool = True
    """False for `sft`, where nothing was sampled."""
