"""The critic: values of states, trained like the policy whatever the split, saved and restored with it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vime_trainer.algorithms.losses import PolicyLossConfig, ValueLossConfig
from vime_trainer.engine.backward import Updates
from vime_trainer.engine.config import CriticConfig, EngineConfig, OptimizerConfig
from vime_trainer.engine.critic import Critic
from vime_trainer.engine.engine import Engine
from vime_trainer.engine.errors import CheckpointError
from vime_trainer.engine.objective import PolicyLoss
from vime_trainer.engine.sample import Sample

pytestmark = pytest.mark.engine
Maker = Callable[..., Sample]
Ranks = Callable[..., list[Any]]
TOKEN_MEAN = ValueLossConfig(value_clip=None, reducer="token_mean")
POLICY = PolicyLoss(PolicyLossConfig(reducer="token_mean"))


def make(path: Path, budget: int = 4096, **critic: Any) -> Engine:
    settings = EngineConfig(micro_batch_tokens=budget, optimizer=OptimizerConfig(lr=1e-2))
    return Engine.from_hf(path, settings, CriticConfig(**({"lr": 1e-2} | critic)))


def critic_of(engine: Engine) -> Critic:
    assert engine.critic is not None
    return engine.critic


def targets(maker: Maker, lengths: tuple[int, ...] = (2, 7, 4), **fields: Any) -> list[Sample]:
    """Samples whose returns are 1, 2, 3, ... and whose old values are 0."""
    return [
        maker(4, n, seed=i, returns=torch.full((n,), float(i + 1)), values=torch.zeros(n), **fields)
        for i, n in enumerate(lengths)
    ]


def test_a_fresh_critic_gives_0_for_every_token_of_the_response(moe_dir: Path, sample_maker: Maker) -> None:
    values = critic_of(make(moe_dir)).values([sample_maker(4, n, seed=n) for n in (1, 6, 3)])
    assert [v.tolist() for v in values] == [[0.0] * n for n in (1, 6, 3)]


def test_a_value_is_that_of_the_state_before_its_token(moe_dir: Path, sample_maker: Maker) -> None:
    critic = critic_of(make(moe_dir))
    critic.train(targets(sample_maker), TOKEN_MEAN)
    critic.train(targets(sample_maker), TOKEN_MEAN)
    sample = sample_maker(4, 6)
    ids = sample.response_token_ids.clone()
    ids[3] = (ids[3] + 1) % 48
    before, after = critic.values([sample, sample_maker(4, 6, response_token_ids=ids)])
    assert torch.equal(before[:4], after[:4])  # token 3 is chosen in state 3, so it is not part of it
    assert not torch.isclose(before[4:], after[4:]).any()


def test_the_rollouts_routes_are_not_the_critics(moe_dir: Path, sample_maker: Maker) -> None:
    critic = critic_of(make(moe_dir))
    critic.train(targets(sample_maker), TOKEN_MEAN)
    with_routes, without = critic.values([sample_maker(4, 6), sample_maker(4, 6, routed_experts=None)])
    assert torch.allclose(with_routes, without, atol=1e-6)


def test_the_value_loss_divides_by_the_global_batch_for_every_split(moe_dir: Path, sample_maker: Maker) -> None:
    # At V = 0 the loss is the mean of G² over 13 tokens: (2·1 + 7·4 + 4·9) / 13.
    results: list[Updates] = []
    for budget in (1, 24, 4096):
        results.append(critic_of(make(moe_dir, budget)).train(targets(sample_maker), TOKEN_MEAN))
    for result in results:
        assert result.metrics["value_loss"] == pytest.approx((2 + 28 + 36) / 13, rel=1e-6)
        assert result.grad_norm == pytest.approx(results[0].grad_norm, rel=1e-5)
        assert result.grad_norm > 0


def test_masked_tokens_neither_train_nor_count(moe_dir: Path, sample_maker: Maker) -> None:
    mask = torch.tensor([True, False, True])
    wild = sample_maker(4, 3, loss_mask=mask, returns=torch.tensor([1.0, 1e6, 3.0]), values=torch.zeros(3))
    result = critic_of(make(moe_dir)).train([wild], TOKEN_MEAN)
    assert result.metrics["value_loss"] == pytest.approx((1 + 9) / 2)


def test_values_come_to_foretell_the_returns(moe_dir: Path, sample_maker: Maker) -> None:
    critic = critic_of(make(moe_dir, epochs=3, mini_batches=2))
    losses = [critic.train(targets(sample_maker), TOKEN_MEAN) for _ in range(12)]
    assert [loss.steps_taken for loss in losses] == [6] * 12
    assert critic.batches == 12
    assert losses[-1].loss < 0.05 * losses[0].loss


def test_the_clip_holds_values_near_those_of_the_start_of_the_batch(moe_dir: Path, sample_maker: Maker) -> None:
    clipped = ValueLossConfig(value_clip=0.1, reducer="token_mean")
    critic = critic_of(make(moe_dir, epochs=8))
    free = critic_of(make(moe_dir, epochs=8))
    critic.train(targets(sample_maker), clipped)
    free.train(targets(sample_maker), TOKEN_MEAN)
    furthest = [max(float(v.abs().max()) for v in c.values(targets(sample_maker))) for c in (critic, free)]
    assert furthest[0] < 0.5 * furthest[1]


def test_the_policys_numbers_do_not_depend_on_a_critic_beside_it(moe_dir: Path, sample_maker: Maker) -> None:
    samples = targets(sample_maker)
    alone = Engine.from_hf(moe_dir, EngineConfig(micro_batch_tokens=4096, optimizer=OptimizerConfig(lr=1e-2)))
    beside = make(moe_dir)
    for _ in range(2):
        critic_of(beside).train(samples, TOKEN_MEAN)
        a, b = alone.train_step(samples, POLICY), beside.train_step(samples, POLICY)
        assert (a.loss, a.grad_norm) == (b.loss, b.grad_norm)
    for (name, ours), (_, theirs) in zip(alone.export(), beside.export(), strict=True):
        assert torch.equal(ours, theirs), name


def test_targets_that_are_missing_are_named(moe_dir: Path, sample_maker: Maker) -> None:
    with pytest.raises(ValueError, match="g3/3: the critic is trained on returns, which are not given"):
        critic_of(make(moe_dir)).train([sample_maker(4, 5, seed=3, values=torch.zeros(5))], TOKEN_MEAN)


def test_a_step_that_is_not_finite_changes_nothing(moe_dir: Path, sample_maker: Maker) -> None:
    critic = critic_of(make(moe_dir))
    bad = sample_maker(4, 5, returns=torch.full((5,), 1e30), values=torch.zeros(5))
    result = critic.train([bad], TOKEN_MEAN)
    assert (result.skipped, critic.batches) == (True, 0)
    assert critic.values([bad])[0].tolist() == [0.0] * 5


# ---------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_critic_goes_on_from_a_checkpoint_bit_for_bit(
    moe_dir: Path, tmp_path: Path, sample_maker: Maker, dtype: str
) -> None:
    settings = EngineConfig(dtype=dtype, optimizer=OptimizerConfig(lr=1e-2))
    chosen = CriticConfig(lr=1e-2, lr_warmup_steps=5, warmup_steps=2)

    def step(engine: Engine) -> Updates:
        critic = critic_of(engine)
        fresh = targets(sample_maker)
        values = critic.values(fresh)
        samples = [
            sample_maker(4, n, seed=i, returns=torch.full((n,), float(i + 1)), values=values[i])
            for i, n in enumerate((2, 7, 4))
        ]
        engine.train_step(samples, POLICY)
        return critic.train(samples, TOKEN_MEAN)

    whole = Engine.from_hf(moe_dir, settings, chosen)
    step(whole)
    assert critic_of(whole).warming_up
    whole.save_checkpoint(tmp_path / "c", 1, {"note": "x"})
    resumed = Engine.from_hf(moe_dir, settings, chosen)
    assert resumed.load_checkpoint(tmp_path / "c") == {"note": "x"}
    for _ in range(2):
        a, b = step(whole), step(resumed)
        assert (a.loss, a.grad_norm, a.lr) == (b.loss, b.grad_norm, b.lr)
    assert not critic_of(resumed).warming_up
    ours, theirs = (critic_of(e).values(targets(sample_maker)) for e in (whole, resumed))
    assert all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))


def test_a_checkpoint_without_a_critic_is_refused_for_ppo_and_says_why(moe_dir: Path, tmp_path: Path) -> None:
    plain = Engine.from_hf(moe_dir, EngineConfig())
    plain.save_checkpoint(tmp_path / "c", 1, {})
    with pytest.raises(CheckpointError, match="holds no critic: it was written by a run without one"):
        make(moe_dir).load_checkpoint(tmp_path / "c")


def test_a_policy_may_go_on_alone_from_a_checkpoint_with_a_critic(moe_dir: Path, tmp_path: Path) -> None:
    make(moe_dir).save_checkpoint(tmp_path / "c", 1, {"a": 1})
    assert Engine.from_hf(moe_dir, EngineConfig()).load_checkpoint(tmp_path / "c") == {"a": 1}


def test_a_damaged_critic_is_named_before_anything_is_loaded(moe_dir: Path, tmp_path: Path) -> None:
    saved = make(moe_dir).save_checkpoint(tmp_path / "c", 1, {})
    file = saved.path / "critic.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))
    with pytest.raises(CheckpointError, match=r"critic\.safetensors"):
        make(moe_dir).load_checkpoint(tmp_path / "c")


TWO = """
from vime_trainer.algorithms.losses import ValueLossConfig
from vime_trainer.engine.config import CriticConfig
engine = Engine.from_hf(names["model"], EngineConfig(micro_batch_tokens=names["budget"]), CriticConfig(lr=1e-2))
batch = [
    make_sample(4, n, seed=i, returns=torch.full((n,), float(i + 1)), values=torch.zeros(n))
    for i, n in enumerate((2, 7, 4))
]
mine = batch[rank::world]
steps = []
for _ in range(3):
    done = engine.critic.train(mine, ValueLossConfig(value_clip=None, reducer=names["reducer"]))
    steps.append([done.loss, done.grad_norm])
result = {"steps": steps, "values": {s.sample_index: v.tolist() for s, v in zip(mine, engine.critic.values(mine))}}
"""


@pytest.mark.parametrize("reducer", ["token_mean", "sequence_mean"])
def test_two_ranks_train_the_critic_of_one(run_ranks: Ranks, moe_dir: Path, reducer: str) -> None:
    (one,) = run_ranks(1, TWO, model=moe_dir, budget=4096, reducer=reducer)
    first, second = run_ranks(2, TWO, model=moe_dir, budget=16, reducer=reducer)
    assert first["steps"] == second["steps"]
    assert first["steps"][0] == pytest.approx(one["steps"][0], rel=1e-6)
    for a, b in zip(one["steps"], first["steps"], strict=True):
        assert b == pytest.approx(a, rel=1e-4)
    for index, values in (first["values"] | second["values"]).items():
        assert values == pytest.approx(one["values"][index], abs=1e-3)
