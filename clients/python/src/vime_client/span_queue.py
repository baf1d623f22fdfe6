"""A bounded queue of spans in front of an exporter: counts what it drops, says once that the destination is down."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from vime_client.logs import get_logger
from vime_client.telemetry import TelemetryConfig

_log = get_logger(__name__)


class BoundedQueue(SpanProcessor):
    """A batch processor that counts what it drops, and stops asking a dead collector once the process leaves."""

    def __init__(self, exporter: SpanExporter, destination: str, config: TelemetryConfig) -> None:
        self._lock = threading.Lock()
        self._limit = config.queue_spans
        self._waiting = 0
        self.dropped = 0
        self._exporter = _CountingExporter(exporter, destination, self._exported)
        self._batches = BatchSpanProcessor(
            self._exporter,
            max_queue_size=config.queue_spans + 1,
            schedule_delay_millis=config.export_interval_s * 1000,
            max_export_batch_size=min(512, config.queue_spans),
        )

    def on_start(self, span: Span, parent_context: Any = None) -> None:
        """Nothing to do."""

    def on_end(self, span: ReadableSpan) -> None:
        """Queue the span, or drop and count it if the queue is full. Never blocks."""
        with self._lock:
            if self._waiting >= self._limit or self._exporter.leaving:
                self.dropped += 1
                return
            self._waiting += 1
        self._batches.on_end(span)

    def shutdown(self) -> None:
        """Export what waits and stop."""
        self._exporter.leaving = True
        self._batches.shutdown()  # type: ignore[no-untyped-call]  # the SDK annotates it only in part
        with self._lock:
            self.dropped += self._waiting
            self._waiting = 0

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Export what waits, now."""
        return self._batches.force_flush(timeout_millis)

    def _exported(self, spans: int, ok: bool) -> None:
        with self._lock:
            self._waiting -= spans
            if not ok:
                self.dropped += spans


class _CountingExporter(SpanExporter):
    """Says once that a destination is down and once that it is back, and reports what happened to each batch."""

    def __init__(self, inner: SpanExporter, destination: str, exported: Any) -> None:
        self._inner = inner
        self._destination = destination
        self._exported = exported
        self._down = False
        self.leaving = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export a batch; while the process leaves, a destination known to be down is not asked again."""
        if self._down and self.leaving:
            self._exported(len(spans), False)
            return SpanExportResult.FAILURE
        result = self._inner.export(spans)
        ok = result is SpanExportResult.SUCCESS
        self._exported(len(spans), ok)
        if ok == self._down:  # changed
            self._down = not ok
            if self._down:
                _log.warning("spans cannot be exported and are dropped until they can", to=self._destination)
            else:
                _log.info("spans are exported again", to=self._destination)
        return result

    def shutdown(self) -> None:
        """Close the destination."""
        self._inner.shutdown()


def otlp_exporter(config: TelemetryConfig) -> SpanExporter:
    """The exporter to the collector at `config.otlp_endpoint`; it tries to connect again every 2 s at most."""
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    # Its own lines, one per failed batch, say what `_CountingExporter` says once.
    logging.getLogger("opentelemetry.exporter.otlp.proto.grpc.exporter").setLevel(logging.CRITICAL)
    reconnect: Any = (("grpc.max_reconnect_backoff_ms", 2000), ("grpc.initial_reconnect_backoff_ms", 200))
    exporter: SpanExporter = OTLPSpanExporter(
        endpoint=config.otlp_endpoint,
        timeout=config.export_timeout_s,
        channel_options=reconnect,
    )
    return exporter
