"""A buffer behind real gRPC on a free port, and a caller of its three services."""

from __future__ import annotations

from contextlib import asynccontextmanager

import grpc
import pytest

from vime.buffer.v1 import batch_service_pb2 as batch_pb
from vime.buffer.v1 import batch_service_pb2_grpc as batch_grpc
from vime.buffer.v1 import prompt_service_pb2 as prompt_pb
from vime.buffer.v1 import prompt_service_pb2_grpc as prompt_grpc
from vime.buffer.v1 import table_service_pb2_grpc as table_grpc
from vime.common.v1 import weight_version_pb2 as version_pb
from vime_buffer.config import BufferSettings
from vime_buffer.convert import duration
from vime_buffer.testing import proto_group, write_prompts
from vime_buffer.wiring import registration
from vime_client.errors import RpcError
from vime_service.server import serving
from vime_service.server_config import MAX_MESSAGE_BYTES, ServerConfig

RUN = "run"
OPTIONS = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES), ("grpc.max_send_message_length", MAX_MESSAGE_BYTES)]


class Caller:
    """The three services behind one channel; every call has a deadline."""

    def __init__(self, channel):
        self.prompts = prompt_grpc.PromptServiceStub(channel)
        self.batches = batch_grpc.BatchServiceStub(channel)
        self.tables = table_grpc.TableServiceStub(channel)

    async def begin(self, resume_step=0):
        opened = await self.batches.OpenIncarnation(
            batch_pb.OpenIncarnationRequest(run_id=RUN, resume_step=resume_step, recipe_digest="r"), timeout=10
        )
        self.incarnation = opened.incarnation
        await self.batches.AnnounceVersion(
            batch_pb.AnnounceVersionRequest(version=self.version(resume_step)), timeout=10
        )
        return opened

    def version(self, step):
        return version_pb.WeightVersion(run_id=RUN, incarnation=self.incarnation, step=step)

    async def lease(self, count=100, wait=0.0, timeout=10, tables=()):
        return await self.prompts.LeasePrompts(
            prompt_pb.LeasePromptsRequest(worker_id="w", max_prompts=count, wait=duration(wait), tables=tables),
            timeout=timeout,
        )

    async def insert(self, lease, group=None, drop_reason=""):
        request = prompt_pb.InsertGroupRequest(
            lease_id=lease.lease_id, group=group or proto_group(lease), drop_reason=drop_reason
        )
        return await self.prompts.InsertGroup(request, timeout=10)

    async def batch(self, step, timeout=10.0):
        return await self.batches.LeaseBatch(
            batch_pb.LeaseBatchRequest(incarnation=self.incarnation, train_step=step), timeout=timeout
        )

    async def complete(self, step, **fields):
        request = batch_pb.CompleteStepRequest(
            incarnation=self.incarnation,
            train_step=step,
            outcome=batch_pb.STEP_OUTCOME_TRAINED,
            published_version=self.version(step),
            **fields,
        )
        return await self.batches.CompleteStep(request, timeout=10)

    async def groups(self, ids):
        call = self.batches.GetGroups(batch_pb.GetGroupsRequest(group_ids=ids), timeout=20)
        return [message async for message in call]


@asynccontextmanager
async def buffer(folder, tables=None, clock=None, message_bytes=MAX_MESSAGE_BYTES, **settings):
    write_prompts(folder / "train.jsonl", 40)
    write_prompts(folder / "heldout.jsonl", 3)
    default = {
        "train": {
            "source": {"path": str(folder / "train.jsonl")},
            "sampling": {"max_tokens": 8},
            "samples_per_prompt": 2,
            "groups_per_step": 2,
        }
    }
    config = BufferSettings.model_validate(
        {"dir": folder / "ledger", "run_id": RUN, "seed": 5, "tables": tables or default, **settings}
    )
    server = ServerConfig(grace_seconds=0.5, max_message_bytes=message_bytes)
    async with (
        serving("buffer", "vime-buffer", server, registration(config, clock)) as service,
        grpc.aio.insecure_channel(service.address, options=OPTIONS) as channel,
    ):
        caller = Caller(channel)
        caller.service = service
        yield caller


async def refused(awaitable):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await awaitable
    return RpcError.from_aio(caught.value)
