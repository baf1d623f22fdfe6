"""What the canary tells apart: a healthy engine from one that loaded right bytes wrongly, in every mix of dtypes.

The engine here is transformers on the weights that the trainer holds, the fault a change of what it loads. The model is
that of the addition recipe: trained, so that it is as sure of itself as a real one.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file, save_file

from vime.bulk.v1.manifest_pb2 import CanaryPrompt
from vime.common.v1.tensor_pb2 import Dtype
from vime_service.bulk import canary_rule
from vime_trainer.engine.config import EngineConfig
from vime_trainer.engine.engine import Engine
from vime_trainer.rank.transfer import canary

pytestmark = pytest.mark.engine

MODEL = Path(__file__).resolve().parents[4] / "recipes" / "addition" / "model"
PROMPTS = 4
Weights = dict[str, torch.Tensor]
Logprobs = npt.NDArray[np.float64]


def swapped(layer: int, one: int, other: int) -> Callable[[Weights], None]:
    def change(weights: Weights) -> None:
        for name in ("gate_proj", "up_proj", "down_proj"):
            a, b = (f"model.layers.{layer}.mlp.experts.{e}.{name}.weight" for e in (one, other))
            weights[a], weights[b] = weights[b], weights[a]

    return change


def transposed(weights: Weights) -> None:
    name = "model.layers.0.self_attn.o_proj.weight"
    weights[name] = weights[name].t().contiguous()


def exchanged_halves(weights: Weights) -> None:
    for expert in range(8):
        gate, up = (f"model.layers.0.mlp.experts.{expert}.{name}_proj.weight" for name in ("gate", "up"))
        weights[gate], weights[up] = weights[up], weights[gate]


def stale(weights: Weights) -> None:
    """As they were one step of Adam at 5e-5 ago: every weight moved by the learning rate."""
    generator = torch.Generator().manual_seed(0)
    for name, tensor in weights.items():
        sign = torch.randint(0, 2, tensor.shape, generator=generator) * 2 - 1
        weights[name] = (tensor.float() + 5e-5 * sign).to(tensor.dtype)


FAULTS = {
    "swapped in layer 0": swapped(0, 0, 1),
    "swapped in layer 0, too": swapped(0, 6, 7),
    "swapped in the last layer": swapped(1, 6, 7),
    "transposed": transposed,
    "gate for up": exchanged_halves,
}


class Canaries:
    """The trainer's canary and |Δ| of engines that loaded its weights, rightly or not."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._prompts: dict[str, list[CanaryPrompt]] = {}
        self._count = 0

    def prompts(self, dtype: str) -> list[CanaryPrompt]:
        if dtype not in self._prompts:
            self._prompts[dtype] = canary(Engine.from_hf(MODEL, EngineConfig.model_validate({"dtype": dtype})), PROMPTS)
        return self._prompts[dtype]

    def logprobs(self, trainer: str) -> Logprobs:
        return np.concatenate([list(prompt.logprobs) for prompt in self.prompts(trainer)])

    def engine(self, trainer: str, engine: str, fault: Callable[[Weights], None] | None = None) -> Logprobs:
        """The engine's logprobs of the trainer's prompts."""
        from transformers import AutoModelForCausalLM

        self._count += 1
        folder = self._scratch / str(self._count)
        shutil.copytree(MODEL, folder)
        weights = load_file(MODEL / "model.safetensors")
        if trainer == "bfloat16":  # what the trainer holds, and sends
            weights = {name: tensor.bfloat16().float() for name, tensor in weights.items()}
        if fault is not None:
            fault(weights)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, engine), attn_implementation="eager")
        out = []
        for prompt in self.prompts(trainer):
            ids = torch.tensor([list(prompt.token_ids)])
            with torch.no_grad():
                logprobs = model(ids).logits.float().log_softmax(-1)[0, :-1]
            out.append(logprobs.gather(1, ids[0, 1:, None])[:, 0].double().numpy())
        return np.concatenate(out)


@pytest.fixture(scope="module")
def canaries(tmp_path_factory: pytest.TempPathFactory) -> Canaries:
    return Canaries(tmp_path_factory.mktemp("engines"))


MIXES = [("float32", "float32"), ("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("bfloat16", "float32")]


@pytest.mark.parametrize(("trainer", "engine"), MIXES)
def test_a_healthy_engine_passes_with_room_and_a_wrong_load_fails_in_every_mix_of_dtypes(
    canaries: Canaries, trainer: str, engine: str
) -> None:
    rule = canary_rule([trainer, engine])
    expected = canaries.logprobs(trainer)
    healthy = rule.difference(canaries.engine(trainer, engine), expected)
    print(f"\n{trainer} trainer, {engine} engine: limit {rule.limit:g}, healthy {healthy:.3g}")
    assert healthy < rule.limit / 3
    for name, fault in FAULTS.items():
        found = rule.difference(canaries.engine(trainer, engine, fault), expected)
        print(f"  {name}: {found:.3g}")
        assert found > 1.5 * rule.limit, name


def test_a_mean_would_not_tell_a_healthy_model_from_a_wrong_one_in_bf16(canaries: Canaries) -> None:
    """Why it is a quantile: a few tokens that are routed otherwise carry most of the mean."""
    gap = np.abs(canaries.engine("bfloat16", "bfloat16") - canaries.logprobs("bfloat16"))
    assert gap.mean() > 0.05  # the limit of 0.2.0, which ended healthy runs
    assert np.sort(gap)[-len(gap) // 10 :].sum() > 0.5 * gap.sum()


def test_in_fp32_weights_of_one_step_ago_are_seen_and_a_pair_of_experts_that_few_tokens_use(canaries: Canaries) -> None:
    rule, expected = canary_rule(["float32", "float32"]), canaries.logprobs("float32")
    for fault in (stale, swapped(1, 4, 5)):
        assert rule.difference(canaries.engine("float32", "float32", fault), expected) > 10 * rule.limit


def test_the_canary_says_what_it_was_computed_in(canaries: Canaries) -> None:
    assert {prompt.dtype for prompt in canaries.prompts("bfloat16")} == {Dtype.DTYPE_BFLOAT16}


def test_a_value_that_is_not_finite_never_passes() -> None:
    for dtype in ("float32", "bfloat16"):
        rule = canary_rule([dtype])
        assert not rule.difference([0.0, float("nan")], [0.0, 0.0]) <= rule.limit
