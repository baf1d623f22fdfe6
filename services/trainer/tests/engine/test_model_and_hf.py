"""The Megatron model against transformers, and its weights in and out."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from vime_trainer.engine.config import EngineConfig, ParallelConfig
from vime_trainer.engine.engine import Engine
from vime_trainer.engine.errors import WeightMapError

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("kind", ["moe", "dense", "tied"])
def test_logits_equal_those_of_transformers(
    kind: str,
    tmp_path: Path,
    moe_config: dict[str, Any],
    dense_config: dict[str, Any],
    model_writer: Callable[..., Path],
) -> None:
    from transformers import AutoModelForCausalLM

    config = {"moe": moe_config, "dense": dense_config, "tied": dense_config | {"tie_word_embeddings": True}}[kind]
    path = model_writer(tmp_path / kind, config)
    engine = Engine.from_hf(path, EngineConfig())
    ids = torch.randint(0, 48, (3, 17), generator=torch.Generator().manual_seed(1))
    lengths = torch.tensor([17, 9, 1])
    ours = engine.next_token_logits(ids, lengths)
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()(ids).logits
    expected = theirs[torch.arange(3), lengths - 1]
    assert (ours - expected).abs().max() <= 1e-5
    assert expected.abs().max() > 1  # the comparison is not between zeros


@pytest.mark.parametrize("kind", ["moe", "dense", "tied"])
def test_a_saved_model_is_the_loaded_one_bit_for_bit(
    kind: str,
    tmp_path: Path,
    moe_config: dict[str, Any],
    dense_config: dict[str, Any],
    model_writer: Callable[..., Path],
) -> None:
    config = {"moe": moe_config, "dense": dense_config, "tied": dense_config | {"tie_word_embeddings": True}}[kind]
    path = model_writer(tmp_path / "in", config)
    (path / "tokenizer.json").write_text("{}")
    Engine.from_hf(path, EngineConfig()).save_hf(tmp_path / "out")
    before, after = load_file(path / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert ("lm_head.weight" in after) == (kind != "tied")


def test_k15_a_stored_copy_of_a_tied_head_is_accepted_only_if_it_is_the_embedding(
    tmp_path: Path, dense_config: dict[str, Any], model_writer: Callable[..., Path], weight_maker: Callable[..., Any]
) -> None:
    config = dense_config | {"tie_word_embeddings": True}
    tensors = weight_maker(config)
    head = tensors["model.embed_tokens.weight"].clone()
    Engine.from_hf(model_writer(tmp_path / "same", config, tensors | {"lm_head.weight": head}), EngineConfig())
    other = model_writer(tmp_path / "other", config, tensors | {"lm_head.weight": head + 1})
    with pytest.raises(WeightMapError, match=r"lm_head\.weight differs"):
        Engine.from_hf(other, EngineConfig())


@pytest.mark.parametrize("fault", ["missing", "extra", "misshaped"])
def test_a_tensor_that_does_not_fit_is_refused_by_name(
    fault: str,
    tmp_path: Path,
    moe_config: dict[str, Any],
    model_writer: Callable[..., Path],
    weight_maker: Callable[..., Any],
) -> None:
    tensors = weight_maker(moe_config)
    name = "model.layers.2.mlp.experts.5.up_proj.weight"
    if fault == "missing":
        del tensors[name]
    elif fault == "extra":
        name = "model.layers.2.mlp.experts.8.up_proj.weight"
        tensors[name] = torch.zeros(24, 32)
    else:
        tensors[name] = torch.zeros(24, 31)
    path = model_writer(tmp_path / "broken", moe_config, tensors)
    with pytest.raises(WeightMapError) as error:
        Engine.from_hf(path, EngineConfig())
    assert name in str(error.value)
    if fault == "misshaped":
        assert "(24, 31)" in str(error.value)
        assert "(24, 32)" in str(error.value)


def test_the_round_trip_check_names_a_tensor_that_changed(moe_dir: Path) -> None:
    from vime_trainer.engine import hf

    engine = Engine.from_hf(moe_dir, EngineConfig())
    with torch.no_grad():
        engine._module.decoder.layers[0].self_attention.linear_qkv.weight[-1, 3] += 1
    with pytest.raises(WeightMapError, match=r"model\.layers\.0\.self_attn\.v_proj\.weight .* by up to 1"):
        hf.assert_round_trip(engine._module, engine.model_shape, hf.Checkpoint(moe_dir))


def test_large_models_are_written_in_shards_and_read_back(moe_dir: Path, tmp_path: Path) -> None:
    from vime_trainer.engine import hf

    engine = Engine.from_hf(moe_dir, EngineConfig())
    hf.write_hf_directory(tmp_path / "out", moe_dir, engine.export(), "float32", shard_bytes=50_000)
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    again = Engine.from_hf(tmp_path / "out", EngineConfig())
    for (name, ours), (other, theirs) in zip(engine.export(), again.export(), strict=True):
        assert name == other
        assert torch.equal(ours, theirs)


def test_an_existing_directory_is_not_overwritten(moe_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(FileExistsError, match="out"):
        Engine.from_hf(moe_dir, EngineConfig()).save_hf(tmp_path / "out")


@pytest.mark.parametrize("axis", ["tensor", "pipeline", "expert", "context"])
def test_layouts_that_were_not_verified_are_refused(axis: str) -> None:
    with pytest.raises(ValidationError, match=rf"parallel\.{axis} = 2 is not supported yet"):
        ParallelConfig(**{axis: 2})
