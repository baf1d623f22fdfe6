"""The calls to the engines: one channel per life of an engine, ended with it, and what a failed call says about it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any

import grpc

from vime.rollout.v1.generation_service_pb2_grpc import GenerationServiceStub
from vime_client.channel import ChannelSettings, open_channel
from vime_client.errors import RpcError
from vime_router.directory import Report
from vime_router.forward import EngineFault, EngineRefused, EngineSaid
from vime_service.errors import EngineFailed
from vime_service.logging import get_logger

_log = get_logger(__name__)

_NOT_NOW = frozenset({"NOT_READY", "DRAINING"})
_FAULTS = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED})


class EngineLink:
    """The channel to one life of one engine, and the calls on it."""

    def __init__(self, engine_id: str, channel: grpc.aio.Channel) -> None:
        self.engine_id = engine_id
        self._channel = channel
        self._stub: Any = GenerationServiceStub(channel)
        self._calls: set[Any] = set()
        self._ended: str | None = None

    async def unary(self, method: str, request: Any, seconds: float) -> Any:
        """Call a unary method of GenerationService; a cancel of this coroutine cancels the call.

        Raises:
            EngineFault: the engine failed or its life ended.
            EngineRefused: it cannot take the call now.
            EngineSaid: what else it answered.
            RpcError: what else came of the call.
        """
        with self._call(method, request, seconds) as call:
            # bounded by: `seconds`, the deadline of the call
            return await call

    @asynccontextmanager
    async def stream(self, method: str, request: Any, seconds: float) -> AsyncIterator[AsyncIterator[Any]]:
        """Call a streaming method; leaving the block ends the call. Reading raises as `unary`."""
        with self._call(method, request, seconds) as call:
            async with aclosing(aiter(call)) as pieces:
                yield pieces

    def end(self, why: str) -> None:
        """Fail the calls that run here: nobody will answer them."""
        self._ended = why
        for call in tuple(self._calls):
            call.cancel()

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()

    @contextmanager
    def _call(self, method: str, request: Any, seconds: float) -> Iterator[Any]:
        call = getattr(self._stub, method)(request, timeout=seconds)
        self._calls.add(call)
        try:
            yield call
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._ended is None or (task is not None and task.cancelling()):
                raise
            raise self._fault(self._ended) from None
        except grpc.aio.AioRpcError as error:
            raise self._verdict(RpcError.from_aio(error)) from None
        finally:
            self._calls.discard(call)
            call.cancel()

    def _verdict(self, error: RpcError) -> Exception:
        refused = error.code is grpc.StatusCode.UNAVAILABLE and error.reason in _NOT_NOW
        if refused or error.reason == "FENCE_NOT_MET":
            return EngineRefused(self.engine_id, error)
        if error.code in _FAULTS:
            # CANCELLED came from the engine: had the caller cancelled, nobody would be reading this.
            return EngineFault(self.engine_id, error, retryable=error.code is not grpc.StatusCode.INTERNAL)
        return EngineSaid(error) if error.reason else error

    def _fault(self, why: str) -> EngineFault:
        cause = EngineFailed(f"engine {self.engine_id} is gone: {why}", engine_id=self.engine_id)
        return EngineFault(self.engine_id, cause, retryable=True)


class EngineLinks:
    """One link per life, opened at its first call."""

    def __init__(self, settings: ChannelSettings) -> None:
        self._settings = settings
        self._links: dict[tuple[str, str], EngineLink] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def to(self, report: Report) -> EngineLink:
        """The link to this life of this engine, picked just now: nobody would close one to a life that has ended."""
        link = self._links.get(report.key)
        if link is None:
            channel = open_channel(report.address, self._settings)
            link = self._links[report.key] = EngineLink(report.engine_id, channel)
        return link

    def open_to(self, report: Report) -> EngineLink | None:
        """The link to this life if calls went there and it has not ended."""
        return self._links.get(report.key)

    def end(self, report: Report, why: str) -> None:
        """The life is over: fail its calls, close its channel. If it comes back, it gets a new link."""
        link = self._links.pop(report.key, None)
        if link is not None:
            link.end(why)
            task = asyncio.get_running_loop().create_task(link.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Close all channels."""
        links = list(self._links.values())
        self._links.clear()
        for link in links:
            await link.close()
        if self._closing:
            await asyncio.wait(self._closing, timeout=1.0)
