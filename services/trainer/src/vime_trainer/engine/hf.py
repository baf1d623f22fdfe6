"""HF safetensors in and out of the Megatron model: one table of names, exact both ways.

Nothing is converted on the way but layout and, at load, the data type. A tensor that is missing, superfluous or of
another shape is refused by its name: a model that is silently half random trains without an error.
"""

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from vime_trainer.engine.errors import WeightMapError
from vime_trainer.engine.shape import ModelShape

Layout = Literal["as_is", "qkv", "gate_up"]
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
# Files of an HF directory that belong to the model but not to its weights.
COMPANIONS = (
    "generation_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
)
SHARD_BYTES = 5_000_000_000

_IN_LAYER: dict[str, tuple[Layout, tuple[str, ...]]] = {
    "input_layernorm.weight": ("as_is", ("input_layernorm.weight",)),
    "pre_mlp_layernorm.weight": ("as_is", ("post_attention_layernorm.weight",)),
    "self_attention.q_layernorm.weight": ("as_is", ("self_attn.q_norm.weight",)),
    "self_attention.k_layernorm.weight": ("as_is", ("self_attn.k_norm.weight",)),
    "self_attention.linear_qkv.weight": (
        "qkv",
        ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    ),
    "self_attention.linear_proj.weight": ("as_is", ("self_attn.o_proj.weight",)),
    "mlp.router.weight": ("as_is", ("mlp.gate.weight",)),
    "mlp.linear_fc1.weight": ("gate_up", ("mlp.gate_proj.weight", "mlp.up_proj.weight")),
    "mlp.linear_fc2.weight": ("as_is", ("mlp.down_proj.weight",)),
}
_OUTSIDE = {
    "embedding.word_embeddings.weight": EMBEDDING,
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": HEAD,
}


@dataclass(frozen=True)
class Entry:
    """How one Megatron parameter is spelled in HF: `layout` tells how the tensors of `hf_names` are joined."""

    layout: Layout
    hf_names: tuple[str, ...]


def entry_for(name: str) -> Entry:
    """The HF counterpart of a Megatron parameter.

    Raises WeightMapError for a parameter that the table does not know.
    """
    if name in _OUTSIDE:
        return Entry("as_is", (_OUTSIDE[name],))
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        prefix, rest = f"model.layers.{parts[2]}.", ".".join(parts[3:])
        if rest in _IN_LAYER:
            layout, names = _IN_LAYER[rest]
            return Entry(layout, tuple(prefix + n for n in names))
        if rest.startswith("mlp.experts.local_experts."):
            expert = f"{prefix}mlp.experts.{parts[6]}."
            if parts[7] == "linear_fc1":
                return Entry("gate_up", (expert + "gate_proj.weight", expert + "up_proj.weight"))
            return Entry("as_is", (expert + "down_proj.weight",))
    raise WeightMapError(f"Megatron parameter {name!r} has no HF counterpart")


def join(layout: Layout, tensors: list[torch.Tensor], shape: ModelShape) -> torch.Tensor:
    """HF tensors -> the Megatron tensor. Megatron interleaves q, k and v per query group; gate and up are stacked."""
    if layout == "as_is":
        return tensors[0]
    if layout == "gate_up":
        return torch.cat(tensors)
    groups, width = shape.num_query_groups, tensors[0].size(-1)
    return torch.cat([t.view(groups, -1, shape.head_dim, width) for t in tensors], dim=1).reshape(-1, width)


def split(layout: Layout, tensor: torch.Tensor, shape: ModelShape) -> list[torch.Tensor]:
    """The Megatron tensor -> HF tensors; the exact inverse of `join`."""
    if layout == "as_is":
        return [tensor]
    if layout == "gate_up":
        return list(tensor.chunk(2))
    groups, width = shape.num_query_groups, tensor.size(-1)
    per_group = shape.num_attention_heads // groups
    parts = torch.split(tensor.view(groups, per_group + 2, shape.head_dim, width), [per_group, 1, 1], dim=1)
    return [p.reshape(-1, width) for p in parts]


def export(model: nn.Module, shape: ModelShape) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (HF name, contiguous tensor) of every weight, in one fixed order, in the model's own type and on its
    device.

    A tensor may be a view of the live weight: it is valid until the next training step.
    """
    for name, parameter in model.named_parameters():
        entry = entry_for(name)
        for hf_name, tensor in zip(entry.hf_names, split(entry.layout, parameter.detach(), shape), strict=True):
            yield hf_name, tensor.contiguous()


class Checkpoint:
    """Read access to the safetensors of an HF directory, one file or an index over several."""

    def __init__(self, path: Path) -> None:
        self.path = path
        index = path / "model.safetensors.index.json"
        single = path / "model.safetensors"
        if index.exists():
            self._file_of: dict[str, str] = dict(json.loads(index.read_text())["weight_map"])
        elif single.exists():
            with safe_open(single, framework="pt") as file:
                self._file_of = dict.fromkeys(file.keys(), single.name)
        else:
            raise WeightMapError(f"{path} holds neither model.safetensors nor model.safetensors.index.json")

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._file_of)

    def __getitem__(self, name: str) -> torch.Tensor:
        with safe_open(self.path / self._file_of[name], framework="pt") as file:
            return cast(torch.Tensor, file.get_tensor(name))


def load(model: nn.Module, shape: ModelShape, checkpoint: Checkpoint) -> None:
    """Copy every weight of `checkpoint` into an unwrapped model.

    Raises WeightMapError naming the tensors that do not fit.
    """
    wanted = {n for name, _ in model.named_parameters() for n in entry_for(name).hf_names}
    _compare_names(wanted, checkpoint, shape)
    for name, parameter in model.named_parameters():
        entry = entry_for(name)
        parts = split(entry.layout, parameter.detach(), shape)
        tensors = [checkpoint[n] for n in entry.hf_names]
        for hf_name, tensor, part in zip(entry.hf_names, tensors, parts, strict=True):
            if tensor.shape != part.shape:
                raise WeightMapError(f"{hf_name} has shape {tuple(tensor.shape)}, the model wants {tuple(part.shape)}")
        with torch.no_grad():
            parameter.copy_(join(entry.layout, tensors, shape))


def _compare_names(wanted: set[str], checkpoint: Checkpoint, shape: ModelShape) -> None:
    missing, extra = sorted(wanted - checkpoint.names), sorted(checkpoint.names - wanted)
    if shape.tie_word_embeddings and extra == [HEAD]:
        # Some writers store the tied head; it must then really be the embedding.
        if not torch.equal(checkpoint[HEAD], checkpoint[EMBEDDING]):
            raise WeightMapError(f"{HEAD} differs from {EMBEDDING}, but config.json says that they are tied")
        extra = []
    if missing or extra:
        raise WeightMapError(
            f"{checkpoint.path}: {len(missing)} tensors are missing {missing[:4]}, {len(extra)} are unknown {extra[:4]}"
        )


def assert_round_trip(model: nn.Module, shape: ModelShape, checkpoint: Checkpoint) -> None:
    """Check that exporting what was loaded gives the checkpoint back, bit for bit after the cast to the model's type.

    Raises WeightMapError naming the first tensor that differs and by how much.
    """
    seen: set[str] = set()
    for name, tensor in export(model, shape):
        source = checkpoint[name].to(tensor.device, tensor.dtype)
        if not torch.equal(tensor, source):
            worst = (tensor.double() - source.double()).abs().max().item()
            raise WeightMapError(f"{name} does not survive the round trip: it differs by up to {worst:.3g}")
        seen.add(name)
    lost = checkpoint.names - seen - ({HEAD} if shape.tie_word_embeddings else set())
    if lost:
        raise WeightMapError(f"{len(lost)} tensors are not exported: {sorted(lost)[:4]}")


def write_hf_directory(
    out: Path, source: Path, tensors: Iterable[tuple[str, torch.Tensor]], dtype: str, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write a complete HF directory: configs and tokenizer copied from `source`, weights from `tensors`, shards if
    large.

    `out` appears whole or not at all: it is written beside and renamed. An existing `out` is refused.
    """
    if out.exists():
        raise FileExistsError(f"{out} exists; choose another directory")
    work = out.with_name(out.name + ".tmp")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    config = json.loads((source / "config.json").read_text())
    for key in ("dtype", "torch_dtype"):
        if key in config:
            config[key] = dtype
    (work / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in COMPANIONS:
        if (source / name).exists():
            shutil.copyfile(source / name, work / name)
    _write_shards(work, list(_shards(tensors, shard_bytes)))
    work.rename(out)


def _shards(tensors: Iterable[tuple[str, torch.Tensor]], limit: int) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > limit:
            yield shard
            shard, size = {}, 0
        # A copy: safetensors refuses tensors that share memory, and views of one weight do.
        shard[name] = tensor.detach().cpu().clone()
        size += tensor.nbytes
    yield shard


def _write_shards(out: Path, shards: list[Mapping[str, torch.Tensor]]) -> None:
    if len(shards) == 1:
        save_file(dict(shards[0]), out / "model.safetensors", metadata={"format": "pt"})
        return
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(dict(shard), out / name, metadata={"format": "pt"})
        where |= dict.fromkeys(shard, name)
    total = sum(t.nbytes for shard in shards for t in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
