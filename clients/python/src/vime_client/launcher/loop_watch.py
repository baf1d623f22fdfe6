"""Training's own life: started when all is ready, started again after the trainer restarted, watched to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from vime.trainer.v1 import trainer_service_pb2 as pb
from vime_client.channel import ChannelSettings
from vime_client.clock import Clock
from vime_client.errors import RpcError
from vime_client.launcher.plan import RunPlan
from vime_client.launcher.state import Phase
from vime_client.trainer import TrainerClient

_POLL_S = 0.5
_CALL_S = 10.0
_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


@dataclass(frozen=True)
class LoopEnd:
    """How training ended."""

    phase: Phase
    """`finished` if nothing is left to train, `incomplete` if its work is not done, `failed`, or `stopped`."""
    reason: str = ""
    """Why it did not reach its last step."""


async def watch_loop(plan: RunPlan, say: Callable[[str], None], clock: Clock) -> LoopEnd:
    """Start the trainer's loop whenever it is idle, until it is finished or failed.

    A trainer that is away is waited for: its keeper starts it again, or gives up and ends the run. One that is there
    and refuses, such as while a person drives single steps, is asked again for `ready_timeout_s`.
    """
    if not plan.trainer:  # services without a trainer run until they are stopped
        # unbounded: such a run ends when the person says so
        await asyncio.get_running_loop().create_future()
    limit = plan.limits.ready_timeout_s
    refused_since: float | None = None
    async with TrainerClient(plan.trainer, ChannelSettings(max_attempts=1, untraced_methods=("*",))) as trainer:
        while True:
            try:
                status = await trainer.status(_CALL_S)
                if status.state == pb.TRAINER_STATE_IDLE:
                    status = await trainer.start()
            except RpcError as error:
                if error.code in _AWAY:
                    say(f"the trainer does not answer: {error.message}")
                    refused_since = None
                else:
                    say(f"the trainer refuses: {error.message}")
                    refused_since = clock.now() if refused_since is None else refused_since
                    if clock.now() - refused_since > limit:
                        return LoopEnd(
                            "failed", f"the trainer refuses for {limit:g} s (launcher.ready_timeout_s): {error.message}"
                        )
            else:
                refused_since = None
                say(status.activity)
                if status.state == pb.TRAINER_STATE_FINISHED:
                    return _end(status)
                if status.state == pb.TRAINER_STATE_INCOMPLETE:
                    return LoopEnd("incomplete", status.detail)
                if status.state == pb.TRAINER_STATE_FAILED:
                    return LoopEnd("failed", f"training failed after step {status.train_step}: {status.detail}")
            await clock.sleep(_POLL_S)


def _end(status: pb.TrainerStatus) -> LoopEnd:
    if status.stopped:
        return LoopEnd("stopped", f"training was stopped after step {status.train_step} of {status.num_steps}")
    return LoopEnd("finished", status.detail)
