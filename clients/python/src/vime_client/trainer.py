"""The trainer: start, watch and stop its loop, or drive single steps under a mode lease."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from google.protobuf.duration_pb2 import Duration

from vime.common.v1 import trajectory_pb2
from vime.trainer.v1 import trainer_service_pb2 as pb
from vime.trainer.v1 import trainer_service_pb2_grpc
from vime_client.channel import ChannelSettings, connected, open_channel
from vime_client.errors import RpcError, rpc_errors
from vime_client.logs import get_logger

CALL_SECONDS = 30.0
"""Deadline of calls that answer at once."""
STEP_SECONDS = 1800.0
"""Deadline of calls that compute."""
CONNECT_SECONDS = 30.0
"""How long a call that is sent only once waits for a trainer that restarts."""
_log = get_logger(__name__)


class TrainerClient:
    """Thin, typed calls of vime.trainer.v1.TrainerService. Every call has a deadline and raises `RpcError`."""

    def __init__(self, address: str, settings: ChannelSettings | None = None) -> None:
        self.address = address
        self._channel = open_channel(address, settings)
        self._repeats = (settings or ChannelSettings()).max_attempts > 1
        self._stub = trainer_service_pb2_grpc.TrainerServiceStub(self._channel)

    async def __aenter__(self) -> TrainerClient:
        """Use as a context manager to close the channel at the end."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the channel."""
        await self.close()

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()

    async def start(self, num_steps: int | None = None) -> pb.TrainerStatus:
        """Start the loop; no error if it runs."""
        with rpc_errors("trainer.Start"):
            return (await self._stub.Start(pb.StartRequest(num_steps=num_steps), timeout=CALL_SECONDS)).status

    async def status(self, timeout_s: float = CALL_SECONDS) -> pb.TrainerStatus:
        """Where the loop stands."""
        with rpc_errors("trainer.GetStatus"):
            return (await self._stub.GetStatus(pb.GetStatusRequest(), timeout=timeout_s)).status

    async def watch(self, after_sequence: int = 0, timeout_s: float = 3600.0) -> AsyncIterator[pb.WatchResponse]:
        """Events after `after_sequence`, until the loop ends; a broken stream raises, and may be asked for again."""
        with rpc_errors("trainer.Watch"):
            async for event in self._stub.Watch(pb.WatchRequest(after_sequence=after_sequence), timeout=timeout_s):
                yield event

    async def stop(self, *, now: bool = False) -> pb.TrainerStatus:
        """End the loop after the step in hand, with a checkpoint; with `now`, give the step up."""
        with rpc_errors("trainer.Stop"):
            return (await self._stub.Stop(pb.StopRequest(now=now), timeout=STEP_SECONDS)).status

    async def save_checkpoint(self) -> pb.SaveCheckpointResponse:
        """Have the loop write a checkpoint after the step in hand."""
        await self._connected()
        with rpc_errors("trainer.SaveCheckpoint"):
            return await self._stub.SaveCheckpoint(pb.SaveCheckpointRequest(), timeout=STEP_SECONDS)

    @asynccontextmanager
    async def mode(self, holder: str, ttl_s: float = 300.0) -> AsyncIterator[SingleSteps]:
        """Take the mode lease, to drive single steps; given back at the end of the block."""
        ttl = Duration()
        ttl.FromNanoseconds(int(ttl_s * 1e9))
        await self._connected()
        with rpc_errors("trainer.AcquireMode"):
            answer = await self._stub.AcquireMode(pb.AcquireModeRequest(holder=holder, ttl=ttl), timeout=CALL_SECONDS)
        try:
            yield SingleSteps(self._stub, answer.mode_lease_id, self._connected)
        except BaseException:  # a cancel gives the lease back, too
            try:
                await self._release(answer.mode_lease_id)
            except RpcError as error:  # it runs out; what the block raised says more
                _log.warning("the mode lease could not be given back", cause=str(error))
            raise
        await self._release(answer.mode_lease_id)

    async def _connected(self) -> None:
        """What a repeat is to other calls: spares a call that is sent once the time in which nobody listens."""
        if self._repeats:
            await connected(self._channel, CONNECT_SECONDS)

    async def _release(self, mode_lease_id: str) -> None:
        await self._connected()
        with rpc_errors("trainer.ReleaseMode"):
            request = pb.ReleaseModeRequest(mode_lease_id=mode_lease_id)
            await self._stub.ReleaseMode(request, timeout=CALL_SECONDS)


class SingleSteps:
    """What the holder of the mode lease may do."""

    def __init__(
        self,
        stub: trainer_service_pb2_grpc.TrainerServiceAsyncStub,
        mode_lease_id: str,
        connected: Callable[[], Awaitable[None]],
    ) -> None:
        self._stub = stub
        self.mode_lease_id = mode_lease_id
        self._connected = connected

    async def train(
        self, groups: Sequence[trajectory_pb2.TrajectoryGroup], learning_rate: float | None = None
    ) -> pb.TrainStepResponse:
        """Train exactly one step on these groups; publishes nothing."""
        request = pb.TrainStepRequest(mode_lease_id=self.mode_lease_id, groups=groups, learning_rate=learning_rate)
        await self._connected()
        with rpc_errors("trainer.TrainStep"):
            return await self._stub.TrainStep(request, timeout=STEP_SECONDS)

    async def publish(self) -> pb.PublishResponse:
        """Always NOT_IMPLEMENTED: a version needs an incarnation, which only the loop opens."""
        await self._connected()
        with rpc_errors("trainer.Publish"):
            request = pb.PublishRequest(mode_lease_id=self.mode_lease_id)
            return await self._stub.Publish(request, timeout=STEP_SECONDS)

    async def save_checkpoint(self) -> pb.SaveCheckpointResponse:
        """Always NOT_IMPLEMENTED: a checkpoint belongs to a step of the loop, see `TrainerClient.save_checkpoint`."""
        await self._connected()
        with rpc_errors("trainer.SaveCheckpoint"):
            request = pb.SaveCheckpointRequest(mode_lease_id=self.mode_lease_id)
            return await self._stub.SaveCheckpoint(request, timeout=STEP_SECONDS)
