"""Two ranks train what one rank trains, whatever the number of samples."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine
Ranks = Callable[..., list[Any]]

TRAIN = """
engine = Engine.from_hf(names["model"], EngineConfig(
    micro_batch_tokens=names["budget"],
    optimizer=OptimizerConfig(lr=1e-2, distributed=names["distributed"]),
))
lengths = names["lengths"]
def sample(i, n):
    trajectory = f"t{i // 2}" if names["trajectories"] else ""
    return make_sample(4, n, seed=i, advantages=per_token(float(i + 1), n), trajectory_id=trajectory)
batch = [sample(i, n) for i, n in enumerate(lengths)]
mine = batch[rank::world] if names["spread"] else (batch if rank == 0 else [])
loss = PolicyLoss(PolicyLossConfig(reducer=names["reducer"]))
steps = []
for _ in range(3):
    r = engine.train_step(mine, loss, mini_batches=names["mini_batches"])
    steps.append([r.loss, r.grad_norm, r.metrics["ppo_kl"] or 0.0, r.metrics["train_rollout_logprob_abs_diff"] or 0.0])
scores = {s.sample_index: x.tolist() for s, x in zip(mine, engine.score(mine))}
result = {"steps": steps, "trained": r.trained, "taken": r.steps_taken, "scores": scores,
          "sums": [t.double().sum().item() for _, t in engine.export()]}
"""
CASE: dict[str, Any] = {
    "budget": 16,
    "distributed": True,
    "spread": True,
    "reducer": "token_mean",
    "mini_batches": 1,
    "trajectories": "",
}


@pytest.mark.parametrize(
    "case",
    [
        {"lengths": [1, 2, 3, 4, 5, 6, 7]},
        {"lengths": [7, 1, 4], "distributed": False},
        {"lengths": [3]},
        {"lengths": [2, 5, 3], "spread": False},
        {"lengths": [1, 2, 3, 4, 5, 6, 7], "reducer": "sequence_mean", "trajectories": "yes", "budget": 4096},
    ],
    ids=["seven", "three, unsharded", "one", "all on one", "forked"],
)
def test_two_ranks_give_the_loss_gradient_and_weights_of_one(
    run_ranks: Ranks, moe_dir: Path, case: dict[str, Any]
) -> None:
    job = CASE | case
    (one,) = run_ranks(1, TRAIN, model=moe_dir, **job)
    two = run_ranks(2, TRAIN, model=moe_dir, **job)
    everything = [["g" + str(i), i] for i in range(len(job["lengths"]))]
    assert sorted(two[0]["trained"] + two[1]["trained"]) == sorted(everything) == sorted(one["trained"])
    assert two[0]["steps"] == two[1]["steps"]
    assert two[0]["sums"] == two[1]["sums"]
    for a, b in zip(one["steps"], two[0]["steps"], strict=True):
        assert b[:2] == pytest.approx(a[:2], rel=2e-5)
        assert b[2:] == pytest.approx(a[2:], abs=1e-5)
    assert two[0]["steps"][0][:2] == pytest.approx(one["steps"][0][:2], rel=1e-6)
    assert two[0]["sums"] == pytest.approx(one["sums"], abs=2e-3)
    for index, values in (two[0]["scores"] | two[1]["scores"]).items():
        assert values == pytest.approx(one["scores"][index], abs=1e-3)


def test_ranks_without_samples_join_every_mini_batch(run_ranks: Ranks, moe_dir: Path) -> None:
    two = run_ranks(2, TRAIN, model=moe_dir, **(CASE | {"lengths": [2, 5, 3], "spread": False, "mini_batches": 3}))
    assert [r["taken"] for r in two] == [3, 3]
    assert two[0]["sums"] == two[1]["sums"]


SKIP = """
engine = Engine.from_hf(names["model"], EngineConfig(optimizer=OptimizerConfig(lr=1e-2)))
loss = PolicyLoss(PolicyLossConfig(reducer="token_mean"))
before = [t.clone() for _, t in engine.export()]
old = per_token(-1e4 if rank == 1 else -3.0, 5)
bad = engine.train_step([make_sample(4, 5, seed=2 * rank, old_logprobs=old)], loss)
same = all(torch.equal(a, b) for a, (_, b) in zip(before, engine.export()))
good = engine.train_step([make_sample(4, 5, seed=2 * rank)], loss)
result = {"bad": bad.skipped, "same": same, "good": good.skipped, "steps": engine.optimizer_steps}
"""


def test_a_sample_that_is_not_finite_on_one_rank_skips_the_step_on_all(run_ranks: Ranks, moe_dir: Path) -> None:
    for result in run_ranks(2, SKIP, model=moe_dir):
        assert result == {"bad": True, "same": True, "good": False, "steps": 1}
