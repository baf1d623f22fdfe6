"""Calls that may be repeated, through the restart of the service they go to.

Their channels repeat nothing by themselves (`Credentials.once`): `patiently` is the only one that does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc

from vime_client.errors import RpcError, rpc_errors
from vime_client.retry import whole_step

T = TypeVar("T")

OUTAGE_S = 120.0
"""How long a service may be gone before the trainer gives up."""


async def patiently(name: str, call: Callable[[], Awaitable[T]]) -> T:
    """Await `call()`, again while the service is away. Only for idempotent calls. Raises RpcError."""
    async for attempt in whole_step(name, attempts=1000, seconds=OUTAGE_S, max_wait_s=2.0, retry_if=_away):
        with attempt, rpc_errors(name):
            return await call()
    raise AssertionError("whole_step ends with a result or an exception")


def _away(error: BaseException) -> bool:
    """Down, restarting, or half-open: the call's deadline ran out without an answer."""
    if not isinstance(error, RpcError):
        return False
    return error.transient or error.code is grpc.StatusCode.DEADLINE_EXCEEDED
