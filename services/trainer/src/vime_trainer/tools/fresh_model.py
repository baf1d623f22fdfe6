"""A fresh tiny Qwen3-MoE on disk: configuration, tokenizer and random weights in the HF layout."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

VOCABULARY = ["<pad>", "<bos>", "<eos>", "<unk>", "<think>", "</think>", *"0123456789", *"+-*/=,:;.?()<> \n"]
PAD, BOS, EOS = 0, 1, 2
CONTEXT = 256


def config(layers: int = 2, hidden: int = 128, experts: int = 8, top_k: int = 2) -> dict[str, Any]:
    """The `config.json`, in names that transformers 4 and 5 both read."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": len(VOCABULARY),
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 32,
        "num_key_value_heads": hidden // 64,
        "head_dim": 32,
        "intermediate_size": 2 * hidden,
        "moe_intermediate_size": hidden // 2,
        "num_experts": experts,
        "num_experts_per_tok": top_k,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "output_router_logits": False,
        "router_aux_loss_coef": 0.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "initializer_range": 0.05,
        "use_cache": True,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "dtype": "float32",
    }


def random_weights(settings: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """HF-named float32 weights: matrices from N(0, initializer_range), norms at one."""
    generator = torch.Generator().manual_seed(seed)
    hidden, width = settings["hidden_size"], settings["head_dim"]
    spread = float(settings["initializer_range"])

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator) * spread

    weights = {"model.embed_tokens.weight": normal(settings["vocab_size"], hidden)}
    for index in range(settings["num_hidden_layers"]):
        layer = f"model.layers.{index}."
        for name, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads"), ("v", "num_key_value_heads")):
            weights[f"{layer}self_attn.{name}_proj.weight"] = normal(settings[heads] * width, hidden)
        weights[f"{layer}self_attn.o_proj.weight"] = normal(hidden, settings["num_attention_heads"] * width)
        for name, size in (("self_attn.q_norm", width), ("self_attn.k_norm", width)):
            weights[f"{layer}{name}.weight"] = torch.ones(size)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{layer}{name}.weight"] = torch.ones(hidden)
        weights[f"{layer}mlp.gate.weight"] = normal(settings["num_experts"], hidden)
        inner = settings["moe_intermediate_size"]
        for expert in range(settings["num_experts"]):
            prefix = f"{layer}mlp.experts.{expert}."
            weights[prefix + "gate_proj.weight"] = normal(inner, hidden)
            weights[prefix + "up_proj.weight"] = normal(inner, hidden)
            weights[prefix + "down_proj.weight"] = normal(hidden, inner)
    weights["model.norm.weight"] = torch.ones(hidden)
    weights["lm_head.weight"] = normal(settings["vocab_size"], hidden)
    return weights


def build_tokenizer() -> Any:
    """A word-level `tokenizers.Tokenizer`: one id per character, the two think tags and the special tokens."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({s: i for i, s in enumerate(VOCABULARY)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"</?think>|<pad>|<bos>|<eos>|[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<pad>", "<bos>", "<eos>", "<unk>"])
    return tokenizer


def write(path: Path, settings: dict[str, Any], seed: int) -> None:
    """Write the whole HF directory."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    ids = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
    generation = ids | {"do_sample": True, "temperature": 1.0}
    (path / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    tokenizer_config = special | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
        "padding_side": "left",
        "chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
    }
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n")
    build_tokenizer().save(str(path / "tokenizer.json"))
    save_file(random_weights(settings, seed), path / "model.safetensors", metadata={"format": "pt"})
