"""Spans reach the file whole, a queue that is full drops and counts, and nothing waits for a collector."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult

from vime_client.metrics import Distribution, Metrics
from vime_client.span_file import FileSpanExporter
from vime_client.telemetry import Telemetry, TelemetryConfig


def _spans(telemetry: Telemetry, count: int) -> float:
    tracer = telemetry.tracer("test")
    began = time.monotonic()
    for number in range(count):
        with tracer.start_as_current_span("step", attributes={"number": number}):
            pass
    return time.monotonic() - began


def test_a_span_is_one_line_with_its_parent_and_the_service(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "traces.jsonl"
    telemetry = Telemetry("buffer", "1.2.3", TelemetryConfig(traces_file=file))
    tracer = telemetry.tracer("test")
    with tracer.start_as_current_span("outer"), tracer.start_as_current_span("inner"):
        pass
    telemetry.shutdown()
    inner, outer = (json.loads(line) for line in file.read_text().splitlines())
    assert (inner["name"], inner["service"], inner["service_version"]) == ("inner", "buffer", "1.2.3")
    assert inner["parent_span_id"] == outer["span_id"]
    assert inner["trace_id"] == outer["trace_id"]
    assert outer["parent_span_id"] == ""
    assert outer["duration_ms"] >= inner["duration_ms"] >= 0
    assert telemetry.dropped_spans == 0


def test_several_processes_share_one_file_without_mixing_lines(tmp_path: Path) -> None:
    file = tmp_path / "traces.jsonl"
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from vime_client.telemetry import Telemetry, TelemetryConfig\n"
        "t = Telemetry(sys.argv[2], '1', TelemetryConfig(traces_file=Path(sys.argv[1]), export_interval_s=0.01))\n"
        "for i in range(500):\n"
        "    with t.tracer('x').start_as_current_span('s', attributes={'pad': 'p' * 500}):\n"
        "        pass\n"
        "t.shutdown()\n"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, str(file), f"service-{n}"]) for n in range(3)]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(lines) == 1500
    assert {line["service"] for line in lines} == {"service-0", "service-1", "service-2"}


def test_the_file_is_bounded_and_keeps_the_latest_spans_of_all_processes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, limit = tmp_path / "traces.jsonl", 20_000
    exporters = [FileSpanExporter(file, limit) for _ in range(2)]
    written = []
    telemetry = Telemetry("buffer", "1", TelemetryConfig())
    caplog.set_level("INFO")
    for number in range(400):
        span = telemetry.tracer("test").start_span(f"span-{number}")
        span.end()
        assert isinstance(span, ReadableSpan)
        assert exporters[number % 2].export([span]) is SpanExportResult.SUCCESS
        written.append(span.name)
    kept = [tmp_path / "traces.jsonl.1", file]
    assert sorted(tmp_path.iterdir()) == sorted(kept)
    assert all(path.stat().st_size < limit + 1000 for path in kept)
    names = [json.loads(line)["name"] for path in kept for line in path.read_text().splitlines()]
    assert names == written[-len(names) :]
    assert len(names) > 20
    assert "put aside" in caplog.text


@pytest.mark.parametrize("collector", ["closed port", "black hole"])
def test_a_dead_collector_holds_up_neither_work_nor_exit(collector: str, caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as hole:
        hole.bind(("127.0.0.1", 0))
        if collector == "black hole":
            hole.listen()
        config = TelemetryConfig(
            otlp_endpoint=f"http://127.0.0.1:{hole.getsockname()[1]}",
            queue_spans=64,
            export_interval_s=0.05,
            export_timeout_s=0.4,
        )
        telemetry = Telemetry("buffer", "1", config)
        assert _spans(telemetry, 1000) < 10.0
        time.sleep(1.0)
        began = time.monotonic()
        telemetry.shutdown()
        assert time.monotonic() - began < 15.0
    assert telemetry.dropped_spans == 1000
    said = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert said == ["spans cannot be exported and are dropped until they can", "spans were dropped"]


def test_a_collector_that_comes_back_gets_the_next_spans() -> None:
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

    received: list[Any] = []

    class Collector(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            received.append(request)
            return trace_service_pb2.ExportTraceServiceResponse()

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = TelemetryConfig(otlp_endpoint=f"http://127.0.0.1:{port}", export_interval_s=0.05, export_timeout_s=0.4)
    telemetry = Telemetry("buffer", "1", config)
    _spans(telemetry, 10)
    end = time.monotonic() + 5
    while telemetry.dropped_spans < 10 and time.monotonic() < end:
        time.sleep(0.05)
    server = grpc.server(futures.ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Collector(), server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    end = time.monotonic() + 8
    while not received and time.monotonic() < end:
        _spans(telemetry, 1)
        time.sleep(0.1)
    telemetry.shutdown()
    server.stop(0)
    assert received
    names = {attribute.key for attribute in received[0].resource_spans[0].resource.attributes}
    assert {"service.name", "service.version"} <= names


def test_a_full_disk_drops_spans_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    telemetry = Telemetry("buffer", "1", TelemetryConfig(traces_file=Path("/dev/full"), export_interval_s=0.02))
    _spans(telemetry, 10)
    time.sleep(0.2)
    _spans(telemetry, 10)
    telemetry.shutdown()
    assert telemetry.dropped_spans == 20
    assert [record.message for record in caplog.records].count(
        "spans cannot be exported and are dropped until they can"
    ) == 1


def test_metrics_are_read_all_at_once_under_their_names_and_labels() -> None:
    metrics = Metrics("buffer")
    dropped = metrics.counter("vime.buffer.dropped", "how many groups were dropped, and why?")
    dropped.add(2, {"reason": "filter"})
    dropped.add(1, {"reason": "filter"})
    dropped.add(4, {"reason": "expired"})
    metrics.histogram("vime.buffer.wait", "does the trainer wait for rollouts?").record(0.5)
    stored = {"stored": 3.0, "leased": 1.0}
    metrics.observe(
        "vime.buffer.groups", "where are the groups?", lambda: [(n, {"state": state}) for state, n in stored.items()]
    )
    assert metrics.snapshot() == {
        "vime.buffer.dropped{reason=filter}": 3.0,
        "vime.buffer.dropped{reason=expired}": 4.0,
        "vime.buffer.wait": Distribution(count=1, sum=0.5, min=0.5, max=0.5),
        "vime.buffer.groups{state=stored}": 3.0,
        "vime.buffer.groups{state=leased}": 1.0,
    }
    stored["stored"] = 0.0
    assert metrics.snapshot()["vime.buffer.groups{state=stored}"] == 0.0
