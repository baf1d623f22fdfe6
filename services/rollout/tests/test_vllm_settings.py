"""The environment that vLLM is started in belongs to its device, and to the user before us."""

from __future__ import annotations

import os

import pytest

from vime_rollout.config import VllmConfig
from vime_rollout.engines.vllm_settings import prepare_environment

CPU_ALONE = ("OMP_NUM_THREADS", "TORCHDYNAMO_DISABLE", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_KVCACHE_SPACE")


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of the environment, without what is looked at here."""
    monkeypatch.setattr(os, "environ", {k: v for k, v in os.environ.items() if k not in CPU_ALONE})


def test_nothing_of_the_cpu_is_laid_over_an_engine_on_cuda() -> None:
    prepare_environment(VllmConfig(model="m", device="cuda"))
    assert not os.environ.keys() & set(CPU_ALONE)
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"


def test_on_cpu_what_the_user_set_stays_and_the_settings_count() -> None:
    os.environ["TORCHDYNAMO_DISABLE"] = "0"
    prepare_environment(VllmConfig(model="m", device="cpu", cpu_threads=3, env={"VLLM_CPU_KVCACHE_SPACE": "7"}))
    assert {name: os.environ[name] for name in CPU_ALONE} == {
        "OMP_NUM_THREADS": "3",
        "TORCHDYNAMO_DISABLE": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "7",
    }
