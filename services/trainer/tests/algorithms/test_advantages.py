"""Advantages against hand-worked values and a plain-Python float64 implementation that walks token by token."""

import math
import statistics

import pytest
import torch

from vime_trainer.algorithms import (
    ESTIMATORS,
    LOCAL,
    AdvantageConfig,
    AdvantageInputs,
    Estimate,
    compute_advantages,
    index_of,
    values,
    whiten,
)
from vime_trainer.algorithms.advantages import suffix_sum
from vime_trainer.algorithms.ranks import simulate

F64 = torch.float64


def inputs_of(rewards, mask, groups=None, **columns):
    tensors = {name: torch.as_tensor(column, dtype=F64) for name, column in columns.items() if name != "trajectories"}
    return AdvantageInputs(
        torch.tensor(rewards, dtype=F64),
        torch.as_tensor(mask),
        index_of(groups or ["g"] * len(rewards)),
        index_of(columns["trajectories"]) if "trajectories" in columns else None,
        **tensors,
    )


def walk(rewards, mask, values, penalty, gamma, lam):
    """GAE and return, one unmasked token after the other, backwards."""
    advantages = [[0.0] * len(row) for row in mask]
    for b, row in enumerate(mask):
        trained = [t for t, m in enumerate(row) if m]
        running, next_value = 0.0, 0.0
        for t in reversed(trained):
            reward = -penalty[b][t] + (rewards[b] if t == trained[-1] else 0.0)
            delta = reward + gamma * next_value - values[b][t]
            running = delta + gamma * lam * running
            advantages[b][t], next_value = running, values[b][t]
    return torch.tensor(advantages, dtype=F64)


def test_grpo_by_hand():
    output = compute_advantages(inputs_of([1, 1, 0, 0], torch.ones(4, 2)), AdvantageConfig())
    # mean 1/2, unbiased std √(1/3) = 0.57735
    assert output.advantages_BT.dtype == torch.float32
    assert output.advantages_BT[:, 0].tolist() == pytest.approx([0.866, 0.866, -0.866, -0.866], abs=1e-4)
    assert torch.equal(output.advantages_BT[:, 0], output.advantages_BT[:, 1])


def test_dr_grpo_only_centres():
    output = compute_advantages(inputs_of([3, 1, 1, 1], torch.ones(4, 1)), AdvantageConfig("dr_grpo"))
    assert output.advantages_BT[:, 0].tolist() == [1.5, -0.5, -0.5, -0.5]


def test_rloo_compares_with_the_mean_of_the_others():
    rewards = [0.3, 1.7, -2.0, 0.25]
    output = compute_advantages(inputs_of(rewards, torch.ones(4, 1), old_logprobs_BT=torch.zeros(4, 1)),
                                AdvantageConfig("rloo"))  # fmt: skip
    expected = [reward - (sum(rewards) - reward) / 3 for reward in rewards]
    assert output.advantages_BT[:, 0].tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo"])
def test_gspo_and_cispo_take_the_grpo_advantage(name):
    assert ESTIMATORS[name].function is ESTIMATORS["grpo"].function


def test_an_unscored_sample_is_out_of_statistics_and_mask_and_is_reported():
    rewards = [1.0, float("nan"), 0.0, float("inf"), 0.0]
    output = compute_advantages(inputs_of(rewards, torch.ones(5, 2)), AdvantageConfig("dr_grpo"))
    assert output.advantages_BT[:, 0].tolist() == pytest.approx([2 / 3, 0, -1 / 3, 0, -1 / 3])
    assert output.unscored_B.tolist() == [False, True, False, True, False]
    assert output.loss_mask_BT.all(-1).tolist() == [True, False, True, False, True]
    assert values(output.metrics)["unscored_samples"] == 2


def test_a_group_with_one_scored_sample_has_advantage_zero():
    output = compute_advantages(inputs_of([1.0, float("nan")], torch.ones(2, 1)), AdvantageConfig())
    assert output.advantages_BT.eq(0).all()
    assert values(output.metrics)["singleton_group_samples"] == 1


def test_samples_forked_from_one_trajectory_count_once_in_the_statistics():
    forked = inputs_of([1, 1, 1, 0], torch.ones(4, 1), trajectories=["t", "t", "t", "u"])
    plain = inputs_of([1, 0], torch.ones(2, 1))
    a, b = (compute_advantages(inputs, AdvantageConfig()).advantages_BT[:, 0].tolist() for inputs in (forked, plain))
    assert a == [b[0], b[0], b[0], b[1]]


def test_siblings_that_disagree_on_the_reward_are_refused():
    with pytest.raises(ValueError, match="rewards of trajectory 0 disagree among its samples: 0 and 1"):
        compute_advantages(inputs_of([1, 0], torch.ones(2, 1), trajectories=["t", "t"]), AdvantageConfig())


def test_gae_by_hand_skips_the_tool_output_and_keeps_the_reward():
    # action, tool, action, tool: R = 1 lands on token 2; V = .5 at the first action, .25 at the second
    inputs = inputs_of([1.0], [[1, 0, 1, 0]], values_BT=[[0.5, 9.0, 0.25, 9.0]])
    output = compute_advantages(inputs, AdvantageConfig("gae", gamma=0.9, lam=0.5))
    # δ₂ = 1 − .25 = .75; δ₁ = .9·.25 − .5 = −.275; A₁ = −.275 + .45·.75 = .0625
    assert output.advantages_BT.tolist() == [pytest.approx([0.0625, 0.0, 0.75, 0.0])]
    assert output.returns_BT.tolist() == [pytest.approx([0.5625, 0.0, 1.0, 0.0])]


@pytest.mark.parametrize("steps", [1, 7, 128, 129, 1000])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (0.0, 1.0)])
def test_gae_agrees_with_walking_token_by_token(steps, gamma, lam):
    generator = torch.Generator().manual_seed(steps)
    mask_BT = torch.rand(5, steps, generator=generator) < 0.7
    mask_BT[0] = False  # a fully masked sample
    columns = {name: torch.randn(5, steps, generator=generator, dtype=F64) for name in
               ("values_BT", "old_logprobs_BT", "ref_logprobs_BT")}  # fmt: skip
    rewards = [0.5, -1.0, 2.0, 0.0, 1.0]
    config = AdvantageConfig("gae", gamma=gamma, lam=lam, kl_coef=0.1, kl_estimator="k2")
    output = compute_advantages(inputs_of(rewards, mask_BT, **columns), config)
    penalty_BT = 0.1 * (columns["old_logprobs_BT"] - columns["ref_logprobs_BT"]) ** 2 / 2
    expected_BT = walk(rewards, mask_BT.tolist(), columns["values_BT"].tolist(), penalty_BT.tolist(), gamma, lam)
    torch.testing.assert_close(output.advantages_BT, expected_BT, rtol=1e-10, atol=1e-10)
    returns_BT = (expected_BT + columns["values_BT"]) * mask_BT
    torch.testing.assert_close(output.returns_BT, returns_BT, rtol=1e-10, atol=1e-10)


def test_gae_ignores_whatever_stands_at_masked_tokens():
    clean = {"values_BT": [[0.5, 0.0, 0.25]], "old_logprobs_BT": [[-1.0, 0, -2]], "ref_logprobs_BT": [[-1.5, 0, -2]]}
    dirty = {name: [[row[0][0], float("nan"), row[0][2]]] for name, row in clean.items()}
    config = AdvantageConfig("gae", kl_coef=0.1)
    a, b = (compute_advantages(inputs_of([1.0], [[1, 0, 1]], **columns), config) for columns in (clean, dirty))
    assert torch.equal(a.advantages_BT, b.advantages_BT)
    assert torch.equal(a.returns_BT, b.returns_BT)


@pytest.mark.parametrize("gamma", [1.0, 0.97])
def test_reinforce_plus_plus_is_the_whitened_discounted_return(gamma):
    generator = torch.Generator().manual_seed(3)
    mask_BT = torch.rand(6, 200, generator=generator) < 0.5
    mask_BT[2] = False  # the original asserts on this
    old_BT, ref_BT = (torch.randn(6, 200, generator=generator, dtype=F64) for _ in range(2))
    rewards = [1.0, 0.0, 5.0, -1.0, 1.0, 0.5]
    config = AdvantageConfig("reinforce_plus_plus", gamma=gamma, kl_coef=0.05)
    inputs = inputs_of(rewards, mask_BT, old_logprobs_BT=old_BT, ref_logprobs_BT=ref_BT)
    output = compute_advantages(inputs, config)
    zeros = [[0.0] * 200] * 6
    raw_BT = walk(rewards, mask_BT.tolist(), zeros, (0.05 * (old_BT - ref_BT)).tolist(), gamma, 1.0)
    tokens = raw_BT[mask_BT].tolist()
    expected_BT = (raw_BT - statistics.mean(tokens)) / math.sqrt(statistics.variance(tokens) + 1e-8) * mask_BT
    torch.testing.assert_close(output.advantages_BT, expected_BT, rtol=1e-9, atol=1e-9)


def test_reinforce_plus_plus_baseline_by_hand_before_whitening():
    inputs = inputs_of([1, 0], [[1, 1], [1, 0]], old_logprobs_BT=[[-1.0, -2.0], [-1.0, 0.0]],
                       ref_logprobs_BT=[[-1.5, -2.0], [-1.0, 9.0]])  # fmt: skip
    config = AdvantageConfig("reinforce_plus_plus_baseline", kl_coef=0.1, whiten=False)
    assert compute_advantages(inputs, config).advantages_BT.tolist() == [[0.45, 0.5], [-0.5, 0.0]]


def test_whitening_uses_the_unbiased_variance_of_unmasked_tokens():
    x_BT = torch.tensor([[1.0, 2.0, 99.0], [3.0, float("nan"), 6.0]], dtype=F64)
    mask_BT = torch.tensor([[1, 1, 0], [1, 0, 1]]).bool()
    std = statistics.stdev([1, 2, 3, 6])
    expected = [[(1 - 3) / std, (2 - 3) / std, 0.0], [0.0, 0.0, (6 - 3) / std]]
    torch.testing.assert_close(whiten(x_BT, mask_BT), torch.tensor(expected, dtype=F64), rtol=1e-7, atol=0)


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_whitening_equal_or_too_few_tokens_gives_zero(tokens):
    mask_BT = torch.arange(8)[None] < tokens
    assert whiten(torch.full((1, 8), 0.7), mask_BT).abs().max() < 1e-6


def test_whitening_does_not_cancel_far_from_zero():
    x_BT = torch.tensor([[1e6, 1e6 + 1, 1e6 + 2]], dtype=torch.float32)
    whitened = whiten(x_BT, torch.ones(1, 3, dtype=torch.bool))
    assert whitened.tolist() == [pytest.approx([-1, 0, 1], abs=1e-6)]


def test_on_policy_distillation_subtracts_the_reverse_kl():
    inputs = inputs_of([1, 1], [[1, 1], [1, 0]], old_logprobs_BT=[[-1.0, -2.0], [-3.0, 0.0]],
                       teacher_logprobs_BT=[[-0.5, -4.0], [-3.0, 7.0]])  # fmt: skip
    output = compute_advantages(inputs, AdvantageConfig(opd_kl_coef=0.5))
    assert output.advantages_BT.tolist() == [[0.25, -1.0], [0.0, 0.0]]
    assert values(output.metrics)["opd_reverse_kl"] == pytest.approx((0.75 + 0.0) / 2)  # mean of per-sample means


def test_a_users_estimator_replaces_the_named_one_and_is_checked():
    def lengths(inputs, config, reduce):
        return Estimate(inputs.per_token(inputs.loss_mask_BT.sum(-1).double()))

    inputs = inputs_of([1, 1], [[1, 1, 0], [1, 0, 0]])
    assert compute_advantages(inputs, AdvantageConfig(), estimator=lengths).advantages_BT.tolist() == [
        [2, 2, 0],
        [1, 0, 0],
    ]
    with pytest.raises(ValueError, match=r"advantages of shape \(2,\), expected \(2, 3\)"):
        compute_advantages(inputs, AdvantageConfig(), estimator=lambda *_: Estimate(torch.zeros(2)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"estimator": "grpo", "kl_coef": 0.1}, "kl_coef=0.1: grpo ignores it; use kl_loss_coef"),
        ({"estimator": "rloo", "gamma": 0.9}, "gamma=0.9: rloo ignores it"),
        ({"estimator": "reinforce_plus_plus", "lam": 0.9}, "lam=0.9: reinforce_plus_plus ignores it"),
        ({"estimator": "gae"}, "gae needs values_BT"),
        ({"estimator": "grpoo"}, "unknown advantage estimator 'grpoo'; known: cispo, dr_grpo, gae"),
        ({"estimator": "gae", "gamma": 1.5}, "AdvantageConfig.gamma=1.5: must be in"),
        ({"estimator": "gae", "kl_coef": -1.0}, "AdvantageConfig.kl_coef=-1.0: must be >= 0"),
        ({"estimator": "reinforce_plus_plus", "kl_coef": 0.1}, "kl_coef=0.1 needs old_logprobs_BT and ref"),
        ({"opd_kl_coef": 1.0}, "opd_kl_coef=1.0 needs old_logprobs_BT and teacher"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_name_and_number(settings, message):
    with pytest.raises(ValueError, match=message):
        compute_advantages(inputs_of([1, 0], torch.ones(2, 1)), AdvantageConfig(**settings))


def test_shapes_that_disagree_are_named():
    with pytest.raises(ValueError, match=r"values_BT has shape \(2, 3\), expected \(2, 2\)"):
        inputs_of([1, 0], torch.ones(2, 2), values_BT=torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"rewards_B and loss_mask_BT must be \[B\] and \[B, T\]"):
        inputs_of([1, 0, 0], torch.ones(2, 2))


def test_a_non_finite_value_is_counted_and_reaches_the_loss_instead_of_raising_on_one_rank():
    inputs = inputs_of([1, 1], torch.ones(2, 2), values_BT=[[0.0, float("nan")], [0.0, 0.0]])
    output = compute_advantages(inputs, AdvantageConfig("gae"))
    assert values(output.metrics)["non_finite_advantages"] == 1
    assert torch.isfinite(output.advantages_BT[1]).all()


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_ranks_that_split_groups_and_trajectories_agree_with_one_rank(name):
    generator = torch.Generator().manual_seed(1)
    samples, steps = 9, 6
    mask_BT = torch.rand(samples, steps, generator=generator) < 0.6
    columns = {column: torch.randn(samples, steps, generator=generator, dtype=F64) for column in
               ("values_BT", "old_logprobs_BT", "ref_logprobs_BT")}  # fmt: skip
    groups, trajectories = index_of("aababbabc"), index_of([0, 0, 1, 2, 3, 1, 4, 5, 6])
    rewards_B = torch.tensor([1, 1, 0, 2, 0.5, 0, float("nan"), 3, 1], dtype=F64)
    trajectories_B = trajectories.ids_B
    rewards_B[trajectories_B == 1] = 0.0
    groups.ids_B[trajectories_B == 1] = 0

    def of(rows, reduce):
        inputs = AdvantageInputs(rewards_B[rows], mask_BT[rows], groups.rows(rows), trajectories.rows(rows),
                                 **{column: x_BT[rows] for column, x_BT in columns.items()})  # fmt: skip
        return compute_advantages(inputs, AdvantageConfig(name), reduce)

    ranks = [torch.tensor(rows, dtype=torch.long) for rows in ([0, 3, 7], [1, 2, 8], [], [4, 5, 6])]
    parts = simulate(len(ranks), lambda rank, reduce: of(ranks[rank], reduce))
    whole_BT = of(slice(None), LOCAL).advantages_BT
    for rows, part in zip(ranks, parts, strict=True):
        torch.testing.assert_close(part.advantages_BT, whole_BT[rows], rtol=1e-10, atol=1e-12)
    assert sum(part.metrics["zero_std_group_samples"].value for part in parts) == 0
    assert sum(part.metrics["unscored_samples"].value for part in parts) == 1


def test_statistics_over_ranks_without_global_trajectories_are_refused():
    inputs = inputs_of([1], torch.ones(1, 1))
    with pytest.raises(ValueError, match="need a global `trajectories` index"):
        simulate(1, lambda _, reduce: compute_advantages(inputs, AdvantageConfig(), reduce))


def test_the_suffix_sum_crosses_many_chunks():
    x_BT = torch.randn(2, 128 * 130 + 5, dtype=F64, generator=torch.Generator().manual_seed(0))
    expected, running = torch.empty_like(x_BT), torch.zeros(2, dtype=F64)
    for t in reversed(range(x_BT.shape[1])):
        running = x_BT[:, t] + 0.999 * running
        expected[:, t] = running
    torch.testing.assert_close(suffix_sum(x_BT, 0.999), expected, rtol=1e-9, atol=1e-9)
