"""A buffer as a process of its own, for programs that kill and measure it. Its clients use only the contract."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import grpc

from vime.buffer.v1.batch_service_pb2_grpc import BatchServiceStub
from vime.buffer.v1.prompt_service_pb2 import PromptLease
from vime.buffer.v1.prompt_service_pb2_grpc import PromptServiceStub
from vime.buffer.v1.table_service_pb2 import GetTableRequest
from vime.buffer.v1.table_service_pb2_grpc import TableServiceStub
from vime.common.v1.trajectory_pb2 import (
    FINISH_REASON_STOP,
    SAMPLE_STATUS_COMPLETED,
    Sample,
    TrajectoryGroup,
)
from vime.common.v1.weight_version_pb2 import VersionSpan

RUN = "chaos"
# File permissions count for root as well once it has dropped CAP_DAC_OVERRIDE (1) from its bounding set
# (PR_CAPBSET_DROP, 24) and executed anew; a read-only folder is then one.
_OBEY_PERMISSIONS = """
import ctypes, os, sys
if os.geteuid() == 0:
    ctypes.CDLL(None).prctl(24, 1, 0, 0, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
_MAX_MESSAGE = 64 << 20


class BufferProcess:
    """Starts, kills and starts again one buffer over one folder, at one port."""

    def __init__(self, folder: Path, table: str, *, segment_bytes: int = 64 << 20) -> None:
        """`table` is the TOML of `[buffer.tables.train]`."""
        self.folder = folder
        self.ledger = folder / "ledger"
        self.process: asyncio.subprocess.Process | None = None
        self.port = 0
        self._config = folder / "buffer.toml"
        self._config.write_text(
            f'[server]\nport_file = "{folder}/address"\ngrace_seconds = 0.5\n[log]\nlevel = "ERROR"\n'
            f'[buffer]\ndir = "{self.ledger}"\nrun_id = "{RUN}"\nsegment_bytes = {segment_bytes}\n'
            f"[buffer.tables.train]\n{table}"
        )

    async def start(self, timeout: float = 60.0) -> float:
        """Start it and wait until it answers; seconds that took.

        Raises:
            RuntimeError: it ended, or did not answer in time.
        """
        before = time.monotonic()
        address = self.folder / "address"
        address.unlink(missing_ok=True)
        arguments = ["-m", "vime_buffer", "--config", str(self._config), "--set", f"server.port={self.port}"]
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _OBEY_PERMISSIONS, *arguments,
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        while not address.exists():
            if self.process.returncode is not None:
                raise RuntimeError(f"the buffer ended with {self.process.returncode} instead of starting")
            if time.monotonic() - before > timeout:
                raise RuntimeError(f"the buffer did not start within {timeout:g} s")
            await asyncio.sleep(0.01)
        self.port = int(address.read_text().strip().rpartition(":")[2])
        async with self.channel() as channel:
            await TableServiceStub(channel).GetTable(
                GetTableRequest(name="train"), timeout=timeout, wait_for_ready=True
            )
        return time.monotonic() - before

    def channel(self) -> grpc.aio.Channel:
        """A channel to it, over restarts."""
        options = [
            ("grpc.max_receive_message_length", _MAX_MESSAGE),
            ("grpc.max_send_message_length", _MAX_MESSAGE),
            ("grpc.initial_reconnect_backoff_ms", 50),
            ("grpc.min_reconnect_backoff_ms", 50),
            ("grpc.max_reconnect_backoff_ms", 200),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        return grpc.aio.insecure_channel(f"127.0.0.1:{self.port}", options=options)

    async def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        assert self.process is not None
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGKILL)
        await self.process.wait()


class Stubs:
    """The three services of the buffer behind one channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.prompts = PromptServiceStub(channel)
        self.batches = BatchServiceStub(channel)
        self.tables = TableServiceStub(channel)


def write_prompts(path: Path, numbers: Iterable[int]) -> None:
    """A prompt file."""
    path.write_text("".join(json.dumps({"prompt": f"say {number}", "answer": number}) + "\n" for number in numbers))


def finished_group(lease: PromptLease, tokens: int = 16) -> TrajectoryGroup:
    """The group of a lease; its tokens are made from its id, so that a mixed-up payload shows."""
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
                prompt_token_ids=[1, 2, 3],
                response_token_ids=response_of(lease.group_id, index, tokens),
                rollout_logprobs=[-0.25] * tokens,
                version_spans=[VersionSpan(weight_version=lease.fence.at_least)],
                finish_reason=FINISH_REASON_STOP,
                status=SAMPLE_STATUS_COMPLETED,
                reward=float(index % 2),
                seed=lease.seeds[index],
            )
            for index in range(lease.num_samples)
        ],
    )


def response_of(group_id: str, index: int, tokens: int) -> list[int]:
    """Tokens that only this sample of this group has."""
    number = int(group_id.rpartition(":")[2])
    return [(number * 31 + index * 7 + position) % 50_000 for position in range(tokens)]
