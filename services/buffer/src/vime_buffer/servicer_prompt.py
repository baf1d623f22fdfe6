"""PromptService: the workers' calls, translated."""

from __future__ import annotations

from typing import Any

from vime.buffer.v1 import prompt_service_pb2 as pb
from vime.buffer.v1 import prompt_service_pb2_grpc
from vime_buffer import convert
from vime_buffer.buffer import Buffer
from vime_buffer.values import Failure
from vime_service.deadlines import patience
from vime_service.errors import InvalidArgument


class PromptServicer(prompt_service_pb2_grpc.PromptServiceServicer):
    """Serves `vime.buffer.v1.PromptService`."""

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer

    async def LeasePrompts(self, request: pb.LeasePromptsRequest, context: Any) -> pb.LeasePromptsResponse:
        if not request.worker_id:
            raise InvalidArgument("worker_id is empty", field="worker_id")
        wait = min(convert.seconds_of(request.wait), patience(context))
        answer = await self._buffer.lease_prompts(
            request.worker_id, request.max_prompts, list(request.tables), wait, request.request_id
        )
        return pb.LeasePromptsResponse(
            leases=[convert.lease_to_proto(lease, self._buffer.settings(lease.table)) for lease in answer.leases],
            blocked_by=pb.BlockReason.ValueType(answer.blocked),
            counts=answer.counts,
        )

    async def KeepAlive(self, request: pb.KeepAliveRequest, context: Any) -> pb.KeepAliveResponse:
        lost, ttl = await self._buffer.keep_alive(request.worker_id, list(request.lease_ids))
        return pb.KeepAliveResponse(lost_lease_ids=lost, ttl=convert.duration(ttl))

    async def InsertGroup(self, request: pb.InsertGroupRequest, context: Any) -> pb.InsertGroupResponse:
        payload = request.group.SerializeToString(deterministic=True)
        group = convert.group_from_proto(request.group)
        there = await self._buffer.insert_group(request.lease_id, group, payload, request.drop_reason)
        return pb.InsertGroupResponse(already_present=there)

    async def FailPrompt(self, request: pb.FailPromptRequest, context: Any) -> pb.FailPromptResponse:
        known = {failure.value for failure in Failure}  # a newer worker may name a class that we do not know
        failure = Failure(request.failure) if request.failure in known else Failure.UNSPECIFIED
        given_up = await self._buffer.fail_prompt(request.lease_id, failure, request.detail)
        return pb.FailPromptResponse(given_up=given_up)
