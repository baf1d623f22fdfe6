"""Mismatch metrics by hand, and the algebra of metrics."""

import math

import pytest
import torch

from vime_trainer.algorithms import Metric, merge, pack, pad_rows, unpack, values
from vime_trainer.algorithms.masking import Mask
from vime_trainer.algorithms.metrics import Averages
from vime_trainer.algorithms.mismatch import mismatch_by_class, mismatch_metrics

F64 = torch.float64
TRAIN = torch.tensor([[-1.0, -2.0, 77.0], [-0.5, math.nan, math.inf]], dtype=F64)
ROLLOUT = torch.tensor([[-1.2, -1.5, -3.0], [-0.5, 0.0, 0.0]], dtype=F64)
MASK = torch.tensor([[1, 1, 0], [1, 0, 0]])


def test_mismatch_metrics_by_hand():
    metrics = values(mismatch_metrics(TRAIN, ROLLOUT, MASK))
    deltas = [[0.2, -0.5], [0.0]]

    def mean_of_means(f):
        return sum(sum(map(f, row)) / len(row) for row in deltas) / 2

    assert metrics["train_rollout_logprob_abs_diff"] == pytest.approx(mean_of_means(abs))
    assert metrics["mismatch_kl"] == pytest.approx(mean_of_means(lambda d: math.exp(d) - 1 - d))
    assert metrics["mis_k3_kl"] == metrics["mismatch_kl"]
    assert metrics["mis_kl"] == pytest.approx(mean_of_means(lambda d: -d))
    assert metrics["mis_chi2_token"] == pytest.approx(mean_of_means(lambda d: math.exp(2 * d) - 1))
    assert metrics["mis_chi2_seq"] == pytest.approx((math.exp(-0.6) - 1) / 2)
    assert metrics["mis_training_ppl"] == pytest.approx((math.exp(1.5) + math.exp(0.5)) / 2)
    assert metrics["mis_rollout_ppl"] == pytest.approx((math.exp(1.35) + math.exp(0.5)) / 2)
    assert metrics["mis_training_log_ppl"] == pytest.approx(1.0)
    assert metrics["mis_log_ppl_diff"] == pytest.approx(0.15 / 2)
    assert metrics["mis_ppl_ratio"] == pytest.approx((math.exp(0.15) + 1) / 2)


def test_token_averages_weigh_every_token_but_the_headline_stays_a_mean_of_means():
    metrics = values(mismatch_metrics(TRAIN, ROLLOUT, MASK, over_tokens=True))
    assert metrics["mis_kl"] == pytest.approx((-0.2 + 0.5 + 0.0) / 3)
    assert metrics["train_rollout_logprob_abs_diff"] == pytest.approx(0.175)


def test_identical_logprobs_give_exactly_no_mismatch():
    metrics = values(mismatch_metrics(ROLLOUT, ROLLOUT, MASK))
    for name in ("train_rollout_logprob_abs_diff", "mismatch_kl", "mis_kl", "mis_chi2_token", "mis_chi2_seq"):
        assert metrics[name] == 0


def test_classes_split_the_mismatch_and_an_absent_class_has_no_value():
    classes = {"_same_version": torch.tensor([True, False]), "_older": torch.tensor([False, False])}
    metrics = values(mismatch_by_class(TRAIN, ROLLOUT, MASK, classes))
    assert metrics["train_rollout_logprob_abs_diff_same_version"] == pytest.approx(0.35)
    assert metrics["mismatch_kl_older"] is None


def test_metrics_add_over_micro_batches_and_survive_packing():
    one, two = torch.tensor(1.0, dtype=F64), torch.tensor(2.0, dtype=F64)
    parts = [{"loss": Metric(one), "kl": Metric(one, two)}, {"loss": Metric(two), "kl": Metric(two, one)}]
    merged = merge(parts)
    assert values(merged) == {"loss": 3.0, "kl": 1.0}
    packed_2M = pack(parts[0]) + pack(parts[1])
    assert values(unpack(packed_2M, merged)) == {"loss": 3.0, "kl": 1.0}
    assert pack({}).shape == (2, 0)
    with pytest.raises(ValueError, match="a sum and a mean do not add"):
        Metric(one) + Metric(one, one)


def test_ragged_columns_are_padded_and_their_lengths_checked():
    padded = pad_rows(logprobs_BT=[torch.tensor([-1.0, -2.0]), torch.tensor([])], loss_mask_BT=[[1, 1], []])
    assert padded["logprobs_BT"].tolist() == [[-1, -2], [0, 0]]
    assert padded["loss_mask_BT"].tolist() == [[1, 1], [0, 0]]
    with pytest.raises(ValueError, match="sample 1: loss_mask_BT has 2 tokens, logprobs_BT has 1"):
        pad_rows(logprobs_BT=[[-1.0], [-1.0]], loss_mask_BT=[[1], [1, 1]])
    with pytest.raises(ValueError, match="loss_mask_BT has 1 samples, logprobs_BT has 2"):
        pad_rows(logprobs_BT=[[-1.0], [-1.0]], loss_mask_BT=[[1]])


@pytest.mark.parametrize("steps", [16, 2048, 32768])
def test_a_mean_of_ratios_keeps_its_digits_beside_padding(steps):
    """float32 sums of thousands of ones lose deviations of 5e-5."""
    mask_BT = torch.arange(steps)[None] < 8
    averages = Averages(Mask(mask_BT), over_tokens=True)
    averages.add("ois", torch.where(mask_BT, 1 + 5e-5, 1.0).float(), masked=1.0)
    assert averages.metrics()["ois"].value - 1 == pytest.approx(5e-5, rel=1e-2)
