"""Fakes of the loop's ports. They keep the ports' promises and count what was asked of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from vime_client.errors import RpcError
from vime_trainer.loop.ports import (
    Batch,
    Commit,
    Completed,
    Described,
    EvalRound,
    Group,
    Harvest,
    Loaded,
    Member,
    Opened,
    RankDied,
    Refused,
    Saved,
    Trained,
    Unusable,
)
from vime_trainer.loop.versions import Version
from vime_trainer.tools import fresh_model


@dataclass
class FakeEngine:
    """One engine's side of the update."""

    engine_id: str
    serving: Version | None = None
    usable: bool = True
    refuse_prepare: str = ""
    fail_staging: str = ""
    dirty_commit: str = ""
    away_for: int = 0
    joined: tuple[int, int, int] | None = None
    aborted: list[str] = field(default_factory=list)


class FakeFleet:
    """Engines by id; a leg fails as its engine says."""

    def __init__(self, *engines: FakeEngine) -> None:
        self.engines = {engine.engine_id: engine for engine in engines}
        self.prepared: list[tuple[str, int, int, int]] = []

    async def members(self, version: Version) -> list[Member]:
        return [Member(e.engine_id, "boot", "address", e.serving, "", e.usable) for e in self.engines.values()]

    async def prepare(self, member: Member, described: Described, generation: int, rank: int, world: int) -> bool:
        engine = self.engines[member.engine_id]
        if engine.away_for:
            engine.away_for -= 1
            raise Refused("connection refused", away=True)
        if engine.refuse_prepare:
            raise Refused(engine.refuse_prepare)
        if engine.serving == described.version:
            return True
        engine.joined = (generation, rank, world)
        self.prepared.append((member.engine_id, generation, rank, world))
        return False

    async def await_staged(self, member: Member, version: Version) -> None:
        if self.engines[member.engine_id].fail_staging:
            raise Refused(self.engines[member.engine_id].fail_staging)

    async def commit(self, member: Member, described: Described) -> Commit:
        engine = self.engines[member.engine_id]
        if engine.dirty_commit:
            engine.serving = None
            raise Refused(engine.dirty_commit, dirty=True)
        engine.serving = described.version
        return Commit(1e-7, 0.01)

    async def abort(self, member: Member, version: Version, cause: str) -> None:
        self.engines[member.engine_id].aborted.append(cause)


class FakeRanks:
    """Ranks whose steps succeed unless told otherwise."""

    data_parallel = 1
    starting = ""

    def __init__(self) -> None:
        self.trained: list[int] = []
        self.unreplayed: list[int] = []
        self.saved: list[int] = []
        self.state: dict[str, Any] = {}
        self.described: list[Version] = []
        self.loaded: list[str | None] = []
        self.sends: list[tuple[int, int]] = []
        self.skip: set[int] = set()
        self.unusable: list[dict[str, str]] = []
        self.die_at: int | None = None
        self.send_fails: list[str] = []
        self.kept: list[int] = []
        self.starts = 0

    async def start(self) -> None:
        self.starts += 1

    async def stop(self) -> None:
        return None

    async def load(self, checkpoint: str | None) -> Loaded:
        self.loaded.append(checkpoint)
        return Loaded(self.state, 1)

    async def train(
        self,
        step: int,
        group_ids: Sequence[str],
        group_ranks: Sequence[int],
        policy: Version,
        *,
        score_without_replay: bool,
        sample_texts: int,
    ) -> Trained:
        if self.die_at == step:
            self.die_at = None
            raise RankDied("rank 0 was killed by SIGKILL")
        if self.unusable:
            return Trained({}, True, [], {}, [], self.unusable.pop(0))
        self.trained.append(step)
        self.unreplayed += [step] if score_without_replay else []
        metrics = {"train/loss": 0.5, "perf/actor_train_time": 0.0, "train/grad_norm": 1.0}
        return Trained(metrics, step in self.skip, ['{"prompt": "1+1="}'], {}, list(group_ids))

    async def describe(self, version: Version) -> Described:
        self.described.append(version)
        return Described(version, None, f"digest-{version}", 100, "127.0.0.1:1", [])

    async def send(self, described: Described, generation: int, world: int, timeout_s: float) -> float:
        self.sends.append((generation, world))
        if self.send_fails:
            raise Refused(self.send_fails.pop(0))
        return 0.01

    async def save(self, step: int, state: dict[str, Any], hf: bool) -> Saved:
        self.saved.append(step)
        self.state = state
        self.kept = [*self.kept, step][-2:]
        return Saved(f"/checkpoints/{step}", self.kept, f"/hf/step_{step:06d}" if hf else "")


class FakeLedger:
    """A ledger that always has a batch of two groups."""

    def __init__(self, ends_after: int | None = None, evals: dict[int, list[str]] | None = None) -> None:
        self.incarnation = 0
        self.completed: list[tuple[int, int, bool, Version | None, bool]] = []
        self.announced: list[Version] = []
        self.committed: list[tuple[int, int]] = []
        self.empty_answers = 0
        self.ends_after = ends_after
        self.evals = evals or {}
        self.opened_from: list[tuple[int, int]] = []
        self.retained_at: int | None = None
        self.quarantined: list[tuple[int, Unusable]] = []
        self.max_unusable = 4
        self.harvested = Harvest(made=100, given_up={}, stored=0, groups_per_step=2)
        self.always_full = False
        self.evals_end = True
        self.evals_hold = True

    async def open_incarnation(self, run_id: str, resume_step: int, highest_known: int, recipe_digest: str) -> Opened:
        self.incarnation = max(self.incarnation, highest_known) + 1
        self.opened_from.append((resume_step, highest_known))
        return Opened(self.incarnation, 0, 0, 0)

    async def announce(self, version: Version) -> list[str]:
        self.announced.append(version)
        return self.evals.get(0, []) if version.step == 0 else []

    async def lease_batch(self, incarnation: int, step: int, wait_s: float) -> Batch:
        await asyncio.sleep(0)
        if self.ends_after is not None and step > self.ends_after:
            return Batch(ended=True, blocked_by="end_of_data")
        if self.always_full:
            return Batch(blocked_by="retained_bytes", counts={"consumed_bytes": 9, "retained_bytes": 8})
        if self.retained_at == step and (step - 1) not in [saved for saved, _ in self.committed]:
            return Batch(blocked_by="retained_bytes", counts={"bytes": 1})
        if self.empty_answers:
            self.empty_answers -= 1
            return Batch(blocked_by="generating", counts={"open": 3})
        attempt = sum(at == step for at, _ in self.quarantined)
        return Batch([Group(f"g{step}-{i}", 4, 40, 0, None, attempt) for i in range(2)])

    async def quarantine(self, incarnation: int, step: int, groups: Sequence[Unusable]) -> None:
        self.quarantined += [(step, group) for group in groups]
        if len(self.quarantined) > self.max_unusable:
            raise RpcError(grpc.StatusCode.FAILED_PRECONDITION, "5 groups in a row", reason="WRONG_STATE")

    async def complete_step(
        self, incarnation: int, step: int, *, trained: bool, published: Version | None, final: bool
    ) -> Completed:
        again = any(done == step for _, done, *_ in self.completed)
        self.completed.append((incarnation, step, trained, published, final))
        if final and again:  # the real one names all rounds of the step, those opened before, too
            return Completed(False, [*self.evals.get(step, []), "eval/final"])
        return Completed(False, self.evals.get(step, []))

    async def checkpoint_committed(self, incarnation: int, step: int, oldest_kept_step: int) -> None:
        self.committed.append((step, oldest_kept_step))

    async def eval_round(self, table: str, step: int) -> EvalRound:
        return EvalRound(self.evals_end, {table: 0.5}, "done" if self.evals_end else "0 of 3 prompts", self.evals_hold)

    async def eval_answers(self, table: str, step: int, prompts: int) -> list[dict[str, Any]]:
        return [{"prompt": f"{i}+1=", "response": str(i), "reward": 0.5} for i in range(prompts)]

    async def harvest(self) -> Harvest:
        return self.harvested

    async def counts(self) -> dict[str, float]:
        return {"buffer/groups_stored": 0.0}


@pytest.fixture
def version() -> Version:
    return Version("run", 1, 7)


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fresh_model.config()))
    return folder


@pytest.fixture
def make_engine() -> type[FakeEngine]:
    return FakeEngine


@pytest.fixture
def make_fleet() -> type[FakeFleet]:
    return FakeFleet


@pytest.fixture
def make_ledger() -> type[FakeLedger]:
    return FakeLedger


@pytest.fixture
def ranks() -> FakeRanks:
    return FakeRanks()
