"""For tests of the buffer and of its callers: small groups that pass every check, and a ledger without a server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from vime.buffer.v1.prompt_service_pb2 import PromptLease
from vime.common.v1.tensor_pb2 import DTYPE_UINT8, DTYPE_UINT16, TensorRef
from vime.common.v1.trajectory_pb2 import (
    FINISH_REASON_STOP,
    ROUTING_SOURCE_GENERATED,
    SAMPLE_STATUS_COMPLETED,
    RoutingSegment,
    RoutingTrace,
    Sample,
    TrajectoryGroup,
)
from vime.common.v1.weight_version_pb2 import VersionSpan
from vime_buffer import batches, catalog, incarnation, leases, quarantine, views
from vime_buffer.digests import payload_digest
from vime_buffer.ledger import Ledger, LedgerOptions
from vime_buffer.settings import TableSettings, check_table
from vime_buffer.values import (
    BatchAnswer,
    Completed,
    GroupFacts,
    Insert,
    LeaseGrant,
    Opened,
    Outcome,
    PromptAnswer,
    Quarantine,
    Unusable,
    Version,
)
from vime_buffer.writer import Writer
from vime_service.clock import Clock, ManualClock

T = TypeVar("T")
RUN_ID = "run"


def write_prompts(path: Path, count: int, first: int = 0) -> Path:
    """A JSONL file with `count` prompts."""
    lines = (json.dumps({"prompt": f"{n} + 1 =", "answer": n + 1}) for n in range(first, first + count))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def table(path: Path, **changes: Any) -> TableSettings:
    """Settings of a small table, checked and filled in."""
    name = changes.setdefault("name", "train")
    source = {"path": path, **changes.pop("source", {})}
    defaults: dict[str, Any] = {"sampling": {"max_tokens": 8}, "samples_per_prompt": 2}
    if not name.startswith("eval/"):
        defaults["groups_per_step"] = 2
    settings = TableSettings.model_validate({**defaults, **changes, "source": source})
    check_table(settings)
    return settings.filled()


def finished(
    lease: LeaseGrant,
    version: Version | None = None,
    *,
    payload: bytes | None = None,
    drop: str = "",
    rewards: Sequence[float] | None = None,
) -> Insert:
    """What a worker inserts for a lease; the payload is different for every attempt."""
    at = version or lease.fence
    samples = lease.num_samples
    facts = GroupFacts(
        group_id=lease.group_id,
        attempt=lease.attempt,
        table=lease.table,
        prompt_id=lease.record.prompt_id,
        sample_tokens=(7,) * samples,
        response_tokens=4 * samples,
        truncated=0,
        rewards=tuple(rewards if rewards is not None else [float(n % 2) for n in range(samples)]),
        versions=(at,),
        seeds=lease.seeds,
    )
    body = payload if payload is not None else f"{lease.group_id}#{lease.attempt}@{at}".encode()
    return Insert(lease.lease_id, facts, body, payload_digest(body), drop)


class Desk:
    """A ledger with its writer, called synchronously. After every call both laws are checked."""

    def __init__(
        self, folder: Path, tables: Iterable[TableSettings] = (), clock: Clock | None = None, **options: Any
    ) -> None:
        self.folder = folder
        self.clock = clock or ManualClock()
        settings: dict[str, Any] = {"run_id": RUN_ID, "seed": 7, **options}
        configured = list(tables)
        settings["source_paths"] = {table.name: table.source.path for table in configured}
        self.ledger = Ledger(LedgerOptions(folder=folder, **settings), self.clock, wall=self.clock.now)
        self.writer = Writer(self.ledger)
        self.incarnation = self.ledger.run().incarnation
        self.call(lambda ledger: catalog.configure_tables(ledger, configured))

    def call(self, work: Callable[[Ledger], T]) -> T:
        """Run an operation, durably, and check the laws."""
        try:
            return self.writer.submit(work).result(timeout=30)
        finally:
            self.assert_laws()

    def assert_laws(self) -> None:
        """Both conservation laws, for every table."""
        broken = self.writer.submit(lambda ledger: [self._broken(ledger, name) for name in ledger.tables]).result(30)
        assert not any(broken), broken

    @staticmethod
    def _broken(ledger: Ledger, name: str) -> list[str]:
        return [f"{name}: {law}" for law in views.table_view(ledger.db, name).counts.broken_laws().items()]

    def counts(self, name: str = "train") -> views.Counts:
        """Counts of a table."""
        return self.call(lambda ledger: views.table_view(ledger.db, name)).counts

    def wait(self, seconds: float) -> None:
        """Let time pass with the beats of a buffer that is awake: an ended lease is ended, and nothing was deaf."""
        assert isinstance(self.clock, ManualClock)
        for _ in range(round(seconds / 0.5)):
            self.clock.advance(0.5)
            self.writer.submit(lambda ledger: None).result(timeout=30)
        self.assert_laws()

    def keep_alive(self, lease_ids: Sequence[str], worker_id: str = "worker") -> tuple[list[str], float]:
        """KeepAlive."""
        return self.call(lambda ledger: leases.keep_alive(ledger, worker_id, lease_ids))

    def close(self) -> None:
        """Stop the writer and close the files."""
        assert self.writer.close()
        self.ledger.close()

    # -------------------------------------------------------------- short names of the calls

    def open(self, resume_step: int = 0, **options: Any) -> Opened:
        """OpenIncarnation."""
        settings: dict[str, Any] = {"highest_known": 0, "recipe_digest": "r", "regenerate": False, **options}
        opened = self.call(lambda ledger: incarnation.open_incarnation(ledger, RUN_ID, resume_step, **settings))
        self.incarnation = opened.incarnation
        return opened

    def announce(self, step: int = 0) -> tuple[str, ...]:
        """AnnounceVersion."""
        version = Version(RUN_ID, self.incarnation, step)
        return self.call(lambda ledger: incarnation.announce_version(ledger, version))

    def begin(self, resume_step: int = 0, **options: Any) -> Opened:
        """OpenIncarnation and AnnounceVersion."""
        opened = self.open(resume_step, **options)
        self.announce(resume_step)
        return opened

    def lease(self, wanted: int = 100, tables: Sequence[str] = ()) -> PromptAnswer:
        """LeasePrompts."""
        return self.call(lambda ledger: leases.lease_prompts(ledger, "worker", wanted, tables))

    def insert(self, lease: LeaseGrant, version: Version | None = None, **changes: Any) -> bool:
        """InsertGroup."""
        insert = finished(lease, version, **changes)
        return self.call(lambda ledger: leases.insert_group(ledger, insert))

    def batch(self, step: int, table_name: str = "train") -> BatchAnswer:
        """LeaseBatch."""
        own = self.incarnation
        return self.call(lambda ledger: batches.lease_batch(ledger, own, step, table_name, workers_ask=True))

    def quarantine(self, step: int, *group_ids: str, detail: str = "bad", table_name: str = "train") -> Quarantine:
        """QuarantineGroups of the attempts that the batch holds."""
        own = self.incarnation
        attempts = {group.group_id: group.attempt for group in self.batch(step, table_name).groups}
        unusable = [Unusable(group_id, attempts[group_id], detail) for group_id in group_ids]
        return self.call(lambda ledger: quarantine.quarantine_groups(ledger, own, step, table_name, unusable))

    def complete(
        self,
        step: int,
        outcome: Outcome = Outcome.TRAINED,
        *,
        publish: bool = True,
        published_step: int | None = None,
        final: bool = False,
        table_name: str = "train",
    ) -> Completed:
        """CompleteStep; it brings the step's own version, that of `published_step`, or none."""
        own = self.incarnation
        brought = step if published_step is None and publish and outcome is Outcome.TRAINED else published_step
        published = None if brought is None else Version(RUN_ID, own, brought)
        return self.call(
            lambda ledger: batches.complete_step(ledger, own, step, table_name, outcome, published, final=final)
        )

    def checkpoint(self, step: int, oldest_kept: int | None = None) -> tuple[int, int]:
        """CheckpointCommitted."""
        own, oldest = self.incarnation, step if oldest_kept is None else oldest_kept
        return self.call(lambda ledger: batches.checkpoint_committed(ledger, own, step, oldest))

    def train(self, step: int, *, publish: bool = True) -> list[str]:
        """Generate what is admitted, lease the batch of `step`, complete it; ids of its groups."""
        for lease in self.lease().leases:
            self.insert(lease)
        groups = [group.group_id for group in self.batch(step).groups]
        self.complete(step, publish=publish)
        return groups


def proto_group(
    lease: PromptLease,
    *,
    response_tokens: int = 4,
    rewards: Sequence[float] | None = None,
    moe_layers: int = 0,
    top_k: int = 2,
    num_experts: int = 8,
) -> TrajectoryGroup:
    """A finished group on the wire; with `moe_layers` it has routes, inline whatever their size."""
    version = lease.fence.exactly if lease.fence.HasField("exactly") else lease.fence.at_least
    prompt_tokens = 3
    rows = prompt_tokens + response_tokens - 1
    routes = None
    if moe_layers:
        item = 1 if num_experts <= 256 else 2
        data = b"".join(n.to_bytes(item, "little") for n in range(top_k)) * (rows * moe_layers)
        experts = TensorRef(
            dtype=DTYPE_UINT8 if item == 1 else DTYPE_UINT16,
            shape=[rows, moe_layers, top_k],
            digest=payload_digest(data).hex(),
            inline=data,
        )
        segment = RoutingSegment(rows=rows, weight_version=version, source=ROUTING_SOURCE_GENERATED, experts=experts)
        routes = RoutingTrace(segments=[segment], moe_layer_ids=range(moe_layers), num_experts=num_experts)
    return TrajectoryGroup(
        group_id=lease.group_id,
        attempt=lease.attempt,
        table=lease.table,
        prompt=lease.prompt,
        sampling=lease.sampling,
        samples=[
            Sample(
                group_id=lease.group_id,
                sample_index=index,
                prompt_token_ids=range(1, prompt_tokens + 1),
                response_token_ids=[index + 5] * response_tokens,
                rollout_logprobs=[-0.5] * response_tokens,
                version_spans=[VersionSpan(weight_version=version)],
                routed_experts=routes,
                finish_reason=FINISH_REASON_STOP,
                status=SAMPLE_STATUS_COMPLETED,
                reward=rewards[index] if rewards is not None else float(index % 2),
                seed=lease.seeds[index],
            )
            for index in range(lease.num_samples)
        ],
    )
