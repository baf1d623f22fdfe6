"""A foreign worker that inserts groups which no model can have made, and a data file with lines that nobody can read.

Each kind spoils one thing of a group that the engine really generated. It must be refused at insert by a reason, or,
where only training can find it, leave its batch for the quarantine; in neither case may it be trained or end the run.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sqlite3
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import xxhash

from vime.buffer.v1.prompt_service_pb2 import FAILURE_CLASS_GENERATION, PromptLease
from vime.common.v1.trajectory_pb2 import RoutingSegment, TrajectoryGroup
from vime_client.buffer import BufferClient
from vime_client.errors import RpcError
from vime_client.generation import GenerationClient
from vime_client.retry import whole_step
from vime_client.worker.group import build_group

WORKER = "poisoner"
LEASE_S, GENERATE_S = 60.0, 60.0
_BAD_LINES = (
    r'{"prompt": "\ud83d", "answer": "1"}',
    '{"prompt": 3, "answer": "1"}',
    '{"answer": "1"}',
    '{"prompt": "1+1=", "answer": "2"',
    '["1+1=", "2"]',
)


def _first_routes(group: TrajectoryGroup, change: Callable[[bytearray], None]) -> None:
    """Change the experts of the first segment and announce their true digest: only their meaning is wrong."""
    experts = group.samples[0].routed_experts.segments[0].experts
    data = bytearray(experts.inline)
    change(data)
    experts.inline = bytes(data)
    experts.digest = xxhash.xxh3_128_hexdigest(experts.inline)


def _token_outside_the_vocabulary(group: TrajectoryGroup) -> None:
    group.samples[0].response_token_ids[0] = 10**6


def _repeated_expert(group: TrajectoryGroup) -> None:
    def change(data: bytearray) -> None:
        data[1] = data[0]

    _first_routes(group, change)


def _unknown_expert(group: TrajectoryGroup) -> None:
    def change(data: bytearray) -> None:
        data[0] = 255

    _first_routes(group, change)


def _routes_by_handle(group: TrajectoryGroup) -> None:
    segment: RoutingSegment = group.samples[0].routed_experts.segments[0]
    segment.experts.handle.scheme, segment.experts.handle.key = "file", "nowhere"


def _other_layers(group: TrajectoryGroup) -> None:
    for sample in group.samples:
        layers = sample.routed_experts.moe_layer_ids
        layers[:] = [layer + 1 for layer in layers]


def _more_experts(group: TrajectoryGroup) -> None:
    for sample in group.samples:
        sample.routed_experts.num_experts = 200


def _foreign_sample(group: TrajectoryGroup) -> None:
    group.samples[0].group_id += "x"


def _unequal_forks(group: TrajectoryGroup) -> None:
    for place, sample in enumerate(group.samples[:2]):
        sample.trajectory_id, sample.reward = "fork", float(place)


def _enormous_reward(group: TrajectoryGroup) -> None:
    group.samples[0].reward = 1e308


def _other_temperature(group: TrajectoryGroup) -> None:
    group.sampling.temperature = 5.0


KINDS: dict[str, Callable[[TrajectoryGroup], None]] = {
    "token outside the vocabulary": _token_outside_the_vocabulary,
    "repeated expert": _repeated_expert,
    "unknown expert": _unknown_expert,
    "routes by handle": _routes_by_handle,
    "other layers": _other_layers,
    "more experts": _more_experts,
    "sample of another group": _foreign_sample,
    "forks of unequal reward": _unequal_forks,
    "enormous reward": _enormous_reward,
    "other temperature": _other_temperature,
}


def spoil_data(path: Path, lines: int, dice: random.Random) -> None:
    """Put `lines` bad lines between the good ones of a JSONL file."""
    good = path.read_text(encoding="utf-8").splitlines()
    for _ in range(lines):
        good.insert(dice.randrange(len(good)), dice.choice(_BAD_LINES))
    path.write_text("\n".join(good) + "\n", encoding="utf-8")


class Poisoner:
    """Counts what became of each poison."""

    def __init__(self) -> None:
        self.refused: Counter[str] = Counter()
        """`kind: reason` of what InsertGroup refused."""
        self.accepted: dict[tuple[str, int], str] = {}
        """Kinds that were stored, by group id and attempt: training must find them."""
        self.lost = 0
        """Groups that never came to an answer, such as by a fault at the same time."""

    async def insert(self, plan: dict[str, Any], dice: random.Random, kind: str = "") -> bool:
        """Draw one prompt, generate its group, spoil it in the way of `kind` (unset: any), and offer it; the lease is
        given back if it is refused. False if the lease was lost meanwhile."""
        kind = kind or dice.choice(sorted(KINDS))
        async with BufferClient(plan["buffer"]) as buffer, GenerationClient(plan["router"]) as engine:
            try:
                lease = await _lease(buffer)
                group = await _group(engine, lease, dice)
                KINDS[kind](group)
                await buffer.insert(lease.lease_id, group)
            except (RpcError, _NoneYet) as error:
                if not isinstance(error, RpcError) or error.code is not grpc.StatusCode.INVALID_ARGUMENT:
                    self.lost += 1
                    return False
                self.refused[f"{kind}: {error.reason}"] += 1
                with contextlib.suppress(RpcError):  # it expires
                    await buffer.fail(lease.lease_id, FAILURE_CLASS_GENERATION, f"poisoned on purpose: {kind}")
            else:
                self.accepted[lease.group_id, lease.attempt] = kind
        return True


async def _lease(buffer: BufferClient) -> PromptLease:
    """One prompt of the train table; its other takers are real workers, so it may take some rounds."""
    steps = whole_step("lease", attempts=1000, seconds=LEASE_S, retry_if=_may_come)
    async for attempt in steps:
        with attempt:
            answer = await buffer.draw(WORKER, 1, 5.0, ["train"])
            if not answer.leases:
                raise _NoneYet
            return answer.leases[0]
    raise AssertionError("tenacity returned without a result or an error")


class _NoneYet(Exception):
    """Nothing was admitted."""


def _may_come(error: BaseException) -> bool:
    return isinstance(error, _NoneYet) or (isinstance(error, RpcError) and error.transient)


async def _group(engine: GenerationClient, lease: PromptLease, dice: random.Random) -> TrajectoryGroup:
    """What an honest worker would insert, with rewards thrown by dice."""
    prompt = await engine.render(lease.prompt.text)
    answer = await engine.generate(
        prompt, lease.sampling, lease.seeds, timeout_s=GENERATE_S, fence=lease.fence, return_routes=True
    )
    group = build_group(lease, prompt, answer)
    for sample in group.samples:
        sample.reward = float(dice.random() < 0.5)
    return group


def read_plan(run_dir: Path) -> dict[str, Any]:
    """Addresses of a run's services."""
    plan: dict[str, Any] = json.loads((run_dir / "services" / "plan.json").read_text(encoding="utf-8"))
    return plan


def forget_the_model(run_dir: Path) -> None:
    """Make the ledger one of 0.2.0, which knew no model and stored what came; the launcher starts its buffer again."""
    state = json.loads((run_dir / "services" / "state.json").read_text())
    os.kill(state["services"]["buffer"]["pid"], signal.SIGKILL)
    with sqlite3.connect(run_dir / "buffer" / "ledger.sqlite") as ledger:
        ledger.execute("UPDATE run SET model = NULL")


def quarantined(run_dir: Path) -> dict[tuple[str, int], str]:
    """Why training could not use which group and attempt, from the ledger of a run that is over."""
    with sqlite3.connect(f"file:{run_dir / 'buffer' / 'ledger.sqlite'}?mode=ro", uri=True) as ledger:
        rows = ledger.execute("SELECT group_id, attempt, detail FROM quarantined").fetchall()
    return {(group_id, attempt): detail for group_id, attempt, detail in rows}
