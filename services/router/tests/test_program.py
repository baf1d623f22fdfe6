"""`python -m vime_router` as a person or the launcher meets it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from vime.common.v1.server_info_service_pb2 import GetServerInfoRequest
from vime.common.v1.server_info_service_pb2_grpc import ServerInfoServiceStub


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "vime_router", *arguments], capture_output=True, text=True, timeout=30, check=False
    )


def test_a_dry_run_prints_the_resolved_settings() -> None:
    result = run("--set", "router.policy=round_robin", "--dry-run")
    assert result.returncode == 0
    assert 'name = "round_robin"' in result.stdout
    assert "queue_timeout_s = 60.0" in result.stdout


def test_a_policy_takes_its_own_settings(tmp_path: Path) -> None:
    file = tmp_path / "router.toml"
    file.write_text('[router]\npolicy = { name = "sticky_least_loaded", load_margin = 3 }\n')
    result = run("--config", str(file), "--dry-run")
    assert result.returncode == 0, result.stderr
    assert "load_margin = 3" in result.stdout


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("router.queue_timeuot_s=1", 'unknown key "router.queue_timeuot_s"; did you mean "router.queue_timeout_s"?'),
        ("router.policy=random", 'router.policy: unknown name "random"; known: sticky_least_loaded, round_robin\n'),
        ("router.policy.name=rond_robin", 'router.policy: unknown name "rond_robin"; did you mean "round_robin"?'),
        ("router.policy=3", "router.policy: must be a table, got 3 (int)"),
        ("router.queue_timeout_s=true", "queue_timeout_s: input should be a valid number, got True (bool)"),
        ("router.queue_timeout_s=inf", "queue_timeout_s: input should be a finite number, got inf (float)"),
        ("router.queue_timeout_s=1e300", "queue_timeout_s: input should be less than or equal to 604800"),
        ("router.queue_timeout_s='2'", "queue_timeout_s: input should be a valid number, got '2' (str)"),
        ("router.dead_after_periods=2", "must not fall, they are 3, 2, 600"),
    ],
)
def test_a_wrong_setting_ends_in_one_sentence(setting: str, said: str) -> None:
    result = run("--set", setting, "--dry-run")
    assert result.returncode == 2
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_the_domain_knows_neither_grpc_nor_messages() -> None:
    code = (
        "import sys, vime_router.forward, vime_router.progress, vime_router.policies; "
        "print([m for m in ('grpc', 'vime', 'google.protobuf') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert result.stdout.strip() == "[]"


def test_the_router_imports_neither_torch_nor_vllm() -> None:
    code = "import sys, vime_router.wiring; print([m for m in ('torch', 'vllm', 'transformers') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert result.stdout.strip() == "[]"


def test_it_serves_is_ready_and_leaves_on_sigterm() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "vime_router", "--set", "log.stderr=false"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().split()[-1]
        with grpc.insecure_channel(address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest(service="vime.rollout.v1.GenerationService")
            health.Check(request, timeout=10, wait_for_ready=True)
            info = ServerInfoServiceStub(channel).GetServerInfo(GetServerInfoRequest(), timeout=10)
            assert info.service == "router"
            assert "vime.router.v1.RouterService" in info.grpc_services
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=15) == 0
    finally:
        process.kill()
        process.wait(timeout=10)
