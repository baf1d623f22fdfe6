"""Telemetry of a service: the shared set-up, and the span of each call that a server handles."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry import trace
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from vime_client.metrics import Distribution, Metrics
from vime_client.span_choice import SpanChoice
from vime_client.telemetry import Telemetry, TelemetryConfig, dist_version, setup_telemetry

__all__ = [
    "Distribution",
    "Metrics",
    "Telemetry",
    "TelemetryConfig",
    "dist_version",
    "server_span",
    "setup_telemetry",
]

_PROPAGATOR = TraceContextTextMapPropagator()
# A refused request is the caller's fault: its span tells the code, but only what was not done for another reason is
# marked as an error: our own faults, and calls that were cancelled.
_NOT_DONE = frozenset(
    {"CANCELLED", "UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"}
)


@dataclass(slots=True)
class HandledCall:
    """A call inside `server_span`; set its answer if it has one message."""

    answer: Any = None


@contextmanager
def server_span(method: str, context: Any, choice: SpanChoice, *, skip: bool = False) -> Iterator[HandledCall]:
    """The span of one handled call, child of the caller's span; current inside the block, streams included.

    Attributes are the method and the status code, never anything of the request. `choice` tells whether it is kept.
    """
    call = HandledCall()
    if skip:
        yield call
        return
    carrier = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
    service, _, name = method.lstrip("/").partition("/")
    with trace.get_tracer("vime_service").start_as_current_span(
        method.lstrip("/"),
        context=_PROPAGATOR.extract(carrier),
        kind=SpanKind.SERVER,
        attributes={"rpc.system": "grpc", "rpc.service": service, "rpc.method": name},
        record_exception=False,  # an aborted call is no exception of ours, and a message may quote the request
        set_status_on_exception=False,
        end_on_exit=False,
    ) as span:
        cancelled = True
        try:
            yield call
            cancelled = False
        except Exception:
            cancelled = False
            raise
        finally:
            code = grpc.StatusCode.CANCELLED if cancelled else _code_of(context)
            span.set_attribute("rpc.grpc.status_code", code.value[0])
            if code.name in _NOT_DONE:
                span.set_status(StatusCode.ERROR, code.name)
            choice.end(span, method, code, call.answer)


def _code_of(context: Any) -> grpc.StatusCode:
    """The status a handler left on its context; grpc.aio keeps it as a number, 0 where nobody set it."""
    code = context.code()
    if isinstance(code, grpc.StatusCode):
        return code
    for known in grpc.StatusCode:
        if known.value[0] == code:
            return known
    return grpc.StatusCode.OK
