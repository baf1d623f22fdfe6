"""Router and engines as the publisher's fleet."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TYPE_CHECKING, TypeVar

import grpc

from vime.bulk.v1.manifest_pb2 import TRANSPORT_GLOO, Rendezvous
from vime.common.v1 import engine_pb2
from vime.rollout.v1 import engine_service_pb2 as pb
from vime.rollout.v1.engine_service_pb2_grpc import EngineServiceStub
from vime.router.v1 import router_service_pb2
from vime.router.v1.router_service_pb2_grpc import RouterServiceStub
from vime_client.channel import ChannelSettings, open_channel
from vime_client.errors import RpcError, StaleIncarnation, rpc_errors
from vime_trainer.adapters.patience import patiently
from vime_trainer.adapters.protos import seconds, to_seconds, version_from_proto, version_to_proto
from vime_trainer.loop.ports import Commit, Described, Member, Refused
from vime_trainer.loop.publisher import PublishConfig
from vime_trainer.loop.versions import Version

if TYPE_CHECKING:
    from vime.rollout.v1.engine_service_pb2_grpc import EngineServiceAsyncStub

_CALL_S = 30.0
_COMMIT_S = 120.0
_USABLE = (
    engine_pb2.ENGINE_STATE_EMPTY,
    engine_pb2.ENGINE_STATE_STAGING,
    engine_pb2.ENGINE_STATE_SERVING,
    engine_pb2.ENGINE_STATE_DIRTY,
    engine_pb2.ENGINE_STATE_PAUSED,
)

T = TypeVar("T")


class GrpcFleet:
    """Implements `loop.ports.Fleet`."""

    def __init__(self, router: grpc.aio.Channel, config: PublishConfig, engines: ChannelSettings) -> None:
        """`engines` are the settings of the channels to the engines."""
        self._router = RouterServiceStub(router)
        self._config, self._settings = config, engines
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def members(self, version: Version) -> list[Member]:
        """See the port."""
        request = router_service_pb2.ListMembersRequest(caller_version=version_to_proto(version))
        answer = await patiently("router.ListMembers", lambda: self._router.ListMembers(request, timeout=_CALL_S))
        return [
            Member(
                engine_id=m.info.engine_id,
                boot_id=m.info.boot_id,
                address=m.info.address,
                serving=version_from_proto(m.weight_version) if _serves(m) else None,
                manifest_digest=m.manifest_digest,
                usable=m.state in _USABLE,
            )
            for m in answer.members
        ]

    async def prepare(self, member: Member, described: Described, generation: int, rank: int, world: int) -> bool:
        """See the port."""
        request = pb.PrepareUpdateRequest(
            manifest=described.manifest,
            rendezvous=Rendezvous(
                transport=TRANSPORT_GLOO,
                address=described.store_address,
                generation=generation,
                rank=rank,
                world_size=world,
            ),
            transfer_timeout=seconds(self._config.transfer_timeout_s),
        )
        answer = await self._leg(member, "PrepareUpdate", self._engine(member).PrepareUpdate(request, timeout=_CALL_S))
        return answer.already_serving

    async def await_staged(self, member: Member, version: Version) -> None:
        """See the port."""
        request = pb.AwaitStagedRequest(weight_version=version_to_proto(version))
        timeout = self._config.transfer_timeout_s + 5.0
        await self._leg(member, "AwaitStaged", self._engine(member).AwaitStaged(request, timeout=timeout))

    async def commit(self, member: Member, described: Described) -> Commit:
        """See the port."""
        request = pb.CommitUpdateRequest(
            weight_version=version_to_proto(described.version),
            canary=described.canary,
            canary_tolerance=self._config.canary_tolerance or 0.0,
            pause_mode=pb.PAUSE_MODE_KEEP,
        )
        answer = await self._leg(member, "CommitUpdate", self._engine(member).CommitUpdate(request, timeout=_COMMIT_S))
        difference = answer.canary_difference if answer.HasField("canary_difference") else None
        return Commit(difference, to_seconds(answer.pause_time))

    async def abort(self, member: Member, version: Version, cause: str) -> None:
        """See the port."""
        request = pb.AbortUpdateRequest(weight_version=version_to_proto(version), cause=cause)
        await self._leg(member, "AbortUpdate", self._engine(member).AbortUpdate(request, timeout=_CALL_S))

    async def close(self) -> None:
        """Close the channels to the engines."""
        channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            await channel.close()

    def _engine(self, member: Member) -> EngineServiceAsyncStub:
        if member.address not in self._channels:
            self._channels[member.address] = open_channel(member.address, self._settings)
        return EngineServiceStub(self._channels[member.address])

    @staticmethod
    async def _leg(member: Member, name: str, call: Awaitable[T]) -> T:
        try:
            with rpc_errors(f"{member.engine_id}.{name}"):
                # bounded by: the deadline that each leg gave its call
                return await call
        except StaleIncarnation:
            raise  # not the member's failure: this trainer is the one that is over
        except RpcError as error:
            raise Refused(str(error), dirty=error.reason == "LOAD_FAILED", away=error.transient) from error


def _serves(status: engine_pb2.EngineStatus) -> bool:
    return status.HasField("weight_version") and status.state != engine_pb2.ENGINE_STATE_DIRTY
