"""A small service on the chassis, for its tests: run as a program for signals, registered in process for the rest."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from pathlib import Path
from typing import Any

from vime_service import ServiceConfig, run_service, service_cli
from vime_service.errors import (
    InvalidArgument,
    ResourceExhausted,
    StaleIncarnation,
    Unavailable,
    Unimplemented,
    VimeError,
)

ECHO = "vime.test.Echo"
state = {"stream_closed": 0, "hang_ended": 0}


class EchoConfig(ServiceConfig):
    """Settings of the test service."""

    cleanup_takes_s: float = 0.0
    """How long its clean-up takes."""
    marker: Path | None = None
    """File that clean-up writes when it is done."""
    start_takes_s: float = 0.0
    """How long its start takes."""
    fail: str = ""
    """Where to fail: "start", "data" or "later"; "stuck thread" and "stuck executor" leave a thread that never ends."""


async def echo(request: bytes, context: Any) -> bytes:
    if request == b"full":
        raise ResourceExhausted("table train holds 12 of 12 groups", retry_after=2.5, kind="table", limit=12, actual=12)
    if request == b"stale":
        raise StaleIncarnation("incarnation 3 is over, 4 is current", incarnation=3, current=4)
    if request == b"later":
        raise Unimplemented("Sleep comes later", rpc="Sleep", why="no engine")
    if request.startswith(b"long"):
        letter = request.removeprefix(b"long").decode().strip() or "x"
        raise VimeError(letter * 100_000, **{f"fact{i}": letter * 10_000 for i in range(100)})
    if request == b"not ready":
        raise Unavailable("the model is loading")
    if request == b"gives up":
        work = asyncio.ensure_future(asyncio.sleep(60))
        asyncio.get_running_loop().call_soon(work.cancel)
        await work
    if request == b"bug":
        raise ZeroDivisionError("the secret is 4711")
    return request


async def count(request: bytes, context: Any) -> Any:
    try:
        for number in range(int(request or b"3")):
            yield str(number).encode()
            await asyncio.sleep(0)
    finally:
        state["stream_closed"] += 1


async def write(request: bytes, context: Any) -> None:
    for number in range(3):
        await context.write(str(number).encode())


class Blocked:
    """What a long poll answers that found nothing: see `vime_client.span_choice`."""

    blocked_by = 1


async def poll(request: bytes, context: Any) -> Any:
    return request or Blocked()


async def hang(request: bytes, context: Any) -> bytes:
    try:
        await asyncio.sleep(60)
    finally:
        state["hang_ended"] += 1
    return b""


def register(service: Any) -> None:
    import grpc  # as late as in a real service: the command line answers without it

    methods = {
        "Echo": grpc.unary_unary_rpc_method_handler(echo),
        "Count": grpc.unary_stream_rpc_method_handler(count),
        "Write": grpc.unary_stream_rpc_method_handler(write),
        "Poll": grpc.unary_unary_rpc_method_handler(
            poll, response_serializer=lambda answer: b"" if isinstance(answer, Blocked) else answer
        ),
        "Hang": grpc.unary_unary_rpc_method_handler(hang),
    }
    service.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(ECHO, methods),))
    service.serves(ECHO)


def run(config: EchoConfig) -> int:
    def register_all(service: Any) -> None:
        async def clean_up() -> None:
            await asyncio.sleep(config.cleanup_takes_s)
            if config.marker is not None:
                config.marker.write_text("clean")

        register(service)
        service.on_cleanup(clean_up)

    async def start(service: Any) -> None:
        async def fail_later() -> None:
            await asyncio.sleep(0.1)
            raise OSError("the disk is gone")

        if config.fail == "start":
            raise ResourceExhausted("model needs 9 GB, 4 GB are free", needed=9, free=4)
        if config.fail == "data":
            raise InvalidArgument("train.jsonl: line 7: not valid JSON")
        if config.fail == "later":
            service.spawn(fail_later(), "writer")
        if config.fail in ("stuck executor", "stuck thread"):
            stuck = threading.Thread(target=time.sleep, args=(60,), name="stuck library")
            if config.fail == "stuck thread":
                stuck.start()
            else:
                asyncio.get_running_loop().run_in_executor(None, time.sleep, 60)
        await asyncio.sleep(config.start_takes_s)

    return run_service("echo", "vime-service", config, register_all, start)


if __name__ == "__main__":
    sys.exit(service_cli("echo", "vime-service", EchoConfig, run))
