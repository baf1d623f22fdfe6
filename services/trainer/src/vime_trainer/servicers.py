"""The trainer's two gRPC services: proto to domain and back, no policy."""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator
from typing import Any

from vime.trainer.v1 import rank_service_pb2 as rank_pb
from vime.trainer.v1 import trainer_service_pb2 as pb
from vime.trainer.v1.rank_service_pb2_grpc import RankServiceServicer
from vime.trainer.v1.trainer_service_pb2_grpc import TrainerServiceServicer
from vime_service import errors
from vime_service.answer_size import check_answer
from vime_service.deadlines import remaining
from vime_service.errors import FailedPrecondition, InvalidArgument, Unavailable, Unimplemented
from vime_service.server_config import MAX_MESSAGE_BYTES
from vime_trainer.adapters.protos import to_seconds, version_to_proto
from vime_trainer.adapters.ranks import CommandFailed, GrpcRanks
from vime_trainer.controller import Trainer
from vime_trainer.engine.config import HIGHEST_LEARNING_RATE
from vime_trainer.loop.events import EvalEvent, Event, EventLog, State, Status, StepEvent
from vime_trainer.loop.ports import RankDied
from vime_trainer.ranks.mailbox import Mailbox

logger = logging.getLogger(__name__)

_MODE_TTL_S = 300.0
_NEXT_WAIT_S = 20.0
_MARGIN_S = 1.0
_LOGPROB_BYTES = 4
_SCORE_FRAME = 16
"""Bytes of a sample's scores, and of their answer, that do not grow with the tokens."""


class TrainerServicer(TrainerServiceServicer):
    """Control of the loop, and single steps.

    Args:
        trainer: the loop's controller.
        events: what it did.
        ranks: the ranks.
        message_bytes: cap of one message.
    """

    def __init__(
        self, trainer: Trainer, events: EventLog, ranks: GrpcRanks, message_bytes: int = MAX_MESSAGE_BYTES
    ) -> None:
        self._trainer, self._events, self._ranks, self._message_bytes = trainer, events, ranks, message_bytes

    async def Start(self, request: pb.StartRequest, context: Any) -> pb.StartResponse:
        """Start the loop."""
        planned = self._trainer.status.num_steps
        if request.HasField("num_steps") and request.num_steps != planned:
            raise InvalidArgument(
                f"num_steps {request.num_steps} differs from the configured {planned}; set trainer.steps",
                field="num_steps",
                expected=planned,
                actual=request.num_steps,
            )
        return pb.StartResponse(status=_status(await self._trainer.start()))

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.WatchResponse]:
        """Events since a sequence, then as they come."""
        async for sequence, event in self._events.watch(int(request.after_sequence)):
            yield _event(sequence, event)

    async def Stop(self, request: pb.StopRequest, context: Any) -> pb.StopResponse:
        """End the loop."""
        return pb.StopResponse(status=_status(await self._trainer.stop(request.now)))

    async def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.GetStatusResponse:
        """Where it stands."""
        return pb.GetStatusResponse(status=_status(self._trainer.status))

    async def AcquireMode(self, request: pb.AcquireModeRequest, context: Any) -> pb.AcquireModeResponse:
        """The mode lease."""
        if not request.holder:
            raise InvalidArgument("holder is empty: name who drives", field="holder")
        ttl_s = to_seconds(request.ttl) if request.HasField("ttl") else _MODE_TTL_S
        if ttl_s <= 0:
            raise InvalidArgument(f"ttl {ttl_s:g} s is over at once: give a positive one", field="ttl", actual=ttl_s)
        try:
            return pb.AcquireModeResponse(mode_lease_id=await self._trainer.acquire_mode(request.holder, ttl_s))
        except CommandFailed as error:
            raise Unavailable(str(error)) from error
        except RankDied as error:
            raise _died(error) from error

    async def ReleaseMode(self, request: pb.ReleaseModeRequest, context: Any) -> pb.ReleaseModeResponse:
        """Give the mode lease back."""
        self._trainer.release_mode(request.mode_lease_id)
        return pb.ReleaseModeResponse()

    async def TrainStep(self, request: pb.TrainStepRequest, context: Any) -> pb.TrainStepResponse:
        """One step on the groups given."""
        rate = request.learning_rate if request.HasField("learning_rate") else None
        if rate is not None and not 0 <= rate <= HIGHEST_LEARNING_RATE:  # NaN is in no range
            raise InvalidArgument(
                f"learning_rate {rate:g} is not in [0, {HIGHEST_LEARNING_RATE:g}]",
                field="learning_rate",
                actual=rate,
                highest=HIGHEST_LEARNING_RATE,
            )
        try:
            with self._trainer.driving(request.mode_lease_id):
                if not request.groups:
                    raise InvalidArgument("groups is empty: nothing to train on", field="groups")
                trained = await self._ranks.train_groups(list(request.groups), rate)
        except CommandFailed as error:
            raise InvalidArgument(str(error), field="groups") from error
        except RankDied as error:
            raise _died(error) from error
        return pb.TrainStepResponse(
            metrics=trained.metrics,
            skipped=trained.skipped,
            trained_samples=trained.trained_samples,
            left_out=trained.left_out,
        )

    async def ScoreSamples(self, request: pb.ScoreSamplesRequest, context: Any) -> pb.ScoreSamplesResponse:
        """Logprobs under the trainer's weights."""
        temperature = request.temperature if request.HasField("temperature") else 1.0
        if not (math.isfinite(temperature) and temperature > 0):
            raise InvalidArgument(
                f"temperature {temperature:g} gives no distribution: it must be finite and above 0 (unset means 1)",
                field="temperature",
                actual=temperature,
            )
        if not request.samples:
            raise InvalidArgument("samples is empty: nothing to score", field="samples")
        tokens = sum(len(sample.response_token_ids) for sample in request.samples)
        what = f"{len(request.samples)} samples of {tokens} response tokens"
        needed = tokens * _LOGPROB_BYTES + (len(request.samples) + 1) * _SCORE_FRAME
        check_answer("samples", what, needed, self._message_bytes)
        try:
            scores = await self._ranks.score(list(request.samples), temperature, request.replay)
        except CommandFailed as error:
            raise InvalidArgument(str(error), field="samples") from error
        except RankDied as error:
            raise _died(error) from error
        return pb.ScoreSamplesResponse(scores=[pb.SampleLogprobs(logprobs=logprobs) for logprobs in scores])

    async def SaveCheckpoint(self, request: pb.SaveCheckpointRequest, context: Any) -> pb.SaveCheckpointResponse:
        """A checkpoint of the loop."""
        if request.mode_lease_id:
            raise Unimplemented(
                "SaveCheckpoint of single steps is not offered: a checkpoint belongs to a step of the ledger",
                rpc="SaveCheckpoint",
                why="single steps are in no ledger",
            )
        step, path = await self._trainer.save_checkpoint()
        return pb.SaveCheckpointResponse(train_step=step, path=path)

    async def Publish(self, request: pb.PublishRequest, context: Any) -> pb.PublishResponse:
        """Not offered: a version needs an incarnation, which the loop opens."""
        raise Unimplemented(
            "Publish by hand is not offered; the loop publishes after each step that is due",
            rpc="Publish",
            why="a version needs an incarnation, which only the loop opens",
        )


def _died(error: RankDied) -> errors.RankDied:
    return errors.RankDied(str(error), rank="unknown" if error.rank is None else error.rank, cause=str(error))


class RankServicer(RankServiceServicer):
    """The seam to the rank processes."""

    def __init__(self, ranks: GrpcRanks) -> None:
        self._ranks = ranks

    @property
    def _mailbox(self) -> Mailbox[rank_pb.NextCommandResponse, rank_pb.ReportResultRequest]:
        if self._ranks.mailbox is None:
            raise FailedPrecondition("no ranks are started", state="no ranks", wanted="ranks")
        return self._ranks.mailbox

    async def AttachRank(self, request: rank_pb.AttachRankRequest, context: Any) -> rank_pb.AttachRankResponse:
        """A rank is up."""
        who = f"{request.hostname}:{request.pid}"
        await self._mailbox.attach(request.launch_id, int(request.rank), who)
        self._ranks.components.update(request.components)
        logger.info("rank %d is up: %s", request.rank, who)
        return rank_pb.AttachRankResponse(world_size=self._mailbox.world_size)

    async def NextCommand(self, request: rank_pb.NextCommandRequest, context: Any) -> rank_pb.NextCommandResponse:
        """The next command, or an empty answer shortly before the deadline."""
        wait_s = min(_NEXT_WAIT_S, max(0.0, remaining(context) - _MARGIN_S))
        found = await self._mailbox.next(request.launch_id, int(request.rank), int(request.after_sequence), wait_s)
        if found is None:
            return rank_pb.NextCommandResponse()
        sequence, command = found
        answer = rank_pb.NextCommandResponse()
        answer.CopyFrom(command)
        answer.sequence = sequence
        return answer

    async def ReportResult(self, request: rank_pb.ReportResultRequest, context: Any) -> rank_pb.ReportResultResponse:
        """The result of a command."""
        await self._mailbox.report(request.launch_id, int(request.rank), int(request.sequence), request)
        return rank_pb.ReportResultResponse()


def _status(status: Status) -> pb.TrainerStatus:
    return pb.TrainerStatus(
        state=_STATES[status.state],
        run_id=status.run_id,
        incarnation=status.incarnation,
        train_step=status.train_step,
        num_steps=status.num_steps,
        published_version=None if status.published is None else version_to_proto(status.published),
        activity=status.activity,
        detail=status.detail,
        checkpoint_step=status.checkpoint_step,
        skipped_steps=status.skipped_steps,
        stopped=status.stopped,
        model_path=status.model_path,
    )


_STATES = {state: pb.TrainerState.Value(f"TRAINER_STATE_{state.name}") for state in State}


def _event(sequence: int, event: Event) -> pb.WatchResponse:
    answer = pb.WatchResponse(sequence=sequence)
    if isinstance(event, StepEvent):
        report = pb.StepReport(
            train_step=event.train_step, metrics=event.metrics, group_ids=event.group_ids, skipped=event.skipped
        )
        if event.published is not None:
            report.published_version.CopyFrom(version_to_proto(event.published))
        answer.step.CopyFrom(report)
    elif isinstance(event, EvalEvent):
        answer.eval.CopyFrom(pb.EvalReport(table=event.table, step=event.step, metrics=event.metrics))
    else:
        answer.status.CopyFrom(_status(event))
    return answer
