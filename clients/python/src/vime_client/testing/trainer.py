"""A trainer in memory that plays a list of events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from vime.trainer.v1 import trainer_service_pb2 as pb
from vime.trainer.v1 import trainer_service_pb2_grpc

_Context = grpc.aio.ServicerContext[Any, Any]
_ENDED = (pb.TRAINER_STATE_FINISHED, pb.TRAINER_STATE_INCOMPLETE, pb.TRAINER_STATE_FAILED)


class FakeTrainer(trainer_service_pb2_grpc.TrainerServiceServicer):
    """Idle until Start, then running; `report` and `finish` are for the test to call.

    Attributes:
        status: where it stands.
        starts: how often Start was called.
    """

    def __init__(self, run_id: str = "fake", num_steps: int = 3) -> None:
        self.status = pb.TrainerStatus(state=pb.TRAINER_STATE_IDLE, run_id=run_id, num_steps=num_steps)
        self.starts = 0
        self._events: list[pb.WatchResponse] = []
        self._changed = asyncio.Event()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register at a server."""
        trainer_service_pb2_grpc.add_TrainerServiceServicer_to_server(self, server)

    def report(self, step: int, **metrics: float) -> None:
        """A step was completed; `rollout__raw_reward=1` is the metric `rollout/raw_reward`."""
        named = {name.replace("__", "/"): value for name, value in metrics.items()}
        self.status.train_step = step
        self._say(pb.WatchResponse(step=pb.StepReport(train_step=step, metrics=named)))

    def finish(
        self,
        state: pb.TrainerState.ValueType = pb.TRAINER_STATE_FINISHED,
        detail: str = "",
        stopped: bool = False,
    ) -> None:
        """The loop ended."""
        self.status.state, self.status.stopped = state, stopped
        self.status.detail = detail
        self._say(pb.WatchResponse(status=self.status))

    async def Start(self, request: pb.StartRequest, context: _Context) -> pb.StartResponse:
        """Run."""
        self.starts += 1
        if self.status.state == pb.TRAINER_STATE_IDLE:
            self.status.state = pb.TRAINER_STATE_RUNNING
            self._say(pb.WatchResponse(status=self.status))
        return pb.StartResponse(status=self.status)

    async def GetStatus(self, request: pb.GetStatusRequest, context: _Context) -> pb.GetStatusResponse:
        """Where it stands."""
        return pb.GetStatusResponse(status=self.status)

    async def Stop(self, request: pb.StopRequest, context: _Context) -> pb.StopResponse:
        """Finish."""
        self.finish()
        return pb.StopResponse(status=self.status)

    async def Watch(self, request: pb.WatchRequest, context: _Context) -> AsyncIterator[pb.WatchResponse]:
        """Events after a sequence, until the loop ends."""
        seen = request.after_sequence
        while True:
            self._changed.clear()
            for event in self._events[seen:]:
                seen = event.sequence
                yield event
            if self.status.state in _ENDED:
                return
            # bounded by: the caller's deadline, which cancels this handler
            await self._changed.wait()

    def _say(self, event: pb.WatchResponse) -> None:
        event.sequence = len(self._events) + 1
        copy = pb.WatchResponse()
        copy.CopyFrom(event)
        self._events.append(copy)
        self._changed.set()
