"""BatchService: the trainer's calls, translated."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from vime.buffer.v1 import batch_service_pb2 as pb
from vime.buffer.v1 import batch_service_pb2_grpc
from vime.buffer.v1 import prompt_service_pb2 as prompt_pb
from vime_buffer import convert
from vime_buffer.buffer import Buffer
from vime_buffer.values import Awaited, BatchGroup, Outcome, Unusable
from vime_service.deadlines import patience
from vime_service.errors import InvalidArgument

_DEFAULT_TABLE = "train"
_MESSAGE_BYTES = 2 << 20
"""Size that messages of GetGroups stay below, unless one group alone is larger."""


class BatchServicer(batch_service_pb2_grpc.BatchServiceServicer):
    """Serves `vime.buffer.v1.BatchService`."""

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer

    async def OpenIncarnation(self, request: pb.OpenIncarnationRequest, context: Any) -> pb.OpenIncarnationResponse:
        opened = await self._buffer.open_incarnation(
            request.run_id,
            request.resume_step,
            request.highest_known,
            request.recipe_digest,
            regenerate=request.regenerate,
            model=convert.model_from_proto(request.model) if request.HasField("model") else None,
        )
        return pb.OpenIncarnationResponse(
            incarnation=opened.incarnation,
            last_ledger_step=opened.last_ledger_step,
            oldest_resumable_step=opened.oldest_resumable_step,
            rewound_groups=opened.rewound_groups,
            requeued_prompts=opened.requeued_prompts,
        )

    async def AnnounceVersion(self, request: pb.AnnounceVersionRequest, context: Any) -> pb.AnnounceVersionResponse:
        opened = await self._buffer.announce_version(convert.version_from_proto(request.version))
        return pb.AnnounceVersionResponse(opened_evals=opened)

    async def LeaseBatch(self, request: pb.LeaseBatchRequest, context: Any) -> pb.LeaseBatchResponse:
        answer = await self._buffer.lease_batch(
            request.incarnation,
            request.train_step,
            request.table or _DEFAULT_TABLE,
            patience(context),
        )
        return pb.LeaseBatchResponse(
            groups=[_summary(group) for group in answer.groups],
            blocked_by=prompt_pb.BlockReason.ValueType(answer.blocked),
            counts=answer.counts,
            replayed=answer.replayed,
            awaited=[_awaited(prompt) for prompt in answer.awaited],
            detail=answer.detail,
        )

    async def CompleteStep(self, request: pb.CompleteStepRequest, context: Any) -> pb.CompleteStepResponse:
        published = request.published_version if request.HasField("published_version") else None
        completed = await self._buffer.complete_step(
            request.incarnation,
            request.train_step,
            request.table or _DEFAULT_TABLE,
            _outcome(request.outcome),
            convert.version_from_proto(published) if published else None,
            final=request.final,
        )
        return pb.CompleteStepResponse(
            checkpoint_wanted=completed.checkpoint_wanted, opened_evals=completed.opened_evals
        )

    async def CheckpointCommitted(
        self, request: pb.CheckpointCommittedRequest, context: Any
    ) -> pb.CheckpointCommittedResponse:
        groups, freed = await self._buffer.checkpoint_committed(
            request.incarnation, request.train_step, request.oldest_kept_step
        )
        return pb.CheckpointCommittedResponse(retired_groups=groups, freed_bytes=freed)

    async def QuarantineGroups(self, request: pb.QuarantineGroupsRequest, context: Any) -> pb.QuarantineGroupsResponse:
        done = await self._buffer.quarantine_groups(
            request.incarnation,
            request.train_step,
            request.table or _DEFAULT_TABLE,
            [Unusable(group.group_id, group.attempt, group.detail) for group in request.groups],
        )
        return pb.QuarantineGroupsResponse(requeued=done.requeued, given_up=done.given_up)

    async def GetGroups(self, request: pb.GetGroupsRequest, context: Any) -> AsyncIterator[pb.GetGroupsResponse]:
        async for payloads in self._buffer.get_groups(list(request.group_ids), _MESSAGE_BYTES):
            response = pb.GetGroupsResponse()
            for payload in payloads:
                response.groups.add().ParseFromString(payload)
            yield response

    async def GetEvalRound(self, request: pb.GetEvalRoundRequest, context: Any) -> pb.GetEvalRoundResponse:
        result = await self._buffer.eval_round(request.table, request.step)
        return pb.GetEvalRoundResponse(
            done=result.done,
            prompts=result.prompts,
            inserted=result.inserted,
            given_up=result.given_up,
            scored=result.scored,
            unscored=result.unscored,
            mean_reward=result.mean_reward,
            truncated_ratio=result.truncated_ratio,
            mean_response_tokens=result.mean_response_tokens,
            pass_at_k=result.pass_at_k,
            version=convert.version_to_proto(result.version) if result.version else None,
            duration=convert.duration(result.seconds),
        )


def _outcome(value: int) -> Outcome:
    if value not in (pb.STEP_OUTCOME_TRAINED, pb.STEP_OUTCOME_SKIPPED):
        raise InvalidArgument(f"outcome {value} is neither TRAINED nor SKIPPED", field="outcome", value=value)
    return Outcome(value)


def _awaited(prompt: Awaited) -> pb.AwaitedPrompt:
    return pb.AwaitedPrompt(
        group_id=prompt.group_id,
        prompt_id=prompt.prompt_id,
        attempt=prompt.attempt,
        worker_id=prompt.worker_id,
        leased_for=None if prompt.leased_for is None else convert.duration(prompt.leased_for),
    )


def _summary(group: BatchGroup) -> pb.GroupSummary:
    return pb.GroupSummary(
        group_id=group.group_id,
        samples=len(group.sample_tokens),
        tokens=sum(group.sample_tokens),
        oldest_version=convert.version_to_proto(group.oldest),
        staleness=group.staleness,
        attempt=group.attempt,
        sample_tokens=group.sample_tokens,
    )
