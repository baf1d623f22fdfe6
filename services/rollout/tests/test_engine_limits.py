"""What would end the engine before it served is told from files, without importing vLLM."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vime_client.config_loading import ConfigError, load_config
from vime_rollout import engine_limits
from vime_rollout.config import RolloutConfig

MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_attention_heads": 4,
    "hidden_size": 128,
    "head_dim": 32,
    "max_position_embeddings": 256,
}


def problems(tmp_path: Path, *settings: str, **model: Any) -> str:
    folder = tmp_path / "model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODEL | model))
    overrides = [f"rollout.vllm.model='{folder}'", *settings]
    try:
        load_config(RolloutConfig, None, overrides, RolloutConfig.surroundings)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.fixture(autouse=True)
def vllm_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_limits, "installed_for", lambda: "cpu")


@pytest.mark.parametrize(
    ("settings", "model", "words"),
    [
        ((), {}, ""),
        (("rollout.vllm.args.enable_prefix_cachin=true",), {}, 'did you mean "enable_prefix_caching"?'),
        (("rollout.vllm.args.zzzzz=1",), {}, "vllm.args takes the fields of its AsyncEngineArgs"),
        ((), {"head_dim": 24}, "attention heads of size 24; vLLM on CPU has kernels for 32, 64, "),
        ((), {"head_dim": None, "hidden_size": 96}, "attention heads of size 24;"),
        (
            ("rollout.vllm.max_model_len=257",),
            {},
            "257 exceeds the model's max_position_embeddings, 256",
        ),
        (("rollout.vllm.max_model_len=257",), {"rope_scaling": {"rope_type": "yarn"}}, ""),
        (("rollout.vllm.tensor_parallel_size=3",), {}, "3 does not divide the model's 4 attention heads"),
        (("rollout.vllm.return_routes=true",), {}, "has no experts"),
        (("rollout.vllm.return_routes=true",), {"num_experts": 8}, ""),
        (("rollout.vllm.device=cuda",), {}, 'device: "cuda", and the installed vLLM was built for cpu'),
        (("rollout.vllm.dtype=flaot32",), {}, "input should be 'auto', 'float32', 'bfloat16' or 'float16'"),
        (
            ("rollout.vllm.device=cpu", "rollout.vllm.gpu_memory_utilization=0.5"),
            {},
            "no effect with device = 'cpu'",
        ),
        (("rollout.fake.layers=1",), {}, "rollout.fake has no effect with engine = 'vllm'"),
        (("rollout.engine=fake", "rollout.vllm.args.zzzzz=1"), {}, ""),
    ],
)
def test_what_the_engine_cannot_do_is_told(tmp_path: Path, settings: Any, model: Any, words: str) -> None:
    found = problems(tmp_path, *settings, **model)
    assert (words in found) if words else (found == ""), found


def test_all_limits_are_told_together(tmp_path: Path) -> None:
    found = problems(tmp_path, "rollout.vllm.max_model_len=512", "rollout.vllm.args.nosuch=1", head_dim=24)
    assert len(found.splitlines()) == 3


def test_a_cuda_build_without_enough_devices_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_limits, "installed_for", lambda: "cuda")
    monkeypatch.setattr(engine_limits, "cuda_devices", lambda: 1)
    assert problems(tmp_path) == ""
    assert "the engine needs 2 CUDA devices, and this machine shows 1" in problems(
        tmp_path, "rollout.vllm.tensor_parallel_size=2"
    )
    monkeypatch.setattr(engine_limits, "cuda_devices", lambda: 0)
    assert "rollout.vllm.device: the engine needs 1 CUDA devices, and this machine shows 0" in problems(tmp_path)


def test_the_head_sizes_are_those_of_the_installed_vllm() -> None:
    vllm = engine_limits.vllm_folder()
    assert vllm is not None
    source = (vllm / "v1" / "attention" / "backends" / "cpu_attn.py").read_text()
    assert f"return {list(engine_limits.CPU_HEAD_SIZES)}" in source
    assert {"model", "dtype", "enable_prefix_caching", "enable_log_requests"} <= set(engine_limits.argument_names(vllm))


def test_nothing_heavy_is_imported_for_it() -> None:
    code = (
        "import sys\nfrom vime_rollout.config import VllmConfig\n"
        "from vime_rollout.engine_limits import engine_problems\n"
        "print(len(list(engine_problems(VllmConfig(model='x', args={'nosuch': 1})))))\n"
        "print([name for name in ('vllm', 'torch', 'grpc') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split("\n")[:2] == ["1", "[]"]
