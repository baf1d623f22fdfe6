"""Failed calls as one exception with everything the server said: status code, reason, metadata, when to try again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import ClassVar

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

_DETAILS_KEY = "grpc-status-details-bin"


class RpcError(Exception):
    """A call failed.

    Attributes:
        code: the gRPC status code.
        reason: name of a `vime.common.v1.ErrorReason` without its prefix, or "" if the server gave none.
            A newer server may send a reason that this client does not know: then go by `code`.
        domain: `<service>.vime` of the service that refused, or "".
        metadata: the facts of the message, such as both numbers that disagree.
        retry_after: seconds the server asks to wait, or None where waiting does not help.
    """

    _by_reason: ClassVar[dict[str, type[RpcError]]] = {}
    handles: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        RpcError._by_reason[cls.handles] = cls

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        *,
        reason: str = "",
        domain: str = "",
        metadata: Mapping[str, str] | None = None,
        retry_after: float | None = None,
        call: str = "",
    ) -> None:
        prefix = f"{call}: " if call else ""
        super().__init__(f"{prefix}{message} [{code.name}{', ' + reason if reason else ''}]")
        self.code = code
        self.message = message
        self.reason = reason
        self.domain = domain
        self.metadata: Mapping[str, str] = MappingProxyType(dict(metadata or {}))
        self.retry_after = retry_after
        self.call = call

    @property
    def transient(self) -> bool:
        """True if the same call can succeed later without anything else changing."""
        return self.code is grpc.StatusCode.UNAVAILABLE or self.retry_after is not None or self._has_no_room

    @property
    def too_large(self) -> bool:
        """True if the request or the answer is above a cap; the message holds both numbers. Waiting does not help."""
        if self.code is not grpc.StatusCode.RESOURCE_EXHAUSTED:
            return False
        return self.reason == "MESSAGE_TOO_LARGE" or (not self.reason and "larger than max" in self.message)

    @property
    def _has_no_room(self) -> bool:
        """gRPC itself refuses so, without a reason of ours, when more calls run than a server takes at once."""
        return self.code is grpc.StatusCode.RESOURCE_EXHAUSTED and not self.reason and not self.too_large

    @classmethod
    def from_aio(cls, error: grpc.aio.AioRpcError, call: str = "") -> RpcError:
        """Decode what the server sent with the status; `call` names the call in the message."""
        info, retry_after = _details(error)
        kind = cls._by_reason.get(info.reason, RpcError)
        return kind(
            error.code(),
            error.details() or error.code().name,
            reason=info.reason,
            domain=info.domain,
            metadata=dict(info.metadata),
            retry_after=retry_after,
            call=call,
        )


class StaleIncarnation(RpcError):
    """The caller's incarnation is over: another trainer opened a later one. Stop, never retry."""

    handles = "STALE_INCARNATION"


class LeaseLost(RpcError):
    """The lease expired or a later attempt took over: drop the work, draw again."""

    handles = "LEASE_LOST"


class FenceNotMet(RpcError):
    """No engine serves weights that pass the fence now."""

    handles = "FENCE_NOT_MET"


@contextmanager
def rpc_errors(call: str = "") -> Iterator[None]:
    """Turn `grpc.aio.AioRpcError` inside the block into `RpcError`; `call` names the call, e.g. "buffer.LeaseBatch"."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise RpcError.from_aio(error, call) from error


def _details(error: grpc.aio.AioRpcError) -> tuple[error_details_pb2.ErrorInfo, float | None]:
    info = error_details_pb2.ErrorInfo()
    retry_after: float | None = None
    for key, value in error.trailing_metadata() or ():
        if key != _DETAILS_KEY or not isinstance(value, bytes):
            continue
        try:
            for detail in status_pb2.Status.FromString(value).details:
                if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
                    detail.Unpack(info)
                elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
                    retry = error_details_pb2.RetryInfo()
                    detail.Unpack(retry)
                    retry_after = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
        except DecodeError:
            continue  # Details are an extra: a peer that garbles them still told us its code and message.
    return info, retry_after
