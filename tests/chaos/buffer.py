"""Kill the buffer under load, tear its last write, fill its disk, damage its files: nothing lost, nothing doubled.

`make chaos NAME=buffer ROUNDS=n`. The buffer is a real process; eight workers and a trainer call it through its
contract all the time, with two thousand groups in flight. In admission order and without a prompt given up, the batch
of every step is known beforehand: what training got is compared with it id by id, and every payload with what its
worker sent; an insert that was acked must be the one that is trained. Sometimes the trainer dies as well and replays
from an older step: the same batches must come again.
"""

from __future__ import annotations

import asyncio
import random
import resource
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration
from tests.buffer_process import RUN, BufferProcess, Stubs, finished_group, response_of, write_prompts

from vime.buffer.v1 import batch_service_pb2 as batch_pb
from vime.buffer.v1 import prompt_service_pb2 as prompt_pb
from vime.buffer.v1.table_service_pb2 import GetTableRequest, TableCounts
from vime.common.v1.weight_version_pb2 import WeightVersion
from vime_client.errors import RpcError

PROMPTS, GROUPS_PER_STEP, STALENESS, WORKERS, TOKENS = 1000, 128, 15, 8, 16
TTL, KEEP_ALIVE_S, KEPT_STEPS, STALL_S = 2, 0.4, 6, 120
TABLE = f"""source = {{ path = "train.jsonl" }}
sampling = {{ max_tokens = {TOKENS} }}
groups_per_step = {GROUPS_PER_STEP}
max_staleness = {STALENESS}
max_attempts = 1000
lease_ttl = {TTL}
generation_deadline = 1
"""
FAULTS = ("kill", "torn", "kill", "full_disk", "kill", "trainer", "kill", "read_only", "kill", "corrupted")
_HEADER = 16
"""Bytes in front of a payload in its segment."""
_PASSING = {"DRAINING", "NOT_READY", "STORAGE_FAILED", "DEADLINE"}


class Load:
    """Workers and a trainer over one buffer, and what became of their work."""

    def __init__(self, buffer: BufferProcess, seed: int) -> None:
        self.buffer = buffer
        self.random = random.Random(seed)
        self.batches: dict[int, list[str]] = {}
        self.completed = 0
        self.oldest_kept = 0
        self.incarnation = 0
        self.mixed: list[str] = []
        self.errors: Counter[str] = Counter()
        self.unclear: Counter[str] = Counter()
        self.damage: list[dict[str, str]] = []
        self.damaged: set[str] = set()
        self.acked: dict[str, int] = {}
        self.lost_acks: set[str] = set()
        self.progress = asyncio.Event()
        self.trainer_must_die = False
        self.stopping = False
        self.replayed = 0

    # -------------------------------------------------------------- calls that outlive a restart

    async def persist(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """Call until it answers. Only what a restart or a full disk explains is tried again."""
        end = time.monotonic() + STALL_S
        pause = 0.05
        while True:
            try:
                return await call()
            except grpc.aio.AioRpcError as raw:
                error = RpcError.from_aio(raw)
                self.errors[error.reason or error.code.name] += 1
                gone = error.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
                if not gone and error.reason not in _PASSING:
                    raise error from None
                if time.monotonic() > end:
                    raise RuntimeError(f"no answer for {STALL_S} s: {error}") from None
                pause = min(1.0, 2 * pause)
                await asyncio.sleep(self.random.uniform(pause / 2, pause))

    # -------------------------------------------------------------- workers

    async def work(self, name: str, stubs: Stubs) -> None:
        """Lease, make, insert, until told to stop. Answers that are lost in a crash are asked for again."""
        while not self.stopping:
            request = prompt_pb.LeasePromptsRequest(worker_id=name, max_prompts=64, wait=Duration(nanos=500_000_000))
            answer = await self.persist(lambda r=request: stubs.prompts.LeasePrompts(r, timeout=5))
            held = {lease.lease_id: lease for lease in answer.leases}
            keeper = asyncio.create_task(self.keep(name, stubs, held))
            try:
                await asyncio.gather(*(self.finish(stubs, held, lease_id) for lease_id in list(held)))
            finally:
                keeper.cancel()

    async def keep(self, name: str, stubs: Stubs, held: dict[str, prompt_pb.PromptLease]) -> None:
        while True:
            await asyncio.sleep(KEEP_ALIVE_S)
            request = prompt_pb.KeepAliveRequest(worker_id=name, lease_ids=list(held))
            answer = await self.persist(lambda r=request: stubs.prompts.KeepAlive(r, timeout=5))
            for lease_id in answer.lost_lease_ids:
                held.pop(lease_id, None)

    async def finish(self, stubs: Stubs, held: dict[str, prompt_pb.PromptLease], lease_id: str) -> None:
        await asyncio.sleep(self.random.expovariate(20))  # generation; some take much longer than others
        lease = held.get(lease_id)
        if lease is None:
            return
        request = prompt_pb.InsertGroupRequest(lease_id=lease_id, group=finished_group(lease, TOKENS))
        try:
            await self.persist(lambda: stubs.prompts.InsertGroup(request, timeout=5))
            if self.acked.setdefault(lease.group_id, lease.attempt) != lease.attempt:
                self.lost_acks.add(lease.group_id)  # it was made twice although the first was acked
            if self.random.random() < 0.05:  # a client that did not see the answer
                await self.persist(lambda: stubs.prompts.InsertGroup(request, timeout=5))
        except RpcError as error:
            if error.reason != "LEASE_LOST":
                self.unclear[str(error)] += 1
        held.pop(lease_id, None)

    # -------------------------------------------------------------- trainer

    async def train(self, stubs: Stubs) -> None:
        """Steps, one after the other; a death is played by resuming from an older step."""
        await self.open(stubs, 0)
        while not self.stopping:
            if self.trainer_must_die:
                self.trainer_must_die = False
                await self.open(stubs, self.random.randint(self.oldest_kept, max(self.oldest_kept, self.completed - 1)))
            step = self.completed + 1
            request = batch_pb.LeaseBatchRequest(incarnation=self.incarnation, train_step=step)
            answer = await self.persist(lambda r=request: stubs.batches.LeaseBatch(r, timeout=2))
            if not answer.groups:
                continue
            ids = [group.group_id for group in answer.groups]
            for group in answer.groups:
                if group.attempt > self.acked.get(group.group_id, group.attempt):
                    self.lost_acks.add(group.group_id)
            try:
                await self.persist(lambda wanted=ids: self.fetch(stubs, wanted))
            except RpcError as error:
                if error.reason != "CORRUPTED":
                    raise
                self.damage.append(dict(error.metadata))
                await self.open(stubs, self.completed)
                continue
            if step in self.batches:
                self.replayed += 1
                if self.batches[step] != ids:
                    self.mixed.append(f"step {step} was replayed with other groups")
            self.batches[step] = ids
            await self.complete(stubs, step)

    async def open(self, stubs: Stubs, step: int) -> None:
        request = batch_pb.OpenIncarnationRequest(
            run_id=RUN, resume_step=step, highest_known=self.incarnation, recipe_digest="chaos"
        )
        opened = await self.persist(lambda: stubs.batches.OpenIncarnation(request, timeout=10))
        if opened.incarnation <= self.incarnation:
            self.mixed.append(f"incarnation {opened.incarnation} after {self.incarnation}")
        self.incarnation, self.completed = opened.incarnation, step
        version = WeightVersion(run_id=RUN, incarnation=self.incarnation, step=step)
        announce = batch_pb.AnnounceVersionRequest(version=version)
        await self.persist(lambda: stubs.batches.AnnounceVersion(announce, timeout=10))

    async def fetch(self, stubs: Stubs, ids: list[str]) -> None:
        got = []
        async for message in stubs.batches.GetGroups(batch_pb.GetGroupsRequest(group_ids=ids), timeout=20):
            got += message.groups
        if [group.group_id for group in got] != ids:
            self.mixed.append(f"asked for {ids[:2]}…, got {[group.group_id for group in got][:2]}…")
        for group in got:
            for index, sample in enumerate(group.samples):
                if list(sample.response_token_ids) != response_of(group.group_id, index, TOKENS):
                    self.mixed.append(f"group {group.group_id} has another's tokens")

    async def complete(self, stubs: Stubs, step: int) -> None:
        request = batch_pb.CompleteStepRequest(
            incarnation=self.incarnation,
            train_step=step,
            outcome=batch_pb.STEP_OUTCOME_TRAINED,
            published_version=WeightVersion(run_id=RUN, incarnation=self.incarnation, step=step),
        )
        await self.persist(lambda: stubs.batches.CompleteStep(request, timeout=10))
        self.completed = step
        if step % 3 == 0 and step - KEPT_STEPS > self.oldest_kept:
            self.oldest_kept = step - KEPT_STEPS
            commit = batch_pb.CheckpointCommittedRequest(
                incarnation=self.incarnation, train_step=step, oldest_kept_step=self.oldest_kept
            )
            await self.persist(lambda: stubs.batches.CheckpointCommitted(commit, timeout=10))
        self.progress.set()


class Chaos:
    """Faults, one a round, each after training has moved on since the last."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.buffer = load.buffer
        self.recovered: list[float] = []
        self.broken_laws: list[str] = []
        self.most_in_flight = 0
        self.done: Counter[str] = Counter()

    async def round(self, fault: str, stubs: Stubs) -> None:
        """Wait for a step, let the load run for a moment, then strike."""
        await self.moved_on()
        await self.look(stubs)
        await asyncio.sleep(self.load.random.uniform(0, 0.3))
        await getattr(self, fault)()
        self.done[fault] += 1
        await self.look(stubs)

    async def moved_on(self) -> None:
        self.load.progress.clear()
        try:
            async with asyncio.timeout(STALL_S):
                await self.load.progress.wait()
        except TimeoutError:
            raise RuntimeError(f"training stands still at step {self.load.completed} for {STALL_S} s") from None

    async def look(self, stubs: Stubs) -> None:
        """Both laws, as the buffer tells its counts."""
        answer = await self.load.persist(lambda: stubs.tables.GetTable(GetTableRequest(name="train"), timeout=10))
        counts = answer.table.counts
        self.broken_laws += broken_laws(counts)
        in_flight = counts.prompts_open + counts.groups_stored + counts.groups_leased
        self.most_in_flight = max(self.most_in_flight, in_flight)

    async def start(self) -> None:
        self.recovered.append(await self.buffer.start())

    # -------------------------------------------------------------- faults

    async def kill(self) -> None:
        """SIGKILL at any moment, perhaps in the middle of a commit."""
        await self.buffer.kill()
        await self.start()

    async def torn(self) -> None:
        """The crash left half a record behind the last one."""
        await self.buffer.kill()
        with self.segments()[-1].open("ab") as file:
            file.write(b"VREC" + self.load.random.randbytes(self.load.random.randint(0, 5000)))
        await self.start()

    async def full_disk(self) -> None:
        """No file may grow any more; then there is room again."""
        pid = self.buffer.process.pid
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        await self.until_refused(
            lambda: resource.prlimit(pid, resource.RLIMIT_FSIZE, (4096, hard)),
            lambda: resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard)),
        )

    async def read_only(self) -> None:
        """The folder of the segments cannot be written; a new process needs a new file there."""
        folder = self.buffer.ledger / "segments"
        await self.buffer.kill()
        folder.chmod(0o555)
        await self.start()
        await self.until_refused(lambda: None, lambda: folder.chmod(0o755))

    async def until_refused(self, break_it: Callable[[], object], mend_it: Callable[[], object]) -> None:
        before = self.load.errors["STORAGE_FAILED"]
        break_it()
        try:
            async with asyncio.timeout(STALL_S):
                while self.load.errors["STORAGE_FAILED"] == before:
                    await asyncio.sleep(0.02)
            await asyncio.sleep(0.3)
        finally:
            mend_it()

    async def corrupted(self) -> None:
        """One byte of a payload that training will want is flipped on disk."""
        place = self.next_payload()
        if place is None:
            return
        group_id, segment, offset, nbytes = place
        self.load.damaged.add(group_id)
        path = self.buffer.ledger / "segments" / f"segment-{segment:08d}.seg"
        seen = len(self.load.damage)
        with path.open("r+b") as file:
            file.seek(offset + _HEADER + nbytes // 2)
            byte = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte[0] ^ 0x40]))
        async with asyncio.timeout(STALL_S):
            while len(self.load.damage) == seen:
                await asyncio.sleep(0.02)
        named = self.load.damage[-1]
        if named != {"segment": path.name, "offset": str(offset)}:
            self.load.unclear[f"damage at {path.name} {offset} was reported as {named}"] += 1

    async def trainer(self) -> None:
        """The trainer dies and resumes from any step that the ledger covers."""
        self.load.trainer_must_die = True
        before = self.load.incarnation
        async with asyncio.timeout(STALL_S):
            while self.load.incarnation == before:
                await asyncio.sleep(0.02)

    def segments(self) -> list[Path]:
        return sorted((self.buffer.ledger / "segments").glob("*.seg"))

    def next_payload(self) -> tuple[str, int, int, int] | None:
        """Where the youngest stored group lies: training has not fetched it yet."""
        uri = f"file:{self.buffer.ledger / 'ledger.sqlite'}?mode=ro"
        connection = sqlite3.connect(uri, uri=True, timeout=30)
        try:
            sql = "SELECT group_id, segment, offset, bytes FROM groups WHERE state = 2 ORDER BY admission DESC LIMIT 1"
            found: tuple[str, int, int, int] | None = connection.execute(sql).fetchone()
        finally:
            connection.close()
        return found


def broken_laws(counts: TableCounts) -> list[str]:
    """One sentence for each law that does not hold."""
    groups = counts.groups_stored + counts.groups_leased + counts.groups_consumed + counts.groups_retired
    groups += sum(counts.groups_dropped.values()) + sum(counts.groups_evicted.values())
    prompts = counts.prompts_open + counts.prompts_inserted + counts.prompts_requeued
    prompts += sum(counts.prompts_given_up.values())
    broken = []
    if counts.groups_inserted != groups:
        broken.append(f"groups: inserted {counts.groups_inserted}, found {groups}")
    if counts.prompts_drawn != prompts:
        broken.append(f"prompts: drawn {counts.prompts_drawn}, found {prompts}")
    return broken


def expected(step: int) -> list[str]:
    """The batch of a step: prompts in the order of the file, epoch after epoch."""
    numbers = range((step - 1) * GROUPS_PER_STEP, step * GROUPS_PER_STEP)
    return [f"train/train:{number // PROMPTS}:{number % PROMPTS}" for number in numbers]


async def chaos(folder: Path, rounds: int) -> dict[str, object]:
    """Play the rounds and judge."""
    write_prompts(folder / "train.jsonl", range(PROMPTS))
    buffer = BufferProcess(folder, TABLE, segment_bytes=1 << 20)
    await buffer.start()
    load = Load(buffer, seed=rounds)
    chaos = Chaos(load)
    async with buffer.channel() as channel:
        stubs = Stubs(channel)
        tasks = [asyncio.create_task(load.train(stubs))]
        tasks += [asyncio.create_task(load.work(f"worker-{number}", stubs)) for number in range(WORKERS)]
        playing = asyncio.create_task(play(chaos, stubs, rounds))
        try:
            # A worker or the trainer that fails ends the whole, and the verdict says why.
            done, _ = await asyncio.wait([playing, *tasks], return_when=asyncio.FIRST_COMPLETED)
            failures = [task.exception() for task in done]
            load.unclear.update(f"{type(error).__name__}: {error}" for error in failures if error is not None)
        finally:
            load.stopping = True
            for task in (playing, *tasks):
                task.cancel()
            await asyncio.gather(playing, *tasks, return_exceptions=True)
            await buffer.kill()
    return verdict(chaos, rounds)


async def play(chaos: Chaos, stubs: Stubs, rounds: int) -> None:
    """All rounds, and a last step that proves that training still moves."""
    for number in range(rounds):
        await chaos.round(FAULTS[number % len(FAULTS)], stubs)
    await chaos.moved_on()
    await chaos.look(stubs)


def verdict(chaos: Chaos, rounds: int) -> dict[str, object]:
    """The numbers."""
    load = chaos.load
    steps = range(1, max(load.batches, default=0) + 1)
    wanted = [group_id for step in steps for group_id in expected(step)]
    trained = [group_id for step in steps for group_id in load.batches[step]]
    out_of_order = sum(1 for step in steps if load.batches[step] != expected(step))
    return {
        "name": "buffer",
        "rounds": rounds,
        "lost": len(set(wanted) - set(trained)) + len(load.lost_acks - load.damaged),
        "doubled": len(trained) - len(set(trained)),
        "mixed": len(load.mixed) + out_of_order,
        "recovered_s_max": round(max(chaos.recovered, default=0.0), 2),
        "laws_held": not chaos.broken_laws,
        "unclear_errors": sum(load.unclear.values()),
        "faults": dict(chaos.done),
        "steps": len(steps),
        "groups_trained": len(trained),
        "steps_replayed": load.replayed,
        "incarnations": load.incarnation,
        "in_flight_max": chaos.most_in_flight,
        "errors_seen": dict(load.errors),
        "details": [*load.mixed, *chaos.broken_laws, *load.unclear][:10],
    }


def run(rounds: int) -> dict[str, object]:
    """`rounds` faults."""
    with tempfile.TemporaryDirectory(prefix="vime-chaos-") as folder:
        return asyncio.run(chaos(Path(folder), rounds))
