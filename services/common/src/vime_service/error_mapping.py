"""An exception of a handler as gRPC status, `ErrorInfo` and `RetryInfo`; the one table between domain and wire."""

from __future__ import annotations

import bisect
import itertools
import uuid
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, NoReturn

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

from vime_client.errors import RpcError
from vime_client.logs import get_logger
from vime_service.errors import DeadlineExceeded, VimeError

_log = get_logger(__name__)

_DETAILS_KEY = "grpc-status-details-bin"
# A peer refuses trailers over 8 KiB, and the whole answer with them. The message travels twice: percent-encoded as the
# status text (three bytes for each byte beyond ASCII), and in the details, which travel in base64.
_MAX_MESSAGE_BYTES = 1024
_MAX_VALUE_BYTES = 256
_MAX_KEY_BYTES = 64
_MAX_KEYS = 12


def status_of(error: VimeError, domain: str) -> status_pb2.Status:
    """The `google.rpc.Status` of a domain error, with `ErrorInfo` and, where waiting helps, `RetryInfo`."""
    code = grpc.StatusCode[error.code]
    return _status(code, error.message, error.reason, domain, error.metadata, error.retry_after)


async def abort_with(context: Any, error: VimeError, domain: str) -> NoReturn:
    """End the call with a domain error. Raises grpc's AbortError."""
    # Not context.abort_with_status(): instrumentations that wrap abort() would record the span as OK.
    status = status_of(error, domain)
    trailer = ((_DETAILS_KEY, status.SerializeToString()),)
    await context.abort(grpc.StatusCode[error.code], status.message, trailer)
    raise AssertionError("context.abort() returned")


async def abort_for(context: Any, error: Exception, *, domain: str, method: str) -> NoReturn:
    """End the call with whatever a handler raised.

    Domain errors go as they are, errors of a call that this handler made are passed on with their details, and
    everything else becomes INTERNAL: the stack goes to the log, the caller gets an incident number to look for there.
    """
    if isinstance(error, VimeError):
        if error.code == "INTERNAL":
            _log.error(error.message, exc_info=error, method=method, reason=error.reason, metadata=dict(error.metadata))
        await abort_with(context, error, domain)
    if isinstance(error, RpcError):
        await _pass_on(context, error)
    if isinstance(error, grpc.aio.AioRpcError):
        await _pass_on(context, RpcError.from_aio(error))
    if isinstance(error, TimeoutError) and _expired(context):
        await abort_with(context, DeadlineExceeded(f"{method} ran out of time"), domain)
    incident = uuid.uuid4().hex[:12]
    _log.error("a handler failed", exc_info=error, method=method, incident=incident)
    hidden = VimeError(f"internal error in {method}; the log of {domain} has incident {incident}", incident=incident)
    await abort_with(context, hidden, domain)


async def _pass_on(context: Any, error: RpcError) -> NoReturn:
    status = _status(error.code, error.message, error.reason, error.domain, error.metadata, error.retry_after)
    await context.abort(error.code, status.message, ((_DETAILS_KEY, status.SerializeToString()),))
    raise AssertionError("context.abort() returned")


def _status(
    code: grpc.StatusCode,
    message: str,
    reason: str,
    domain: str,
    metadata: Mapping[str, str],
    retry_after: float | None,
) -> status_pb2.Status:
    status = status_pb2.Status(code=code.value[0], message=_clip(message, _MAX_MESSAGE_BYTES, _percent_encoded))
    if reason:
        clipped = {
            _clip(key, _MAX_KEY_BYTES): _clip(value, _MAX_VALUE_BYTES)
            for key, value in list(metadata.items())[:_MAX_KEYS]
        }
        _pack(status, error_details_pb2.ErrorInfo(reason=reason, domain=domain, metadata=clipped))
    if retry_after is not None:
        delay = duration_pb2.Duration()
        delay.FromTimedelta(timedelta(seconds=retry_after))
        _pack(status, error_details_pb2.RetryInfo(retry_delay=delay))
    return status


def _expired(context: Any) -> bool:
    left = context.time_remaining()
    return left is not None and left <= 0.01


def _pack(status: status_pb2.Status, detail: Any) -> None:
    packed = any_pb2.Any()
    packed.Pack(detail)
    status.details.append(packed)


def _encoded(character: str) -> int:
    return len(character.encode())


def _percent_encoded(character: str) -> int:
    return 1 if " " <= character <= "~" and character != "%" else 3 * _encoded(character)


def _clip(text: str, limit: int, bytes_of: Callable[[str], int] = _encoded) -> str:
    """`text` in at most `limit` bytes; what no encoding has (a lone surrogate, as in odd file names) becomes "?"."""
    text = text[: limit + 1].encode(errors="replace").decode()  # no character has less than a byte
    sizes = list(itertools.accumulate(map(bytes_of, text)))
    if not sizes or sizes[-1] <= limit:
        return text
    return text[: bisect.bisect_right(sizes, limit - 3)] + "..."
