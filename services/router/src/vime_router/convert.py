"""Between the contract's messages and the router's own words. Refuses what no engine may say."""

from __future__ import annotations

import math
from datetime import timedelta

from google.protobuf.duration_pb2 import Duration

from vime.common.v1.engine_pb2 import EngineStatus
from vime.common.v1.weight_version_pb2 import Fence as FenceProto
from vime.common.v1.weight_version_pb2 import VersionSpan, WeightVersion
from vime.router.v1.router_service_pb2 import EngineHealth, HeartbeatRequest, RoutedEngine
from vime_client.addresses import split_address
from vime_router.breaker import BreakerState
from vime_router.directory import EngineLoad, EngineState, Entry, Liveness, Report
from vime_router.fences import Fence, FenceKind, Version
from vime_router.fleet import Seat
from vime_router.progress import Span
from vime_service.errors import InvalidArgument

_LARGEST_STATUS = 64 << 10
"""Bytes of one engine's status: a message carries a thousand of them."""


def version_of(message: WeightVersion) -> Version:
    """A weight version."""
    return Version(message.run_id, message.incarnation, message.step)


def fence_of(message: FenceProto) -> Fence:
    """A fence; unset means any.

    Raises:
        InvalidArgument: it names no run.
    """
    kind = message.WhichOneof("kind")
    if kind is None or kind == "any":
        return Fence()
    version = version_of(message.at_least if kind == "at_least" else message.exactly)
    if not version.run_id:
        raise InvalidArgument(f"fence.{kind}.run_id is empty", field=f"fence.{kind}.run_id")
    return Fence(FenceKind(kind), version)


def span_of(message: VersionSpan) -> Span:
    """A version span; weights that no run published have no version."""
    version = version_of(message.weight_version) if message.HasField("weight_version") else None
    return Span(message.first_token, version)


def span_message(span: Span) -> VersionSpan:
    """A version span as message."""
    message = VersionSpan(first_token=span.first_token)
    if span.version is not None:
        message.weight_version.run_id = span.version.run_id
        message.weight_version.incarnation = span.version.incarnation
        message.weight_version.step = span.version.step
    return message


def report_of(request: HeartbeatRequest) -> Report:
    """A heartbeat.

    Raises:
        InvalidArgument: it does not say who it is from, or more than every listing can carry.
    """
    status, info = request.status, request.status.info
    size = status.ByteSize()
    if size > _LARGEST_STATUS:
        raise InvalidArgument(
            f"status has {size} bytes, at most {_LARGEST_STATUS} may be: every listing carries it",
            field="status",
            limit=_LARGEST_STATUS,
            actual=size,
        )
    for field in ("engine_id", "boot_id", "address", "model_id"):
        if not getattr(info, field):
            raise InvalidArgument(f"status.info.{field} is empty", field=f"status.info.{field}")
    try:
        split_address(info.address)
    except ValueError as error:
        raise InvalidArgument(str(error), field="status.info.address", engine_id=info.engine_id) from None
    version = version_of(status.weight_version) if status.HasField("weight_version") else None
    return Report(
        engine_id=info.engine_id,
        boot_id=info.boot_id,
        address=info.address,
        model_id=info.model_id,
        updatable=info.updatable,
        state=_state_of(status),
        version=version,
        highest_seen=version_of(request.highest_seen) if request.HasField("highest_seen") else None,
        load=_load_of(status),
        status=status.SerializeToString(),
    )


def routed_engine(entry: Entry, seat: Seat, liveness: Liveness, age_s: float) -> RoutedEngine:
    """An engine as the router sees it."""
    return RoutedEngine(
        status=EngineStatus.FromString(entry.report.status),
        health=_health(liveness, seat),
        in_flight=seat.load.calls,
        requests=seat.load.sent,
        faults=seat.breaker.faults,
        heartbeat_age=duration_of(age_s),
        sticky_hits=seat.sticky_hits,
        draining=entry.draining,
    )


def duration_of(seconds: float) -> Duration:
    """Seconds as message."""
    message = Duration()
    message.FromTimedelta(timedelta(seconds=seconds))
    return message


def _state_of(status: EngineStatus) -> EngineState:
    try:
        return EngineState(status.state)
    except ValueError:  # a newer engine's state: not one that we may route to
        return EngineState.UNSPECIFIED


def _load_of(status: EngineStatus) -> EngineLoad | None:
    load = status.load
    if not status.HasField("load") or not math.isfinite(load.kv_cache_usage):
        return None
    return EngineLoad(load.running, load.waiting, min(1.0, max(0.0, load.kv_cache_usage)))


def _health(liveness: Liveness, seat: Seat) -> EngineHealth.ValueType:
    if liveness is Liveness.DEAD:
        return EngineHealth.ENGINE_HEALTH_DEAD
    if liveness is Liveness.SUSPECT:
        return EngineHealth.ENGINE_HEALTH_SUSPECT
    if seat.breaker.state is not BreakerState.CLOSED:
        return EngineHealth.ENGINE_HEALTH_BROKEN
    return EngineHealth.ENGINE_HEALTH_ALIVE
