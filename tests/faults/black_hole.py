"""A TCP proxy that can turn into a black hole: connections stay open, and what goes in comes out nowhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from enum import Enum

_CHUNK = 64 * 1024


class Mode(Enum):
    """What becomes of bytes."""

    PASS = "pass"
    """They go through."""
    SWALLOW = "swallow"
    """They vanish, in both directions, also on connections that are open already: a half-open connection."""
    SWALLOW_ANSWERS = "swallow answers"
    """What the client sends arrives; what the server says vanishes."""


class BlackHole:
    """The proxy. `address` is where clients connect; `mode` may change at any time."""

    def __init__(self, target: str) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.mode = Mode.PASS
        self.accepted = 0
        self.swallowed = 0

    async def start(self) -> None:
        """Listen on a free port of loopback."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)

    @property
    def address(self) -> str:
        """Where clients connect."""
        assert self._server is not None
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def heal(self) -> None:
        """Let bytes through again. Connections that lost some are ended, as a firewall ends those it has forgotten."""
        self.mode = Mode.PASS
        for writer in tuple(self._writers):
            writer.transport.abort()

    async def close(self) -> None:
        """End everything."""
        assert self._server is not None
        self._server.close()
        self.heal()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        server_reader, server_writer = await asyncio.open_connection(self._host, self._port)
        ends = (writer, server_writer)
        self._writers.update(ends)
        try:
            # The end of either way ends the connection.
            await asyncio.wait(
                [
                    asyncio.ensure_future(self._pump(reader, server_writer, Mode.SWALLOW)),
                    asyncio.ensure_future(self._pump(server_reader, writer, Mode.SWALLOW, Mode.SWALLOW_ANSWERS)),
                ],
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            for end in ends:
                self._writers.discard(end)
                end.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *swallowing: Mode) -> None:
        with suppress(ConnectionError):
            while piece := await reader.read(_CHUNK):
                if self.mode in swallowing:
                    self.swallowed += len(piece)
                    continue
                writer.write(piece)
                await writer.drain()


@asynccontextmanager
async def black_hole(target: str) -> AsyncIterator[BlackHole]:
    """A proxy in front of `target`, passing everything at first."""
    proxy = BlackHole(target)
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.close()
