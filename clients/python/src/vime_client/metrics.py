"""Metrics of one process, kept in memory through OpenTelemetry's API. Each answers a question written beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from opentelemetry.metrics import CallbackOptions, Counter, Histogram, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

Labels = Mapping[str, str]


@dataclass(frozen=True)
class Distribution:
    """What a histogram saw: how many values, their sum, the smallest and the largest."""

    count: int
    sum: float
    min: float
    max: float


class Metrics:
    """Makes instruments and reads them all at once. Names are dotted: `vime.buffer.groups`."""

    def __init__(self, service: str) -> None:
        self._reader = InMemoryMetricReader()
        self._provider = MeterProvider(metric_readers=[self._reader], shutdown_on_exit=False)
        self._meter = self._provider.get_meter(f"vime.{service}")

    def counter(self, name: str, question: str, unit: str = "1") -> Counter:
        """A sum that only grows: `counter.add(1, {"reason": "expired"})`."""
        return self._meter.create_counter(name, unit=unit, description=question)

    def histogram(self, name: str, question: str, unit: str = "s") -> Histogram:
        """A distribution: `histogram.record(0.25)`."""
        return self._meter.create_histogram(name, unit=unit, description=question)

    def observe(
        self, name: str, question: str, read: Callable[[], Iterable[tuple[float, Labels]]], unit: str = "1"
    ) -> None:
        """A gauge derived from state, read when somebody looks: `read` gives values with their labels."""

        def callback(_options: CallbackOptions) -> Iterable[Observation]:
            return [Observation(value, dict(labels)) for value, labels in read()]

        self._meter.create_observable_gauge(name, callbacks=[callback], unit=unit, description=question)

    def snapshot(self) -> dict[str, float | Distribution]:
        """All values now, under `name` or `name{label=value,…}`."""
        data = self._reader.get_metrics_data()
        found: dict[str, float | Distribution] = {}
        for resource in data.resource_metrics if data else ():
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    for point in metric.data.data_points:
                        found[_key(metric.name, point.attributes or {})] = _value(point)
        return found


def _key(name: str, labels: Mapping[str, Any]) -> str:
    inner = ",".join(f"{key}={labels[key]}" for key in sorted(labels))
    return f"{name}{{{inner}}}" if inner else name


def _value(point: Any) -> float | Distribution:
    if hasattr(point, "bucket_counts"):
        return Distribution(point.count, point.sum, point.min, point.max)
    return float(point.value)
