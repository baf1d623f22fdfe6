"""The buffer as the loop's ledger."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import grpc

from vime.buffer.v1 import batch_service_pb2 as pb
from vime.buffer.v1 import prompt_service_pb2, table_service_pb2
from vime.buffer.v1.batch_service_pb2_grpc import BatchServiceStub
from vime.buffer.v1.table_service_pb2_grpc import TableServiceStub
from vime.common.v1.engine_pb2 import ModelDescription
from vime.common.v1.trajectory_pb2 import FinishReason, Sample, TrajectoryGroup
from vime_client.errors import RpcError
from vime_trainer.adapters.patience import patiently
from vime_trainer.adapters.protos import enum_name, prompt_text, to_seconds, version_from_proto, version_to_proto
from vime_trainer.engine.shape import ModelShape
from vime_trainer.loop.ports import Batch, Completed, EvalRound, Group, Harvest, Opened, Unusable
from vime_trainer.loop.versions import Version

_CALL_S = 60.0
# LeaseBatch answers an empty OK shortly before its deadline; the rest is for the way back.
_MARGIN_S = 2.0
_DETAIL_CHARS = 500

logger = logging.getLogger(__name__)
_FINAL = (prompt_service_pb2.BLOCK_REASON_END_OF_DATA, prompt_service_pb2.BLOCK_REASON_CLOSED)


class GrpcLedger:
    """Implements `loop.ports.Ledger`. Every call has a deadline and may be repeated: all are idempotent."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        table: str = "train",
        regenerate: bool = False,
        model: ModelShape | None = None,
    ) -> None:
        """`model` is what is trained, so that the ledger refuses what it cannot have produced; unset: not said."""
        self._model, self._regenerate = None if model is None else _description(model), regenerate
        self._batches, self._tables = BatchServiceStub(channel), TableServiceStub(channel)
        self._table = table
        self._holds: dict[str, bool] = {}

    async def open_incarnation(self, run_id: str, resume_step: int, highest_known: int, recipe_digest: str) -> Opened:
        """See the port."""
        request = pb.OpenIncarnationRequest(
            run_id=run_id,
            resume_step=resume_step,
            highest_known=highest_known,
            recipe_digest=recipe_digest,
            regenerate=self._regenerate,
            model=self._model,
        )
        try:
            answer = await patiently(
                "buffer.OpenIncarnation", lambda: self._batches.OpenIncarnation(request, timeout=_CALL_S)
            )
        except RpcError as error:
            if error.reason != "RESUME_OUT_OF_RANGE":
                raise
            remedy = f"{error.message}; trainer.faults.regenerate = true makes the missing groups anew"
            raise RpcError(error.code, remedy, reason=error.reason, metadata=error.metadata) from error
        return Opened(answer.incarnation, answer.last_ledger_step, answer.rewound_groups, answer.requeued_prompts)

    async def announce(self, version: Version) -> list[str]:
        """See the port."""
        answer = await patiently(
            "buffer.AnnounceVersion",
            lambda: self._batches.AnnounceVersion(
                pb.AnnounceVersionRequest(version=version_to_proto(version)), timeout=_CALL_S
            ),
        )
        return list(answer.opened_evals)

    async def lease_batch(self, incarnation: int, step: int, wait_s: float) -> Batch:
        """See the port."""
        request = pb.LeaseBatchRequest(incarnation=incarnation, train_step=step, table=self._table)
        answer = await patiently(
            "buffer.LeaseBatch", lambda: self._batches.LeaseBatch(request, timeout=wait_s + _MARGIN_S)
        )
        reason = enum_name(prompt_service_pb2.BlockReason, answer.blocked_by)
        return Batch(
            groups=[
                Group(
                    g.group_id,
                    g.samples,
                    g.tokens,
                    g.staleness,
                    version_from_proto(g.oldest_version) if g.HasField("oldest_version") else None,
                    g.attempt,
                )
                for g in answer.groups
            ],
            ended=not answer.groups and answer.blocked_by in _FINAL,
            blocked_by=reason,
            counts=dict(answer.counts),
            replayed=answer.replayed,
            detail=answer.detail,
        )

    async def quarantine(self, incarnation: int, step: int, groups: Sequence[Unusable]) -> None:
        """See the port."""
        request = pb.QuarantineGroupsRequest(
            incarnation=incarnation,
            train_step=step,
            table=self._table,
            groups=[
                pb.UnusableGroup(group_id=g.group_id, attempt=g.attempt, detail=g.detail[:_DETAIL_CHARS])
                for g in groups
            ],
        )
        await patiently("buffer.QuarantineGroups", lambda: self._batches.QuarantineGroups(request, timeout=_CALL_S))

    async def complete_step(
        self, incarnation: int, step: int, *, trained: bool, published: Version | None, final: bool
    ) -> Completed:
        """See the port."""
        request = pb.CompleteStepRequest(
            incarnation=incarnation,
            train_step=step,
            outcome=pb.STEP_OUTCOME_TRAINED if trained else pb.STEP_OUTCOME_SKIPPED,
            published_version=None if published is None else version_to_proto(published),
            final=final,
            table=self._table,
        )
        answer = await patiently("buffer.CompleteStep", lambda: self._batches.CompleteStep(request, timeout=_CALL_S))
        return Completed(answer.checkpoint_wanted, list(answer.opened_evals))

    async def checkpoint_committed(self, incarnation: int, step: int, oldest_kept_step: int) -> None:
        """See the port."""
        request = pb.CheckpointCommittedRequest(
            incarnation=incarnation, train_step=step, oldest_kept_step=oldest_kept_step
        )
        await patiently(
            "buffer.CheckpointCommitted", lambda: self._batches.CheckpointCommitted(request, timeout=_CALL_S)
        )

    async def eval_round(self, table: str, step: int) -> EvalRound:
        """See the port."""
        answer = await patiently(
            "buffer.GetEvalRound",
            lambda: self._batches.GetEvalRound(pb.GetEvalRoundRequest(table=table, step=step), timeout=_CALL_S),
        )
        means = {
            table: answer.mean_reward,
            f"{table}-truncated_ratio": answer.truncated_ratio,
            f"{table}/response_len/mean": answer.mean_response_tokens,
        }
        metrics = {  # a mean over nothing is no 0
            **(means if answer.scored else {}),
            f"{table}/n": float(answer.scored),
            f"{table}/unscored": float(answer.unscored),
            f"{table}/given_up": float(answer.given_up),
            f"{table}/seconds": to_seconds(answer.duration),
        }
        metrics |= {f"{table}-pass@{k}": value for k, value in answer.pass_at_k.items()}
        ended = answer.inserted + answer.given_up
        return EvalRound(
            answer.done, metrics, f"{ended} of {answer.prompts} prompts", await self._holds_training(table)
        )

    async def eval_answers(self, table: str, step: int, prompts: int) -> list[dict[str, Any]]:
        """See the port."""
        request = table_service_pb2.ListGroupsRequest(
            table=table, state=table_service_pb2.GROUP_STATE_CONSUMED, page_size=prompts, eval_step=step
        )
        try:
            listed = await patiently("buffer.ListGroups", lambda: self._tables.ListGroups(request, timeout=_CALL_S))
            wanted = [group.group_id for group in listed.groups]
            groups = await patiently("buffer.GetGroups", lambda: self._groups(wanted)) if wanted else []
        except RpcError as error:  # a diary is no reason to end a run
            logger.warning("the answers of %s at step %d cannot be read: %s", table, step, error)
            return []
        return [_answer(group, group.samples[0]) for group in groups if group.samples]

    async def _groups(self, group_ids: list[str]) -> list[TrajectoryGroup]:
        stream = self._batches.GetGroups(pb.GetGroupsRequest(group_ids=group_ids), timeout=_CALL_S)
        return [group async for part in stream for group in part.groups]

    async def _holds_training(self, table: str) -> bool:
        if table not in self._holds:  # a table's setting is fixed
            request = table_service_pb2.GetTableRequest(name=table)
            answer = await patiently("buffer.GetTable", lambda: self._tables.GetTable(request, timeout=_CALL_S))
            config = answer.table.config
            self._holds[table] = config.eval_hold if config.HasField("eval_hold") else True
        return self._holds[table]

    async def harvest(self) -> Harvest:
        """See the port."""
        info = await self._info()
        counts = info.counts
        lost = dict(counts.prompts_given_up) | {"unusable": counts.prompts_unusable}
        return Harvest(
            # each attempt was an insert, those that were made again, too
            made=counts.groups_inserted - sum(counts.groups_evicted.values()) - counts.groups_dropped["unusable"],
            given_up={why: n for why, n in sorted(lost.items()) if n},
            stored=counts.groups_stored,
            groups_per_step=info.config.groups_per_step,
        )

    async def _info(self) -> table_service_pb2.TableInfo:
        request = table_service_pb2.GetTableRequest(name=self._table)
        answer = await patiently("buffer.GetTable", lambda: self._tables.GetTable(request, timeout=_CALL_S))
        return answer.table

    async def counts(self) -> dict[str, float]:
        """See the port."""
        counts = (await self._info()).counts
        named = {
            "groups_inserted": counts.groups_inserted,
            "groups_stored": counts.groups_stored,
            "groups_leased": counts.groups_leased,
            "groups_consumed": counts.groups_consumed,
            "groups_retired": counts.groups_retired,
            "groups_dropped": sum(counts.groups_dropped.values()),
            "groups_evicted": sum(counts.groups_evicted.values()),
            "prompts_drawn": counts.prompts_drawn,
            "prompts_open": counts.prompts_open,
            "prompts_inserted": counts.prompts_inserted,
            "prompts_requeued": counts.prompts_requeued,
            "prompts_given_up": sum(counts.prompts_given_up.values()),
            "payload_bytes": counts.payload_bytes,
        }
        metrics = {f"buffer/{name}": float(value) for name, value in named.items()}
        metrics |= {f"rollout/dynamic_filter/drop_{why}": float(n) for why, n in counts.groups_dropped.items()}
        return metrics


def _answer(group: TrajectoryGroup, sample: Sample) -> dict[str, Any]:
    return {
        "prompt_id": group.prompt.prompt_id,
        "prompt": prompt_text(group.prompt),
        "record": group.prompt.record_json,
        "response": sample.response_text,
        "reward": sample.reward if sample.HasField("reward") else None,
        "parts": dict(sample.reward_parts),
        "finish_reason": enum_name(FinishReason, sample.finish_reason),
    }


def _description(shape: ModelShape) -> ModelDescription:
    return ModelDescription(
        vocab_size=shape.vocab_size,
        # The last token is never consumed, so it needs no position.
        max_model_len=shape.max_position_embeddings + 1,
        moe_layer_ids=shape.moe_layers,
        num_experts=shape.num_experts,
        experts_per_token=shape.top_k,
    )
