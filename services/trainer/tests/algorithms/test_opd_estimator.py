"""On-policy distillation without a reward: the advantage is the teacher's alone."""

import pytest
import torch

from vime_trainer.algorithms import AdvantageConfig, AdvantageInputs, compute_advantages, index_of, values

OLD_BT = torch.tensor([[-1.0, -2.0], [-0.5, -3.0]])
TEACHER_BT = torch.tensor([[-1.5, -1.0], [-0.5, float("nan")]])


def inputs(rewards):
    mask_BT = torch.tensor([[True, True], [True, False]])
    return AdvantageInputs(torch.tensor(rewards), mask_BT, index_of("gg"), old_logprobs_BT=OLD_BT,
                           teacher_logprobs_BT=TEACHER_BT)  # fmt: skip


def test_tokens_that_the_teacher_finds_likelier_gain_whatever_the_reward():
    for rewards in ([1.0, 0.0], [0.0, 5.0]):
        made = compute_advantages(inputs(rewards), AdvantageConfig("opd", opd_kl_coef=2.0))
        assert made.advantages_BT.tolist() == [[-1.0, 2.0], [0.0, 0.0]]  # -2 · (log π_o − log π_T), 0 where masked
        # Mean over samples of the mean over tokens of log π_o − log π_T: ((0.5 − 1) / 2 + 0) / 2.
        assert values(made.metrics)["opd_reverse_kl"] == pytest.approx(-0.125)


def test_an_unscored_sample_teaches_nothing():
    made = compute_advantages(inputs([float("nan"), 1.0]), AdvantageConfig("opd", opd_kl_coef=1.0))
    assert made.loss_mask_BT.tolist() == [[False, False], [True, False]]
