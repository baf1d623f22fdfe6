"""Durable inserts and leases per second over gRPC, against appending and syncing the same bytes to a bare file.

`make bench NAME=buffer`. The buffer is a process of its own on this machine; 64 groups are on their way at once. The
baseline writes the very same payloads to a file of the same disk, with one fdatasync for each, in the same run and in
turns with ours. Every insert is checked, indexed, and on disk (payload and ledger row) before it is answered.
"""

from __future__ import annotations

import asyncio
import os
import platform
import statistics
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import grpc
from tests.buffer_process import RUN, BufferProcess, Stubs, finished_group, write_prompts

from vime.buffer.v1 import batch_service_pb2 as batch_pb
from vime.buffer.v1 import prompt_service_pb2 as prompt_pb
from vime.common.v1.weight_version_pb2 import WeightVersion

TURNS, GROUPS, IN_FLIGHT, SAMPLES, TOKENS = 5, 512, 64, 8, 256
TABLE = f"""source = {{ path = "train.jsonl" }}
sampling = {{ max_tokens = {TOKENS} }}
samples_per_prompt = {SAMPLES}
groups_per_step = {GROUPS}
"""


async def take(stubs: Stubs) -> tuple[list[prompt_pb.PromptLease], float]:
    """Lease a whole turn, 64 prompts a call; leases per second."""
    leases: list[prompt_pb.PromptLease] = []
    start = time.perf_counter()
    while len(leases) < GROUPS:
        request = prompt_pb.LeasePromptsRequest(worker_id="bench", max_prompts=IN_FLIGHT)
        leases += (await stubs.prompts.LeasePrompts(request, timeout=30)).leases
    return leases, GROUPS / (time.perf_counter() - start)


async def insert(stubs: Stubs, requests: list[prompt_pb.InsertGroupRequest]) -> float:
    """Insert, 64 at a time; inserts per second."""
    waiting = iter(requests)

    async def work() -> None:
        for request in waiting:
            await stubs.prompts.InsertGroup(request, timeout=30)

    start = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(IN_FLIGHT)))
    return len(requests) / (time.perf_counter() - start)


def append_and_sync(folder: Path, payloads: list[bytes], at_once: int) -> float:
    """Write payloads to a bare file with one fdatasync for every `at_once` of them; payloads per second."""
    fd = os.open(folder / "bare", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    start = time.perf_counter()
    for number, payload in enumerate(payloads, start=1):
        os.write(fd, payload)
        if number % at_once == 0:
            os.fdatasync(fd)
    taken = time.perf_counter() - start
    os.close(fd)
    return len(payloads) / taken


async def train(stubs: Stubs, step: int) -> float:
    """Lease the batch, fetch its payloads, complete the step; MB of payload per second of fetching."""
    batch = await stubs.batches.LeaseBatch(batch_pb.LeaseBatchRequest(incarnation=1, train_step=step), timeout=30)
    ids = [group.group_id for group in batch.groups]
    start, size = time.perf_counter(), 0
    async for message in stubs.batches.GetGroups(batch_pb.GetGroupsRequest(group_ids=ids), timeout=60):
        size += message.ByteSize()
    taken = time.perf_counter() - start
    published = WeightVersion(run_id=RUN, incarnation=1, step=step)
    complete = batch_pb.CompleteStepRequest(
        incarnation=1, train_step=step, outcome=batch_pb.STEP_OUTCOME_TRAINED, published_version=published
    )
    await stubs.batches.CompleteStep(complete, timeout=30)
    return size / taken / 1e6


async def measure(folder: Path) -> dict[str, object]:
    """Play the turns."""
    write_prompts(folder / "train.jsonl", range(GROUPS))
    buffer = BufferProcess(folder, TABLE)
    await buffer.start()
    figures: dict[str, list[float]] = {key: [] for key in ("inserts", "leases", "bare", "bare_grouped", "fetch_mb")}
    nbytes = 0
    try:
        async with buffer.channel() as channel:
            stubs = Stubs(channel)
            await stubs.batches.OpenIncarnation(batch_pb.OpenIncarnationRequest(run_id=RUN), timeout=10)
            first = WeightVersion(run_id=RUN, incarnation=1, step=0)
            await stubs.batches.AnnounceVersion(batch_pb.AnnounceVersionRequest(version=first), timeout=10)
            for step in range(1, TURNS + 1):
                leases, rate = await take(stubs)
                groups = [finished_group(lease, TOKENS) for lease in leases]
                payloads = [group.SerializeToString() for group in groups]
                nbytes = len(payloads[0])
                requests = [
                    prompt_pb.InsertGroupRequest(lease_id=lease.lease_id, group=group)
                    for lease, group in zip(leases, groups, strict=True)
                ]
                figures["leases"].append(rate)
                figures["bare"].append(append_and_sync(folder, payloads, 1))
                figures["inserts"].append(await insert(stubs, requests))
                figures["bare_grouped"].append(append_and_sync(folder, payloads, IN_FLIGHT))
                figures["fetch_mb"].append(await train(stubs, step))
    finally:
        await buffer.kill()
    median = {key: round(statistics.median(values), 1) for key, values in figures.items()}
    return {
        "name": "buffer",
        "ours": median["inserts"],
        "baseline": median["bare"],
        "ratio": round(median["inserts"] / median["bare"], 3),
        "unit": "durable groups/s",
        "leases_per_s": median["leases"],
        "bare_one_sync_for_64_per_s": median["bare_grouped"],
        "fetch_mb_per_s": median["fetch_mb"],
        "group_bytes": nbytes,
        "in_flight": IN_FLIGHT,
        "turns": TURNS,
        "versions": {
            "python": platform.python_version(),
            "grpcio": grpc.__version__,
            "vime-buffer": version("vime-buffer"),
        },
        "cpus": os.cpu_count(),
    }


def run() -> dict[str, object]:
    """Measure."""
    with tempfile.TemporaryDirectory(prefix="vime-bench-") as folder:
        return asyncio.run(measure(Path(folder)))
