"""Value, SFT, distillation, DPO and score centering: by hand, by closed form, by finite differences."""

import math

import pytest
import torch

from vime_trainer.algorithms import (
    DPOConfig,
    Head,
    PolicyBatch,
    PolicyLossConfig,
    PreferenceSide,
    ValueBatch,
    ValueLossConfig,
    batch_denominators,
    denominators,
    dpo_loss,
    head_distillation_loss,
    message_mask,
    pair_count,
    policy_loss,
    sampled_distillation_loss,
    sft_loss,
    tis,
    value_loss,
    values,
)

F64 = torch.float64


def rand(*shape, seed=0):
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


# ---- value


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "gradient", "clipped"),
    [
        (1.1, 1.0, 2.0, 0.81, -1.8, 0),  # inside ±0.2: plain (V − G)², no ½
        (1.5, 1.0, 2.0, 0.64, 0.0, 1),  # moved too far towards G: held at 1.2, no gradient
        (0.5, 1.0, 2.0, 2.25, -3.0, 0),  # moved away: the larger, plain error
        (1.5, 1.0, 1.0, 0.25, 1.0, 0),
    ],
)
def test_the_value_loss_by_hand_in_every_region(value, old, target, loss, gradient, clipped):
    v_BT = torch.tensor([[value]], dtype=F64, requires_grad=True)
    batch = ValueBatch(v_BT, torch.tensor([[old]], dtype=F64), torch.tensor([[target]], dtype=F64), torch.ones(1, 1))
    output = value_loss(batch, ValueLossConfig(), denominators(batch.loss_mask_BT))
    assert output.loss.item() == pytest.approx(loss)
    assert torch.autograd.grad(output.loss, v_BT)[0].item() == pytest.approx(gradient)
    assert values(output.metrics)["value_clipfrac"] == clipped


@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("reducer", ["token_mean", "sequence_mean"])
def test_the_value_loss_against_a_walk_and_finite_differences(clip, reducer):
    mask_BT = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0]])
    v_BT, old_BT, g_BT = rand(3, 4, seed=1).requires_grad_(), rand(3, 4, seed=2), rand(3, 4, seed=3)
    counts = denominators(mask_BT)

    def loss(v_BT):
        config = ValueLossConfig(value_clip=clip, reducer=reducer)
        return value_loss(ValueBatch(v_BT, old_BT, g_BT, mask_BT), config, counts).loss

    total = 0.0
    for b, t in mask_BT.nonzero().tolist():
        v, old, g = v_BT[b, t].item(), old_BT[b, t].item(), g_BT[b, t].item()
        near = v if clip is None else old + min(max(v - old, -clip), clip)
        weight = 1 / 4 if reducer == "token_mean" else 1 / (2 * mask_BT[b].sum().item())
        total += weight * max((v - g) ** 2, (near - g) ** 2)
    assert loss(v_BT).item() == pytest.approx(total)
    assert torch.autograd.gradcheck(loss, v_BT, eps=1e-7, atol=1e-6)


def test_a_value_within_the_bound_is_not_clipped_by_rounding():
    """V_old + (V − V_old) is not V in float32, and was counted as clipped where it came out worse."""
    generator = torch.Generator().manual_seed(0)
    old_BT = torch.randn(8, 200, generator=generator)
    v_BT = old_BT + 0.1 * (torch.rand(old_BT.shape, generator=generator) - 0.5)
    g_BT, mask_BT = torch.randn(old_BT.shape, generator=generator), torch.ones(old_BT.shape)
    output = value_loss(ValueBatch(v_BT, old_BT, g_BT, mask_BT), ValueLossConfig(), denominators(mask_BT))
    assert values(output.metrics)["value_clipfrac"] == 0


def test_masked_values_may_be_anything():
    v_BT = torch.tensor([[1.0, math.nan]], requires_grad=True)
    other_BT = torch.tensor([[0.0, math.inf]])
    mask_BT = torch.tensor([[1, 0]])
    output = value_loss(ValueBatch(v_BT, other_BT, other_BT, mask_BT), ValueLossConfig(), denominators(mask_BT))
    assert output.loss.item() == 1.0
    assert torch.autograd.grad(output.loss, v_BT)[0].tolist() == [[2.0, 0.0]]


# ---- SFT


def test_sft_is_the_mean_negative_logprob_of_trained_tokens():
    logprobs_BT = torch.tensor([[-1.0, -2.0, -9.0], [-3.0, -9.0, -9.0]], dtype=F64, requires_grad=True)
    mask_BT = torch.tensor([[1, 1, 0], [1, 0, 0]])
    output = sft_loss(logprobs_BT, mask_BT, denominators(mask_BT))
    assert output.loss.item() == pytest.approx(2.0)
    assert torch.autograd.grad(output.loss, logprobs_BT)[0].tolist() == [
        pytest.approx([-1 / 3, -1 / 3, 0]),
        pytest.approx([-1 / 3, 0, 0]),
    ]
    assert sft_loss(logprobs_BT, mask_BT, denominators(mask_BT), "sequence_mean").loss.item() == pytest.approx(2.25)


def test_a_conversation_trains_only_the_chosen_messages():
    # system, user, generation prefix, assistant body, tool, prefix, silenced assistant body
    mask_T = message_mask([2, 1, 1, 3, 2, 1, 2], [False, False, False, True, False, False, False])
    assert mask_T.tolist() == [False] * 4 + [True] * 3 + [False] * 5
    with pytest.raises(ValueError, match="2 message lengths, 1 flags"):
        message_mask([1, 2], [True])


# ---- distillation


def test_sampled_distillation_has_the_gradient_of_the_reverse_kl_in_expectation():
    logits_V = rand(5, seed=4).requires_grad_()
    teacher_V = torch.log_softmax(rand(5, seed=5), -1)
    log_p_V = torch.log_softmax(logits_V, -1)
    exact = (log_p_V.exp() * (log_p_V - teacher_V)).sum()
    (expected,) = torch.autograd.grad(exact, logits_V, retain_graph=True)
    ones_BT = torch.ones(1, 1)
    total = torch.zeros(5, dtype=F64)
    for v in range(5):
        output = sampled_distillation_loss(
            log_p_V[v].reshape(1, 1), teacher_V[v].reshape(1, 1), ones_BT, denominators(ones_BT)
        )
        total += log_p_V[v].exp().detach() * torch.autograd.grad(output.loss, logits_V, retain_graph=True)[0]
        assert values(output.metrics)["opd_reverse_kl"] == pytest.approx((log_p_V[v] - teacher_V[v]).item())
    torch.testing.assert_close(total, expected)


def test_head_distillation_over_the_whole_vocabulary_is_the_forward_kl():
    logprobs_BTK = torch.log_softmax(rand(2, 3, 6, seed=6), -1).requires_grad_()
    teacher_BTK = torch.log_softmax(rand(2, 3, 6, seed=7), -1)
    mask_BT = torch.tensor([[1, 1, 0], [1, 0, 0]])
    counts = denominators(mask_BT)
    kl_BT = torch.nn.functional.kl_div(logprobs_BTK, teacher_BTK, log_target=True, reduction="none").sum(-1)
    output = head_distillation_loss(logprobs_BTK, teacher_BTK, mask_BT, counts)
    torch.testing.assert_close(output.loss, (kl_BT * mask_BT).sum() / 3)
    shorter_BTK = teacher_BTK.clone()
    shorter_BTK[..., 4:] = -torch.inf  # a position with fewer than K candidates
    output = head_distillation_loss(logprobs_BTK, shorter_BTK, mask_BT, counts)
    assert torch.isfinite(torch.autograd.grad(output.loss, logprobs_BTK)[0]).all()


# ---- DPO


def sides(seed=0, pairs=3, steps=4):
    chosen_mask, rejected_mask = torch.ones(pairs, steps), torch.ones(pairs, steps + 1)
    chosen_mask[0, 2:] = 0
    return [
        PreferenceSide(rand(*mask.shape, seed=seed + i).requires_grad_(), rand(*mask.shape, seed=seed + i + 9), mask)
        for i, mask in enumerate((chosen_mask, rejected_mask))
    ]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_dpo_against_plain_python_and_finite_differences(smoothing):
    chosen, rejected = sides()
    config = DPOConfig(beta=0.3, label_smoothing=smoothing)
    pairs = pair_count(chosen, rejected)
    margins = []
    for b in range(3):
        ratios = [
            sum((side.logprobs_BT[b] - side.ref_logprobs_BT[b])[side.loss_mask_BT[b]].tolist())
            for side in (chosen, rejected)
        ]
        margins.append(0.3 * (ratios[0] - ratios[1]))
    expected = sum(
        (1 - smoothing) * math.log1p(math.exp(-m)) + smoothing * math.log1p(math.exp(m)) for m in margins
    ) / 3  # fmt: skip
    output = dpo_loss(chosen, rejected, config, pairs)
    assert output.loss.item() == pytest.approx(expected)
    assert values(output.metrics)["dpo_accuracy"] == pytest.approx(sum(m > 0 for m in margins) / 3)
    assert values(output.metrics)["dpo_margin"] == pytest.approx(sum(margins) / 3)

    def loss(a_BT, b_BT):
        new = [PreferenceSide(x_BT, side.ref_logprobs_BT, side.loss_mask_BT) for x_BT, side in
               ((a_BT, chosen), (b_BT, rejected))]  # fmt: skip
        return dpo_loss(*new, config, pairs).loss

    assert torch.autograd.gradcheck(loss, (chosen.logprobs_BT, rejected.logprobs_BT))


def test_dpo_at_the_reference_is_log_two_and_pulls_the_sides_apart():
    zeros_BT = torch.zeros(1, 1, dtype=F64)
    chosen, rejected = (PreferenceSide(zeros_BT.clone().requires_grad_(), zeros_BT, torch.ones(1, 1)) for _ in range(2))
    output = dpo_loss(chosen, rejected, DPOConfig(beta=0.1), pair_count(chosen, rejected))
    assert output.loss.item() == pytest.approx(math.log(2))
    gradients = torch.autograd.grad(output.loss, (chosen.logprobs_BT, rejected.logprobs_BT))
    assert [gradient.item() for gradient in gradients] == pytest.approx([-0.05, 0.05])  # ∓β σ(0)


def test_a_pair_with_an_empty_side_is_left_out_of_loss_and_denominator():
    chosen, rejected = sides()
    chosen.loss_mask_BT[1] = False
    pairs = pair_count(chosen, rejected)
    assert pairs.item() == 2
    whole = dpo_loss(chosen, rejected, DPOConfig(), pairs)
    parts = [dpo_loss(*(PreferenceSide(side.logprobs_BT[b:b + 1], side.ref_logprobs_BT[b:b + 1],
                                       side.loss_mask_BT[b:b + 1]) for side in (chosen, rejected)), DPOConfig(), pairs)
             for b in range(3)]  # fmt: skip
    assert sum(part.loss.item() for part in parts) == pytest.approx(whole.loss.item())
    assert parts[1].loss.item() == 0


# ---- reinforce and score centering


def head_loss(log_p_V, log_q_V, sampled, head, config, advantage=1.0):
    """Loss of one token when the engine sampled `sampled` and reports the tokens in `head`."""
    batch = PolicyBatch(
        log_p_V[sampled].reshape(1, 1), torch.full((1, 1), advantage, dtype=F64), torch.ones(1, 1), None,
        log_q_V[sampled].reshape(1, 1), head=Head(log_q_V[head].reshape(1, 1, -1), log_p_V[head].reshape(1, 1, -1)),
    )  # fmt: skip
    return policy_loss(batch, config, batch_denominators(batch, config))


F = {
    "one": lambda x: 1.0,
    "identity": lambda x: x,
    "truncate": lambda x: min(max(x, 0.5), 1.5),
    "mask": lambda x: x if 0.5 <= x <= 1.5 else 0.0,
}


@pytest.mark.parametrize("importance", F)
def test_score_centering_has_mean_zero_gradient_when_the_head_is_the_vocabulary(importance):
    """E_q[w ∇log p_a − ∇C] = 0: a constant advantage then moves nothing on average."""
    logits_V = rand(6, seed=8).requires_grad_()
    log_p_V, log_q_V = torch.log_softmax(logits_V, -1), torch.log_softmax(rand(6, seed=8) + 0.5 * rand(6, seed=9), -1)
    config = PolicyLossConfig(objective="score_centering", importance=importance, importance_low=0.5,
                              importance_high=1.5)  # fmt: skip
    total = torch.zeros(6, dtype=F64)
    for v in range(6):
        loss = head_loss(log_p_V, log_q_V, v, list(range(6)), config).loss
        total += log_q_V[v].exp() * torch.autograd.grad(loss, logits_V, retain_graph=True)[0]
    torch.testing.assert_close(total, torch.zeros_like(total), atol=1e-12, rtol=0)


@pytest.mark.parametrize("importance", F)
def test_score_centering_with_a_short_head_by_hand(importance):
    log_p_V, log_q_V = torch.log_softmax(rand(6, seed=1), -1), torch.log_softmax(rand(6, seed=2), -1)
    f, head = F[importance], [0, 2]
    p, q = log_p_V.exp().tolist(), log_q_V.exp().tolist()
    r = (1 - q[0] - q[2]) / (1 - p[0] - p[2])
    centre = sum((q[v] * f(p[v] / q[v]) - r * f(1 / r) * p[v]) * math.log(p[v]) for v in head)
    config = PolicyLossConfig(objective="score_centering", importance=importance, importance_low=0.5,
                              importance_high=1.5)  # fmt: skip
    output = head_loss(log_p_V, log_q_V, 1, head, config, advantage=2.0)
    assert output.loss.item() == pytest.approx(-2.0 * (f(p[1] / q[1]) * math.log(p[1]) - centre))
    metrics = values(output.metrics)
    assert metrics["sc_correction"] == pytest.approx(centre)
    assert metrics["sc_sampler_head_mass"] == pytest.approx(q[0] + q[2])
    assert metrics["sc_train_head_mass"] == pytest.approx(p[0] + p[2])
    assert metrics["sc_importance_weight"] == pytest.approx(f(p[1] / q[1]))


def test_an_absent_head_entry_changes_nothing():
    log_p_V, log_q_V = torch.log_softmax(rand(6, seed=1), -1), torch.log_softmax(rand(6, seed=2), -1)
    config = PolicyLossConfig(objective="score_centering")
    short = head_loss(log_p_V, log_q_V, 1, [0, 2], config).loss
    padded_q_V, padded_p_V = log_q_V.clone(), log_p_V.clone().requires_grad_()
    padded_q_V[5] = -torch.inf
    padded = head_loss(padded_p_V, padded_q_V, 1, [0, 2, 5], config).loss
    assert padded.item() == pytest.approx(short.item())
    assert torch.isfinite(torch.autograd.grad(padded, padded_p_V)[0]).all()


def test_reinforce_by_hand():
    logprobs_BT = torch.tensor([[-1.0, -2.0]], dtype=F64, requires_grad=True)
    rollout_BT = torch.tensor([[-1.0 - math.log(3.0), -2.0 + math.log(2.0)]], dtype=F64)
    batch = PolicyBatch(logprobs_BT, torch.tensor([[2.0, 1.0]], dtype=F64), torch.ones(1, 2), None, rollout_BT)
    config = PolicyLossConfig(objective="reinforce", importance="truncate", importance_high=2.0)
    output = policy_loss(batch, config, batch_denominators(batch, config))
    assert output.loss.item() == pytest.approx((2.0 * 2.0 * 1.0 + 0.5 * 1.0 * 2.0) / 2)  # w = 2 (of 3) and 0.5
    assert torch.autograd.grad(output.loss, logprobs_BT)[0].tolist() == [pytest.approx([-2.0, -0.25])]


def test_reinforce_equals_the_clip_loss_on_policy_up_to_its_value():
    logprobs_BT = rand(2, 3, seed=5).requires_grad_()
    batch = PolicyBatch(logprobs_BT, rand(2, 3, seed=6), torch.ones(2, 3), None, rand(2, 3, seed=7))
    gradients = []
    for config in (PolicyLossConfig(objective="reinforce"), PolicyLossConfig(), PolicyLossConfig(correction=tis())):
        loss = policy_loss(batch, config, batch_denominators(batch, config)).loss
        gradients.append(torch.autograd.grad(loss, logprobs_BT)[0])
    torch.testing.assert_close(gradients[0], gradients[1])
    assert not torch.allclose(gradients[1], gradients[2])
