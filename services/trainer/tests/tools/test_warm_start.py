"""The fresh model and the supervised steps that make the starting model."""

import random
from pathlib import Path

import pytest
import torch

from vime_trainer.engine.config import EngineConfig, OptimizerConfig
from vime_trainer.engine.engine import Engine
from vime_trainer.tools import addition, fresh_model, warm_start

pytestmark = pytest.mark.engine
MODEL = Path(__file__).parents[4] / "recipes" / "addition" / "model"


def test_a_fresh_model_is_read_by_transformers_and_learns(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    fresh_model.write(tmp_path, fresh_model.config(), seed=0)
    config = AutoConfig.from_pretrained(tmp_path)
    assert (config.num_experts, config.num_experts_per_tok, config.norm_topk_prob) == (8, 2, True)
    assert config.rope_parameters["rope_theta"] == 10000.0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer("347+586=").input_ids
    assert ids == fresh_model.build_tokenizer().encode("347+586=").ids
    assert len(ids) == 8
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (fresh_model.EOS, fresh_model.PAD)
    message = [{"role": "user", "content": "1+2="}]
    assert tokenizer.apply_chat_template(message, tokenize=False) == "1+2="
    engine = Engine.from_hf(tmp_path, EngineConfig(optimizer=OptimizerConfig(lr=2e-3, beta2=0.95)))
    generator = random.Random(0)
    problems = addition.draw(generator, held_out=False)
    own = fresh_model.build_tokenizer()
    losses = []
    for _ in range(12):
        rows = [warm_start.demonstration(next(problems), own, generator) for _ in range(16)]
        losses.append(engine.sft_step(rows).loss)
    assert losses[0] == pytest.approx(torch.log(torch.tensor(32.0)).item(), abs=0.6)  # a guess over 32 tokens
    assert losses[-1] < 0.8 * losses[0]


def test_the_shipped_model_answers_about_half_greedily_and_a_third_at_temperature_one() -> None:
    engine = Engine.from_hf(MODEL, EngineConfig())
    problems = addition.distinct(128, addition.HELDOUT_SEED, held_out=True)
    tokenizer = fresh_model.build_tokenizer()
    greedy = warm_start.evaluate(engine, tokenizer, problems, temperature=0)
    sampled = warm_start.evaluate(engine, tokenizer, problems, temperature=1.0, seed=1)
    assert 0.35 < greedy.reward < 0.68
    assert 0.2 < sampled.reward < 0.5
    assert 0.3 < greedy.worked < 0.7


def test_generation_stops_at_the_end_token_and_at_the_budget() -> None:
    engine = Engine.from_hf(MODEL, EngineConfig())
    tokenizer = fresh_model.build_tokenizer()
    prompts = torch.tensor([tokenizer.encode(p).ids for p in ("347+586=", "111+222=")])
    for response in warm_start.generate(engine, prompts, temperature=0):
        assert len(response) <= warm_start.MAX_NEW_TOKENS
        assert fresh_model.EOS not in response[:-1]
