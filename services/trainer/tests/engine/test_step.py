"""One training batch: global denominators, skipped steps, mini-batches, schedules."""

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from vime_trainer.algorithms.index import Index
from vime_trainer.algorithms.losses import CorrectionConfig, LossOutput, PolicyBatch, PolicyLossConfig
from vime_trainer.algorithms.ranks import Reduce
from vime_trainer.algorithms.reducers import Denominators
from vime_trainer.engine.config import EngineConfig, OptimizerConfig
from vime_trainer.engine.engine import Engine
from vime_trainer.engine.errors import EngineError
from vime_trainer.engine.objective import PolicyLoss
from vime_trainer.engine.sample import Sample, per_token
from vime_trainer.engine.sft import Demonstration

pytestmark = pytest.mark.engine
Maker = Callable[..., Sample]
TOKEN_MEAN = PolicyLoss(PolicyLossConfig(reducer="token_mean"))
SEQUENCE_MEAN = PolicyLoss(PolicyLossConfig(reducer="sequence_mean"))


def make(path: Path, **settings: Any) -> Engine:
    optimizer = settings.pop("optimizer", OptimizerConfig(lr=1e-2))
    return Engine.from_hf(path, EngineConfig(optimizer=optimizer, **settings))


def snapshot(engine: Engine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.export()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    ("lengths", "advantages", "token_mean", "sequence_mean"),
    [((2, 8), (1.0, -0.5), 0.2, -0.25), ((1, 3, 6), (2.0, -1.0, 0.5), -0.2, -0.5)],
)
@pytest.mark.parametrize("budget", [1, 20, 4096])
def test_the_loss_divides_by_the_global_batch_for_every_split(
    moe_dir: Path,
    sample_maker: Maker,
    lengths: tuple[int, ...],
    advantages: tuple[float, ...],
    token_mean: float,
    sequence_mean: float,
    budget: int,
) -> None:
    # Old logprobs are the trainer's own, so the ratio is 1 and the loss is -mean(advantage).
    pairs = enumerate(zip(lengths, advantages, strict=True))
    samples = [sample_maker(4, n, seed=i, advantages=per_token(a, n)) for i, (n, a) in pairs]
    one = make(moe_dir, micro_batch_tokens=budget).train_step(samples, TOKEN_MEAN)
    assert one.loss == pytest.approx(token_mean, abs=1e-6)
    assert one.metrics["loss"] == pytest.approx(token_mean, abs=1e-6)
    assert one.trained == [(f"g{i}", i) for i in range(len(lengths))]
    whole = make(moe_dir).train_step(samples, TOKEN_MEAN)
    assert one.grad_norm == pytest.approx(whole.grad_norm, rel=1e-5)
    assert make(moe_dir, micro_batch_tokens=budget).train_step(samples, SEQUENCE_MEAN).loss == pytest.approx(
        sequence_mean, abs=1e-6
    )


def test_masked_tokens_neither_train_nor_count(moe_dir: Path, sample_maker: Maker) -> None:
    mask = torch.tensor([1, 1, 1, 0, 0], dtype=torch.bool)
    advantages = torch.tensor([1.0, 2.0, 3.0, 1e6, -1e6])
    result = make(moe_dir).train_step([sample_maker(4, 5, loss_mask=mask, advantages=advantages)], TOKEN_MEAN)
    assert result.loss == pytest.approx(-2.0, abs=1e-6)


def test_forked_samples_share_the_weight_of_one_trajectory(moe_dir: Path, sample_maker: Maker) -> None:
    fork = [sample_maker(4, 5, seed=i, trajectory_id="t", advantages=per_token(1.0, 5)) for i in (0, 1)]
    alone = sample_maker(4, 3, seed=2, trajectory_id="u", advantages=per_token(-2.0, 3))
    assert make(moe_dir).train_step([*fork, alone], SEQUENCE_MEAN).loss == pytest.approx(0.5, abs=1e-6)


def test_the_temperature_of_the_sampling_is_that_of_the_logprobs(moe_dir: Path, sample_maker: Maker) -> None:
    engine = make(moe_dir)
    for temperature in (0.5, 0.7, 1.0, 1.5):
        sample = sample_maker(4, 5, temperature=temperature)
        ids = torch.cat([sample.prompt_token_ids, sample.response_token_ids])[None]
        scored = engine.score([sample], replay=False)[0]
        for t, token in enumerate(sample.response_token_ids):
            logits = engine.next_token_logits(ids, torch.tensor([4 + t]))[0]
            expected = torch.log_softmax(logits / temperature, -1)[token]
            assert scored[t] == pytest.approx(float(expected), abs=1e-5)


def test_temperature_scaled_logprob_of_a_known_distribution() -> None:
    from vime_trainer.engine.logprobs import token_entropy, token_logprobs

    logits = torch.tensor([[[2.0, 0.0, 0.0]]])
    half = torch.tensor([0.5])
    assert token_logprobs(logits, torch.tensor([[0]]), half).item() == pytest.approx(-0.03598, abs=1e-5)
    p = torch.softmax(logits[0, 0] / 0.5, -1)
    assert token_entropy(logits, half).item() == pytest.approx(float(-(p * p.log()).sum()), abs=1e-6)
    assert logits.tolist() == [[[2.0, 0.0, 0.0]]]  # the cross entropy works in place, but not on the caller's logits


@pytest.mark.parametrize("fault", ["ratio overflow", "infinite gradient"])
def test_k29_a_step_that_is_not_finite_changes_nothing_and_the_next_one_trains(
    moe_dir: Path, sample_maker: Maker, fault: str
) -> None:
    engine = make(moe_dir, optimizer=OptimizerConfig(lr=1e-2, warmup_steps=4))
    good = [sample_maker(4, n, seed=n) for n in (3, 5)]
    engine.train_step(good, TOKEN_MEAN)
    weights, moments, lr = snapshot(engine), optimizer_state(engine), engine.lr
    if fault == "ratio overflow":
        bad = [good[0], sample_maker(4, 5, seed=9, advantages=per_token(-1.0, 5), old_logprobs=per_token(-1e4, 5))]
        bad[0] = sample_maker(4, 3, old_logprobs=per_token(-3.0, 3))
        result = engine.train_step(bad, TOKEN_MEAN)
        assert not math.isfinite(result.loss)
    else:
        parameter = engine._module.embedding.word_embeddings.weight
        hook = parameter.register_hook(lambda grad: torch.full_like(grad, float("inf")))
        result = engine.train_step(good, TOKEN_MEAN)
        hook.remove()
        assert not math.isfinite(result.grad_norm)
    assert result.skipped
    assert (result.steps_taken, result.steps_skipped) == (0, 1)
    assert same(weights, snapshot(engine))
    assert same(moments, optimizer_state(engine))
    assert (engine.optimizer_steps, engine.lr) == (1, lr)
    after = engine.train_step(good, TOKEN_MEAN)
    assert not after.skipped
    assert after.lr == lr
    assert not same(weights, snapshot(engine))


def optimizer_state(engine: Engine) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    for c, chained in enumerate(engine._updater.optimizer.chained_optimizers):
        for p, state in enumerate(chained.optimizer.state.values()):
            out |= {f"{c}.{p}.{key}": value.clone() for key, value in state.items()}
    return out


def test_a_batch_without_a_token_to_train_on_is_skipped(moe_dir: Path, sample_maker: Maker) -> None:
    engine = make(moe_dir)
    engine.train_step([sample_maker(4, 5)], TOKEN_MEAN)
    before = snapshot(engine)
    for samples in ([], [sample_maker(4, 5, loss_mask=torch.zeros(5, dtype=torch.bool))]):
        result = engine.train_step(samples, TOKEN_MEAN)
        assert result.skipped
        assert result.loss == 0
    assert same(before, snapshot(engine))


def test_mini_batches_are_optimizer_steps_and_share_the_old_logprobs(moe_dir: Path, sample_maker: Maker) -> None:
    samples = [sample_maker(4, 5, seed=i) for i in range(5)]
    engine = make(moe_dir)
    expected = engine.score(samples)
    seen: list[torch.Tensor] = []

    class Watching(PolicyLoss):
        def share(self, batch: PolicyBatch, counts: Denominators) -> LossOutput:
            assert batch.old_logprobs_BT is not None
            seen.append(batch.old_logprobs_BT)
            return super().share(batch, counts)

    result = engine.train_step(samples, Watching(TOKEN_MEAN.config), mini_batches=2)
    assert (result.steps_taken, engine.optimizer_steps) == (2, 2)
    assert len(result.trained) == len(result.logprobs) == 5
    assert [len(x) for x in seen] == [3, 2]
    old = torch.cat(seen)  # each sample's, in the order of the mini-batches
    assert all(float((old - row).abs().amax(-1).min()) < 1e-5 for row in expected)
    # The second mini-batch meets changed weights.
    moved = sorted(float((a - b).abs().max()) for a, b in zip(expected, result.logprobs, strict=True))
    assert max(moved[:3]) <= 1e-5
    assert min(moved[3:]) > 1e-3


def test_more_mini_batches_than_samples_skip_the_empty_ones(moe_dir: Path, sample_maker: Maker) -> None:
    result = make(moe_dir).train_step([sample_maker(4, 5)], TOKEN_MEAN, mini_batches=3)
    assert (result.steps_taken, result.steps_skipped) == (1, 2)
    # The one sample's own loss: mini-batches without a token are no part of the mean.
    alone = make(moe_dir).train_step([sample_maker(4, 5)], TOKEN_MEAN)
    assert result.loss == result.metrics["loss"] == pytest.approx(alone.loss) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="mini_batches = 0"):
        make(moe_dir).train_step([sample_maker(4, 5)], TOKEN_MEAN, mini_batches=0)


def test_the_order_of_the_samples_decides_no_mini_batch(moe_dir: Path, sample_maker: Maker) -> None:
    samples = [sample_maker(4, 5, seed=i, group_place=i) for i in range(6)]
    turned = [sample_maker(4, 5, seed=i, group_place=5 - i) for i in reversed(range(6))]
    results = []
    for batch in (samples, turned):
        engine = make(moe_dir, optimizer=OptimizerConfig(lr=1e-3))
        losses = [engine.train_step(batch, TOKEN_MEAN, mini_batches=3).loss for _ in range(2)]
        results.append([*losses, *(float(tensor.double().sum()) for tensor in snapshot(engine).values())])
    assert results[0] == pytest.approx(results[1], rel=1e-5, abs=1e-5)


def test_only_what_changed_the_weights_counts_as_trained(moe_dir: Path, sample_maker: Maker) -> None:
    masked = sample_maker(4, 5, seed=1, loss_mask=torch.zeros(5, dtype=torch.bool))
    assert make(moe_dir).train_step([sample_maker(4, 5), masked], TOKEN_MEAN).trained == [("g0", 0)]
    overflowing = [sample_maker(4, 5, seed=i, old_logprobs=per_token(-1e4, 5)) for i in range(2)]
    assert make(moe_dir).train_step(overflowing, TOKEN_MEAN).trained == []


@pytest.mark.parametrize("advantage", [float("nan"), float("inf"), float("-inf")])
def test_an_advantage_that_could_not_be_computed_skips_the_step(
    dense_dir: Path, sample_maker: Maker, advantage: float
) -> None:
    engine = make(dense_dir)
    before = snapshot(engine)
    result = engine.train_step([sample_maker(4, 5, advantages=per_token(advantage, 5)), sample_maker()], TOKEN_MEAN)
    assert result.skipped
    assert same(before, snapshot(engine))


def test_a_correction_over_the_whole_batch_is_fed_with_old_logprobs(moe_dir: Path, sample_maker: Maker) -> None:
    loss = PolicyLoss(PolicyLossConfig(reducer="token_mean", correction=CorrectionConfig(batch_normalize=True)))
    samples = [sample_maker(4, n, seed=n) for n in (2, 5, 9)]
    results = [make(moe_dir, micro_batch_tokens=b).train_step(samples, loss) for b in (1, 4096)]
    assert results[0].loss == pytest.approx(results[1].loss, abs=1e-6)
    assert results[0].grad_norm == pytest.approx(results[1].grad_norm, rel=1e-5)


def test_kl_to_the_reference_needs_reference_logprobs_of_every_sample(moe_dir: Path, sample_maker: Maker) -> None:
    loss = PolicyLoss(PolicyLossConfig(kl_loss_coef=0.5, kl_loss_type="k3"))
    with pytest.raises(ValueError, match="ref_logprobs_BT"):
        make(moe_dir).train_step([sample_maker(), sample_maker(reference_logprobs=per_token(-3.0, 5))], loss)
    engine = make(moe_dir)
    same_policy = engine.score([sample_maker()])[0]
    result = engine.train_step([sample_maker(reference_logprobs=same_policy)], loss)
    assert result.metrics["kl_loss"] == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_reference_stays_where_the_run_began(moe_dir: Path, sample_maker: Maker, dtype: str) -> None:
    engine = make(moe_dir, keep_reference=True, dtype=dtype)
    samples = [sample_maker(4, 5, seed=i) for i in range(3)]
    begin = engine.score(samples)
    for _ in range(2):
        engine.train_step(samples, TOKEN_MEAN)
    before, own = snapshot(engine), engine.score(samples)
    reference = engine.score(samples, weights="reference")
    assert all(torch.equal(a, b) for a, b in zip(begin, reference, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(own, reference, strict=True))
    assert same(before, snapshot(engine))
    assert all(torch.equal(a, b) for a, b in zip(own, engine.score(samples), strict=True))
    with pytest.raises(ValueError, match="no reference policy"):
        make(moe_dir).score(samples, weights="reference")


def test_an_unsharded_optimizer_sees_the_gradients_of_a_sharded_one(moe_dir: Path, sample_maker: Maker) -> None:
    # Gradients that stay on the parameters would double from the second step on; Adam would hide it.
    samples = [sample_maker(4, n, seed=n) for n in (2, 5)]
    norms = []
    for distributed in (True, False):
        engine = make(moe_dir, optimizer=OptimizerConfig(lr=1e-3, distributed=distributed))
        norms.append([engine.train_step(samples, TOKEN_MEAN).grad_norm for _ in range(3)])
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_the_entropy_bonus_has_a_gradient(moe_dir: Path, sample_maker: Maker) -> None:
    samples = [sample_maker(4, 5, advantages=per_token(0.0, 5))]
    without = make(moe_dir).train_step(samples, PolicyLoss(PolicyLossConfig()))
    assert without.grad_norm == 0
    engine = make(moe_dir, optimizer=OptimizerConfig(lr=1e-3))
    bonus = PolicyLoss(PolicyLossConfig(entropy_coef=1.0))
    entropies = [engine.train_step(samples, bonus).metrics["entropy_loss"] or 0.0 for _ in range(5)]
    assert all(b > a > 0 for a, b in pairwise(entropies))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"warmup_steps": 4}, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]),
        ({"schedule": "linear", "decay_steps": 4}, [0.75, 0.5, 0.25, 0.0, 0.0, 0.0]),
        ({"schedule": "cosine", "decay_steps": 4, "min_lr": 1e-3}, [0.8682, 0.55, 0.2318, 0.1, 0.1, 0.1]),
        ({"schedule": "linear", "warmup_steps": 2, "decay_steps": 4}, [0.5, 1.0, 0.5, 0.0, 0.0, 0.0]),
    ],
)
def test_the_learning_rate_follows_its_schedule(
    dense_dir: Path, sample_maker: Maker, settings: dict[str, Any], expected: list[float]
) -> None:
    engine = make(dense_dir, optimizer=OptimizerConfig(lr=1e-2, **settings))
    rates = [engine.train_step([sample_maker()], TOKEN_MEAN).lr for _ in expected]
    assert rates == pytest.approx([1e-2 * x for x in expected], abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"schedule": "linear"}, "needs decay_steps"),
        ({"schedule": "linear", "warmup_steps": 5, "decay_steps": 5}, "decay_steps = 5 must exceed warmup_steps = 5"),
        ({"decay_steps": 5}, "decay_steps = 5 has no meaning"),
        ({"schedule": "linear", "decay_steps": 4, "lr": 1e-4, "min_lr": 1e-3}, "min_lr = 0.001 exceeds lr = 0.0001"),
    ],
)
def test_schedules_that_contradict_themselves_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        OptimizerConfig(**settings)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_supervised_steps_lower_the_loss(moe_dir: Path, dtype: str) -> None:
    engine = make(moe_dir, dtype=dtype)
    ids = torch.tensor([5, 6, 7, 8, 9, 10])
    mask = torch.tensor([0, 0, 1, 1, 1, 1])
    demonstrations = [Demonstration(ids, mask), Demonstration(ids[:4], mask[:4])]
    losses = [engine.sft_step(demonstrations).loss for _ in range(12)]
    assert losses[-1] < 0.5 * losses[0]


def test_the_supervised_loss_is_the_mean_over_learnt_tokens(dense_dir: Path) -> None:
    engine = make(dense_dir)
    ids = torch.tensor([[5, 6, 7, 8]])
    logprobs = [
        float(torch.log_softmax(engine.next_token_logits(ids, torch.tensor([t])), -1)[0, ids[0, t]]) for t in (1, 2, 3)
    ]
    result = engine.sft_step([Demonstration(ids[0], torch.tensor([1, 0, 1, 1]))])
    assert result.loss == pytest.approx(-(logprobs[1] + logprobs[2]) / 2, abs=1e-6)


def test_a_users_own_loss_is_one_more_object(dense_dir: Path, sample_maker: Maker) -> None:
    class Halved(PolicyLoss):
        def counts(self, batch: PolicyBatch, trajectories: Index | None, reduce: Reduce) -> Denominators:
            counts = super().counts(batch, trajectories, reduce)
            return Denominators(counts.tokens * 2, counts.sequences, counts.trajectory_tokens_B)

    sample = sample_maker(4, 5, advantages=per_token(1.0, 5))
    assert make(dense_dir).train_step([sample], Halved(TOKEN_MEAN.config)).loss == pytest.approx(-0.5, abs=1e-6)


def test_the_plan_uses_each_sample_once_within_the_budget() -> None:
    from vime_trainer.engine.batch import plan

    generator = torch.Generator().manual_seed(3)
    for count in range(40):
        lengths = torch.randint(1, 50, (count,), generator=generator).tolist()
        batches = plan(lengths, 64)
        assert sorted(i for b in batches for i in b) == list(range(count))
        assert all(len(b) == 1 or len(b) * max(lengths[i] for i in b) <= 64 for b in batches)
        assert batches == plan(lengths, 64)


@pytest.mark.parametrize("rate", [math.nan, math.inf, -1e-3, 7.0])
def test_a_learning_rate_that_would_ruin_the_weights_is_refused(
    moe_dir: Path, sample_maker: Maker, rate: float
) -> None:
    engine = make(moe_dir)
    before = snapshot(engine)
    with pytest.raises(EngineError, match=rf"learning rate {rate:g} is not in \[0, 1\]"):
        engine.train_step([sample_maker(2, 3)], TOKEN_MEAN, lr=rate)
    assert same(before, snapshot(engine))
