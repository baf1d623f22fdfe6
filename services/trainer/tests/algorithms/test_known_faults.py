"""The known faults of the field: the scenario that shows each and the right value (K numbers: docs/algorithms.md)."""

import math

import pytest
import torch

from vime_trainer.algorithms import (
    AdvantageConfig,
    AdvantageInputs,
    PolicyBatch,
    PolicyLossConfig,
    batch_denominators,
    compute_advantages,
    index_of,
    kl_estimate,
    merge,
    policy_loss,
    values,
)
from vime_trainer.algorithms.ranks import simulate


def on_policy_batch(lengths, advantages, dtype=torch.float32):
    """Ratio 1: current = old = rollout."""
    width = max(max(lengths), 1)
    mask_BT = torch.arange(width)[None] < torch.tensor(lengths)[:, None]
    logprobs_BT = torch.full(mask_BT.shape, -0.7, dtype=dtype, requires_grad=True)
    advantages_BT = torch.tensor(advantages, dtype=dtype)[:, None].expand(mask_BT.shape)
    return PolicyBatch(logprobs_BT, advantages_BT, mask_BT, logprobs_BT.detach(), logprobs_BT.detach())


def loss_over(batch, reducer, ranks):
    """Loss and gradient when `ranks` lists, for every rank, its micro-batches as lists of samples."""
    config = PolicyLossConfig(reducer=reducer)

    def rank_loss(rank, reduce):
        mine = [sample for micro in ranks[rank] for sample in micro]
        counts = batch_denominators(batch.rows(torch.tensor(mine, dtype=torch.long)), config, reduce=reduce)
        total, start = torch.zeros((), dtype=torch.float64), 0
        for micro in ranks[rank]:
            rows = slice(start, start + len(micro))
            start += len(micro)
            micro_batch = batch.rows(torch.tensor(micro, dtype=torch.long))
            total = total + policy_loss(micro_batch, config, counts.rows(rows)).loss
        return total

    loss = sum(simulate(len(ranks), rank_loss))
    (gradient_BT,) = torch.autograd.grad(loss, batch.logprobs_BT)
    return loss.item(), gradient_BT


@pytest.mark.parametrize(
    ("lengths", "advantages", "splits", "token_mean", "sequence_mean"),
    [
        ([2, 8], [1.0, -0.5], [[[[0, 1]]], [[[0], [1]]], [[[0]], [[1]]]], 0.2, -0.25),
        ([1, 3, 6], [2.0, -1.0, 0.5],
         [[[[0, 1, 2]]], [[[0, 1], [2]]], [[[2]], [[0], [1]]], [[[0, 1, 2]], []]], -0.2, -0.5),
    ],
)  # fmt: skip
def test_k01_any_split_gives_the_loss_and_gradient_of_the_global_batch(
    lengths, advantages, splits, token_mean, sequence_mean
):
    for reducer, expected in (("token_mean", token_mean), ("sequence_mean", sequence_mean)):
        batch = on_policy_batch(lengths, advantages)
        outcomes = [loss_over(batch, reducer, split) for split in splits]
        for loss, gradient_BT in outcomes:
            assert loss == pytest.approx(expected, rel=1e-5)
            assert gradient_BT.norm().item() == pytest.approx(outcomes[0][1].norm().item(), rel=1e-5)
            torch.testing.assert_close(gradient_BT, outcomes[0][1])


def test_k03_the_logprob_is_that_of_the_tempered_distribution():
    stored = torch.log_softmax(torch.tensor([2.0, 0.0, 0.0]) / 0.5, -1)[0]
    assert stored.item() == pytest.approx(-0.03598, abs=1e-5)
    raw = torch.log_softmax(torch.tensor([2.0, 0.0, 0.0]), -1)[0]
    # what a mix of the two would look like in the metrics: ratio 1.2258, and 0.2036 of difference
    batch = PolicyBatch(
        stored.reshape(1, 1).requires_grad_(), torch.ones(1, 1), torch.ones(1, 1), None, raw.reshape(1, 1)
    )
    output = policy_loss(batch, PolicyLossConfig(), batch_denominators(batch, PolicyLossConfig()))
    assert values(output.metrics)["train_rollout_logprob_abs_diff"] == pytest.approx(math.log(1.2258), abs=1e-4)


def advantages_of(rewards, groups, estimator="grpo", **settings):
    inputs = AdvantageInputs(
        torch.tensor(rewards, dtype=torch.float64), torch.ones(len(rewards), 1), index_of(groups),
        old_logprobs_BT=torch.zeros(len(rewards), 1, dtype=torch.float64),
    )  # fmt: skip
    return compute_advantages(inputs, AdvantageConfig(estimator, **settings))


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo"])
@pytest.mark.parametrize("reward", [0.7, 0.35, 1 / 3, 1e30])
def test_k05_a_group_of_equal_rewards_has_advantage_exactly_zero(estimator, reward):
    output = advantages_of([reward] * 8, ["g"] * 8, estimator)
    assert output.advantages_BT.eq(0).all()
    assert values(output.metrics)["zero_std_group_samples"] == 8


def test_k05_one_winner_in_four_with_sample_std():
    advantages_B = advantages_of([1, 0, 0, 0], "gggg").advantages_BT[:, 0]
    assert advantages_B.tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline"])
def test_k05_a_group_of_one_has_advantage_zero_and_is_counted(estimator):
    output = advantages_of([3.0], ["alone"], estimator)
    assert output.advantages_BT.tolist() == [[0.0]]
    assert values(output.metrics)["singleton_group_samples"] == 1


def test_k05_leave_one_out_does_not_divide_by_a_residue():
    advantages_B = advantages_of([0.7] * 7 + [0.0], "g" * 8, "rloo").advantages_BT[:, 0]
    assert advantages_B[7].item() == pytest.approx(-0.7, abs=1e-12)
    assert advantages_B[:7].tolist() == pytest.approx([0.1] * 7, abs=1e-12)


@pytest.mark.parametrize(("kind", "value"), [("k1", 0.5), ("k2", 0.125), ("k3", 0.106531), ("low_var_kl", 0.106531)])
def test_k12_the_kl_term_has_the_right_value_sign_and_a_gradient(kind, value):
    logprobs_BT = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
    ref_BT = torch.tensor([[-1.5]], dtype=torch.float64)
    assert kl_estimate(logprobs_BT, ref_BT, kind).item() == pytest.approx(value, abs=1e-6)

    batch = PolicyBatch(logprobs_BT, torch.zeros(1, 1), torch.ones(1, 1), ref_logprobs_BT=ref_BT)
    config = PolicyLossConfig(kl_loss_coef=1.0, kl_loss_type=kind)
    output = policy_loss(batch, config, batch_denominators(batch, config))
    assert output.loss.item() == pytest.approx(value, abs=1e-6)
    (gradient,) = torch.autograd.grad(output.loss, logprobs_BT)
    expected = {"k1": 1.0, "k2": 0.5, "k3": 0.393469, "low_var_kl": 0.393469}[kind]
    assert gradient.item() == pytest.approx(expected, abs=1e-6)  # positive: descent lowers log π towards the reference


def test_k29_a_ratio_that_overflows_makes_the_loss_non_finite_so_that_the_step_is_skipped():
    logprobs_BT = torch.tensor([[0.0]], requires_grad=True)
    batch = PolicyBatch(logprobs_BT, -torch.ones(1, 1), torch.ones(1, 1), torch.tensor([[-200.0]]))
    output = policy_loss(batch, PolicyLossConfig(), batch_denominators(batch, PolicyLossConfig()))
    assert not torch.isfinite(output.loss)


def test_k30_statistics_come_before_the_truncation_filter_and_groups_go_by_id():
    output = advantages_of([1, 0, 0, 0, 1, 1, 0, 0], "aaaabbbb")
    kept = torch.tensor([True, True, True, False, True, True, True, True])
    survivors = output.advantages_BT[kept, 0].tolist()
    assert survivors == pytest.approx([1.5, -0.5, -0.5, 0.866, 0.866, -0.866, -0.866], abs=1e-3)


def test_k30_interleaved_and_uneven_groups_are_normalised_by_id():
    output = advantages_of([1, 1, 0, 1, 0, 0, 0], "abababa")
    alone_a = advantages_of([1, 0, 0, 0], "aaaa").advantages_BT[:, 0]
    alone_b = advantages_of([1, 1, 0], "bbb").advantages_BT[:, 0]
    assert torch.equal(output.advantages_BT[0::2, 0], alone_a)
    assert torch.equal(output.advantages_BT[1::2, 0], alone_b)


@pytest.mark.parametrize("empty_row", ["no tokens", "all masked, with garbage"])
@pytest.mark.parametrize("reducer", ["token_mean", "sequence_mean"])
def test_k32_a_sample_without_trained_tokens_neither_counts_nor_poisons(empty_row, reducer):
    mask_BT = torch.tensor([[0, 0, 0, 0], [1, 1, 1, 1]])
    garbage = 0.0 if empty_row == "no tokens" else float("nan")
    logprobs_BT = torch.tensor([[garbage] * 4, [-1.0] * 4], requires_grad=True)
    old_BT = torch.tensor([[garbage - 1000] * 4, [-1.0] * 4])
    batch = PolicyBatch(logprobs_BT, torch.ones(2, 4), mask_BT, old_BT, old_BT, torch.full((2, 4), -torch.inf))
    batch.ref_logprobs_BT[1] = -1.0
    config = PolicyLossConfig(reducer=reducer, kl_loss_coef=0.1, kl_loss_type="k3")
    output = policy_loss(batch, config, batch_denominators(batch, config))
    assert output.loss.item() == pytest.approx(-1.0)  # denominator 4 tokens, or 1 sample with tokens
    (gradient_BT,) = torch.autograd.grad(output.loss, logprobs_BT)
    assert torch.isfinite(gradient_BT).all()
    assert gradient_BT[0].eq(0).all()


@pytest.mark.parametrize("width", [0, 3])
@pytest.mark.parametrize("reducer", ["token_mean", "sequence_mean"])
def test_k32_a_batch_without_any_trained_token_gives_zero_and_says_empty(width, reducer):
    logprobs_BT = torch.full((1, width), -1.0, requires_grad=True)
    batch = PolicyBatch(logprobs_BT, torch.ones(1, width), torch.zeros(1, width), logprobs_BT.detach())
    config = PolicyLossConfig(reducer=reducer)
    counts = batch_denominators(batch, config)
    assert counts.empty
    output = policy_loss(batch, config, counts)
    output.loss.backward()
    assert output.loss.item() == 0
    assert logprobs_BT.grad.eq(0).all()


def test_k32_a_rank_that_holds_only_an_empty_sample_meets_the_others_and_adds_nothing():
    batch = on_policy_batch([0, 4], [1.0, 1.0])
    config = PolicyLossConfig(reducer="token_mean")

    def rank(rank, reduce):
        mine = batch.rows(torch.tensor([rank]))
        return policy_loss(mine, config, batch_denominators(mine, config, reduce=reduce))

    outputs = simulate(2, rank)
    assert [output.loss.item() for output in outputs] == [0.0, -1.0]
    assert values(merge(output.metrics for output in outputs))["loss"] == -1.0
