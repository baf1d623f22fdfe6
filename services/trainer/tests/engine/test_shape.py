"""Reading a model's shape from config.json."""

from typing import Any

import pytest

from vime_trainer.engine.errors import UnsupportedModelError
from vime_trainer.engine.shape import ModelShape


def test_transformers_4_and_5_names_give_the_same_shape(moe_config: dict[str, Any]) -> None:
    old = {k: v for k, v in moe_config.items() if k not in ("num_local_experts", "rope_parameters")}
    old |= {"num_experts": 8, "rope_theta": 10000.0, "rope_scaling": None}
    assert ModelShape.from_config(old) == ModelShape.from_config(moe_config)


@pytest.mark.parametrize(
    ("step", "dense", "expected"),
    [(1, [], (0, 1, 2)), (1, [1], (0, 2)), (2, [], (1,)), (3, [], (2,)), (2, [0], (1,))],
)
def test_moe_layers_follow_the_sparse_step_and_the_dense_list(
    moe_config: dict[str, Any], step: int, dense: list[int], expected: tuple[int, ...]
) -> None:
    shape = ModelShape.from_config(moe_config | {"decoder_sparse_step": step, "mlp_only_layers": dense})
    assert shape.moe_layers == expected


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, ("LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")),
        ({"architectures": None}, ("None", "Qwen3ForCausalLM")),
        ({"norm_topk_prob": False}, ("norm_topk_prob", "False")),
        ({"norm_topk_prob": None}, ("norm_topk_prob", "None")),
        ({"attention_bias": True}, ("attention_bias", "True")),
        ({"use_sliding_window": True}, ("use_sliding_window",)),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, ("yarn",)),
        ({"quantization_config": {"bits": 4}}, ("quantization_config",)),
        ({"num_experts_per_tok": 9}, ("9", "8")),
        ({"mlp_only_layers": [0, 1, 2]}, ("no layer of 3",)),
        ({"num_local_experts": None}, ("num_local_experts", "num_experts")),
    ],
)
def test_what_would_be_built_unfaithfully_is_refused(
    moe_config: dict[str, Any], change: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        ModelShape.from_config(moe_config | change)
    assert all(word in str(error.value) for word in words)
