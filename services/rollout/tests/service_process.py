"""The service as a process, and a client for it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import torch
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2, health_pb2_grpc

from vime.bulk.v1 import manifest_pb2
from vime.common.v1 import trajectory_pb2
from vime.rollout.v1 import engine_service_pb2 as engine_pb
from vime.rollout.v1 import engine_service_pb2_grpc, generation_service_pb2_grpc
from vime.rollout.v1 import generation_service_pb2 as pb
from vime_client.channel import open_channel
from vime_service.bulk import Deadline, WeightSender
from vime_service.bulk.gloo import GlooTransport
from vime_service.bulk.wire import manifest_to_proto, version_to_proto

from .conftest import manifest_of


@dataclass
class Running:
    """A service process that answers, with stubs of its services."""

    process: subprocess.Popen[bytes]
    address: str
    channel: grpc.aio.Channel
    directory: Path
    _sends: int = 0
    senders: list[GlooTransport] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.generation: Any = generation_service_pb2_grpc.GenerationServiceStub(self.channel)
        self.engine: Any = engine_service_pb2_grpc.EngineServiceStub(self.channel)
        self.health: Any = health_pb2_grpc.HealthStub(self.channel)

    async def is_ready(self) -> bool:
        """What health tells about readiness; a process that is busy importing its engine may not answer in time."""
        try:
            answer = await self.health.Check(health_pb2.HealthCheckRequest(service="ready"), timeout=5)
        except grpc.aio.AioRpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def wait_ready(self, seconds: float) -> None:
        async with asyncio.timeout(seconds):
            while not await self.is_ready():
                assert self.process.poll() is None, f"ended with {self.process.returncode}: {self.log()}"
                await asyncio.sleep(0.05)

    async def publish(
        self, step: int, weights: Mapping[str, torch.Tensor], incarnation: int = 1, **commit: Any
    ) -> engine_pb.CommitUpdateResponse:
        """A whole update over gloo, as a trainer would."""
        manifest = manifest_of(step, weights, incarnation)
        host = GlooTransport.host("0", "127.0.0.1", Deadline.after(10))
        self.senders.append(host)
        self._sends += 1
        rendezvous = manifest_pb2.Rendezvous(
            transport=manifest_pb2.TRANSPORT_GLOO,
            address=host.endpoint,
            generation=self._sends,
            rank=1,
            world_size=2,
        )
        await self.engine.PrepareUpdate(
            engine_pb.PrepareUpdateRequest(
                manifest=manifest_to_proto(manifest), rendezvous=rendezvous, transfer_timeout=Duration(seconds=20)
            ),
            timeout=30,
        )

        def send() -> None:
            host.form(self._sends, ["0", "1"], Deadline.after(20))
            WeightSender(host, manifest, weights).send(Deadline.after(20))

        key = version_to_proto(manifest.version)
        staged = engine_pb.AwaitStagedRequest(weight_version=key)
        await asyncio.gather(asyncio.to_thread(send), self.engine.AwaitStaged(staged, timeout=30))
        answer: engine_pb.CommitUpdateResponse = await self.engine.CommitUpdate(
            engine_pb.CommitUpdateRequest(weight_version=key, **commit), timeout=60
        )
        return answer

    async def generate(self, request_id: str, prompt: list[int], seeds: tuple[int, ...] = (1,), **fields: Any) -> Any:
        sampling = trajectory_pb2.SamplingParams(
            max_tokens=fields.pop("max_tokens", 8), ignore_eos=True, **fields.pop("sampling", {})
        )
        request = pb.GenerateRequest(
            request_id=request_id, prompt_token_ids=prompt, seeds=seeds, sampling=sampling, **fields
        )
        return await self.generation.Generate(request, timeout=30)

    async def until_running(self, count: int) -> None:
        """Wait until the engine runs that many samples."""
        async with asyncio.timeout(20):
            while True:
                status = (await self.engine.GetEngine(engine_pb.GetEngineRequest(), timeout=5)).status
                if status.load.running == count:
                    return
                await asyncio.sleep(0.01)

    def log(self) -> str:
        return (self.directory / "log").read_text()[-4000:]

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(10)

    def terminate(self, seconds: float = 15) -> int:
        self.process.terminate()
        return self.process.wait(seconds)


@asynccontextmanager
async def service(directory: Path, *settings: str, ready_s: float = 120) -> AsyncIterator[Running]:
    """A service in a process of its own, live, and waited for until it is ready."""
    directory.mkdir(exist_ok=True)
    port_file = directory / "port"
    log = (directory / "log").open("wb")
    arguments = [f"server.port_file={port_file}", f"rollout.updates.staging_dir={directory}", *settings]
    process = subprocess.Popen(
        [sys.executable, "-m", "vime_rollout", *(part for setting in arguments for part in ("--set", setting))],
        stdout=log,
        stderr=log,
    )
    running: Running | None = None
    try:
        end = time.monotonic() + 120
        while not port_file.exists():
            assert process.poll() is None, (directory / "log").read_text()
            assert time.monotonic() < end, "the service did not listen"
            await asyncio.sleep(0.05)
        address = port_file.read_text().strip()
        running = Running(process, address, open_channel(address), directory)
        await running.wait_ready(ready_s)
        yield running
    finally:
        if running is not None:
            await running.channel.close()
            for sender in running.senders:
                sender.close()
        process.kill()
        process.wait(10)
        log.close()


def children_of(pid: int) -> set[int]:
    """All descendants of a process."""
    found: set[int] = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            child = int(path.parent.name)
            found |= {child} | children_of(child)
    return found


def alive(pids: set[int]) -> set[int]:
    """Those that still run; a zombie does not."""
    living = set()
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z":
            living.add(pid)
    return living
