"""A model's shape as its HF `config.json` tells it. Imports no torch."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from vime_trainer.engine.errors import UnsupportedModelError

KNOWN_ARCHITECTURES = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")


class ModelShape(BaseModel):
    """Sizes and switches that decide which Megatron model is built. Frozen: a shape is a value."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    architecture: str
    """First entry of `architectures`."""
    vocab_size: int = Field(gt=0)
    """Rows of the embedding."""
    hidden_size: int = Field(gt=0)
    """Width of the residual stream."""
    num_layers: int = Field(gt=0)
    """Decoder layers."""
    num_attention_heads: int = Field(gt=0)
    """Query heads."""
    num_query_groups: int = Field(gt=0)
    """Key and value heads."""
    head_dim: int = Field(gt=0)
    """Width of one head."""
    ffn_hidden_size: int = Field(gt=0)
    """Inner width of dense layers."""
    rms_norm_eps: float = Field(gt=0)
    """Epsilon of every RMSNorm."""
    rope_theta: float = Field(gt=0)
    """Base of the rotary embedding."""
    max_position_embeddings: int = Field(gt=0)
    """Longest sequence."""
    tie_word_embeddings: bool = False
    """The head is the embedding; no `lm_head.weight` exists."""
    num_experts: int = 0
    """Routed experts of a MoE layer; 0 for dense models."""
    top_k: int = 0
    """Experts per token."""
    moe_ffn_hidden_size: int = 0
    """Inner width of one expert."""
    moe_layers: tuple[int, ...] = ()
    """Indices (from 0) of the layers that are MoE, in order: the layer axis of a routing trace."""

    @property
    def is_moe(self) -> bool:
        """True when at least one layer routes."""
        return bool(self.moe_layers)

    @classmethod
    def from_hf(cls, path: Path) -> "ModelShape":
        """Read `path/config.json`. Raises UnsupportedModelError for anything that would not be built faithfully."""
        file = path / "config.json"
        try:
            raw = json.loads(file.read_text())
        except FileNotFoundError as error:
            raise UnsupportedModelError(f"{path} holds no config.json") from error
        except json.JSONDecodeError as error:
            raise UnsupportedModelError(f"{file} is not JSON: {error}") from error
        return cls.from_config(raw)

    @classmethod
    def from_config(cls, raw: Mapping[str, Any]) -> "ModelShape":
        """Build from the parsed `config.json`; knows the names of transformers 4 and 5."""
        architecture = (list(raw.get("architectures") or []) or [None])[0]
        if architecture not in KNOWN_ARCHITECTURES:
            raise UnsupportedModelError(
                f"architecture {architecture!r} is unknown; known: {', '.join(KNOWN_ARCHITECTURES)}"
            )
        _refuse_variants(raw)
        heads = _integer(raw, "num_attention_heads")
        hidden = _integer(raw, "hidden_size")
        return cls(
            architecture=architecture,
            vocab_size=_integer(raw, "vocab_size"),
            hidden_size=hidden,
            num_layers=_integer(raw, "num_hidden_layers"),
            num_attention_heads=heads,
            num_query_groups=_integer(raw, "num_key_value_heads"),
            head_dim=int(raw.get("head_dim") or hidden // heads),
            ffn_hidden_size=_integer(raw, "intermediate_size"),
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope_theta=_rope_theta(raw),
            max_position_embeddings=_integer(raw, "max_position_embeddings"),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            **(_moe_fields(raw) if architecture == "Qwen3MoeForCausalLM" else {}),
        )


def _integer(raw: Mapping[str, Any], name: str, *others: str) -> int:
    for key in (name, *others):
        if raw.get(key) is not None:
            return int(raw[key])
    raise UnsupportedModelError(f"config.json lacks {' or '.join((name, *others))}")


def _rope_theta(raw: Mapping[str, Any]) -> float:
    # transformers 5 writes rope_parameters, transformers 4 rope_theta beside rope_scaling.
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise UnsupportedModelError(f"rope_type {kind!r} is not supported; supported: 'default'")
    theta = rope.get("rope_theta", raw.get("rope_theta"))
    if theta is None:
        raise UnsupportedModelError("config.json has neither rope_parameters.rope_theta nor rope_theta")
    return float(theta)


def _refuse_variants(raw: Mapping[str, Any]) -> None:
    wanted = {"attention_bias": False, "use_sliding_window": False, "hidden_act": "silu"}
    for key, value in wanted.items():
        if raw.get(key, value) != value:
            raise UnsupportedModelError(f"{key} = {raw[key]!r} is not supported; supported: {value!r}")
    if raw.get("quantization_config"):
        raise UnsupportedModelError("quantised checkpoints cannot be trained: config.json has a quantization_config")


def _moe_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    if raw.get("norm_topk_prob") is not True:
        # Megatron normalises over the top-k (softmax after top-k); anything else would silently be another model.
        raise UnsupportedModelError(f"norm_topk_prob = {raw.get('norm_topk_prob')!r} is not supported; it must be true")
    experts = _integer(raw, "num_local_experts", "num_experts")
    top_k = _integer(raw, "num_experts_per_tok")
    if not 0 < top_k <= experts:
        raise UnsupportedModelError(f"num_experts_per_tok = {top_k} is not in 1..{experts} (the number of experts)")
    step, dense = int(raw.get("decoder_sparse_step", 1)), set(raw.get("mlp_only_layers") or [])
    layers = _integer(raw, "num_hidden_layers")
    moe = tuple(i for i in range(layers) if i not in dense and (i + 1) % step == 0)
    if not moe:
        raise UnsupportedModelError(
            f"no layer of {layers} is MoE (decoder_sparse_step {step}, mlp_only_layers {dense})"
        )
    return {
        "num_experts": experts,
        "top_k": top_k,
        "moe_layers": moe,
        "moe_ffn_hidden_size": _integer(raw, "moe_intermediate_size"),
    }
