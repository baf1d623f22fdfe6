"""Working block by block, masking by bits and slopes written by hand change nothing but the speed."""

from dataclasses import replace

import pytest
import torch

from vime_trainer.algorithms import (
    ESTIMATORS,
    AdvantageConfig,
    AdvantageInputs,
    Head,
    PolicyBatch,
    PolicyLossConfig,
    batch_denominators,
    compute_advantages,
    icepop,
    index_of,
    masking,
    mis,
    policy_loss,
    tis,
    values,
)
from vime_trainer.algorithms.losses import TokenLoss
from vime_trainer.algorithms.masking import Mask, where_true, with_slope

F64 = torch.float64
SAMPLES, TOKENS = 7, 5

CONFIGS = {
    "grpo": PolicyLossConfig(),
    "everything": PolicyLossConfig(
        eps_clip_high=0.28, eps_clip_c=1.5, opsm_delta=1e-3, correction=replace(icepop(), renormalize=True),
        kl_loss_coef=0.1, kl_loss_type="k3", unbiased_kl=True, entropy_coef=0.01, reducer="token_mean",
    ),
    "gspo": PolicyLossConfig(objective="gspo", correction=replace(mis("sequence"), batch_normalize=True)),
    "cispo": PolicyLossConfig(objective="cispo", correction=tis()),
    "score centering": PolicyLossConfig(objective="score_centering", importance="truncate"),
}  # fmt: skip


def batch(seed=0):
    g = torch.Generator().manual_seed(seed)

    def normal(*shape, scale=1.0):
        return scale * torch.randn(*shape, generator=g, dtype=F64)

    mask_BT = torch.rand(SAMPLES, TOKENS, generator=g) < 0.6
    mask_BT[2] = False
    old_BT = -1 - normal(SAMPLES, TOKENS).abs()
    head_BTK = torch.log_softmax(normal(SAMPLES, TOKENS, 4), -1)[..., :3]
    return PolicyBatch(
        (old_BT + normal(SAMPLES, TOKENS, scale=0.3)).requires_grad_(), normal(SAMPLES, TOKENS), mask_BT, old_BT,
        old_BT + normal(SAMPLES, TOKENS, scale=0.2), old_BT + normal(SAMPLES, TOKENS, scale=0.4),
        normal(SAMPLES, TOKENS).requires_grad_(), Head(head_BTK + 0.01, head_BTK.clone().requires_grad_()),
    )  # fmt: skip


def outcome(made, config):
    output = policy_loss(made, config, batch_denominators(made, config))
    leaves = (made.logprobs_BT, made.entropy_BT, made.head.logprobs_BTK)
    gradients = torch.autograd.grad(3.0 * output.loss, leaves, allow_unused=True, materialize_grads=True)
    return output.loss.detach(), gradients, values(output.metrics)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("entries", [1, 12, 20])
def test_blocks_of_any_size_give_the_loss_gradient_and_metrics_of_one(name, entries, monkeypatch):
    whole = outcome(batch(), CONFIGS[name])
    monkeypatch.setattr(masking, "BLOCK_ENTRIES", entries)
    loss, gradients, metrics = outcome(batch(), CONFIGS[name])
    torch.testing.assert_close((loss, gradients), whole[:2], rtol=1e-12, atol=1e-14)
    assert metrics == {key: value if value is None else pytest.approx(value) for key, value in whole[2].items()}


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_advantages_by_blocks_equal_those_of_one_block(name, monkeypatch):
    made = batch(1)
    rewards_B = torch.tensor([1.0, 0.0, 2.0, torch.nan, 1.0, 0.5, 0.0])
    inputs = AdvantageInputs(rewards_B, made.loss_mask_BT, index_of("aabbaab"), None, made.old_logprobs_BT,
                             made.ref_logprobs_BT, None, made.entropy_BT)  # fmt: skip
    whole = compute_advantages(inputs, AdvantageConfig(name))
    monkeypatch.setattr(masking, "BLOCK_ENTRIES", 10)
    split = compute_advantages(inputs, AdvantageConfig(name))
    torch.testing.assert_close(split.advantages_BT, whole.advantages_BT, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(split.returns_BT, whole.returns_BT, rtol=1e-12, atol=1e-14)


def test_without_gradient_the_blocks_still_add_up(monkeypatch):
    monkeypatch.setattr(masking, "BLOCK_ENTRIES", 10)
    made, config = batch(), PolicyLossConfig()
    with torch.no_grad():
        quiet = policy_loss(made, config, batch_denominators(made, config)).loss
    assert not quiet.requires_grad
    assert quiet.item() == pytest.approx(outcome(made, config)[0].item())


def test_a_users_objective_keeps_its_own_gradients_also_over_many_blocks(monkeypatch):
    monkeypatch.setattr(masking, "BLOCK_ENTRIES", 10)
    made, config = batch(), PolicyLossConfig(reducer="token_mean")
    scale = torch.tensor(2.0, dtype=F64, requires_grad=True)
    output = policy_loss(made, config, batch_denominators(made, config),
                         objective=lambda terms, config: TokenLoss(scale * terms.log_ratio_BT))  # fmt: skip
    (slope,) = torch.autograd.grad(output.loss, scale)
    assert slope.item() == pytest.approx(output.loss.item() / 2)


def test_asking_for_a_second_derivative_is_refused_not_answered_with_zero():
    made, config = batch(), PolicyLossConfig()
    loss = policy_loss(made, config, batch_denominators(made, config)).loss
    (gradient_BT,) = torch.autograd.grad(loss, made.logprobs_BT, create_graph=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(gradient_BT.sum(), made.logprobs_BT)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_masking_keeps_bits_where_trained_and_clears_anything_elsewhere(dtype):
    x_BT = torch.tensor([[1.5, float("nan"), -0.0, float("inf"), -3.25]], dtype=dtype, requires_grad=True)
    zeroed_BT = Mask(torch.tensor([[1, 0, 1, 0, 1]])).zero(x_BT)
    assert zeroed_BT.tolist() == [[1.5, 0.0, 0.0, 0.0, -3.25]]
    (gradient_BT,) = torch.autograd.grad(zeroed_BT.sum(), x_BT)
    assert gradient_BT.tolist() == [[1, 0, 1, 0, 1]]


def test_masking_is_differentiable_twice_and_keeps_non_finite_numbers_where_trained():
    x_BT = torch.randn(2, 3, dtype=F64, requires_grad=True)
    mask = Mask(torch.tensor([[1, 0, 1], [0, 0, 1]]))
    assert torch.autograd.gradcheck(mask.zero, x_BT)
    assert torch.autograd.gradgradcheck(mask.zero, x_BT)
    assert torch.isnan(mask.zero(torch.full((2, 3), torch.nan))[0, 0])


def test_a_mask_sums_and_counts():
    mask = Mask(torch.tensor([[1, 0, 2], [0, 0, 0]]))
    assert mask.tokens_B.tolist() == [2, 0]
    assert mask.sum(torch.tensor([[1.0, 5.0, 2.0], [1.0, 1.0, 1.0]])).tolist() == [3, 0]
    assert mask.mean(torch.tensor([[1.0, 5.0, 2.0], [1.0, 1.0, 1.0]])).tolist() == [1.5, 0]
    assert mask.sum(torch.tensor([[4.0], [4.0]])).tolist() == [8, 0]


def test_comparisons_are_numbers_and_slopes_are_the_gradient():
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    assert where_true(torch.gt, x, 1.5).tolist() == [0.0, 1.0, 1.0]
    y = with_slope(x.square(), 2 * x, x)
    assert y.tolist() == [1, 4, 9]
    assert torch.autograd.grad(y.sum(), x)[0].tolist() == [2, 4, 6]


def test_a_masked_difference_has_its_gradient_in_the_first_argument_alone():
    x_BT, y_BT = (torch.randn(2, 3, dtype=F64, requires_grad=True) for _ in range(2))
    mask = Mask(torch.tensor([[1, 0, 1], [0, 0, 1]]))
    assert torch.equal(mask.difference(x_BT, y_BT), mask.zero(x_BT - y_BT))
    assert torch.autograd.gradcheck(lambda x: mask.difference(x, y_BT), x_BT)
    assert torch.autograd.grad(mask.difference(x_BT, y_BT).sum(), y_BT, allow_unused=True) == (None,)
    assert mask.difference(torch.full((2, 3), torch.inf), torch.full((2, 3), torch.inf))[0, 1] == 0
