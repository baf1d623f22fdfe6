"""The rank's loop: ask for a command, run it in the engine's thread, report."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from google.protobuf.message import Message
from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from vime.buffer.v1.batch_service_pb2 import GetGroupsRequest
from vime.buffer.v1.batch_service_pb2_grpc import BatchServiceStub
from vime.common.v1.trajectory_pb2 import TrajectoryGroup
from vime.trainer.v1 import rank_service_pb2 as pb
from vime.trainer.v1.rank_service_pb2_grpc import RankServiceStub
from vime_client.channel import ChannelSettings, open_channel
from vime_client.errors import RpcError, rpc_errors
from vime_client.logs import get_logger
from vime_service.bulk import BulkError, ManifestError, TransportError
from vime_trainer.adapters.patience import patiently
from vime_trainer.adapters.ranks import PEER_FAILED
from vime_trainer.config import TrainerConfig
from vime_trainer.engine.errors import EngineError, PeerFailed
from vime_trainer.rank.commands import Commands
from vime_trainer.rank.groups import GroupError

_log = get_logger(__name__)
_tracer = trace.get_tracer("vime_trainer.rank")
_POLL_S = 20.0
_CALL_S = 30.0
_FETCH_S = 120.0
# What a rank reports as the command's failure and survives; anything else is a fault of ours and ends it.
_REPORTED = (EngineError, GroupError, BulkError, RpcError, ValueError, OSError)


class RankWorker:
    """One rank of one launch."""

    def __init__(self, config: TrainerConfig) -> None:
        self._settings = config.trainer
        self._launch_id = os.environ["VIME_LAUNCH_ID"]
        self._service = os.environ["VIME_TRAINER_ADDRESS"]
        self._rank = int(os.environ.get("RANK", "0"))
        self._thread = ThreadPoolExecutor(1, "engine")  # one thread: torch's generators and settings are per thread

    async def run(self) -> int:
        """Until ExitCommand (0) or until the service is gone (1)."""
        own = ChannelSettings.model_validate(self._settings.credentials.model_dump())
        once = self._settings.credentials.once()
        channel, buffer = open_channel(self._service, own), open_channel(self._settings.buffer_address, once)
        self._stub, self._buffer = RankServiceStub(channel), BatchServiceStub(buffer)
        try:
            commands = await self._in_thread(lambda: Commands(self._settings))
            await self._attach()
            return await self._serve(commands)
        except RpcError as error:
            _log.error("the trainer service does not answer", exc_info=error)
            return 1
        finally:
            await channel.close()
            await buffer.close()
            self._thread.shutdown(wait=False, cancel_futures=True)

    async def _attach(self) -> None:
        request = pb.AttachRankRequest(
            launch_id=self._launch_id,
            rank=self._rank,
            pid=os.getpid(),
            hostname=socket.gethostname(),
            components=_components(),
        )
        with rpc_errors("trainer.AttachRank"):
            await self._stub.AttachRank(request, timeout=_CALL_S)

    async def _serve(self, commands: Commands) -> int:
        done = 0
        while True:
            request = pb.NextCommandRequest(launch_id=self._launch_id, rank=self._rank, after_sequence=done)
            with rpc_errors("trainer.NextCommand"):
                command = await self._stub.NextCommand(request, timeout=_POLL_S + _CALL_S)
            if command.sequence == 0:
                continue
            if command.WhichOneof("command") == "exit":
                await self._in_thread(commands.close)
                return 0
            report = await self._execute(commands, command)
            with rpc_errors("trainer.ReportResult"):
                await self._stub.ReportResult(report, timeout=_CALL_S)
            done = command.sequence

    async def _execute(self, commands: Commands, command: pb.NextCommandResponse) -> pb.ReportResultRequest:
        name = command.WhichOneof("command") or ""
        report = pb.ReportResultRequest(launch_id=self._launch_id, rank=self._rank, sequence=command.sequence)
        parent = TraceContextTextMapPropagator().extract({"traceparent": command.traceparent})
        try:
            with _tracer.start_as_current_span(f"rank.{name}", context=parent):
                result = await self._dispatch(commands, name, command)
        except _REPORTED as error:
            _log.error("command failed", exc_info=error, command=name, sequence=command.sequence)
            report.error = f"{type(error).__name__}: {error}"
            report.error_reason = _reason(error)
            return report
        getattr(report, name).CopyFrom(result)
        return report

    async def _dispatch(self, commands: Commands, name: str, command: pb.NextCommandResponse) -> Message:
        if name == "train":
            started = time.monotonic()
            groups, failure = list[TrajectoryGroup](), None
            try:
                groups = await self._groups(commands, command.train)
            except (RpcError, GroupError) as error:
                failure = error
            fetch_s = time.monotonic() - started
            await self._in_thread(lambda: commands.fetched(failure))
            trained: Message = await self._in_thread(lambda: commands.train(command.train, groups, fetch_s))
            return trained
        run: Callable[[Message], Message] | None = getattr(commands, name, None) if name in _COMMANDS else None
        if run is None:
            raise ValueError(f"unknown command {name!r}: the service is newer than this rank")
        result: Message = await self._in_thread(lambda: run(getattr(command, name)))
        return result

    async def _groups(self, commands: Commands, command: pb.TrainCommand) -> list[TrajectoryGroup]:
        """This rank's groups: given with the command, or fetched from the buffer by id."""
        mine = commands.my_groups(command)
        if command.inline_groups:
            return [command.inline_groups[place] for place in mine]
        wanted = [command.group_ids[place] for place in mine]
        groups = await patiently("buffer.GetGroups", lambda: self._fetch(wanted)) if wanted else []
        got = [group.group_id for group in groups]
        if got != wanted:
            missing = sorted(set(wanted) - set(got))
            raise GroupError(f"asked for {len(wanted)} groups, got {len(got)} or in another order; missing {missing}")
        return groups

    async def _fetch(self, group_ids: list[str]) -> list[TrajectoryGroup]:
        stream = self._buffer.GetGroups(GetGroupsRequest(group_ids=group_ids), timeout=_FETCH_S)
        return [group async for part in stream for group in part.groups]

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


_COMMANDS = ("load", "score", "describe", "send", "save")


def _reason(error: Exception) -> str:
    if isinstance(error, PeerFailed):
        return PEER_FAILED
    if isinstance(error, TransportError):
        return "TRANSFER_FAILED"
    if isinstance(error, ManifestError):
        return "MANIFEST_REFUSED"
    return error.reason if isinstance(error, RpcError) else "INVALID_FIELD"


def _components() -> dict[str, str]:
    import megatron.core
    import torch

    return {"torch": torch.__version__, "megatron-core": megatron.core.__version__}
