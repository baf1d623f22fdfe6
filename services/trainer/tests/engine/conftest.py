"""Tiny models on disk, written without any model library, and samples for them."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from vime_trainer.engine.sample import Sample, per_token
from vime_trainer.engine.shape import ModelShape

COMMON: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 40,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "attention_bias": False,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "dtype": "float32",
}
DENSE = COMMON | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
MOE = COMMON | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [1],
}


def weights(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights under HF names."""
    shape = ModelShape.from_config(config)
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator) * 0.2

    hidden, heads, groups, width = shape.hidden_size, shape.num_attention_heads, shape.num_query_groups, shape.head_dim
    out = {"model.embed_tokens.weight": normal(shape.vocab_size, hidden)}
    for i in range(shape.num_layers):
        layer = f"model.layers.{i}."
        for name, size in (("q", heads), ("k", groups), ("v", groups)):
            out[f"{layer}self_attn.{name}_proj.weight"] = normal(size * width, hidden)
        out[f"{layer}self_attn.o_proj.weight"] = normal(hidden, heads * width)
        for name in ("self_attn.q_norm", "self_attn.k_norm"):
            out[f"{layer}{name}.weight"] = 1 + normal(width)
        for name in ("input_layernorm", "post_attention_layernorm"):
            out[f"{layer}{name}.weight"] = 1 + normal(hidden)
        mlps = [f"{layer}mlp."]
        inner = shape.ffn_hidden_size
        if i in shape.moe_layers:
            out[f"{layer}mlp.gate.weight"] = normal(shape.num_experts, hidden)
            mlps = [f"{layer}mlp.experts.{e}." for e in range(shape.num_experts)]
            inner = shape.moe_ffn_hidden_size
        for mlp in mlps:
            out[mlp + "gate_proj.weight"] = normal(inner, hidden)
            out[mlp + "up_proj.weight"] = normal(inner, hidden)
            out[mlp + "down_proj.weight"] = normal(hidden, inner)
    out["model.norm.weight"] = 1 + normal(hidden)
    if not shape.tie_word_embeddings:
        out["lm_head.weight"] = normal(shape.vocab_size, hidden)
    return out


def write_model(path: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor] | None = None) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(weights(config) if tensors is None else tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture(scope="session")
def moe_config() -> dict[str, Any]:
    return dict(MOE)


@pytest.fixture(scope="session")
def dense_config() -> dict[str, Any]:
    return dict(DENSE)


@pytest.fixture(scope="session")
def moe_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers, of which 0 and 2 route over 8 experts."""
    return write_model(tmp_path_factory.mktemp("moe") / "model", MOE)


@pytest.fixture(scope="session")
def dense_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("dense") / "model", DENSE)


@pytest.fixture(scope="session")
def model_writer() -> Callable[..., Path]:
    return write_model


@pytest.fixture(scope="session")
def weight_maker() -> Callable[..., dict[str, torch.Tensor]]:
    return weights


def make_sample(prompt: int = 4, response: int = 5, seed: int = 0, **fields: Any) -> Sample:
    """Random tokens, plausible logprobs, random valid routes; any field can be replaced."""
    generator = torch.Generator().manual_seed(1000 * prompt + 10 * response + seed)
    trace = torch.rand(prompt + response - 1, 2, 8, generator=generator).topk(2, -1).indices.to(torch.uint8)
    base: dict[str, Any] = {
        "prompt_token_ids": torch.randint(0, 48, (prompt,), generator=generator),
        "response_token_ids": torch.randint(0, 48, (response,), generator=generator),
        "rollout_logprobs": -3 - torch.rand(response, generator=generator),
        "loss_mask": torch.ones(response, dtype=torch.bool),
        "advantages": per_token(1.0 if seed % 2 else -0.5, response),
        "group_id": f"g{seed}",
        "sample_index": seed,
        "routed_experts": trace,
    }
    return Sample(**(base | fields))


@pytest.fixture(scope="session")
def sample_maker() -> Callable[..., Sample]:
    return make_sample


def launch(scratch: Path, world: int, code: str, values: dict[str, Any]) -> list[Any]:
    """Run `code` in `world` new processes that form one process group; each assigns JSON to `result`."""
    script = scratch / "ranks.py"
    script.write_text(PREAMBLE + code + "\n" + EPILOGUE)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    here = os.pathsep.join([str(Path(__file__).parent), *(p for p in sys.path if p)])
    common = os.environ | {"PYTHONPATH": here, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    outs = [scratch / f"result{rank}.json" for rank in range(world)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(script), json.dumps(values, default=str), str(out)],
            env=common | {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, out in enumerate(outs)
    ]
    try:
        errors = [process.communicate(timeout=150)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for rank, (process, error) in enumerate(zip(processes, errors, strict=True)):
        assert process.returncode == 0, f"rank {rank}:\n{error[-3000:]}"
    return [json.loads(out.read_text()) for out in outs]


@pytest.fixture
def run_ranks(tmp_path: Path) -> Callable[..., list[Any]]:
    """run_ranks(world, code, **names): the code sees `rank`, `world`, `names`, `make_sample`; results come by rank."""
    return lambda world, code, **values: launch(tmp_path, world, code, values)


@pytest.fixture(scope="module")
def module_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Any]]:
    """`run_ranks` for fixtures that a whole module shares."""
    return lambda world, code, **values: launch(tmp_path_factory.mktemp("ranks"), world, code, values)


PREAMBLE = """
import json, os, sys
import torch
from conftest import make_sample
from vime_trainer.algorithms.losses import PolicyLossConfig
from vime_trainer.engine import distributed
from vime_trainer.engine.config import EngineConfig, OptimizerConfig
from vime_trainer.engine.engine import Engine
from vime_trainer.engine.errors import EngineError
from vime_trainer.engine.objective import PolicyLoss
from vime_trainer.engine.sample import per_token

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
names = json.loads(sys.argv[1])
"""
EPILOGUE = """
with open(sys.argv[2], "w") as out:
    json.dump(result, out)
distributed.shutdown()
"""
