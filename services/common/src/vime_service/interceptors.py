"""The one interceptor of every vime server: span, rights, request, deadline, errors, and what is in flight.

In that order: the bytes of a caller without rights are never parsed.

Streaming handlers may be async generators or may use `context.write`. A generator is closed as soon as its call ends,
also when the caller cancels: its `finally` frees the engine slot at once, not when the garbage collector comes by.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from vime_client.logs import get_logger
from vime_client.span_choice import SpanChoice
from vime_service.auth import Gate
from vime_service.deadlines import Deadline, _server_bound
from vime_service.error_mapping import abort_for, abort_with
from vime_service.errors import Aborted, DeadlineExceeded, Draining, InvalidArgument
from vime_service.telemetry import server_span

_log = get_logger(__name__)
Behaviour = Callable[[Any, Any], Awaitable[Any]]
Parse = Callable[[bytes], Any]


class InFlight:
    """The calls being handled now, and the way to end those that outlast the grace period."""

    def __init__(self) -> None:
        self._methods: dict[asyncio.Task[Any], str] = {}
        self._ended: set[asyncio.Task[Any]] = set()
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._methods)

    def add(self, task: asyncio.Task[Any], method: str) -> None:
        """A call begins."""
        self._methods[task] = method
        self._empty.clear()

    def remove(self, task: asyncio.Task[Any]) -> None:
        """A call is over."""
        self._methods.pop(task, None)
        self._ended.discard(task)
        if not self._methods:
            self._empty.set()

    async def wait_empty(self, seconds: float) -> bool:
        """Wait until no call is left, at most `seconds`; True if so."""
        try:
            async with asyncio.timeout(seconds):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True

    def end_all(self, prefix: str = "/") -> int:
        """Cancel calls of methods that begin with `prefix`; their callers get UNAVAILABLE. Returns how many."""
        tasks = [task for task, method in self._methods.items() if method.startswith(prefix)]
        self._ended.update(tasks)
        for task in tasks:
            task.cancel()
        return len(tasks)

    def was_ended(self, task: asyncio.Task[Any]) -> bool:
        """True if `end_all` cancelled it, not its caller."""
        return task in self._ended


class ChassisInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every handler of a server.

    Args:
        domain: `<service>.vime`, the domain of its errors.
        gate: who may call what.
        max_call_seconds: bound of a call whose caller named no deadline; `/grpc.*` methods are exempt (health watches).
        untraced: tells which methods get no span.
    """

    def __init__(self, domain: str, gate: Gate, *, max_call_seconds: float, untraced: Callable[[str], bool]) -> None:
        self._domain = domain
        self._gate = gate
        self._max_call_seconds = max_call_seconds
        self._untraced = untraced
        self._warned: set[str] = set()
        self._choice = SpanChoice()
        self.in_flight = InFlight()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Called by gRPC for each call; answers the handler to run."""
        handler: Any = await continuation(handler_call_details)
        if handler is None:  # unknown method: gRPC answers UNIMPLEMENTED
            return handler
        method = str(handler_call_details.method)
        inner = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        # A single request comes to us as bytes, and is parsed once its caller is known. Streams of requests (gRPC's own
        # reflection; none of ours) are parsed by gRPC.
        parse: Parse | None = None if handler.request_streaming else handler.request_deserializer
        behaviour = self._around(method, _streaming(inner) if handler.response_streaming else inner, parse)
        make: Any = {  # typed by grpc-stubs for one kind each, and chosen here at run time
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }[handler.request_streaming, handler.response_streaming]
        by_grpc = handler.request_deserializer if handler.request_streaming else None
        made: grpc.RpcMethodHandler[Any, Any] = make(behaviour, by_grpc, handler.response_serializer)
        return made

    def _around(self, method: str, behaviour: Behaviour, parse: Parse | None) -> Behaviour:
        async def handle(request: Any, context: Any) -> Any:
            span = server_span(method, context, self._choice, skip=self._untraced(method))
            task = asyncio.current_task()
            assert task is not None, "gRPC runs each handler in a task"
            self.in_flight.add(task, method)
            try:
                with span as call:
                    call.answer = await self._guarded(method, behaviour, parse, request, context)
                    return call.answer
            finally:
                self.in_flight.remove(task)

        return handle

    async def _guarded(self, method: str, behaviour: Behaviour, parse: Parse | None, request: Any, context: Any) -> Any:
        try:
            self._gate.check(method, context)
            if parse is not None:
                request = _parsed(method, parse, request)
            return await self._bounded(method, behaviour, request, context)
        except grpc.aio.AbortError:
            raise
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and self.in_flight.was_ended(task):
                task.uncancel()
                await abort_with(context, Draining(f"{self._domain} is shutting down"), self._domain)
            if task is not None and task.cancelling():  # by its caller, who listens no more
                raise
            _log.warning("a handler ended because what it waited for was cancelled", method=method, exc_info=True)
            given_up = Aborted(f"{method} ended: what it waited for in {self._domain} was cancelled")
            return await abort_with(context, given_up, self._domain)
        except Exception as error:  # noqa: BLE001  the boundary: whatever a handler raises becomes a status
            return await abort_for(context, error, domain=self._domain, method=method)

    async def _bounded(self, method: str, behaviour: Behaviour, request: Any, context: Any) -> Any:
        if context.time_remaining() is not None or method.startswith("/grpc."):
            return await behaviour(request, context)
        if method not in self._warned:
            self._warned.add(method)
            _log.warning("a caller set no deadline", method=method, bound_s=self._max_call_seconds)
        token = _server_bound.set(Deadline.after(self._max_call_seconds))
        try:
            async with asyncio.timeout(self._max_call_seconds) as bound:
                return await behaviour(request, context)
        except TimeoutError:
            if not bound.expired():
                raise
            raise DeadlineExceeded(
                f"{method} came without a deadline and took longer than {self._max_call_seconds:g} s",
                limit=self._max_call_seconds,
            ) from None
        finally:
            _server_bound.reset(token)


def _parsed(method: str, parse: Parse, request: bytes) -> Any:
    try:
        return parse(request)
    except DecodeError as error:
        raise InvalidArgument(f"the request of {method} is no such message: {error}", field="request") from None


def _streaming(inner: Callable[[Any, Any], Any]) -> Behaviour:
    """A streaming handler as a coroutine that writes, so that the generator is closed before the call is over."""
    if not inspect.isasyncgenfunction(inner):
        return inner

    async def write_all(request: Any, context: Any) -> None:
        async with aclosing(inner(request, context)) as responses:
            async for response in responses:
                await context.write(response)

    return write_all
