"""OpenTelemetry of one process: spans into the run's `traces.jsonl` and, if wanted, to a collector; metrics in memory.

Telemetry never holds up work: spans wait in a bounded queue, what does not fit or cannot be sent is dropped and
counted, a collector that is down costs one warning, and leaving takes at most `shutdown_seconds`.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from vime_client.config_loading import ConfigModel, Seconds
from vime_client.logs import get_logger

if TYPE_CHECKING:
    from opentelemetry import trace
    from opentelemetry.sdk.trace.export import SpanExporter

    from vime_client.span_queue import BoundedQueue

_log = get_logger(__name__)


class TelemetryConfig(ConfigModel):
    """Where spans go. Nothing set: they are made, so that their context travels, and thrown away."""

    traces_file: Path | None = None
    """File that gets one JSON object per span; several processes may share it."""
    traces_file_bytes: int = Field(default=64 << 20, ge=4096)
    """Size at which the file is put aside as `<name>.1`, in place of the one before: at most twice that is kept."""
    otlp_endpoint: str | None = None
    """OTLP/gRPC collector, such as `http://localhost:4317` (https for TLS)."""
    queue_spans: int = Field(default=4096, ge=64)
    """Spans that may wait; more are dropped and counted."""
    export_interval_s: Seconds = 0.5
    """How often waiting spans are written or sent."""
    export_timeout_s: Seconds = 2.0
    """How long one batch may take to reach the collector."""
    shutdown_seconds: Seconds = 3.0
    """How long leaving may wait for the last spans."""


class Telemetry:
    """The tracer provider and the metrics of this process. Make it with `setup_telemetry`, end it with `shutdown`."""

    def __init__(self, service: str, version: str, config: TelemetryConfig) -> None:
        # Here, because the SDK takes a quarter of a second to import and a command line needs `TelemetryConfig` only.
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        from vime_client.metrics import Metrics
        from vime_client.span_file import FileSpanExporter
        from vime_client.span_queue import otlp_exporter

        self.config = config
        self.metrics = Metrics(service)
        resource = Resource.create({"service.name": service, "service.version": version, "process.pid": os.getpid()})
        # The SDK's own exit handler waits up to 30 s for each exporter; `shutdown` is bounded.
        self.provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._queues: list[BoundedQueue] = []
        if config.traces_file is not None:
            self._add(FileSpanExporter(config.traces_file, config.traces_file_bytes), str(config.traces_file))
        if config.otlp_endpoint is not None:
            self._add(otlp_exporter(config), config.otlp_endpoint)

    @property
    def dropped_spans(self) -> int:
        """Spans that reached no file and no collector."""
        return sum(queue.dropped for queue in self._queues)

    def tracer(self, name: str) -> trace.Tracer:
        """A tracer whose spans go where this process's spans go."""
        return self.provider.get_tracer(name)

    def shutdown(self) -> None:
        """Send what waits and stop; returns within `shutdown_seconds`, whatever the collector does."""
        ends = [threading.Thread(target=queue.shutdown, daemon=True) for queue in self._queues]
        for end in ends:
            end.start()
        deadline = time.monotonic() + self.config.shutdown_seconds
        for end in ends:
            end.join(max(0.0, deadline - time.monotonic()))
        dropped = self.dropped_spans
        if dropped:
            _log.warning("spans were dropped", dropped=dropped)

    def _add(self, exporter: SpanExporter, destination: str) -> None:
        from vime_client.span_queue import BoundedQueue

        queue = BoundedQueue(exporter, destination, self.config)
        self._queues.append(queue)
        self.provider.add_span_processor(queue)


def setup_telemetry(service: str, dist: str, config: TelemetryConfig | None = None) -> Telemetry:
    """Set up this process's telemetry and make it OpenTelemetry's default.

    Args:
        service: `service.name`, such as "buffer".
        dist: distribution whose version becomes `service.version`, such as "vime-buffer".
    """
    from opentelemetry import trace

    telemetry = Telemetry(service, dist_version(dist), config or TelemetryConfig())
    trace.set_tracer_provider(telemetry.provider)
    return telemetry


def dist_version(dist: str) -> str:
    """Version of an installed distribution, or "0+unknown" in a source tree that is not installed."""
    import importlib.metadata

    try:
        return importlib.metadata.version(dist)
    except importlib.metadata.PackageNotFoundError:
        return "0+unknown"
