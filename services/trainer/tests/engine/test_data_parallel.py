"""Two ranks train what one rank trains, whatever the number of samples."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine
Ranks = Callable[..., list[Any]]

DEFAULTS: dict[str, Any] = {
    "budget": 16,
    "distributed": True,
    "spread": True,
    "reducer": "token_mean",
    "mini_batches": 1,
    "forked": False,
}
CASES: dict[str, dict[str, Any]] = {
    "seven": {"lengths": [1, 2, 3, 4, 5, 6, 7]},
    "three, unsharded": {"lengths": [7, 1, 4], "distributed": False},
    "one": {"lengths": [3]},
    "all on rank 0": {"lengths": [2, 5, 3], "spread": False},
    "three mini-batches": {"lengths": [1, 2, 3, 4, 5, 6, 7], "mini_batches": 3, "budget": 4096},
    "forked": {"lengths": [1, 2, 3, 4, 5, 6, 7], "reducer": "sequence_mean", "forked": True, "budget": 4096},
}
TRAIN = """
def train(case):
    optimizer = OptimizerConfig(lr=1e-2, distributed=case["distributed"])
    engine = Engine.from_hf(names["model"], EngineConfig(micro_batch_tokens=case["budget"], optimizer=optimizer))

    def sample(i, n):
        fork = {"trajectory_id": f"t{i % 2}", "group_place": i // 4, "group_id": f"h{i // 4}"} if case["forked"] else {}
        return make_sample(4, n, seed=i, advantages=per_token(float(i + 1), n), **fork)

    batch = [sample(i, n) for i, n in enumerate(case["lengths"])]
    mine = batch[rank::world] if case["spread"] else (batch if rank == 0 else [])
    loss = PolicyLoss(PolicyLossConfig(reducer=case["reducer"]))
    steps = []
    for _ in range(3):
        r = engine.train_step(mine, loss, mini_batches=case["mini_batches"])
        metrics = [r.metrics[n] or 0.0 for n in ("ppo_kl", "train_rollout_logprob_abs_diff")]
        steps.append([r.loss, r.grad_norm, *metrics])
    scores = {s.sample_index: x.tolist() for s, x in zip(mine, engine.score(mine))}
    sums = [t.double().sum().item() for _, t in engine.export()]
    return {"steps": steps, "trained": r.trained, "taken": r.steps_taken, "scores": scores, "sums": sums}

result = {name: train(case) for name, case in names["cases"].items()}
"""


@pytest.fixture(scope="module")
def results(module_ranks: Ranks, moe_dir: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """All cases, on one rank and on two."""
    cases = {name: DEFAULTS | case for name, case in CASES.items()}
    (one,) = module_ranks(1, TRAIN, model=moe_dir, cases=cases)
    more = cases | {"mini-batches": DEFAULTS | {"lengths": [2, 5, 3], "spread": False, "mini_batches": 3}}
    return one, module_ranks(2, TRAIN, model=moe_dir, cases=more)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_give_the_loss_gradient_and_weights_of_one(
    results: tuple[dict[str, Any], list[dict[str, Any]]], name: str
) -> None:
    one, (first, second) = results[0][name], (rank[name] for rank in results[1])
    group = "h{0}" if CASES[name].get("forked") else "g{1}"
    everything = [[group.format(i // 4, i), i] for i in range(len(CASES[name]["lengths"]))]
    assert sorted(first["trained"] + second["trained"]) == everything == sorted(one["trained"])
    assert first["steps"] == second["steps"]
    assert first["sums"] == second["sums"]
    assert first["steps"][0][:2] == pytest.approx(one["steps"][0][:2], rel=1e-6)
    for a, b in zip(one["steps"], first["steps"], strict=True):
        assert b == pytest.approx(a, rel=1e-4, abs=1e-5)
    assert first["sums"] == pytest.approx(one["sums"], abs=2e-3)
    for index, values in (first["scores"] | second["scores"]).items():
        assert values == pytest.approx(one["scores"][index], abs=1e-3)


def test_ranks_without_samples_join_every_mini_batch(
    results: tuple[dict[str, Any], list[dict[str, Any]]],
) -> None:
    first, second = (rank["mini-batches"] for rank in results[1])
    assert (first["taken"], second["taken"]) == (3, 3)
    assert first["sums"] == second["sums"]


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


def test_k29_a_sample_that_is_not_finite_on_one_rank_skips_the_step_on_all(run_ranks: Ranks, moe_dir: Path) -> None:
    for result in run_ranks(2, SKIP, model=moe_dir):
        assert result == {"bad": True, "same": True, "good": False, "steps": 1}
