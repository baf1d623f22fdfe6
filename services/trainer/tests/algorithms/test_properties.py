"""What must not matter does not: order of samples, the split into micro-batches and ranks, padding, masked content."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vime_trainer.algorithms import (
    AdvantageConfig,
    AdvantageInputs,
    PolicyBatch,
    PolicyLossConfig,
    batch_denominators,
    compute_advantages,
    icepop,
    index_of,
    merge,
    mis,
    pack,
    policy_loss,
    tis,
    unpack,
    values,
)
from vime_trainer.algorithms.ranks import simulate

F64 = torch.float64
LOSSES = {
    "dapo": PolicyLossConfig(eps_clip_high=0.28, reducer="token_mean", correction=tis()),
    "grpo": PolicyLossConfig(kl_loss_coef=0.1, kl_loss_type="k3", opsm_delta=1e-4),
    "dr_grpo": PolicyLossConfig(reducer="fixed_length", fixed_length=9),
    "gspo": PolicyLossConfig(objective="gspo", correction=mis("geometric", "mask", high=1.2)),
    "cispo": PolicyLossConfig(objective="cispo", correction=replace(icepop(0.8, 1.3), renormalize=True)),
    "normalised": PolicyLossConfig(correction=replace(mis("sequence"), batch_normalize=True), reducer="token_mean"),
}
ADVANTAGES = ["grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae"]


class Case:
    """A random batch: uneven groups, forked trajectories, masks with holes, empty and unscored samples."""

    def __init__(self, seed: int, samples: int, steps: int) -> None:
        g = torch.Generator().manual_seed(seed)
        self.samples, self.steps = samples, steps
        self.trajectories = index_of(torch.randint(0, max(samples * 3 // 4, 1), (samples,), generator=g).tolist())
        groups_J = torch.randint(0, 3, (self.trajectories.size,), generator=g)
        rewards_J = torch.randint(0, 3, (self.trajectories.size,), generator=g).double()
        rewards_J[torch.rand(self.trajectories.size, generator=g) < 0.1] = torch.nan
        self.groups = index_of(groups_J[self.trajectories.ids_B].tolist(), range(3))
        self.rewards_B = rewards_J[self.trajectories.ids_B]
        self.mask_BT = torch.rand(samples, steps, generator=g) < 0.6
        self.mask_BT[torch.rand(samples, generator=g) < 0.2] = False
        names = ("logprobs_BT", "old_logprobs_BT", "rollout_logprobs_BT", "ref_logprobs_BT", "values_BT")
        self.columns = {name: 0.3 * torch.randn(samples, steps, generator=g, dtype=F64) - 1 for name in names}

    def inputs(self, rows):
        names = ("old_logprobs_BT", "ref_logprobs_BT", "values_BT")
        return AdvantageInputs(
            self.rewards_B[rows], self.mask_BT[rows], self.groups.rows(rows), self.trajectories.rows(rows),
            **{name: self.columns[name][rows] for name in names},
        )  # fmt: skip

    def loss(self, estimator, config, ranks):
        """Loss, d loss / d logprob in the original order, and metrics, for micro-batches given per rank."""
        leaf_BT = self.columns["logprobs_BT"].clone().requires_grad_()

        def rank(rank, reduce):
            order = torch.tensor([b for micro in ranks[rank] for b in micro], dtype=torch.long)
            advantages = compute_advantages(self.inputs(order), AdvantageConfig(estimator), reduce)
            names = ("old_logprobs_BT", "rollout_logprobs_BT", "ref_logprobs_BT")
            batch = PolicyBatch(leaf_BT[order], advantages.advantages_BT, advantages.loss_mask_BT,
                                **{name: self.columns[name][order] for name in names})  # fmt: skip
            counts = batch_denominators(batch, config, self.trajectories.rows(order), reduce)
            starts = [sum(map(len, ranks[rank][:i])) for i in range(len(ranks[rank]) + 1)]
            rows = [slice(*bounds) for bounds in itertools.pairwise(starts)] or [slice(0, 0)]
            outputs = [policy_loss(batch.rows(micro), config, counts.rows(micro)) for micro in rows]
            return sum(output.loss for output in outputs), merge(output.metrics for output in outputs)

        losses, metrics = zip(*simulate(len(ranks), rank), strict=True)
        (gradient_BT,) = torch.autograd.grad(sum(losses), leaf_BT)
        summed = unpack(sum(pack(each) for each in metrics), metrics[0])
        return sum(losses).detach(), gradient_BT, values(summed)


cases = st.builds(Case, st.integers(0, 10_000), st.integers(1, 9), st.integers(0, 8))
same = {"rtol": 1e-9, "atol": 1e-12}


@given(case=cases, loss=st.sampled_from(sorted(LOSSES)), estimator=st.sampled_from(ADVANTAGES), data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_split_into_ranks_and_micro_batches_gives_the_same_loss_gradient_and_metrics(case, loss, estimator, data):
    whole = case.loss(estimator, LOSSES[loss], [[list(range(case.samples))]])
    order = data.draw(st.permutations(range(case.samples)))
    cuts = sorted(data.draw(st.lists(st.integers(0, case.samples), max_size=5)))
    micros = [order[a:b] for a, b in zip([0, *cuts], [*cuts, case.samples], strict=True)]
    count = data.draw(st.integers(1, 3))
    split = case.loss(estimator, LOSSES[loss], [micros[rank::count] for rank in range(count)])
    torch.testing.assert_close(split[:2], whole[:2], **same)
    for name, value in whole[2].items():
        assert split[2][name] == (None if value is None else pytest.approx(value, rel=1e-9, abs=1e-12)), name


@given(case=cases, loss=st.sampled_from(sorted(LOSSES)), estimator=st.sampled_from(ADVANTAGES), extra=st.integers(1, 5))
@settings(max_examples=30, deadline=None)
def test_padding_and_what_stands_in_it_change_nothing(case, loss, estimator, extra):
    all_rows = [[list(range(case.samples))]]
    expected = case.loss(estimator, LOSSES[loss], all_rows)
    for name, x_BT in case.columns.items():
        filler = torch.full((case.samples, extra), float("nan"), dtype=F64)
        case.columns[name] = torch.cat([x_BT.masked_fill(~case.mask_BT, float("inf")), filler], 1)
    case.mask_BT = torch.cat([case.mask_BT, torch.zeros(case.samples, extra, dtype=torch.bool)], 1)
    loss_value, gradient_BT, metrics = case.loss(estimator, LOSSES[loss], all_rows)
    torch.testing.assert_close((loss_value, gradient_BT[:, : case.steps]), expected[:2], **same)
    assert gradient_BT[:, case.steps :].eq(0).all()
    assert metrics == {name: value if value is None else pytest.approx(value) for name, value in expected[2].items()}


@given(case=cases, estimator=st.sampled_from(ADVANTAGES), data=st.data())
@settings(max_examples=30, deadline=None)
def test_advantages_follow_their_samples_through_any_permutation(case, estimator, data):
    order = torch.tensor(data.draw(st.permutations(range(case.samples))), dtype=torch.long)
    whole = compute_advantages(case.inputs(slice(None)), AdvantageConfig(estimator))
    shuffled = compute_advantages(case.inputs(order), AdvantageConfig(estimator))
    torch.testing.assert_close(shuffled.advantages_BT, whole.advantages_BT[order], **same)


@given(rewards=st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=12), shift=st.floats(-10, 10))
@settings(max_examples=100, deadline=None)
def test_grpo_advantages_have_mean_zero_and_do_not_see_a_common_shift(rewards, shift):
    def advantages(values_B):
        inputs = AdvantageInputs(torch.tensor(values_B, dtype=F64), torch.ones(len(values_B), 1),
                                 index_of(["g"] * len(values_B)), old_logprobs_BT=torch.zeros(len(values_B), 1, dtype=F64))  # fmt: skip  # noqa: E501
        return compute_advantages(inputs, AdvantageConfig("dr_grpo")).advantages_BT[:, 0]

    plain_B = advantages(rewards)
    scale = max(map(abs, rewards)) + 1
    assert plain_B.sum().abs() <= 1e-9 * scale * len(rewards)
    assert (advantages([reward + shift for reward in rewards]) - plain_B).abs().max() <= 1e-9 * scale
