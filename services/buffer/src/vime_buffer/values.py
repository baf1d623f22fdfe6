"""The nouns of the ledger, as plain values: no gRPC and no protobuf from here on down."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import IntEnum

from vime_buffer.settings import SamplingSettings
from vime_service.errors import InvalidArgument

_PAGE_TOKEN = re.compile("[0-9]{1,19}")


@dataclass(frozen=True, slots=True)
class Version:
    """One set of weights: incarnation first, then step."""

    run_id: str
    incarnation: int
    step: int

    def __str__(self) -> str:
        return f"{{{self.incarnation}, {self.step}}}"

    def satisfies_at_least(self, other: Version) -> bool:
        """True if a fence `at_least other` lets this version pass: neither incarnation nor step is lower."""
        return (
            self.run_id == other.run_id and self.incarnation >= other.incarnation and self.step >= other.step
        )  # fmt: skip


class State(IntEnum):
    """Where a prompt and its group stand. 1 to 7 are the contract's GroupState; the others are not groups."""

    QUEUED = 0
    """Admitted once and waiting to be leased again, or a prompt of an eval round that nobody took yet."""
    OPEN = 1
    """Leased to a worker."""
    STORED = 2
    """Inserted, waiting for training."""
    LEASED = 3
    """In a batch that is not completed."""
    CONSUMED = 4
    """Of a completed batch or eval round, payload kept."""
    RETIRED = 5
    """Of a completed batch or eval round, payload gone."""
    DROPPED = 6
    """Dropped by a filter or by hand."""
    EVICTED = 7
    """Only in listings: an eviction queues the prompt again, so the row itself never rests here."""
    GIVEN_UP = 8
    """Its last attempt failed."""
    WITHDRAWN = 9
    """Of a round or batch that a rewind made meaningless; never drawn again."""


class Blocked(IntEnum):
    """Why a lease call answered with nothing; the contract's BlockReason."""

    NOT = 0
    ADMISSION = 1
    NO_VERSION = 2
    END_OF_DATA = 3
    EVAL = 4
    GENERATING = 5
    NO_WORKER = 6
    CLOSED = 7
    RETAINED_BYTES = 8
    SOURCE = 9


class Failure(IntEnum):
    """Why a lease was given back; the contract's FailureClass."""

    UNSPECIFIED = 0
    GENERATION = 1
    REWARD = 2
    TIMEOUT = 3
    SHUTDOWN = 4
    USER_CODE = 5
    INVALID = 6
    """Nobody can generate it, whoever tries: it is given up at once."""


class Outcome(IntEnum):
    """How a step ended; the contract's StepOutcome."""

    TRAINED = 1
    SKIPPED = 2


EVICT_STALE = "STALE"
EVICT_LOST_LINEAGE = "LOST_LINEAGE"
EVICT_REGENERATED = "REGENERATED"
EVICT_CORRUPTED = "CORRUPTED"
GIVE_UP_EXPIRED = "EXPIRED"
DROP_DELETED = "deleted"
DROP_OTHER = "other"
UNUSABLE = "unusable"
"""Groups that training could not use: the reason under which they count as dropped, and their prompts as given up."""

PAYLOAD_STATES = (State.STORED, State.LEASED, State.CONSUMED)
"""States of groups whose payload is kept."""


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What every trajectory of the model keeps. No experts and no layers: it is dense, and has no routes."""

    vocab_size: int = 0
    """0: not known."""
    max_model_len: int = 0
    """Longest prompt + response in tokens; 0: not known."""
    moe_layer_ids: tuple[int, ...] = ()
    num_experts: int = 0
    top_k: int = 0

    def stored(self) -> str:
        """As the ledger keeps it."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str | None) -> ModelLimits | None:
        """From the ledger."""
        if text is None:
            return None
        data = json.loads(text)
        return cls(**{**data, "moe_layer_ids": tuple(data["moe_layer_ids"])})


@dataclass(frozen=True, slots=True)
class PromptRecord:
    """A record of a source. `prompt` is text, chat messages or token ids; `record_json` is the line, byte for byte."""

    source: str
    epoch: int
    index: int
    record_json: str
    prompt: str | Sequence[Mapping[str, object]] | Sequence[int]

    @property
    def prompt_id(self) -> str:
        """Unique within the run."""
        return prompt_id(self.source, self.epoch, self.index)


def page_start(token: str) -> int:
    """The row id that a page token stands for; 0 where there is none.

    Raises:
        InvalidArgument: not a token of ours.
    """
    if token and not _PAGE_TOKEN.fullmatch(token):
        raise InvalidArgument(f'"{token[:80]}" is no page token', field="page_token", value=token[:80])
    return int(token or 0)


def prompt_id(source: str, epoch: int, index: int) -> str:
    """`<source>:<epoch>:<index>`."""
    return f"{source}:{epoch}:{index}"


@dataclass(frozen=True, slots=True)
class LeaseGrant:
    """The right to generate one group."""

    lease_id: str
    table: str
    record: PromptRecord
    group_id: str
    attempt: int
    fence: Version
    exact: bool
    """True: exactly `fence`; False: at least `fence`."""
    num_samples: int
    ttl: float
    """Seconds."""
    eval_step: int | None
    seeds: tuple[int, ...]
    reward: str
    sampling: SamplingSettings


@dataclass(frozen=True, slots=True)
class PromptAnswer:
    """Leases, or why there are none."""

    leases: tuple[LeaseGrant, ...] = ()
    blocked: Blocked = Blocked.NOT
    counts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """What the ledger keeps of a group beside its bytes."""

    group_id: str
    attempt: int
    table: str
    prompt_id: str
    sample_tokens: tuple[int, ...]
    """Prompt and response tokens of each sample."""
    response_tokens: int
    truncated: int
    """Samples cut by the budget."""
    rewards: tuple[float, ...]
    """Rewards of the scored samples."""
    versions: tuple[Version, ...]
    """Every version in the spans once, the oldest first; none if no sample has a response."""
    engines: tuple[str, ...] = ()
    """Engines that generated it, as their samples name them."""
    seeds: tuple[int, ...] = ()
    """The seed of each trajectory; none where nothing was sampled."""


@dataclass(frozen=True, slots=True)
class Insert:
    """A finished group on its way into the ledger."""

    lease_id: str
    facts: GroupFacts
    payload: bytes
    digest: bytes
    drop_reason: str = ""
    sampling: Mapping[str, object] | None = None
    """See `GroupContent`; None is not compared."""
    prompt_differs: Callable[[PromptRecord], str] = lambda record: ""


@dataclass(frozen=True, slots=True)
class BatchGroup:
    """One group of a batch, without its payload."""

    group_id: str
    attempt: int
    sample_tokens: tuple[int, ...]
    oldest: Version
    staleness: int


@dataclass(frozen=True, slots=True)
class Awaited:
    """A prompt that a batch waits for."""

    group_id: str
    prompt_id: str
    attempt: int
    worker_id: str = ""
    """Who holds its lease; "" while it is queued."""
    leased_for: float | None = None
    """Seconds since it was leased; None while it is queued."""


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """A batch, or why there is none."""

    groups: tuple[BatchGroup, ...] = ()
    blocked: Blocked = Blocked.NOT
    counts: Mapping[str, int] = field(default_factory=dict)
    replayed: bool = False
    awaited: tuple[Awaited, ...] = ()
    detail: str = ""
    """The reason in words, where it is more than the counts."""


@dataclass(frozen=True, slots=True)
class Unusable:
    """A group that training found it cannot use."""

    group_id: str
    attempt: int
    detail: str


@dataclass(frozen=True, slots=True)
class Quarantine:
    """What QuarantineGroups did: how many prompts wait again, and how many are given up."""

    requeued: int
    given_up: int


@dataclass(frozen=True, slots=True)
class QuarantinedRow:
    """One line of the listing of quarantined groups."""

    group_id: str
    attempt: int
    prompt_id: str
    train_step: int
    detail: str
    worker_id: str
    engines: tuple[str, ...]
    nbytes: int
    kept: bool


@dataclass(frozen=True, slots=True)
class Opened:
    """What OpenIncarnation did."""

    incarnation: int
    last_ledger_step: int
    oldest_resumable_step: int
    rewound_groups: int
    requeued_prompts: int


@dataclass(frozen=True, slots=True)
class Completed:
    """What CompleteStep did."""

    checkpoint_wanted: bool
    opened_evals: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RoundResult:
    """What an eval round gave. Means are over scored samples, or over all where the name says so."""

    done: bool
    prompts: int
    inserted: int
    given_up: int
    scored: int
    unscored: int
    mean_reward: float
    truncated_ratio: float
    mean_response_tokens: float
    pass_at_k: Mapping[int, float]
    version: Version | None
    seconds: float


@dataclass(frozen=True, slots=True)
class GroupRow:
    """One line of a listing."""

    group_id: str
    state: State
    attempt: int
    train_step: int | None
    admission: int
    nbytes: int
    oldest: Version | None
    mean_reward: float | None


@dataclass(frozen=True, slots=True)
class Place:
    """Where a payload lies."""

    segment: int
    offset: int
    nbytes: int
