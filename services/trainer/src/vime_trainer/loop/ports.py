"""What the loop needs from the world: the ledger, the fleet and the ranks, as interfaces.

The loop knows no grpc; adapters (`vime_trainer.adapters`) and tests implement these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from vime_trainer.loop.versions import Version


@dataclass(frozen=True)
class Opened:
    """An incarnation that the ledger granted."""

    incarnation: int
    last_ledger_step: int
    rewound_groups: int
    requeued_prompts: int


@dataclass(frozen=True)
class Group:
    """A group of a batch, for planning."""

    group_id: str
    samples: int
    tokens: int
    staleness: int
    oldest: Version | None
    attempt: int = 0


@dataclass(frozen=True)
class Batch:
    """A leased batch; or, when `groups` is empty, the reason why there is none yet (`ended`: never will be)."""

    groups: list[Group] = field(default_factory=list)
    ended: bool = False
    blocked_by: str = ""
    counts: Mapping[str, int] = field(default_factory=dict)
    replayed: bool = False
    detail: str = ""
    """The reason in words, where it is more than the counts."""


@dataclass(frozen=True)
class Unusable:
    """A group of a leased batch that cannot be trained."""

    group_id: str
    attempt: int
    detail: str


@dataclass(frozen=True)
class Completed:
    """What the ledger said to a completed step."""

    checkpoint_wanted: bool
    opened_evals: list[str]


@dataclass(frozen=True)
class Harvest:
    """What became of the prompts of a table."""

    made: int
    """Prompts whose group could be used."""
    given_up: dict[str, int]
    """Prompts that no group was made of, or none that could be used (`unusable`), by reason."""
    stored: int
    """Groups that are ready and in no batch."""
    groups_per_step: int


@dataclass(frozen=True)
class EvalRound:
    """An eval round as it stands."""

    done: bool
    metrics: dict[str, float]
    progress: str
    holds: bool = True
    """Training waits for it. Rounds that hold nothing up are reported when they are done, at the latest at the end."""


class Ledger(Protocol):
    """The buffer, as the trainer sees it. All calls carry the incarnation and a deadline."""

    async def open_incarnation(
        self, run_id: str, resume_step: int, highest_known: int, recipe_digest: str
    ) -> Opened: ...

    async def announce(self, version: Version) -> list[str]:
        """Returns the eval tables whose rounds were opened."""

    async def lease_batch(self, incarnation: int, step: int, wait_s: float) -> Batch: ...

    async def quarantine(self, incarnation: int, step: int, groups: Sequence[Unusable]) -> None:
        """Take groups out of the step's batch; their prompts are made again or given up. Asked for the same step, the
        ledger then gives the batch once it is whole. Raises what ends the run when the ledger has had enough of
        them."""

    async def complete_step(
        self, incarnation: int, step: int, *, trained: bool, published: Version | None, final: bool
    ) -> Completed: ...

    async def checkpoint_committed(self, incarnation: int, step: int, oldest_kept_step: int) -> None: ...

    async def eval_round(self, table: str, step: int) -> EvalRound: ...

    async def eval_answers(self, table: str, step: int, prompts: int) -> list[dict[str, Any]]:
        """What was answered to the first prompts of a round that is done, as records for people; in order, the same
        prompts in every round. Fewer where some were given up or cannot be read any more."""

    async def harvest(self) -> Harvest:
        """What became of the table's prompts so far."""

    async def counts(self) -> dict[str, float]:
        """Counts of the train table by metric name, such as `buffer/groups_stored`."""


@dataclass(frozen=True)
class Member:
    """An engine that a weight update must reach."""

    engine_id: str
    boot_id: str
    address: str
    serving: Version | None
    manifest_digest: str
    usable: bool
    """False while it is loading or draining: it is not waited for."""


class Refused(Exception):
    """A member refused or failed a leg of the update; the message says why. `dirty`: its weights are unknown. `away`:
    it did not answer at all, as while it starts again."""

    def __init__(self, message: str, dirty: bool = False, away: bool = False) -> None:
        super().__init__(message)
        self.dirty, self.away = dirty, away


class Fleet(Protocol):
    """Router and engines, as the publisher sees them. Every leg raises Refused for a member's own failure."""

    async def members(self, version: Version) -> list[Member]: ...

    async def prepare(self, member: Member, described: Described, generation: int, rank: int, world: int) -> bool:
        """True if the member serves the version already and does not join."""

    async def await_staged(self, member: Member, version: Version) -> None: ...

    async def commit(self, member: Member, described: Described) -> Commit: ...

    async def abort(self, member: Member, version: Version, cause: str) -> None: ...


@dataclass(frozen=True)
class Commit:
    """What a commit reported."""

    canary_difference: float | None
    pause_s: float


@dataclass(frozen=True)
class Described:
    """Weights that are ready to be sent."""

    version: Version
    manifest: Any
    """The adapter's own form."""
    digest: str
    total_bytes: int
    store_address: str
    canary: Any
    """The adapter's own form."""


@dataclass(frozen=True)
class Trained:
    """A train command's result."""

    metrics: dict[str, float]
    skipped: bool
    sample_json: list[str]
    left_out: dict[str, str]
    trained_samples: list[str]
    unusable_groups: dict[str, str] = field(default_factory=dict)
    """Groups that cannot be trained, by id, with the reason. If there is one, nothing was trained."""


@dataclass(frozen=True)
class Loaded:
    """Weights were loaded. `state`: what the checkpoint kept; empty for the starting model."""

    state: dict[str, Any]
    parameters: int


@dataclass(frozen=True)
class Saved:
    """A checkpoint was committed."""

    path: str
    kept_steps: list[int]
    hf_path: str = ""
    """Folder of its HF export; empty if there is none."""


class RankDied(Exception):
    """A rank process ended; the message names it and its cause. `rank`: which; None where it is not one of them."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class Ranks(Protocol):
    """The rank processes. Commands run one after the other on all of them; any may raise RankDied."""

    @property
    def data_parallel(self) -> int: ...

    @property
    def starting(self) -> str:
        """What `start` waits for now, for people."""

    async def start(self) -> None:
        """Have fresh processes, which hold no weights yet."""

    async def stop(self) -> None: ...

    async def load(self, checkpoint: str | None) -> Loaded: ...

    async def train(
        self,
        step: int,
        group_ids: Sequence[str],
        group_ranks: Sequence[int],
        policy: Version,
        *,
        score_without_replay: bool,
        sample_texts: int,
    ) -> Trained: ...

    async def describe(self, version: Version) -> Described: ...

    async def send(self, described: Described, generation: int, world: int, timeout_s: float) -> float:
        """Seconds the transfer took."""

    async def save(self, step: int, state: dict[str, Any], hf: bool) -> Saved: ...
