"""A service's life: bind, register, serve, become ready, stop in order.

    async def register(service: Service) -> None:
        add_BufferServiceServicer_to_server(servicer, service.server)
        service.serves("vime.buffer.v1.BufferService")
        service.on_cleanup(ledger.close)

    async def start(service: Service) -> None:      # optional: slow things, while the server is already live
        await engine.load()

    exit_code = run_service("buffer", "vime-buffer", config, register, start)

Health (`grpc.health.v1`): "" and "live" say that the process answers; "ready" and the full name of each service say
that it can do its work: not before `start` has returned, and not after SIGTERM.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from vime.common.v1 import server_info_service_pb2_grpc
from vime_client.addresses import join_address
from vime_client.logs import get_logger
from vime_service.auth import Gate, StartupError, server_credentials
from vime_service.errors import VimeError
from vime_service.interceptors import ChassisInterceptor
from vime_service.server_config import ServerConfig
from vime_service.server_info import SERVICE_NAME as SERVER_INFO
from vime_service.server_info import ServerInfoServicer
from vime_service.telemetry import Telemetry

_log = get_logger(__name__)
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

Callback = Callable[[], Awaitable[None] | None]


class Service:
    """A running service, as `register` and `start` see it.

    Attributes:
        name: "buffer", "router", "rollout" or "trainer".
        server: the gRPC server to add servicers to, in `register`.
        address: `host:port` where it listens, the port being the real one.
        stopping: set when it begins to stop; long polls and watches end themselves on it.
        telemetry: the process's tracer and metrics, where it has them.
        components: names and versions that GetServerInfo tells, such as `{"vllm": "0.30.0"}`.
    """

    def __init__(self, name: str, dist: str, config: ServerConfig, telemetry: Telemetry | None = None) -> None:
        config.check_exposure()
        self.name = name
        self.config = config
        self.telemetry = telemetry
        self.components: dict[str, str] = {}
        self.stopping = asyncio.Event()
        self.failure: BaseException | None = None
        self.address = ""
        self._dist = dist
        self._interceptor = ChassisInterceptor(
            f"{name}.vime",
            Gate(config.grants),
            max_call_seconds=config.max_call_seconds,
            untraced=config.untraced,
        )
        self.server = grpc.aio.server(
            interceptors=[self._interceptor],
            options=config.grpc_options(),
            maximum_concurrent_rpcs=config.max_concurrent_calls,
        )
        self._health = health_aio.HealthServicer()
        self._grpc_services: list[str] = []
        self._on_stopping: list[Callback] = []
        self._on_cleanup: list[Callback] = []
        self._tasks: set[asyncio.Task[None]] = set()

    # -------------------------------------------------------------- for the service

    def serves(self, *full_names: str) -> None:
        """Name the gRPC services that were added to `server`: health, reflection and GetServerInfo tell them."""
        self._grpc_services.extend(full_names)

    def on_stopping(self, callback: Callback) -> None:
        """Call `callback` as soon as the service begins to stop, while calls are still in flight."""
        self._on_stopping.append(callback)

    def on_cleanup(self, callback: Callback) -> None:
        """Call `callback` after the last call has ended; what was added last is called first."""
        self._on_cleanup.append(callback)

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run `work` beside the server until it stops. If it fails, the service stops and exits with 1."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    async def set_ready(self, ready: bool) -> None:
        """Change what health tells about readiness."""
        for name in ("ready", *self._grpc_services):
            await self._health.set(name, _SERVING if ready else _NOT_SERVING)

    def request_stop(self, why: str, failure: BaseException | None = None) -> None:
        """Begin to stop. With a `failure` the exit code will be 1. Later requests change nothing."""
        if self.stopping.is_set():
            return
        self.failure = failure
        _log.info("stopping", why=why, in_flight=len(self._interceptor.in_flight))
        self.stopping.set()

    @property
    def in_flight(self) -> int:
        """Calls being handled now."""
        return len(self._interceptor.in_flight)

    # -------------------------------------------------------------- life

    async def open(self, register: Callable[[Service], Awaitable[None] | None]) -> None:
        """Bind, register, answer. Live afterwards, not yet ready.

        Raises:
            StartupError: the port is busy, the address is not ours, or a credential file cannot be read.
        """
        port = self._bind()
        self.address = join_address(self.config.host, port)
        await _maybe(register(self))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        server_info_service_pb2_grpc.add_ServerInfoServiceServicer_to_server(
            ServerInfoServicer(self.name, self._dist, lambda: self._grpc_services, self.components), self.server
        )
        self._grpc_services.append(SERVER_INFO)
        if self.config.reflection:
            names = [*self._grpc_services, "grpc.health.v1.Health", reflection.SERVICE_NAME]
            reflection.enable_server_reflection(names, self.server)
        await self._health.set("live", _SERVING)
        await self.set_ready(False)
        await self.server.start()
        if self.config.port_file is not None:
            _write_port_file(self.config.port_file, self.address)
        _log.info("listening", address=self.address)

    async def close(self) -> bool:
        """Stop in order; True if every clean-up succeeded. Takes at most grace + cleanup seconds and a little."""
        self.request_stop("closed")
        await self._health.set("", _NOT_SERVING)
        await self.set_ready(False)
        clean = await self._call_all(self._on_stopping, self.config.grace_seconds or 1.0)
        await self._drain()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self.config.cleanup_seconds)
        clean = await self._call_all(self._on_cleanup[::-1], self.config.cleanup_seconds) and clean
        if self.config.port_file is not None:
            self.config.port_file.unlink(missing_ok=True)
        _log.info("stopped", clean=clean)
        return clean

    def _bind(self) -> int:
        config = self.config
        try:
            if config.tls is None:
                return self.server.add_insecure_port(config.address)
            return self.server.add_secure_port(config.address, server_credentials(config.tls))
        except RuntimeError:
            raise StartupError(
                f"{self.name} cannot listen on {config.address}: the port is in use, or the address is not this "
                "machine's; choose another server.port (0 takes a free one) or stop the other process"
            ) from None

    async def _drain(self) -> None:
        """Refuse new calls at once; let those in flight end within the grace period, then end them."""
        flights = self._interceptor.in_flight
        stopped = asyncio.create_task(self.server.stop(self.config.grace_seconds + 2.0))
        flights.end_all("/grpc.")  # a health watch never ends by itself
        await flights.wait_empty(self.config.grace_seconds)
        ended = flights.end_all()
        if ended:
            _log.warning("calls outlasted the grace period", ended=ended, grace_s=self.config.grace_seconds)
        # bounded by: the grace that it was given
        await stopped

    async def _call_all(self, callbacks: list[Callback], seconds: float) -> bool:
        clean = True
        end = asyncio.get_running_loop().time() + seconds
        for callback in callbacks:
            name = getattr(callback, "__qualname__", repr(callback))
            try:
                async with asyncio.timeout_at(end):
                    await _maybe(callback())
            except TimeoutError:
                clean = False
                _log.error("clean-up took too long", callback=name, limit_s=seconds)
            except Exception as error:  # noqa: BLE001  one failed clean-up must not keep the others from running
                clean = False
                _log.error("clean-up failed", exc_info=error, callback=name)
        return clean

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or self.stopping.is_set():
            return
        error = task.exception()
        if error is not None:
            expected = isinstance(error, (StartupError, VimeError))  # says itself what is wrong; no stack needed
            _log.error("a background task failed", exc_info=None if expected else error, task=task.get_name())
            self.request_stop(f"{task.get_name()} failed: {error}", error)


Register = Callable[[Service], Awaitable[None] | None]
Start = Callable[[Service], Awaitable[None]]


@asynccontextmanager
async def serving(
    name: str,
    dist: str,
    config: ServerConfig,
    register: Register,
    start: Start | None = None,
    telemetry: Telemetry | None = None,
) -> AsyncIterator[Service]:
    """Serve inside the block, without signals: for tests, and for several services in one process."""
    service = Service(name, dist, config, telemetry)
    try:
        await service.open(register)
        if start is not None:
            await start(service)
        await service.set_ready(True)
        yield service
    finally:
        await service.close()


async def serve(
    name: str,
    dist: str,
    config: ServerConfig,
    register: Register,
    start: Start | None = None,
    telemetry: Telemetry | None = None,
) -> int:
    """Serve until SIGTERM, SIGINT or a failure; the exit code: 0 when asked to stop, 1 after a failure.

    Raises:
        StartupError: see `Service.open`.
        VimeError: `start` or a background task failed with it.
    """
    service = Service(name, dist, config, telemetry)
    _handle_signals(service)  # first: a signal during a slow start must not leave half-started children behind
    try:
        await service.open(register)
        sys.stdout.write(f"vime-{name} listening on {service.address}\n")
        sys.stdout.flush()
        service.spawn(_start(service, start), "start-up")
        # unbounded: this is the service's life; signals and failures end it
        await service.stopping.wait()
    finally:
        clean = await service.close()
    if isinstance(service.failure, (StartupError, VimeError)):
        raise service.failure
    return 0 if clean and service.failure is None else 1


async def _start(service: Service, start: Start | None) -> None:
    if start is not None:
        await start(service)
    await service.set_ready(True)
    _log.info("ready", address=service.address)


def _handle_signals(service: Service) -> None:
    """SIGTERM and SIGINT stop the service once; further ones are counted, logged, and cut nothing short."""
    loop = asyncio.get_running_loop()
    seen = 0

    def arrived(signum: int) -> None:
        nonlocal seen
        seen += 1
        if seen == 1:
            service.request_stop(signal.Signals(signum).name)
        else:
            _log.warning("already stopping, clean-up goes on", signal=signal.Signals(signum).name, seen=seen)

    def handler(signum: int, _frame: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed: the process is leaving anyway
            loop.call_soon_threadsafe(arrived, signum)

    # Not loop.add_signal_handler: closing the loop would restore the default action, and a second SIGTERM would then
    # kill the process while it writes its last spans.
    for wanted in (signal.SIGTERM, signal.SIGINT):
        signal.signal(wanted, handler)


async def _maybe(result: Awaitable[None] | None) -> None:
    if inspect.isawaitable(result):
        # bounded by: whoever calls; registering waits for nobody, callbacks at the end share a time
        await result


def _write_port_file(path: Any, address: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(address + "\n", encoding="ascii")
    temporary.replace(path)  # a reader sees the whole address or no file
