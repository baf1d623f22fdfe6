"""Spans as lines of a file that several processes append to."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from vime_client.logs import get_logger

_log = get_logger(__name__)


class FileSpanExporter(SpanExporter):
    """Appends one JSON object per span. A batch is one `write` to a file opened with O_APPEND: lines never mix.

    A file that has reached `max_bytes` becomes `<name>.1`, in place of the one before, and a new one begins: the two
    hold the latest spans. Whichever process comes first does so; the others find another file under the name.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Opens the file, with its folder.

        Raises:
            OSError: the file cannot be opened.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._max_bytes = max_bytes
        self._fd: int | None = self._open()

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def _current(self, fd: int) -> int:
        """The file to write to: `fd`, unless it is full or has been put aside."""
        if self._is_named(fd):
            size = os.fstat(fd).st_size
            if size < self._max_bytes:
                return fd
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held until `fd` is closed
            except BlockingIOError:  # another process is about it
                return fd
            if self._is_named(fd):
                self._path.replace(self._path.with_name(f"{self._path.name}.1"))
                _log.info("the file of spans is full: it is put aside", file=str(self._path), bytes=size)
        new = self._open()
        os.close(fd)
        return new

    def _is_named(self, fd: int) -> bool:
        return self._path.exists() and os.path.samestat(os.fstat(fd), self._path.stat())

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Append the batch; FAILURE if the disk does not take all of it."""
        if self._fd is None:
            return SpanExportResult.FAILURE
        data = "".join(
            json.dumps(span_as_dict(span), ensure_ascii=False, default=str) + "\n" for span in spans
        ).encode()
        try:
            self._fd = self._current(self._fd)
            written = os.write(self._fd, data)
        except OSError:  # disk full, file system gone: the caller counts it and says so once
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS if written == len(data) else SpanExportResult.FAILURE

    def shutdown(self) -> None:
        """Close the file."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def span_as_dict(span: ReadableSpan) -> dict[str, Any]:
    """The span with hexadecimal ids, times in nanoseconds since 1970, and the duration in milliseconds."""
    context = span.get_span_context()
    start, end = span.start_time or 0, span.end_time or 0
    return {
        "name": span.name,
        "trace_id": f"{context.trace_id:032x}" if context else "",
        "span_id": f"{context.span_id:016x}" if context else "",
        "parent_span_id": f"{span.parent.span_id:016x}" if span.parent else "",
        "kind": span.kind.name,
        "service": span.resource.attributes.get("service.name", ""),
        "service_version": span.resource.attributes.get("service.version", ""),
        "pid": span.resource.attributes.get("process.pid", 0),
        "start_unix_nano": start,
        "end_unix_nano": end,
        "duration_ms": (end - start) / 1e6,
        "status": span.status.status_code.name,
        "status_message": span.status.description or "",
        "attributes": dict(span.attributes or {}),
        "events": [
            {"name": event.name, "unix_nano": event.timestamp, "attributes": dict(event.attributes or {})}
            for event in span.events
        ],
    }
