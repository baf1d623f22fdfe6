"""What counts as a reward, and what leaves a sample unscored. Never 0 for want of a number."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy
import pytest

from vime.common.v1 import trajectory_pb2 as pb
from vime_client.rewards.reward import apply_score, prompt_arguments
from vime_client.rewards.values import Score, as_score


class Hostile(str):
    """Text that cannot be shown."""

    def __repr__(self) -> str:
        raise KeyError("\ud83d")

    __str__ = __repr__


class HostileNumber:
    """A number that ends the program which reads it."""

    def __float__(self) -> float:
        raise SystemExit("\ud83d")


@pytest.mark.parametrize(
    ("value", "reward"),
    [
        (True, 1.0),
        (False, 0.0),
        (3, 3.0),
        (0.25, 0.25),
        (-1, -1.0),
        (Fraction(1, 4), 0.25),
        (Decimal("0.5"), 0.5),
        (numpy.float32(0.5), 0.5),
        (numpy.int64(7), 7.0),
        (numpy.bool_(True), 1.0),
        (numpy.array(2.0), 2.0),
    ],
)
def test_numbers_of_all_kinds_are_rewards(value: Any, reward: float) -> None:
    assert as_score(value).reward == reward
    assert as_score(value).unscored is None


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "NOT_A_NUMBER"),
        ("1", "NOT_A_NUMBER"),
        (b"1", "NOT_A_NUMBER"),
        ([1.0], "NOT_A_NUMBER"),
        ({}, "NOT_A_NUMBER"),
        ({"score": 1}, "NOT_A_NUMBER"),
        (1 + 2j, "NOT_A_NUMBER"),
        (numpy.complex64(1 + 2j), "NOT_A_NUMBER"),
        (numpy.array([1.0]), "NOT_A_NUMBER"),
        (object(), "NOT_A_NUMBER"),
        (math.nan, "NOT_FINITE"),
        (math.inf, "NOT_FINITE"),
        (-math.inf, "NOT_FINITE"),
        (10**400, "NOT_FINITE"),
        (numpy.float64("nan"), "NOT_FINITE"),
        ((math.nan, {"a": 1}), "NOT_FINITE"),
        ((1.0, {"\ud83d": 1}), "RAISED"),
        ((1.0, {"long" * 100: 1}), "RAISED"),
        ((1.0, {i: i for i in range(100_000)}), "RAISED"),
        (Hostile("1"), "RAISED"),
        ({"reward": Hostile("1")}, "RAISED"),
        ((1.0, {Hostile("name"): 1}), "RAISED"),
        (HostileNumber(), "RAISED"),
    ],
)
def test_anything_else_leaves_the_sample_unscored_with_its_class(value: Any, reason: str) -> None:
    score = as_score(value)
    assert (score.reward, score.unscored) == (None, reason)
    assert 0 < len(score.detail) <= 300
    sample = pb.Sample()
    apply_score(sample, score)
    assert not sample.HasField("reward")
    assert sample.unscored_reason == pb.UnscoredReason.Value(f"UNSCORED_REASON_{reason}")


def test_parts_come_with_a_pair_or_a_mapping_and_odd_ones_are_told() -> None:
    assert dict(as_score((1, {"format": 0.5, "length": True})).parts) == {"format": 0.5, "length": 1.0}
    mapping = {"reward": 1, "format": 0.5, "why": "good", "parts": {"judge": 0.25}}
    score = as_score(mapping)
    assert (score.reward, dict(score.parts)) == (1.0, {"format": 0.5, "judge": 0.25})
    odd = as_score((1, {"format": "high", "ok": 1}))
    assert dict(odd.parts) == {"ok": 1.0}
    assert "format='high'" in odd.detail
    mixed = as_score((1, {"a": math.nan, "b": -math.inf, "c": 10**400, 4: numpy.float32(0.5), "d": "\ud83d" * 1000}))
    assert dict(mixed.parts) == {"4": 0.5}
    assert all(f"{name}=" in mixed.detail for name in "abc")
    apply_score(pb.Sample(), mixed)  # what is told of the others can be sent


def test_a_zero_is_a_reward() -> None:
    sample = pb.Sample()
    apply_score(sample, Score(0.0, None, "", {}, 0.25))
    assert sample.HasField("reward")
    assert sample.reward == 0.0
    assert sample.reward_time.ToTimedelta().total_seconds() == 0.25


def test_prompts_come_as_people_wrote_them() -> None:
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
    assert prompt_arguments(pb.Prompt(text="1+1="), "train")["prompt"] == "1+1="
    assert prompt_arguments(pb.Prompt(chat=chat), "train")["prompt"] == [{"role": "user", "content": "hi"}]
    assert prompt_arguments(pb.Prompt(token_ids=pb.TokenIds(ids=[1, 2])), "train")["prompt"] == [1, 2]
