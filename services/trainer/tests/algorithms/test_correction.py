"""TIS, IcePop, MIS, rejection, veto: weights by hand, no gradient, and what happens to the denominators."""

import math
from dataclasses import replace

import pytest
import torch

from vime_trainer.algorithms import (
    CorrectionConfig,
    PolicyBatch,
    PolicyLossConfig,
    Rejection,
    batch_denominators,
    icepop,
    merge,
    mis,
    policy_loss,
    tis,
    values,
)
from vime_trainer.algorithms.losses import correct
from vime_trainer.algorithms.masking import Mask
from vime_trainer.algorithms.ranks import simulate

F64 = torch.float64


def weights(ratios, config, mask=None):
    """w of each token for the given π_o/q."""
    log_BT = torch.tensor(ratios, dtype=F64).log()
    mask_BT = torch.ones_like(log_BT).bool() if mask is None else torch.tensor(mask).bool()
    mask = Mask(mask_BT)
    return mask.zero(correct(mask.zero(log_BT), mask, config).weight_BT.expand(log_BT.shape)).tolist()


def test_tis_clamps_the_token_ratio():
    assert weights([[0.1, 1.0, 1.9, 5.0]], tis(high=2.0, low=0.25)) == [pytest.approx([0.25, 1.0, 1.9, 2.0])]


def test_icepop_zeroes_the_ratio_outside_its_band():
    assert weights([[0.4, 0.6, 1.9, 2.1]], icepop(0.5, 2.0)) == [pytest.approx([0, 0.6, 1.9, 0])]


@pytest.mark.parametrize(
    ("level", "weight"), [("token", [2.0, 0.5, 4.0]), ("sequence", [4.0] * 3), ("geometric", [4 ** (1 / 3)] * 3)]
)
def test_levels_aggregate_over_unmasked_tokens(level, weight):
    config = CorrectionConfig(level=level, mode="truncate", high=100.0)
    got = weights([[2.0, 0.5, 4.0, 77.0]], config, [[1, 1, 1, 0]])
    assert got == [pytest.approx([*weight, 0.0])]


@pytest.mark.parametrize(
    ("mode", "weight"), [("truncate", [0.25, 1.0, 3.0]), ("clip", [1 / 3, 1.0, 3.0]), ("mask", [0.0, 1.0, 0.0])]
)
def test_modes_differ_outside_the_band_and_the_low_bound_is_one_over_high(mode, weight):
    assert weights([[0.25, 1.0, 4.0]], CorrectionConfig(mode=mode, high=3.0)) == [pytest.approx(weight)]


def test_rejection_has_its_own_level_and_bounds():
    config = CorrectionConfig(mode="truncate", high=2.0, rejection=Rejection("sequence", high=1.5))
    assert weights([[2.0, 0.5], [2.0, 2.0]], config) == [pytest.approx([2.0, 0.5]), [0.0, 0.0]]


def test_one_catastrophic_token_vetoes_its_sample_only_when_unmasked():
    config = mis(veto=1e-4)
    assert weights([[1.0, 1e-5], [1.0, 1.0]], config) == [[0.0, 0.0], pytest.approx([1.0, 1.0])]
    assert weights([[1.0, 1e-5]], config, [[1, 0]]) == [pytest.approx([1.0, 0.0])]


@pytest.mark.parametrize("gap", [-1e4, -200.0, 200.0, 1e4])
@pytest.mark.parametrize("config", [tis(), icepop(), mis("sequence"), mis("geometric", "clip")])
def test_extreme_ratios_give_finite_weights_within_the_bounds(gap, config):
    made = correct(torch.full((1, 3), gap), Mask(torch.ones(1, 3)), config)
    assert torch.isfinite(made.weight_BT).all()
    assert made.weight_BT.max() <= config.high


def batch_of(ratios, advantages=None, mask=None):
    """log π = log π_o; π_o/q as given."""
    log_BT = torch.tensor(ratios, dtype=F64).log()
    logprobs_BT = torch.full_like(log_BT, -1.0).requires_grad_()
    a_BT = torch.ones_like(log_BT) if advantages is None else torch.tensor(advantages, dtype=F64)
    mask_BT = torch.ones_like(log_BT) if mask is None else torch.tensor(mask)
    return PolicyBatch(logprobs_BT, a_BT, mask_BT, logprobs_BT.detach(), -1.0 - log_BT)


def loss_of(batch, correction, reducer="token_mean"):
    config = PolicyLossConfig(correction=correction, reducer=reducer)
    return policy_loss(batch, config, batch_denominators(batch, config))


def test_the_weight_multiplies_loss_and_gradient_and_has_no_gradient_itself():
    batch = batch_of([[0.5, 1.5]])
    output = loss_of(batch, tis())
    assert output.loss.item() == pytest.approx(-(0.5 + 1.5) / 2)
    assert torch.autograd.grad(output.loss, batch.logprobs_BT)[0].tolist() == [pytest.approx([-0.25, -0.75])]


def test_without_old_logprobs_the_weight_still_carries_no_gradient():
    batch = replace(batch_of([[0.5, 1.5]]), old_logprobs_BT=None)
    output = loss_of(batch, tis())
    assert torch.autograd.grad(output.loss, batch.logprobs_BT)[0].tolist() == [pytest.approx([-0.25, -0.75])]


@pytest.mark.parametrize("reducer", ["token_mean", "sequence_mean"])
def test_rejected_tokens_stay_in_the_denominator_unless_renormalised(reducer):
    batch = batch_of([[1.0, 3.0], [1.0, 1.0]])
    assert loss_of(batch, icepop(), reducer).loss.item() == pytest.approx(-0.75)
    assert loss_of(batch, replace(icepop(), renormalize=True), reducer).loss.item() == pytest.approx(-1.0)


def test_a_batch_that_is_rejected_whole_is_empty_when_renormalised_and_zero_otherwise():
    batch = batch_of([[9.0, 9.0]])
    for renormalize in (False, True):
        config = PolicyLossConfig(correction=replace(icepop(), renormalize=renormalize))
        counts = batch_denominators(batch, config)
        output = policy_loss(batch, config, counts)
        assert output.loss.item() == 0
        assert counts.empty == renormalize
        assert values(output.metrics)["mis_rejected_fraction"] == 1.0


def test_batch_normalisation_makes_the_mean_weight_one_over_all_ranks():
    batch = batch_of([[0.5, 1.0], [1.5, 1.9]])
    config = PolicyLossConfig(correction=CorrectionConfig(mode="truncate", batch_normalize=True), reducer="token_mean")

    def rank(rank, reduce):
        mine = batch.rows(slice(rank, rank + 1))
        return policy_loss(mine, config, batch_denominators(mine, config, reduce=reduce)).loss

    losses = simulate(2, rank)
    assert sum(losses).item() == pytest.approx(-1.0)
    assert losses[0].item() == pytest.approx(-(0.5 + 1.0) / 1.225 / 4)


@pytest.mark.parametrize("change", [{"renormalize": True}, {"batch_normalize": True}])
def test_a_correction_of_the_whole_batch_is_refused_without_old_logprobs(change):
    batch = replace(batch_of([[1.0]]), old_logprobs_BT=None)
    with pytest.raises(ValueError, match="need old_logprobs_BT and rollout_logprobs_BT of the batch"):
        loss_of(batch, replace(tis(), **change))


def test_the_metrics_of_the_correction_by_hand():
    batch = batch_of([[0.1, 1.0, 3.0, 1e-6], [1.0, 1.0, 9.0, 9.0]], mask=[[1, 1, 1, 1], [1, 1, 0, 0]])
    metrics = values(loss_of(batch, mis("token", "mask", high=2.0)).metrics)
    ratios = [0.1, 1.0, 3.0, math.exp(math.log(1e-6)), 1.0, 1.0]
    assert metrics["tis"] == pytest.approx(sum(ratios) / 6)
    assert metrics["tis_abs"] == pytest.approx(sum(abs(ratio - 1) for ratio in ratios) / 6)
    assert metrics["tis_clipfrac"] == pytest.approx(4 / 6)  # the whole first sample is vetoed
    assert metrics["mis_rejected_fraction"] == pytest.approx(4 / 6)
    assert metrics["mis_mask_fraction_low"] == pytest.approx(2 / 6)
    assert metrics["mis_mask_fraction_high"] == pytest.approx(1 / 6)
    assert metrics["mis_catastrophic_token_fraction"] == pytest.approx(1 / 6)
    assert metrics["mis_catastrophic_seq_fraction"] == pytest.approx(1 / 2)
    assert metrics["mis_ratio_mean_after_mis"] == pytest.approx(2 / 6)


def test_sequence_level_metrics_count_every_token_of_a_sample():
    batch = batch_of([[2.0, 2.0, 2.0], [1.0, 1.0, 1.0]], mask=[[1, 1, 1], [1, 0, 0]])
    metrics = values(loss_of(batch, mis("sequence", "truncate", high=4.0)).metrics)
    assert metrics["tis"] == pytest.approx((3 * 8.0 + 1.0) / 4)
    assert metrics["mis_truncate_fraction"] == pytest.approx(3 / 4)
    assert metrics["mis_ratio_mean_after_mis"] == pytest.approx((3 * 4.0 + 1.0) / 4)


def test_metrics_have_the_same_names_whatever_the_data_so_that_ranks_can_add_them():
    config = PolicyLossConfig(correction=mis("geometric", "mask"))
    full, empty = batch_of([[1.0, 2.0]]), batch_of([[1.0, 2.0]], mask=[[0, 0]])
    outputs = [policy_loss(batch, config, batch_denominators(full, config)) for batch in (full, empty)]
    assert outputs[0].metrics.keys() == outputs[1].metrics.keys()
    merged = values(merge(output.metrics for output in outputs))
    assert merged["tis"] == values(outputs[0].metrics)["tis"]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: tis(high=0.0), r"CorrectionConfig.high=0.0: must be in \[1, e\^20\)"),
        (lambda: tis(high=1.0, low=1.0), "CorrectionConfig.low=1.0: must be below high=1; None means 1/high=1"),
        (lambda: tis(low=1.5), r"CorrectionConfig.low=1.5: must be in \[0, 1\]: 1 is no mismatch"),
        (lambda: mis(veto=2.0), r"CorrectionConfig.veto=2.0: must be in \(0, 1\)"),
        (lambda: mis(level="word"), "CorrectionConfig.level='word': token, sequence or geometric"),
        (lambda: Rejection(high=-1.0), "Rejection.high=-1.0"),
    ],
)
def test_settings_that_cannot_work_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()
