"""vime.rollout.v1.EngineService over a `Core`: contract in, domain, contract out."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from vime.rollout.v1 import engine_service_pb2 as pb
from vime.rollout.v1 import engine_service_pb2_grpc
from vime_rollout import convert
from vime_rollout.core import Core
from vime_rollout.engine import PauseMode
from vime_rollout.status import engine_status
from vime_rollout.transfers import check_transport
from vime_service.deadlines import remaining
from vime_service.errors import InvalidArgument, Unavailable

_RESERVE_S = 0.2

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")
Handler = Callable[["EngineServicer", RequestT, Any], Awaitable[ResponseT]]


def _tells(handler: Handler[RequestT, ResponseT]) -> Handler[RequestT, ResponseT]:
    """Tell the router after the call, whether or not it succeeded."""

    @functools.wraps(handler)
    async def told(self: EngineServicer, request: RequestT, context: Any) -> ResponseT:
        try:
            return await handler(self, request, context)
        finally:
            self.changed()

    return told


class EngineServicer(engine_service_pb2_grpc.EngineServiceServicer):
    """See the contract.

    Args:
        core: the engine.
        address: where others reach it.
        changed: called after each call that may have changed what is served. The router then hears of it now and not a
            heartbeat period later, for which every request fenced to new weights would wait.
    """

    def __init__(self, core: Core, address: str, changed: Callable[[], None] = lambda: None) -> None:
        self._core = core
        self._address = address
        self.changed = changed

    async def GetEngine(self, request: pb.GetEngineRequest, context: Any) -> pb.GetEngineResponse:
        """See the contract."""
        return pb.GetEngineResponse(status=engine_status(self._core, self._address))

    async def PrepareUpdate(self, request: pb.PrepareUpdateRequest, context: Any) -> pb.PrepareUpdateResponse:
        """See the contract."""
        core = self._ready()
        rendezvous = convert.rendezvous_in(request.rendezvous)
        check_transport(rendezvous.transport)
        timeout_s = convert.seconds_in(request.transfer_timeout, core.config.updates.transfer_timeout_seconds)
        prepared = await core.updater.prepare(convert.manifest_in(request.manifest), rendezvous, timeout_s)
        return pb.PrepareUpdateResponse(already_serving=prepared.already_serving, staging_bytes=prepared.staging_bytes)

    async def AwaitStaged(self, request: pb.AwaitStagedRequest, context: Any) -> pb.AwaitStagedResponse:
        """See the contract."""
        version = convert.version_in(request.weight_version, "weight_version")
        stats = await self._ready().updater.await_staged(version, remaining(context, reserve=_RESERVE_S))
        return pb.AwaitStagedResponse(bytes=stats.nbytes, transfer_time=convert.duration_out(stats.seconds))

    @_tells
    async def CommitUpdate(self, request: pb.CommitUpdateRequest, context: Any) -> pb.CommitUpdateResponse:
        """See the contract."""
        core = self._ready()
        done = await core.updater.commit(
            convert.version_in(request.weight_version, "weight_version"),
            convert.canary_in(request.canary),
            request.canary_tolerance,
            convert.pause_mode_in(request.pause_mode, PauseMode.KEEP, "pause_mode"),
        )
        return pb.CommitUpdateResponse(
            canary_difference=done.canary_difference,
            pause_time=convert.duration_out(done.pause_seconds),
            parameters=done.parameters,
        )

    @_tells
    async def AbortUpdate(self, request: pb.AbortUpdateRequest, context: Any) -> pb.AbortUpdateResponse:
        """See the contract."""
        core = self._ready()
        await core.updater.abort(convert.version_in(request.weight_version, "weight_version"), request.cause)
        return pb.AbortUpdateResponse(status=engine_status(core, self._address))

    @_tells
    async def PullUpdate(self, request: pb.PullUpdateRequest, context: Any) -> pb.PullUpdateResponse:
        """See the contract."""
        core = self._ready()
        payload = request.payload
        if payload.scheme != "file" or payload.offset:
            raise InvalidArgument(
                f"payload {payload.scheme!r} at offset {payload.offset}: whole files of scheme 'file' can be pulled",
                field="payload",
            )
        await core.updater.pull(
            convert.manifest_in(request.manifest),
            payload.key,
            convert.canary_in(request.canary),
            request.canary_tolerance,
            remaining(context, reserve=_RESERVE_S),
        )
        return pb.PullUpdateResponse(status=engine_status(core, self._address))

    @_tells
    async def Pause(self, request: pb.PauseRequest, context: Any) -> pb.PauseResponse:
        """See the contract."""
        core = self._ready()
        aborted = await core.control.pause(
            convert.version_in(request.caller_version, "caller_version"),
            convert.pause_mode_in(request.mode, PauseMode.ABORT, "mode"),
            convert.seconds_in(request.expires_after, core.config.pause_expiry_seconds),
        )
        return pb.PauseResponse(aborted=aborted)

    @_tells
    async def Resume(self, request: pb.ResumeRequest, context: Any) -> pb.ResumeResponse:
        """See the contract."""
        await self._ready().control.resume(convert.version_in(request.caller_version, "caller_version"))
        return pb.ResumeResponse()

    @_tells
    async def YieldDevice(self, request: pb.YieldDeviceRequest, context: Any) -> pb.YieldDeviceResponse:
        """See the contract."""
        caller = convert.version_in(request.caller_version, "caller_version")
        return pb.YieldDeviceResponse(freed_bytes=await self._ready().control.give_device(caller))

    @_tells
    async def ReturnDevice(self, request: pb.ReturnDeviceRequest, context: Any) -> pb.ReturnDeviceResponse:
        """See the contract."""
        await self._ready().control.take_device(convert.version_in(request.caller_version, "caller_version"))
        return pb.ReturnDeviceResponse()

    def _ready(self) -> Core:
        if not self._core.started:
            raise Unavailable("the engine is loading its model", retry_after=1.0)
        return self._core
