"""The addition problems, their tokens, and the reward of the recipe."""

import importlib.util
import random
from pathlib import Path
from types import ModuleType

import pytest

from vime_trainer.tools.addition import (
    HELDOUT_SEED,
    TRAIN_SEED,
    Problem,
    distinct,
    write_demonstrations,
    write_jsonl,
)
from vime_trainer.tools.fresh_model import EOS, VOCABULARY, build_tokenizer

RECIPE = Path(__file__).parents[4] / "recipes" / "addition"


def test_the_working_adds_the_columns_from_the_right_with_their_carries() -> None:
    problem = Problem(347, 586)
    assert (problem.prompt, problem.answer) == ("347+586=", "933")
    assert problem.working == "7+6=13,4+8+1=13,3+5+1=9"
    assert Problem(660, 498).working == "0+8=8,6+9=15,6+4+1=11"


def test_no_training_prompt_is_held_out() -> None:
    train = distinct(2000, TRAIN_SEED, held_out=False)
    held = distinct(500, HELDOUT_SEED, held_out=True)
    assert len(set(train)) == 2000
    assert not set(train) & set(held)
    assert all(p.held_out for p in held)
    share = sum(Problem(a, 500).held_out for a in range(100, 1000)) / 900
    assert 0.08 < share < 0.17


def test_working_is_shown_mostly_where_the_last_digits_carry() -> None:
    generator = random.Random(0)
    carry = sum("<think>" in Problem(209, 109).demonstration(generator) for _ in range(1000))
    plain = sum("<think>" in Problem(201, 101).demonstration(generator) for _ in range(1000))
    assert 800 < carry < 900
    assert 100 < plain < 200


def test_the_longest_demonstration_fits_the_generation_budget_and_survives_the_tokenizer() -> None:
    tokenizer = build_tokenizer()
    text = f"<think>{Problem(999, 999).working}</think>1998"
    ids = tokenizer.encode(text).ids
    assert len(ids) + 1 == 31
    assert tokenizer.decode(ids) == text
    assert [VOCABULARY[i] for i in ids[:3]] == ["<think>", "9", "+"]
    assert tokenizer.encode("<eos>").ids == [EOS]
    assert tokenizer.decode([*ids, EOS]) == text


def test_the_recipes_files_are_what_the_generator_writes(tmp_path: Path) -> None:
    for name, count, seed, held_out in (("train", 4096, TRAIN_SEED, False), ("heldout", 512, HELDOUT_SEED, True)):
        write_jsonl(tmp_path / name, distinct(count, seed, held_out))
        assert (tmp_path / name).read_text() == (RECIPE / f"{name}.jsonl").read_text()
    write_demonstrations(tmp_path / "shown", distinct(2048, TRAIN_SEED, held_out=False))
    assert (tmp_path / "shown").read_text() == (RECIPE / "demonstrations.jsonl").read_text()


@pytest.fixture(scope="module")
def reward() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reward", RECIPE / "reward.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("text", "finish_reason", "expected"),
    [
        ("933", "stop", 1.0),
        ("<think>7+6=13,4+8+1=13,3+5+1=9</think>933", "stop", 1.0),
        ("933", "length", 0.0),
        ("9334", "stop", 0.0),
        ("<think>933", "stop", 0.0),
        ("<think></think>93", "stop", 0.0),
        ("", "stop", 0.0),
    ],
)
def test_only_an_exact_sum_that_ended_by_itself_is_rewarded(
    reward: ModuleType, text: str, finish_reason: str, expected: float
) -> None:
    assert reward.score(text=text, answer="933", finish_reason=finish_reason, prompt="347+586=") == expected
