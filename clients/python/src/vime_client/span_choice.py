"""Which finished calls leave a span: those that tell something. Client and server choose by the same rule."""

from __future__ import annotations

from typing import Any

import grpc
from opentelemetry.trace import Span


class SpanChoice:
    """Ends the spans of calls, or leaves them out, which is never to end them.

    A poll that was answered "nothing yet" (its answer says what it is blocked by) leaves none. Calls that are refused
    one after the other because a server is not up are one event: the first leaves a span, and the first that gets
    another answer tells in an event how many there were.
    """

    def __init__(self) -> None:
        self._refused: dict[str, int] = {}

    def end(self, span: Span, method: str, code: grpc.StatusCode, answer: Any = None) -> None:
        """End the span of a call of `method`, or leave it out; `answer` is the message of a call that has one."""
        if code is grpc.StatusCode.UNAVAILABLE:
            self._refused[method] = self._refused.get(method, 0) + 1
            if self._refused[method] == 1:
                span.end()
            return
        refused = self._refused.pop(method, 0)
        if refused > 1:
            span.add_event("refused before", {"calls": refused})
        elif getattr(answer, "blocked_by", 0):
            return
        span.end()
