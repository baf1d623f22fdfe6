"""What happens to every call of a channel: a deadline, a span whose context travels along, the token.

Why not opentelemetry-instrumentation-grpc: its aio client interceptor waits for the status inside the interceptor, and
a caller that is cancelled then cancels that wait instead of the call, so the server computes on for nobody. Here the
call is returned at once, the span ends in its done callback, and a cancel reaches the server.
"""

from __future__ import annotations

import asyncio
import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from vime_client.span_choice import SpanChoice

_PROPAGATOR = TraceContextTextMapPropagator()
_finishing: set[asyncio.Task[None]] = set()  # asyncio keeps only weak references to tasks


@dataclass(frozen=True)
class CallPolicy:
    """How a channel treats its calls. Times in seconds; `method_timeouts_s` maps globs over `/pkg.Service/Method`."""

    timeout_s: float
    stream_timeout_s: float
    method_timeouts_s: Mapping[str, float]
    untraced: Callable[[str], bool]
    token: str | None = field(default=None, repr=False)

    def timeout_of(self, method: str, *, streaming: bool) -> float:
        """Deadline of a call of `method` that names none."""
        for glob, seconds in self.method_timeouts_s.items():
            if fnmatch.fnmatchcase(method, glob):
                return seconds
        return self.stream_timeout_s if streaming else self.timeout_s


def client_interceptors(policy: CallPolicy) -> list[grpc.aio.ClientInterceptor]:
    """One interceptor per kind of call: grpc.aio registers an object for the first kind it implements only."""
    kinds = (_UnaryUnary, _UnaryStream, _StreamUnary, _StreamStream)
    choice = SpanChoice()
    return [kind(policy, choice) for kind in kinds]


class _Intercept:
    def __init__(self, policy: CallPolicy, choice: SpanChoice) -> None:
        self._policy = policy
        self._choice = choice

    def _prepare(
        self, details: grpc.aio.ClientCallDetails, *, streaming: bool
    ) -> tuple[grpc.aio.ClientCallDetails, Span | None]:
        method = _name_of(details)
        metadata = grpc.aio.Metadata(*(tuple(details.metadata) if details.metadata else ()))
        if self._policy.token is not None:
            metadata.add("authorization", f"Bearer {self._policy.token}")
        span = None if self._policy.untraced(method) else _start_span(method, metadata)
        timeout = details.timeout
        if timeout is None:
            timeout = self._policy.timeout_of(method, streaming=streaming)
        return (
            grpc.aio.ClientCallDetails(details.method, timeout, metadata, details.credentials, details.wait_for_ready),
            span,
        )

    async def _call(
        self, continuation: Callable[..., Any], details: grpc.aio.ClientCallDetails, request: Any, *, streaming: bool
    ) -> Any:
        details, span = self._prepare(details, streaming=streaming)
        try:
            call = await continuation(details, request)
        except BaseException:
            if span is not None:
                span.end()
            raise
        if span is not None:
            method = _name_of(details)
            call.add_done_callback(lambda done: _finish(done, span, self._choice, method, has_answer=not streaming))
        return call


# The ignores below: the base classes are generic for type checkers only, and cannot be subscripted at run time.
class _UnaryUnary(_Intercept, grpc.aio.UnaryUnaryClientInterceptor):  # type: ignore[type-arg, unused-ignore]
    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await self._call(continuation, client_call_details, request, streaming=False)


class _UnaryStream(_Intercept, grpc.aio.UnaryStreamClientInterceptor):  # type: ignore[type-arg, unused-ignore]
    async def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await self._call(continuation, client_call_details, request, streaming=True)


class _StreamUnary(_Intercept, grpc.aio.StreamUnaryClientInterceptor):  # type: ignore[type-arg, unused-ignore]
    async def intercept_stream_unary(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        return await self._call(continuation, client_call_details, request_iterator, streaming=True)


class _StreamStream(_Intercept, grpc.aio.StreamStreamClientInterceptor):  # type: ignore[type-arg, unused-ignore]
    async def intercept_stream_stream(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        return await self._call(continuation, client_call_details, request_iterator, streaming=True)


def _name_of(details: grpc.aio.ClientCallDetails) -> str:
    raw: Any = details.method  # typed str, but grpc.aio hands out bytes
    return raw.decode() if isinstance(raw, bytes) else str(raw)


def _start_span(method: str, metadata: grpc.aio.Metadata) -> Span:
    service, _, name = method.lstrip("/").partition("/")
    span = trace.get_tracer("vime_client").start_span(
        method.lstrip("/"),
        kind=SpanKind.CLIENT,
        attributes={"rpc.system": "grpc", "rpc.service": service, "rpc.method": name},
    )
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, trace.set_span_in_context(span))
    for key, value in carrier.items():
        metadata.add(key, value)
    return span


def _finish(call: Any, span: Span, choice: SpanChoice, method: str, *, has_answer: bool) -> None:
    """End the span of a finished call. Its status is there already, but grpc.aio hands it out by coroutine only."""

    async def finish() -> None:
        code = await call.code()
        span.set_attribute("rpc.grpc.status_code", code.value[0])
        if code is not grpc.StatusCode.OK:
            span.set_status(StatusCode.ERROR, code.name)
        # bounded by: the call is done
        answer = await call if has_answer and code is grpc.StatusCode.OK else None
        choice.end(span, method, code, answer)

    try:
        task = asyncio.get_running_loop().create_task(finish())
    except RuntimeError:  # the loop is closing: the span ends without its status
        span.end()
        return
    _finishing.add(task)
    task.add_done_callback(_finishing.discard)
