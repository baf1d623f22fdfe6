"""The service as a program: --help, wrong settings, signals, a parent that dies, a collector that is down."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(echo_program: Path) -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def begin(*overrides: str, wait: bool = True) -> subprocess.Popen[str]:
        command = [sys.executable, str(echo_program), *(part for o in overrides for part in ("--set", o))]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(process)
        if wait:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("vime-echo listening on 127.0.0.1:")
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def _run(echo_program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(echo_program), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


def test_help_names_every_setting(echo_program: Path) -> None:
    done = _run(echo_program, "--help")
    assert done.returncode == 0
    assert "server.port (int, default 0)  Port to listen on" in done.stdout
    assert "marker (Path, default None)" in done.stdout


@pytest.mark.parametrize("module", ["vime_service.runner", "vime_service.server_config", "vime_service.errors"])
def test_what_the_command_line_needs_is_light(module: str) -> None:
    code = (
        f"import sys, {module}\n"
        "print([m for m in ('grpc', 'torch', 'numpy', 'opentelemetry.sdk', 'asyncio') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == "[]"


def test_the_whole_chassis_imports_no_torch_and_no_numpy() -> None:
    code = (
        "import sys, vime_service as v\n"
        "[getattr(v, n) for n in v.__all__]\n"
        "print(sorted({'torch', 'numpy', 'vllm', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == "[]"


def test_dry_run_prints_the_resolved_settings_as_toml(echo_program: Path, tmp_path: Path) -> None:
    import tomllib

    file = tmp_path / "echo.toml"
    file.write_text("[server]\nport = 4000\n")
    done = _run(echo_program, "--config", str(file), "--set", "server.port=4001", "--set", "fail=later", "--dry-run")
    assert done.returncode == 0
    resolved = tomllib.loads(done.stdout)
    assert (resolved["server"]["port"], resolved["server"]["grace_seconds"], resolved["fail"]) == (4001, 5.0, "later")


def test_an_unknown_setting_ends_with_code_2_and_the_nearest_name(echo_program: Path, tmp_path: Path) -> None:
    file = tmp_path / "echo.toml"
    file.write_text("[server]\nprot = 4000\n")
    done = _run(echo_program, "--config", str(file))
    assert done.returncode == 2
    assert done.stderr == f'vime-echo: {file}:2: unknown key "server.prot"; did you mean "server.port"?\n'


def test_version_is_the_distributions(echo_program: Path) -> None:
    assert _run(echo_program, "--version").stdout.startswith("vime-service ")


def test_a_busy_port_ends_with_code_1_and_one_sentence(echo_program: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = _run(echo_program, "--set", f"server.port={port}", "--set", "log.stderr=false")
    assert done.returncode == 1
    assert done.stderr.startswith(f"vime-echo: echo cannot listen on 127.0.0.1:{port}: the port is in use")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("where", "code", "sentence"),
    [
        ("start", 1, "model needs 9 GB, 4 GB are free"),
        ("data", 2, "vime-echo: train.jsonl: line 7: not valid JSON"),  # no later start mends it
        ("later", 1, "writer failed: the disk is gone"),
    ],
)
def test_a_failure_after_the_bind_stops_the_service_with_its_code(
    echo_program: Path, tmp_path: Path, where: str, code: int, sentence: str
) -> None:
    marker = tmp_path / "clean"
    done = _run(echo_program, "--set", f"fail={where}", "--set", f"marker={marker}")
    assert done.returncode == code
    assert sentence in done.stderr
    assert marker.read_text() == "clean"


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_one_signal_stops_the_service_with_code_0(start: Start, tmp_path: Path, sent: signal.Signals) -> None:
    process = start(f"marker={tmp_path / 'clean'}")
    process.send_signal(sent)
    assert process.wait(5) == 0
    assert (tmp_path / "clean").read_text() == "clean"


def test_k38_a_second_sigterm_does_not_cut_clean_up_short(start: Start, tmp_path: Path) -> None:
    process = start(f"marker={tmp_path / 'clean'}", "cleanup_takes_s=1.0")
    for _ in range(3):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
    assert process.wait(5) == 0
    assert (tmp_path / "clean").read_text() == "clean"
    assert process.stderr is not None
    said = process.stderr.read()
    assert "already stopping, clean-up goes on  (signal=SIGTERM seen=3)" in said


def test_a_signal_during_a_slow_start_stops_it_cleanly(start: Start, tmp_path: Path) -> None:
    process = start(f"marker={tmp_path / 'clean'}", "start_takes_s=60")
    process.send_signal(signal.SIGINT)
    assert process.wait(5) == 0
    assert (tmp_path / "clean").read_text() == "clean"


def test_clean_up_that_hangs_is_given_up_with_code_1(start: Start, tmp_path: Path) -> None:
    process = start("cleanup_takes_s=60", "server.cleanup_seconds=0.5", f"marker={tmp_path / 'clean'}")
    process.send_signal(signal.SIGTERM)
    assert process.wait(5) == 1
    assert not (tmp_path / "clean").exists()


@pytest.mark.parametrize("stuck", ["thread", "executor"])
def test_a_thread_that_never_ends_does_not_hold_up_the_exit(start: Start, tmp_path: Path, stuck: str) -> None:
    process = start(f"fail=stuck {stuck}", "server.cleanup_seconds=0.5", f"marker={tmp_path / 'clean'}")
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(5) == 1
    assert (tmp_path / "clean").read_text() == "clean"
    assert process.stderr is not None
    assert "still here 0.5 s after the service stopped, threads [" in process.stderr.read()


def test_a_service_dies_with_the_process_that_started_it(echo_program: Path, tmp_path: Path) -> None:
    marker, port_file = tmp_path / "clean", tmp_path / "port"
    code = (
        "import os, subprocess, sys, time\n"
        f"settings = [f'server.parent_pid={{os.getpid()}}', 'marker={marker}', 'server.port_file={port_file}']\n"
        "settings = [part for setting in settings for part in ('--set', setting)]\n"
        f"child = subprocess.Popen([sys.executable, {str(echo_program)!r}, *settings])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        _until(port_file.exists)
        parent.kill()
    _until(lambda: not _alive(child))
    assert marker.read_text() == "clean"  # it stopped in order, it was not killed


def test_a_child_that_ignores_the_signal_is_killed_when_its_parent_is_gone() -> None:
    child_code = (
        "import signal, time\n"
        "from vime_service.parent_watch import die_with_parent\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "die_with_parent(kill_after_s=0.5, poll_s=0.1)\n"
        "print('armed', flush=True)\n"
        "time.sleep(60)\n"
    )
    code = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child_code!r}], stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    _until(lambda: not _alive(child))


def test_logs_and_spans_land_in_the_run_folder(start: Start, tmp_path: Path) -> None:
    log = tmp_path / "logs" / "echo.jsonl"
    process = start(f"log.file={log}", "log.stderr=false", f"telemetry.traces_file={tmp_path / 'traces.jsonl'}")
    _until(lambda: '"ready"' in log.read_text())
    process.send_signal(signal.SIGTERM)
    assert process.wait(5) == 0
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["msg"] for line in lines] == ["listening", "ready", "stopping", "stopped"]
    assert {line["service"] for line in lines} == {"echo"}
    assert lines[2]["fields"]["why"] == "SIGTERM"
    assert (tmp_path / "traces.jsonl").exists()


@pytest.mark.parametrize("collector", ["closed port", "black hole"])
def test_k39_a_collector_that_is_down_costs_one_warning_and_little_time(
    start: Start, tmp_path: Path, collector: str
) -> None:
    from vime_client.channel import ChannelSettings

    with socket.socket() as hole:
        hole.bind(("127.0.0.1", 0))
        if collector == "black hole":
            hole.listen()  # the kernel accepts, nobody ever answers
        endpoint = f"http://127.0.0.1:{hole.getsockname()[1]}"
        process = start(
            f'telemetry.otlp_endpoint="{endpoint}"',
            "telemetry.export_timeout_s=0.5",
            "telemetry.export_interval_s=0.1",
            "server.port_file=" + str(tmp_path / "port"),
        )
        _until((tmp_path / "port").exists)
        _call_many((tmp_path / "port").read_text().strip(), 50, ChannelSettings())
        time.sleep(1.2)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert time.monotonic() - began < 15.0
    assert process.stderr is not None
    said = process.stderr.read()
    assert said.count("spans cannot be exported") == 1
    assert "spans were dropped  (dropped=50)" in said


def _call_many(address: str, times: int, settings: Any) -> None:
    import asyncio

    from vime_client.channel import open_channel

    async def call() -> None:
        async with open_channel(address, settings) as channel:
            echo = channel.unary_unary("/vime.test.Echo/Echo")
            for _ in range(times):
                assert await echo(b"x", timeout=5) == b"x"

    asyncio.run(call())


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _until(true: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"not within {seconds} s (this process: {os.getpid()})"
        time.sleep(0.05)
