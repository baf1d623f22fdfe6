"""The policy loss against hand-worked values, closed-form gradients, finite differences, and extreme inputs."""

import math
from dataclasses import replace

import pytest
import torch

from vime_trainer.algorithms import (
    Denominators,
    PolicyBatch,
    PolicyLossConfig,
    batch_denominators,
    index_of,
    policy_loss,
    tis,
    values,
)
from vime_trainer.algorithms.losses import TokenLoss

F64 = torch.float64


def one_token(ratio, advantage, config, **columns):
    """Loss and d loss / d log π of a single token with the given π/π_o."""
    logprobs_BT = torch.full((1, 1), math.log(ratio) - 1.0, dtype=F64, requires_grad=True)
    batch = PolicyBatch(logprobs_BT, torch.full((1, 1), advantage, dtype=F64), torch.ones(1, 1),
                        torch.full((1, 1), -1.0, dtype=F64), **columns)  # fmt: skip
    output = policy_loss(batch, config, batch_denominators(batch, config))
    (gradient_BT,) = torch.autograd.grad(output.loss, logprobs_BT)
    return output.loss.item(), gradient_BT.item(), values(output.metrics)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped", "lower"),
    [
        (1.0, 2.0, -2.0, -2.0, 0, 0),  # on policy: −A, gradient −A
        (1.1, 1.0, -1.1, -1.1, 0, 0),
        (1.5, 1.0, -1.28, 0.0, 1, 0),  # above 1 + ε_hi: no more reward, no gradient
        (1.5, -1.0, 1.5, 1.5, 0, 0),  # too likely and bad: full gradient
        (0.5, 1.0, -0.5, -0.5, 0, 0),  # too unlikely and good: full gradient
        (0.5, -1.0, 0.8, 0.0, 1, 0),
        (9.0, -1.0, 3.0, 0.0, 0, 1),  # dual clip: at most −cA; the field counts it apart
    ],
)
def test_the_clip_by_hand_in_every_region(ratio, advantage, loss, gradient, clipped, lower):
    config = PolicyLossConfig(eps_clip=0.2, eps_clip_high=0.28, eps_clip_c=3.0)
    got_loss, got_gradient, metrics = one_token(ratio, advantage, config)
    assert got_loss == pytest.approx(loss)
    assert got_gradient == pytest.approx(gradient)
    assert (metrics["pg_clipfrac"], metrics["pg_clipfrac_lower"]) == (clipped, lower)
    assert metrics["ppo_kl"] == pytest.approx(-math.log(ratio))
    assert metrics["ois"] == pytest.approx(ratio)


def test_without_dual_clip_a_bad_token_has_no_bound():
    assert one_token(9.0, -1.0, PolicyLossConfig())[0] == pytest.approx(9.0)


def test_the_upper_bound_defaults_to_the_lower_one():
    assert one_token(1.5, 1.0, PolicyLossConfig(eps_clip=0.1))[0] == pytest.approx(-1.1)


@pytest.mark.parametrize(
    ("ratio", "eps", "weight", "clipped"),
    [(1.1, 0.2, 1.1, 0), (2.0, 0.2, 1.2, 1), (0.1, 0.2, 0.8, 1), (0.1, 1.0, 0.1, 0), (0.1, 7.0, 0.1, 0)],
)
def test_cispo_bounds_the_weight_and_keeps_the_gradient(ratio, eps, weight, clipped):
    config = PolicyLossConfig(objective="cispo", eps_clip=eps, eps_clip_high=0.2)
    loss, gradient, metrics = one_token(ratio, 2.0, config)
    assert loss == pytest.approx(-weight * 2.0 * (math.log(ratio) - 1.0))
    assert gradient == pytest.approx(-weight * 2.0)  # sg on the weight
    assert metrics["pg_clipfrac"] == clipped


def random_batch(seed=0, samples=4, steps=7, spread=0.3, dtype=F64):
    """Sample 0 is fully masked; masks have holes."""
    generator = torch.Generator().manual_seed(seed)

    def normal(scale=1.0):
        return scale * torch.randn(samples, steps, generator=generator, dtype=F64)

    mask_BT = torch.rand(samples, steps, generator=generator) < 0.7
    mask_BT[0] = False
    old_BT = -1 - normal().abs()
    columns = {
        "logprobs_BT": old_BT + normal(spread), "advantages_BT": normal(), "old_logprobs_BT": old_BT,
        "rollout_logprobs_BT": old_BT + normal(0.2), "ref_logprobs_BT": old_BT + normal(0.5),
        "entropy_BT": normal().abs(),
    }  # fmt: skip
    columns = {name: x_BT.to(dtype) for name, x_BT in columns.items()}
    columns["logprobs_BT"].requires_grad_()
    columns["entropy_BT"].requires_grad_()
    return PolicyBatch(loss_mask_BT=mask_BT, **columns)


def by_hand(batch, config):
    """Token by token in Python floats: loss and d loss / d log π (closed form), for clip, gspo and cispo."""
    mask = batch.loss_mask_BT.tolist()
    lp, old, a, q, r = (x_BT.tolist() for x_BT in (batch.logprobs_BT, batch.old_logprobs_BT, batch.advantages_BT,
                                                   batch.rollout_logprobs_BT, batch.ref_logprobs_BT))  # fmt: skip
    h = batch.entropy_BT.tolist()
    trained = [[t for t, m in enumerate(row) if m] for row in mask]
    tokens, samples = sum(map(len, trained)), sum(1 for row in trained if row)
    low, high = max(1 - config.eps_clip, 0), 1 + (config.eps_clip_high or config.eps_clip)
    loss, gradient = 0.0, [[0.0] * len(row) for row in mask]
    for b, row in enumerate(trained):
        if not row:
            continue
        weight = {"token_mean": 1 / tokens, "sequence_mean": 1 / (samples * len(row)),
                  "fixed_length": 1 / (samples * (config.fixed_length or 1))}[config.reducer]  # fmt: skip
        drift = sum(lp[b][t] - old[b][t] for t in row) / len(row)
        for t in row:
            rho = math.exp(drift if config.objective == "gspo" else lp[b][t] - old[b][t])
            bounded = min(max(rho, low), high)
            if config.objective == "cispo":
                value, slope = -bounded * a[b][t] * lp[b][t], -bounded * a[b][t]
            elif -bounded * a[b][t] > -rho * a[b][t]:
                value, slope = -bounded * a[b][t], 0.0
            else:
                value, slope = -rho * a[b][t], -rho * a[b][t]
            if config.eps_clip_c and a[b][t] < 0 and value > -config.eps_clip_c * a[b][t]:
                value, slope = -config.eps_clip_c * a[b][t], 0.0
            factor = 1.0
            if config.opsm_delta is not None and a[b][t] < 0 and -drift > config.opsm_delta:
                factor = 0.0
            if config.correction is not None:
                w = math.exp(old[b][t] - q[b][t])
                factor *= min(max(w, config.correction.lower), config.correction.high)
            delta = lp[b][t] - r[b][t]
            kl, kl_slope = {
                "k1": (delta, 1.0),
                "k2": (delta**2 / 2, delta),
                "k3": (math.exp(-delta) - 1 + delta, 1 - math.exp(-delta)),
            }[config.kl_loss_type]
            if config.unbiased_kl:
                true_rho = math.exp(lp[b][t] - old[b][t])
                kl, kl_slope = kl * true_rho, (kl_slope + kl) * true_rho
            loss += weight * (factor * value + config.kl_loss_coef * kl - config.entropy_coef * h[b][t])
            gradient[b][t] += weight * config.kl_loss_coef * kl_slope
            for s in row if config.objective == "gspo" else [t]:
                gradient[b][s] += weight * factor * slope / (len(row) if config.objective == "gspo" else 1)
    return loss, torch.tensor(gradient, dtype=F64)


CONFIGS = {
    "grpo": PolicyLossConfig(),
    "dapo": PolicyLossConfig(eps_clip_high=0.28, reducer="token_mean"),
    "dr_grpo": PolicyLossConfig(reducer="fixed_length", fixed_length=16),
    "dual clip": PolicyLossConfig(eps_clip=0.1, eps_clip_c=1.05, reducer="token_mean"),
    "gspo": PolicyLossConfig(objective="gspo", eps_clip=0.03, eps_clip_high=0.04),
    "gspo over tokens": PolicyLossConfig(objective="gspo", eps_clip=0.03, reducer="token_mean"),
    "cispo": PolicyLossConfig(objective="cispo", eps_clip=1.0, eps_clip_high=0.1, reducer="token_mean"),
    "opsm": PolicyLossConfig(opsm_delta=1e-4),
    "tis": PolicyLossConfig(correction=tis(high=1.1, low=0.8)),
    "k1": PolicyLossConfig(kl_loss_coef=0.3),
    "k2 unbiased": PolicyLossConfig(kl_loss_coef=0.3, kl_loss_type="k2", unbiased_kl=True),
    "k3 unbiased, entropy": PolicyLossConfig(
        kl_loss_coef=0.3, kl_loss_type="k3", unbiased_kl=True, entropy_coef=0.01, reducer="token_mean"
    ),
    "gspo, opsm, tis, k3": PolicyLossConfig(
        objective="gspo", eps_clip=0.1, opsm_delta=1e-4, correction=tis(), kl_loss_coef=0.1, kl_loss_type="k3"
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradient_agree_with_the_closed_form(name, seed):
    batch, config = random_batch(seed), CONFIGS[name]
    output = policy_loss(batch, config, batch_denominators(batch, config))
    (gradient_BT,) = torch.autograd.grad(output.loss, batch.logprobs_BT)
    loss, expected_BT = by_hand(batch, config)
    assert output.loss.item() == pytest.approx(loss, rel=1e-10)
    torch.testing.assert_close(gradient_BT, expected_BT, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "cispo"])
def test_the_gradient_agrees_with_finite_differences(name):
    batch, config = random_batch(5), CONFIGS[name]
    counts = batch_denominators(batch, config)

    def loss(logprobs_BT, entropy_BT):
        return policy_loss(replace(batch, logprobs_BT=logprobs_BT, entropy_BT=entropy_BT), config, counts).loss

    assert torch.autograd.gradcheck(loss, (batch.logprobs_BT, batch.entropy_BT), eps=1e-7, atol=1e-6)


@pytest.mark.parametrize("name", CONFIGS)
def test_float32_agrees_with_float64(name):
    config = CONFIGS[name]
    outputs = []
    for dtype in (torch.float32, F64):
        batch = random_batch(2, dtype=dtype)
        output = policy_loss(batch, config, batch_denominators(batch, config))
        outputs.append((output.loss, torch.autograd.grad(output.loss, batch.logprobs_BT)[0].double()))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-5, atol=1e-6)


def test_entropy_is_a_bonus_and_is_reported_with_its_own_sign():
    batch = random_batch()
    config = PolicyLossConfig(entropy_coef=0.5)
    counts = batch_denominators(batch, config)
    with_bonus = policy_loss(batch, config, counts)
    without = policy_loss(batch, PolicyLossConfig(), counts)
    entropy = values(with_bonus.metrics)["entropy_loss"]
    assert entropy > 0
    assert (with_bonus.loss - without.loss).item() == pytest.approx(-0.5 * entropy)


def test_the_first_step_needs_no_old_logprobs_and_equals_an_explicit_ratio_of_one():
    batch = random_batch()
    config = PolicyLossConfig(correction=tis())
    counts = batch_denominators(batch, config)
    explicit = replace(batch, old_logprobs_BT=batch.logprobs_BT.detach())
    implicit = replace(batch, old_logprobs_BT=None)
    a, b = (policy_loss(x, config, counts).loss for x in (explicit, implicit))
    assert torch.equal(a, b)
    assert torch.equal(*(torch.autograd.grad(x, batch.logprobs_BT)[0] for x in (a, b)))


def test_opsm_drops_only_bad_tokens_of_a_drifted_sample():
    old_BT = torch.zeros(2, 2, dtype=F64)
    logprobs_BT = torch.tensor([[-0.1, -0.1], [0.1, 0.1]], dtype=F64, requires_grad=True)
    batch = PolicyBatch(logprobs_BT, torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=F64), torch.ones(2, 2), old_BT)
    config = PolicyLossConfig(opsm_delta=1e-4, reducer="token_mean")
    output = policy_loss(batch, config, batch_denominators(batch, config))
    (gradient_BT,) = torch.autograd.grad(output.loss, logprobs_BT)
    assert (gradient_BT == 0).tolist() == [[False, True], [False, False]]
    assert values(output.metrics)["opsm_clipfrac"] == 0.25  # and its token stays in the denominator of 4


def test_a_custom_objective_and_a_custom_reducer_take_part():
    def squared(terms, config):
        return TokenLoss(terms.log_ratio_BT.square())

    def tenth(counts: Denominators, length):
        return torch.full_like(counts.trajectory_tokens_B, 0.1)

    batch, config = random_batch(), PolicyLossConfig(kl_loss_coef=1.0, kl_loss_type="k2")
    counts = batch_denominators(batch, config)
    output = policy_loss(batch, config, counts, objective=squared, reducer=tenth)
    gap_BT = (batch.logprobs_BT - batch.old_logprobs_BT) * batch.loss_mask_BT
    assert values(output.metrics)["pg_loss"] == pytest.approx(0.1 * gap_BT.square().sum().item())
    plain = values(policy_loss(batch, config, counts).metrics)
    assert values(output.metrics)["kl_loss"] == plain["kl_loss"]  # a custom reducer weighs the objective alone
    assert output.loss.item() == pytest.approx(values(output.metrics)["pg_loss"] + plain["kl_loss"])


def test_the_reference_is_measured_also_when_it_does_not_pull():
    batch, config = random_batch(), PolicyLossConfig(kl_loss_type="k3")
    output = policy_loss(batch, config, batch_denominators(batch, config))
    assert values(output.metrics)["kl_loss"] > 0
    assert values(output.metrics)["loss"] == values(output.metrics)["pg_loss"]


def test_the_mismatch_metric_is_a_mean_of_per_sample_means_even_with_token_mean():
    mask_BT = torch.tensor([[1, 0, 0], [1, 1, 1]])
    old_BT = torch.zeros(2, 3, requires_grad=True)
    rollout_BT = torch.tensor([[0.4, 9.0, 9.0], [-0.1, 0.1, 0.1]])
    batch = PolicyBatch(old_BT, torch.ones(2, 3), mask_BT, None, rollout_BT)
    for reducer in ("token_mean", "sequence_mean"):
        config = PolicyLossConfig(reducer=reducer)
        metrics = values(policy_loss(batch, config, batch_denominators(batch, config)).metrics)
        assert metrics["train_rollout_logprob_abs_diff"] == pytest.approx((0.4 + 0.1) / 2)


@pytest.mark.parametrize("reducer", ["token_mean", "sequence_mean", "fixed_length"])
def test_forked_siblings_share_the_weight_of_one_trajectory(reducer):
    """A trajectory cut into two samples trains like the uncut one."""
    config = PolicyLossConfig(reducer=reducer, fixed_length=10 if reducer == "fixed_length" else None)

    def loss(rows, trajectories):
        width = max(map(len, rows))
        mask_BT = torch.tensor([[t < len(row) for t in range(width)] for row in rows])
        a_BT = torch.tensor([[*row, *[0.0] * (width - len(row))] for row in rows], dtype=F64)
        batch = PolicyBatch(torch.zeros_like(a_BT), a_BT, mask_BT)
        return policy_loss(batch, config, batch_denominators(batch, config, index_of(trajectories))).loss.item()

    whole = loss([[1.0, 2.0, 3.0], [5.0]], ["t", "u"])
    assert loss([[1.0], [2.0, 3.0], [5.0]], ["t", "t", "u"]) == pytest.approx(whole)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"eps_clip": 0.0}, "PolicyLossConfig.eps_clip=0.0: must be > 0"),
        ({"eps_clip": 1.0}, "PolicyLossConfig.eps_clip=1.0: must be < 1"),
        ({"eps_clip_c": 1.0}, "PolicyLossConfig.eps_clip_c=1.0: must be > 1"),
        ({"objective": "cispo", "eps_clip_c": 3.0}, "eps_clip_c=3.0: objective cispo has no dual clip"),
        ({"kl_loss_coef": -0.1}, "kl_loss_coef=-0.1: must be >= 0"),
        ({"kl_loss_type": "k4"}, "kl_loss_type='k4': known: k1, k2, k3"),
        ({"reducer": "fixed_length"}, "fixed_length=None: must be given with the fixed_length reducer"),
        ({"fixed_length": 8}, "fixed_length=8: must be given with the fixed_length reducer, and only with it"),
        ({"objective": "reinforce", "correction": tis()}, "objective reinforce weighs by `importance` itself"),
        ({"importance": "mask"}, "importance='mask': objective clip ignores it"),
        ({"kl_loss_coef": 0.1}, "kl_loss_coef=0.1 needs ref_logprobs_BT"),
        ({"entropy_coef": 0.1}, "entropy_coef=0.1 needs entropy_BT"),
        ({"correction": tis()}, "the correction needs rollout_logprobs_BT"),
        ({"objective": "clipp"}, "unknown objective 'clipp'; known: cispo, clip, gspo"),
        ({"reducer": "mean"}, "unknown reducer 'mean'; known: fixed_length, sequence_mean, token_mean"),
        ({"objective": "score_centering"}, "objective score_centering needs head"),
        ({"objective": "reinforce", "importance": "identity"}, "importance='identity' needs rollout_logprobs_BT"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_name_and_number(settings, message):
    def attempt():
        batch = PolicyBatch(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1))
        config = PolicyLossConfig(**settings)
        policy_loss(batch, config, batch_denominators(batch, config))

    with pytest.raises(ValueError, match=message):
        attempt()


def test_shapes_that_disagree_are_named():
    with pytest.raises(ValueError, match=r"old_logprobs_BT has shape \(2, 4\), expected \(2, 3\)"):
        PolicyBatch(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 4))


@pytest.mark.parametrize("objective", ["clip", "gspo", "cispo"])
@pytest.mark.parametrize("gap", [-80.0, -30.0, 30.0, 80.0])
def test_extreme_but_representable_ratios_stay_finite_where_the_formula_is(objective, gap):
    logprobs_BT = torch.full((1, 2), gap - 100.0, requires_grad=True)
    batch = PolicyBatch(logprobs_BT, torch.ones(1, 2), torch.ones(1, 2), torch.full((1, 2), -100.0),
                        torch.full((1, 2), -1.0))  # fmt: skip
    config = PolicyLossConfig(objective=objective, correction=tis())
    output = policy_loss(batch, config, batch_denominators(batch, config))
    (gradient_BT,) = torch.autograd.grad(output.loss, logprobs_BT)
    assert torch.isfinite(output.loss)
    assert torch.isfinite(gradient_BT).all()
