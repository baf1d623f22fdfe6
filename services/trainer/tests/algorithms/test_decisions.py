"""Filters, refills, rewards, overlong handling, pass@k and signs of degeneration."""

import itertools
import math

import numpy as np
import pytest
import torch

from vime_trainer.algorithms.decisions import (
    DynamicSamplingConfig,
    GroupDecision,
    RewardConfig,
    SoftOverlong,
    decide_group,
    decide_refill,
    drop_truncated,
    parse_rewards,
    pass_at_k,
    pass_rates,
    repetition_frac,
    shape_rewards,
    soft_overlong_penalty,
    truncated_ratio,
)

DEFAULT = DynamicSamplingConfig()


def test_k31_the_filter_reads_the_raw_reward_and_drops_an_all_wrong_group():
    assert decide_group([0, 0, 0, 0], DEFAULT) == GroupDecision(False, "zero_std_0")  # shaped [0,0,-.5,-1] would pass


def test_k31_generation_ends_after_max_attempts_on_data_that_never_varies():
    config = DynamicSamplingConfig(max_attempts=3)
    kept = dropped = 0
    for attempts in itertools.count():
        decision = decide_refill(kept, dropped, attempts, groups_per_step=4, config=config)
        if decision.action != "draw":
            break
        dropped += sum(not decide_group([0.0] * 4, config).keep for _ in range(decision.groups))
    assert (decision.action, attempts) == ("fail", 3)
    assert decision.reason == "0 of 4 groups kept, 12 dropped, after max_attempts=3"


def test_k31_the_fallback_fills_the_batch_to_exactly_its_size():
    config = DynamicSamplingConfig(max_attempts=2, when_exhausted="use_dropped")
    decision = decide_refill(kept=3, dropped=9, attempts=2, groups_per_step=8, config=config)
    assert (decision.action, decision.groups) == ("use_dropped", 5)
    assert decide_refill(3, 4, 2, 8, config).action == "fail"  # not enough dropped ones either


def test_k31_a_refill_draws_exactly_what_is_missing_and_stops_when_full():
    assert decide_refill(kept=5, dropped=3, attempts=1, groups_per_step=8, config=DEFAULT).groups == 3
    assert decide_refill(kept=8, dropped=3, attempts=1, groups_per_step=8, config=DEFAULT).action == "done"


def test_k31_a_fan_out_group_counts_one_reward_per_trajectory():
    rewards, trajectories = [1.0, 1.0, 1.0, 0.0], ["t", "t", "t", "u"]
    assert decide_group(rewards, DEFAULT, trajectories).keep
    one_trajectory = decide_group([1.0, 1.0, 1.0], DEFAULT, ["t", "t", "t"])
    assert one_trajectory == GroupDecision(False, "one_scored")
    with pytest.raises(ValueError, match="trajectory 't' have rewards 1 and 0"):
        decide_group([1.0, 0.0], DEFAULT, ["t", "t"])


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [([None, math.nan], "unscored"), ([1.0, None], "one_scored"), ([], "unscored"), ([1.0, 1.0], "zero_std_1")],
)
def test_a_group_without_contrast_is_dropped_with_its_reason(rewards, reason):
    assert decide_group(rewards, DEFAULT) == GroupDecision(False, reason)


def test_a_minimum_std_can_be_asked_for():
    config = DynamicSamplingConfig(min_std=0.1)
    assert decide_group([0.5, 0.501], config) == GroupDecision(False, "low_std")
    assert decide_group([0.0, 1.0], config).keep


def test_rewards_are_numbers_or_the_sample_is_unscored_with_a_reason():
    raw = [True, 3, 0.5, np.float32(0.25), np.int64(2), np.bool_(False), torch.tensor(1.5)]
    assert parse_rewards(raw).rewards_B.tolist() == [1.0, 3.0, 0.5, 0.25, 2.0, 0.0, 1.5]
    bad = parse_rewards([None, math.nan, -math.inf, "1.0", [1.0], np.zeros(2), 10**400, {"score": 1}])
    assert bad.rewards_B.isnan().all()
    assert list(bad.reasons.values()) == [
        "missing", "NaN", "infinite", "not a number: str", "not a number: list", "not a number: ndarray", "infinite",
        "a mapping, and no reward key is set",
    ]  # fmt: skip


def test_a_reward_key_picks_from_a_mapping():
    parsed = parse_rewards([{"score": 1}, {"other": 1}, 2.0], key="score")
    assert parsed.rewards_B[0] == 1
    assert parsed.rewards_B[2] == 2
    assert parsed.reasons == {1: "no key 'score'"}


def test_shaping_clamps_adds_the_penalty_scales_and_leaves_unscored_alone():
    raw_B = torch.tensor([5.0, -5.0, math.nan])
    shaped_B = shape_rewards(raw_B, RewardConfig(scale=2.0, low=-1.0, high=1.0), torch.tensor([-0.5, 0.0, 0.0]))
    assert shaped_B[:2].tolist() == [1.0, -2.0]
    assert shaped_B[2].isnan()


def test_the_soft_overlong_penalty_falls_linearly_through_the_cache():
    lengths_B = torch.tensor([0, 80, 81, 90, 100, 101, 500])
    penalty_B = soft_overlong_penalty(lengths_B, SoftOverlong(max_length=100, cache=20))
    assert penalty_B.tolist() == pytest.approx([0, 0, -0.05, -0.5, -1, -1, -1])


def test_dropping_truncated_samples_zeroes_their_mask_only():
    mask_BT = torch.tensor([[1, 1], [1, 0]])
    assert drop_truncated(mask_BT, torch.tensor([True, False])).tolist() == [[False, False], [True, False]]


@pytest.mark.parametrize(("n", "c"), [(1, 0), (1, 1), (5, 2), (8, 8), (6, 0), (7, 1)])
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample(n, c):
    correct = [True] * c + [False] * (n - c)
    for k in range(1, n + 1):
        subsets = [any(subset) for subset in itertools.combinations(correct, k)]
        assert pass_at_k(n, c, k) == pytest.approx(sum(subsets) / len(subsets))


def test_pass_rates_count_exact_ones_by_group_and_skip_the_unscored():
    rewards = [1.0, 0.0, 0.999, 0.0, 1.0, None, 1.0]
    rates = pass_rates(rewards, ["a", "a", "a", "a", "b", "b", "c"])
    assert rates == pytest.approx({1: (0.25 + 1 + 1) / 3, 2: 0.5, 4: 1.0})
    assert pass_rates([None], ["a"]) == {}


@pytest.mark.parametrize(("n", "c", "k", "message"), [(4, 5, 1, "correct=5"), (4, 1, 5, "k=5"), (4, 1, 0, "k=0")])
def test_pass_at_k_refuses_impossible_counts(n, c, k, message):
    with pytest.raises(ValueError, match=message):
        pass_at_k(n, c, k)


def test_repetition_looks_at_the_last_ten_thousand_characters():
    varied = "".join(f"{i * 7919 % 10007} " for i in range(4000))
    assert repetition_frac(["ab" * 6000, "ab" * 100, varied, varied + "x" * 10_000]) == 0.5
    assert repetition_frac([]) is None


def test_truncation_is_the_share_of_length_finishes():
    assert truncated_ratio(["stop", "length", "length", "abort"]) == 0.5
    assert truncated_ratio([]) is None


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: DynamicSamplingConfig(max_attempts=0), "DynamicSamplingConfig.max_attempts=0: must be >= 1"),
        (lambda: SoftOverlong(10, 11), r"SoftOverlong.cache=11: must be in \(0, max_length=10\]"),
        (lambda: RewardConfig(low=1.0, high=0.0), "RewardConfig.low=1.0: must be below high=0.0"),
    ],
)
def test_settings_that_cannot_work_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()
