"""Training's own life: started when all is ready, started again after the trainer restarted, watched to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from vime.trainer.v1 import trainer_service_pb2 as pb
from vime_client.channel import ChannelSettings
from vime_client.clock import Clock
from vime_client.errors import RpcError
from vime_client.launcher.plan import RunPlan
from vime_client.trainer import TrainerClient

_POLL_S = 0.5
_CALL_S = 10.0


@dataclass(frozen=True)
class LoopEnd:
    """How training ended."""

    ok: bool
    """True if it reached its last step."""
    reason: str = ""
    """Why not."""


async def watch_loop(plan: RunPlan, say: Callable[[str], None], clock: Clock) -> LoopEnd:
    """Start the trainer's loop whenever it is idle, until it is finished or failed.

    A trainer that is away is waited for: its keeper starts it again, or gives up and ends the run.
    """
    if not plan.trainer:  # services without a trainer run until they are stopped
        # unbounded: such a run ends when the person says so
        await asyncio.get_running_loop().create_future()
    async with TrainerClient(plan.trainer, ChannelSettings(max_attempts=1, untraced_methods=("*",))) as trainer:
        while True:
            try:
                status = await trainer.status(_CALL_S)
                if status.state == pb.TRAINER_STATE_IDLE:
                    status = await trainer.start()
            except RpcError as error:
                say(f"trainer does not answer: {error.code.name}")
            else:
                say(status.activity)
                if status.state == pb.TRAINER_STATE_FINISHED:
                    return LoopEnd(True)
                if status.state == pb.TRAINER_STATE_FAILED:
                    return LoopEnd(False, f"training failed after step {status.train_step}: {status.detail}")
            await clock.sleep(_POLL_S)
