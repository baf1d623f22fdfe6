"""Errors that the domain raises and the wire carries: one class per reason, raised with the noun and the number.

Domain code imports this module and nothing of gRPC. `vime_service.error_mapping` turns an error into its status code,
`google.rpc.ErrorInfo{reason, domain, metadata}` and, where waiting helps, `RetryInfo`.

A service adds a class of its own by subclassing the one with the right code and naming a reason of
`vime.common.v1.ErrorReason` (without its prefix):

    class LeaseExpired(Aborted):
        reason = "LEASE_LOST"

    raise LeaseExpired(f"lease of group {group_id} expired at attempt {attempt}", group_id=group_id, attempt=attempt)
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar


class VimeError(Exception):
    """Base of all errors a caller is told about.

    Class attributes:
        code: name of the gRPC status code.
        reason: name of the `ErrorReason` value without its prefix.

    Args:
        message: one sentence naming the thing and the number. It is sent to the caller: no secrets, no prompt text.
        retry_after: seconds after which the same call may succeed; None where waiting does not help.
        metadata: every dynamic part of the message again, as key and value.
    """

    code: ClassVar[str] = "INTERNAL"
    reason: ClassVar[str] = "INTERNAL"
    default_retry_after: ClassVar[float | None] = None

    def __init__(self, message: str, *, retry_after: float | None = None, **metadata: object) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after = self.default_retry_after if retry_after is None else retry_after
        self.metadata: Mapping[str, str] = MappingProxyType({key: str(value) for key, value in metadata.items()})


# ------------------------------------------------------------------ one class per status code


class InvalidArgument(VimeError):
    """The request is wrong whatever the state. Nobody retries."""

    code = "INVALID_ARGUMENT"
    reason = "INVALID_FIELD"


class NotFound(VimeError):
    """The named thing does not exist. Metadata: kind, name."""

    code = "NOT_FOUND"
    reason = "NOT_FOUND"


class AlreadyExists(VimeError):
    """The key is taken by another body. Metadata: kind, name."""

    code = "ALREADY_EXISTS"
    reason = "ALREADY_EXISTS"


class FailedPrecondition(VimeError):
    """The call does not fit the state; retry after the state changed."""

    code = "FAILED_PRECONDITION"
    reason = "WRONG_STATE"


class Aborted(VimeError):
    """A race was lost: do the whole step again, or stop. Subclasses name the reason."""

    code = "ABORTED"
    reason = "UNSPECIFIED"


class ResourceExhausted(VimeError):
    """A table, queue or budget is full; `retry_after` says when to try again."""

    code = "RESOURCE_EXHAUSTED"
    reason = "FULL"
    default_retry_after: ClassVar[float | None] = 1.0


class Unavailable(VimeError):
    """Not now: the channel retries it."""

    code = "UNAVAILABLE"
    reason = "NOT_READY"


class DeadlineExceeded(VimeError):
    """The call's time is over."""

    code = "DEADLINE_EXCEEDED"
    reason = "DEADLINE"


class Unimplemented(VimeError):
    """The contract has it, this version does not. Metadata: rpc, why."""

    code = "UNIMPLEMENTED"
    reason = "NOT_IMPLEMENTED"


class PermissionDenied(VimeError):
    """The caller is known and may not use the method. Metadata: method."""

    code = "PERMISSION_DENIED"
    reason = "PERMISSION_DENIED"


class Unauthenticated(VimeError):
    """No token or certificate, or a wrong one."""

    code = "UNAUTHENTICATED"
    reason = "UNAUTHENTICATED"


class DataLoss(VimeError):
    """Stored bytes fail their check. Metadata: segment, offset."""

    code = "DATA_LOSS"
    reason = "CORRUPTED"


class Internal(VimeError):
    """A fault of ours that the caller can do nothing about."""

    code = "INTERNAL"
    reason = "INTERNAL"


# ------------------------------------------------------------------ INVALID_ARGUMENT


class LengthMismatch(InvalidArgument):
    """Arrays that belong together differ in length. Metadata: field, expected, actual."""

    reason = "LENGTH_MISMATCH"


class BadRoutingTrace(InvalidArgument):
    """Routing rows are missing, extra, duplicate or out of range. Metadata: expected, actual."""

    reason = "BAD_ROUTING_TRACE"


class PromptTooLong(InvalidArgument):
    """The prompt leaves no room for a response. Metadata: prompt_tokens, max_model_len."""

    reason = "PROMPT_TOO_LONG"


class DigestMismatch(InvalidArgument):
    """Bytes do not have the digest that was announced. Metadata: name, expected, actual."""

    reason = "DIGEST_MISMATCH"


class InexactSampling(InvalidArgument):
    """The sampling settings have logprobs the trainer cannot reproduce. Metadata: field, value."""

    reason = "INEXACT_SAMPLING"


# ------------------------------------------------------------------ ABORTED


class StaleIncarnation(Aborted):
    """The caller's incarnation is over. Metadata: incarnation, current."""

    reason = "STALE_INCARNATION"


class LeaseLost(Aborted):
    """The lease's attempt was superseded or expired. Metadata: group_id, attempt, current."""

    reason = "LEASE_LOST"


class TransferFailed(Aborted):
    """A weight transfer failed; the old version keeps serving. Metadata: generation, cause."""

    reason = "TRANSFER_FAILED"


# ------------------------------------------------------------------ FAILED_PRECONDITION


class FenceNotMet(FailedPrecondition):
    """No weights pass the fence now. Metadata: fence, serving."""

    reason = "FENCE_NOT_MET"


class VersionConflict(FailedPrecondition):
    """The version is known with another manifest digest. Metadata: version, expected, actual."""

    reason = "VERSION_CONFLICT"


class ManifestRefused(FailedPrecondition):
    """The manifest does not fit the engine's model. Metadata: name and what differs."""

    reason = "MANIFEST_REFUSED"


class FleetOwned(FailedPrecondition):
    """The engine belongs to another run. Metadata: run_id, owner."""

    reason = "FLEET_OWNED"


class WrongStep(FailedPrecondition):
    """The step is not the next one. Metadata: step, expected."""

    reason = "WRONG_STEP"


class ResumeOutOfRange(FailedPrecondition):
    """The ledger does not cover the resume step. Metadata: resume_step, oldest, newest."""

    reason = "RESUME_OUT_OF_RANGE"


class ImpossibleConfig(FailedPrecondition):
    """Settings that must deadlock. Metadata: both numbers."""

    reason = "IMPOSSIBLE_CONFIG"


class ModeHeld(FailedPrecondition):
    """Another client holds the mode lease. Metadata: mode, holder."""

    reason = "MODE_HELD"


# ------------------------------------------------------------------ RESOURCE_EXHAUSTED, UNAVAILABLE, INTERNAL


class MessageTooLarge(ResourceExhausted):
    """The message is larger than the cap; waiting does not help. Metadata: limit, actual."""

    reason = "MESSAGE_TOO_LARGE"
    default_retry_after = None


class StorageFailed(ResourceExhausted):
    """The disk is full or not writable; older data is intact. Metadata: path."""

    reason = "STORAGE_FAILED"
    default_retry_after = 5.0


class Draining(Unavailable):
    """The service is draining or shutting down."""

    reason = "DRAINING"


class NoEngine(Unavailable):
    """No engine can take the request now. Metadata: known, serving."""

    reason = "NO_ENGINE"


class EngineFailed(Unavailable):
    """The engine behind the service failed. Metadata: engine_id."""

    reason = "ENGINE_FAILED"


class RankDied(Unavailable):
    """A rank of the trainer died. Metadata: rank, cause."""

    reason = "RANK_DIED"


class LoadFailed(Internal):
    """The load left unknown weights; the engine is DIRTY. Metadata: cause."""

    reason = "LOAD_FAILED"
