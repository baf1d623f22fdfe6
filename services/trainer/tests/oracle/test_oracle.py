"""The product's losses and gradients against `formulas.py`, which shares no code with it.

Groups go the way of a train command: selected on each rank, given advantages, cut into mini-batches, split into
micro-batches. What each leaves at a token's logprob is compared, for every member of the family, on one rank and two.
"""

from __future__ import annotations

import importlib.util
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from vime.common.v1 import trajectory_pb2 as tr
from vime_trainer.algorithm_config import AlgorithmConfig, build_loss, build_value_loss
from vime_trainer.algorithms.losses import ValueBatch, value_loss
from vime_trainer.algorithms.metrics import Metrics, merge, values
from vime_trainer.algorithms.ranks import Reduce, simulate
from vime_trainer.algorithms.reducers import denominators
from vime_trainer.engine.batch import response_column
from vime_trainer.engine.objective import PolicyLoss, SupervisedLoss, policy_batch
from vime_trainer.engine.sample import Sample
from vime_trainer.engine.trajectories import cut, global_trajectories
from vime_trainer.rank.groups import select, with_advantages


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


formulas = _load("formulas")
CPU = torch.device("cpu")
Key = tuple[int, int]
Batch = list[list[Any]]

# ---------------------------------------------------------------------- data


def pieces(seed: int = 0) -> Batch:
    """Uneven groups with all that went wrong once: ids that groups share, an id like a default key, forks of unequal
    length, tool tokens, samples cut off, failed and unscored, a group of equal rewards."""
    source = random.Random(seed)

    def piece(reward: float | None, length: int, **fields: Any) -> Any:
        def row(low: float, high: float) -> list[float]:
            return torch.tensor([source.uniform(low, high) for _ in range(length)]).tolist()  # as float32 holds them

        rollout = row(-3, -0.2)
        old = torch.tensor([min(x + source.gauss(0, 0.35), -0.01) for x in rollout]).tolist()
        now = [min(x + source.gauss(0, 0.3), -0.01) for x in old]
        before = row(-1, 1)
        holes = fields.pop("holes", ())
        return formulas.Piece(
            reward=reward,
            mask=[t not in holes for t in range(length)],
            old=old,
            rollout=[math.nan if t in holes else x for t, x in enumerate(rollout)],
            ref=row(-3, -0.2),
            teacher=row(-3, -0.2),
            value_before=before,
            now=torch.tensor(now, dtype=torch.float64, requires_grad=True),
            value=torch.tensor([v + source.gauss(0, 0.25) for v in before], dtype=torch.float64, requires_grad=True),
            **fields,
        )

    return [
        [piece(1.0, 4, fork="t0"), piece(0.0, 6, fork="t1", holes=(2, 5)), piece(0.25, 2)],
        [piece(0.0, 5, fork="t0"), piece(2.0, 3, fork="t1"), piece(0.5, 7, truncated=True), piece(1.0, 1, fork="#4"),
         piece(1.0, 3)],
        [piece(1.5, 2, fork="f"), piece(1.5, 8, fork="f", holes=(0, 1)), piece(0.0, 4), piece(None, 3),
         piece(math.nan, 2), piece(0.0, 2, failed=True)],
        [piece(0.7, 3), piece(0.7, 4), piece(0.7, 2)],
        [piece(-1.0, 6, truncated=True), piece(1.0, 2, fork="f"), piece(1.0, 3, fork="f", holes=(1,))],
    ]  # fmt: skip


def groups_of(batch: Batch, names: Sequence[str]) -> list[tr.TrajectoryGroup]:
    made = []
    for name, group in zip(names, batch, strict=True):
        proto = tr.TrajectoryGroup(group_id=name, sampling=tr.SamplingParams(temperature=0.8))
        for i, piece in enumerate(group):
            status = tr.SAMPLE_STATUS_TRUNCATED if piece.truncated else tr.SAMPLE_STATUS_COMPLETED
            proto.samples.add(
                group_id=proto.group_id,
                sample_index=i,
                prompt_token_ids=[1],
                response_token_ids=range(len(piece.mask)),
                loss_mask=piece.mask,
                rollout_logprobs=piece.rollout,
                reward=piece.reward,
                trajectory_id=piece.fork,
                status=tr.SAMPLE_STATUS_FAILED if piece.failed else status,
            )
        made.append(proto)
    return made


# ---------------------------------------------------------------------- the product's way


class Step:
    """What one step of the product leaves: loss and metrics of each mini-batch, its samples, and gradients."""

    def __init__(
        self, batch: Batch, config: AlgorithmConfig, ranks: int, micro: int, mini: int, names: str = "vwxyz"
    ) -> None:
        self.batch, self.config, self.micro, self.mini = batch, config, micro, mini
        self.groups = groups_of(batch, names)
        self.leaves = {(p, i): piece.now.detach().clone().requires_grad_() for p, i, piece in every(batch)}
        self.values = {(p, i): piece.value.detach().clone().requires_grad_() for p, i, piece in every(batch)}
        parts = simulate(ranks, lambda rank, reduce: self._rank(rank, ranks, reduce))
        self.keys = [[key for part in parts for key in part[m][0]] for m in range(mini)]
        self.metrics = [values(merge(part[m][1] for part in parts)) for m in range(mini)]
        self.advantages = {key: row for part in parts for minis in part for key, row in minis[2].items()}

    def _rank(self, rank: int, ranks: int, reduce: Reduce) -> list[tuple[list[Key], Metrics, dict[Key, Any]]]:
        config = self.config
        places = [p for p in range(len(self.groups)) if p % ranks == rank]
        share = select([self.groups[p] for p in places], places, config)
        samples = [self._with_columns(sample) for sample in share.samples]
        if config.objective != "sft":
            samples, _ = with_advantages(replace(share, samples=samples), len(self.groups), config, reduce)
        index = global_trajectories(samples, reduce)
        found = []
        for part in cut(samples, index, self.mini, "seed", reduce):
            chosen = [samples[i] for i in part]
            mine = index.rows(torch.tensor(part, dtype=torch.int64))
            metrics = [self._policy(chosen, mine, reduce), self._critic(chosen, mine, reduce)]
            keys = [key_of(sample) for sample in chosen]
            found.append((keys, merge(metrics), {key_of(s): s.advantages for s in chosen}))
        return found

    def _with_columns(self, sample: Sample) -> Sample:
        piece = self.batch[sample.group_place][sample.sample_index]
        columns = {"old_logprobs": piece.old, "reference_logprobs": piece.ref, "teacher_logprobs": piece.teacher,
                   "values": piece.value_before}  # fmt: skip
        if self.config.use_rollout_logprobs:
            del columns["old_logprobs"]  # the sample has them from the engine
        return replace(sample, **{name: torch.tensor(row) for name, row in columns.items()})

    def _policy(self, samples: Sequence[Sample], index: Any, reduce: Reduce) -> Metrics:
        config = self.config
        loss: Any = (
            SupervisedLoss(config.reducer, config.fixed_length)
            if config.objective == "sft"
            else PolicyLoss(build_loss(config))
        )
        reference = config.kl_loss_coef > 0
        old = [s.old_logprobs for s in samples]
        zeros = response_column([torch.zeros(len(s.loss_mask)) for s in samples], CPU)
        counts = loss.counts(policy_batch(samples, zeros, old, CPU, reference=reference), index, reduce)
        metrics = []
        for rows in self._micro_batches(len(samples)):
            chosen = [samples[i] for i in rows]
            logprobs = response_column([self.leaves[key_of(s)] for s in chosen], CPU)
            part = policy_batch(chosen, logprobs, [old[i] for i in rows], CPU, reference=reference)
            output = loss.share(part, counts.rows(torch.tensor(rows)))
            output.loss.backward()
            metrics.append(output.metrics)
        return merge(metrics)

    def _critic(self, samples: Sequence[Sample], index: Any, reduce: Reduce) -> Metrics:
        if self.config.estimator != "ppo":
            return {}
        mask = response_column([s.loss_mask for s in samples], CPU)
        counts = denominators(mask, index, reduce)
        metrics = []
        for rows in self._micro_batches(len(samples)):
            columns = [
                response_column([self.values[key_of(samples[i])] for i in rows], CPU),
                *(response_column([getattr(samples[i], name) for i in rows], CPU) for name in ("values", "returns")),
            ]
            part = ValueBatch(*columns, mask[rows][:, : columns[0].shape[1]])
            output = value_loss(part, build_value_loss(self.config), counts.rows(torch.tensor(rows)))
            output.loss.backward()
            metrics.append(output.metrics)
        return merge(metrics)

    def _micro_batches(self, count: int) -> list[list[int]]:
        size = max(1, -(-count // self.micro))
        return [list(range(count))[start : start + size] for start in range(0, count, size)]


def every(batch: Batch) -> list[tuple[int, int, Any]]:
    return [(p, i, piece) for p, group in enumerate(batch) for i, piece in enumerate(group)]


def key_of(sample: Sample) -> Key:
    return sample.group_place, sample.sample_index


# ---------------------------------------------------------------------- settings: the recipe's, and the formulas'

TIS = {"level": "token", "mode": "clip", "low": 0.0, "high": 1.2}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({}, {}),
    "grpo, sequence mean": ({"reducer": "sequence_mean"}, {"reducer": "sequence_mean"}),
    "dr_grpo": (
        {"estimator": "dr_grpo", "reducer": "fixed_length", "fixed_length": 8},
        {"estimator": "dr_grpo", "reducer": "fixed_length", "length": 8},
    ),
    "rloo": ({"estimator": "rloo", "reducer": "sequence_mean"}, {"estimator": "rloo", "reducer": "sequence_mean"}),
    "reinforce++": (
        {"estimator": "reinforce_plus_plus", "kl_coef": 0.1, "gamma": 0.9},
        {"estimator": "reinforce_plus_plus", "kl_coef": 0.1, "gamma": 0.9, "whiten": True},
    ),
    "reinforce++ baseline": (
        {"estimator": "reinforce_plus_plus_baseline", "kl_coef": 0.2, "mask_truncated": True},
        {"estimator": "reinforce_plus_plus_baseline", "kl_coef": 0.2, "mask_truncated": True, "whiten": True},
    ),
    "ppo": (
        {"estimator": "ppo", "gamma": 0.95, "lam": 0.9, "reducer": "sequence_mean"},
        {"estimator": "ppo", "gamma": 0.95, "lam": 0.9, "reducer": "sequence_mean"},
    ),
    "ppo whitened, no value clip": (
        {"estimator": "ppo", "lam": 0.8, "whiten": True, "critic": {"value_clip": 0.0}, "kl_coef": 0.05},
        {"estimator": "ppo", "lam": 0.8, "whiten": True, "value_clip": None, "kl_coef": 0.05},
    ),
    "opd": ({"estimator": "opd", "opd_kl_coef": 0.7}, {"estimator": "opd", "opd": 0.7}),
    "grpo with a teacher": ({"opd_kl_coef": 0.3}, {"opd": 0.3}),
    "dapo": (
        {"eps_clip_high": 0.28, "overlong": {"max_length": 7, "cache": 4, "factor": 0.5}},
        {"high": 0.28, "overlong": (7, 4, 0.5)},
    ),
    "cut off samples masked, whitened": (
        {"mask_truncated": True, "whiten": True, "reducer": "sequence_mean"},
        {"mask_truncated": True, "whiten": True, "reducer": "sequence_mean"},
    ),
    "dual clip": ({"eps_clip_c": 1.3}, {"dual": 1.3}),
    "gspo": (
        {"estimator": "gspo", "objective": "gspo", "eps_clip": 0.05, "reducer": "sequence_mean", "eps_clip_c": 1.1},
        {"objective": "gspo", "low": 0.05, "high": 0.05, "reducer": "sequence_mean", "dual": 1.1},
    ),
    "cispo": (
        {"estimator": "cispo", "objective": "cispo", "eps_clip": 1.0, "eps_clip_high": 0.15},
        {"objective": "cispo", "low": 1.0, "high": 0.15},
    ),
    "reinforce": ({"objective": "reinforce"}, {"objective": "reinforce"}),
    "opsm": ({"opsm_delta": 0.05}, {"opsm": 0.05}),
    "the engine's logprobs as old": ({"use_rollout_logprobs": True}, {"rollout_as_old": True}),
    "tis": ({"correction": {"kind": "tis", "high": 1.2}}, {"correction": TIS}),
    "icepop, renormalised": (
        {"correction": {"kind": "icepop", "low": 0.8, "high": 1.25, "renormalize": True}, "reducer": "sequence_mean"},
        {"correction": {"level": "token", "mode": "mask", "low": 0.8, "high": 1.25, "renormalize": True},
         "reducer": "sequence_mean"},
    ),
    "icepop": (
        {"correction": {"kind": "icepop", "low": 0.8, "high": 1.25}},
        {"correction": {"level": "token", "mode": "mask", "low": 0.8, "high": 1.25}},
    ),
    "mis, geometric": (
        {"correction": {"kind": "mis", "level": "geometric", "mode": "mask", "high": 1.2, "batch_normalize": True}},
        {"correction": {"level": "geometric", "mode": "mask", "low": 1 / 1.2, "high": 1.2, "normalize": True}},
    ),
    "mis, sequence with veto": (
        {"correction": {"kind": "mis", "level": "sequence", "mode": "truncate", "high": 1.5, "veto": 0.6}},
        {"correction": {"level": "sequence", "mode": "truncate", "low": 1 / 1.5, "high": 1.5, "veto": 0.6}},
    ),
    **{
        f"kl loss {kind}": ({"kl_loss_coef": 0.1, "kl_loss_type": kind}, {"kl_loss": 0.1, "kl_type": kind})
        for kind in ("k1", "k2", "k3", "low_var_kl")
    },
    "sft": ({"objective": "sft"}, {"objective": "sft"}),
    "sft, sequence mean": (
        {"objective": "sft", "reducer": "sequence_mean"}, {"objective": "sft", "reducer": "sequence_mean"}
    ),
}  # fmt: skip


# ---------------------------------------------------------------------- comparison


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_of_every_token_are_those_of_the_papers(name: str) -> None:
    recipe, wanted = CASES[name]
    config = AlgorithmConfig.model_validate(recipe)
    from_engine = wanted.get("rollout_as_old", False)
    rules = formulas.Rules(**{key: value for key, value in wanted.items() if key != "rollout_as_old"})
    for ranks, micro, mini in ((1, 1, 1), (2, 3, 1), (1, 2, 3), (2, 1, 3)):
        batch = pieces()
        step = Step(batch, config, ranks, micro, mini)
        if from_engine:
            for _, _, piece in every(batch):
                piece.old = piece.rollout
        _compare(step, batch, rules)


def _compare(step: Step, batch: Batch, rules: Any) -> None:
    a, g = formulas.advantages(batch, rules) if rules.objective != "sft" else ({}, {})
    for key, row in a.items():
        mine = step.advantages[key]
        wanted = torch.zeros(len(mine))
        for t, x in row.items():
            wanted[t] = x
        torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-6)
    wanted_keys = {(p, i) for p, i, piece in every(batch) if formulas.trained(piece, rules)}
    assert wanted_keys <= {key for keys in step.keys for key in keys}
    for m, keys in enumerate(step.keys):
        found = formulas.policy_loss(batch, keys, a, rules)
        if found.loss.requires_grad:
            found.loss.backward()
        metrics = step.metrics[m]
        assert metrics["loss"] == pytest.approx(float(found.loss.detach()), rel=1e-5, abs=1e-7)
        if "pg_clipfrac" in metrics:
            assert metrics["pg_clipfrac"] == pytest.approx(found.clipped)
        assert metrics.get("pg_clipfrac_lower", 0.0) == pytest.approx(found.lower)
        if rules.estimator == "ppo":
            critic = formulas.value_loss(batch, keys, g, rules)
            critic.loss.backward()
            assert metrics["value_loss"] == pytest.approx(float(critic.loss.detach()), rel=1e-5)
            assert metrics["value_clipfrac"] == pytest.approx(critic.clipped)
    for p, i, piece in every(batch):
        _same_gradient(step.leaves[p, i], piece.now)
        _same_gradient(step.values[p, i], piece.value)


def _same_gradient(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    zeros = torch.zeros_like(theirs)
    mine = zeros if ours.grad is None else ours.grad
    torch.testing.assert_close(mine, zeros if theirs.grad is None else theirs.grad, rtol=1e-5, atol=1e-8)


def test_the_cut_is_that_of_the_global_batch_and_divides_no_trajectory() -> None:
    config = AlgorithmConfig()
    batch = pieces()
    cuts = [Step(batch, config, ranks, 1, 4).keys for ranks in (1, 2, 3)]
    assert (
        [sorted(part) for part in cuts[0]] == [sorted(part) for part in cuts[1]] == [sorted(part) for part in cuts[2]]
    )
    owners = [{formulas.trajectory(p, i, batch[p][i]) for p, i in part} for part in cuts[0]]
    assert sum(len(part) for part in owners) == len(set().union(*owners)) == 15
    assert sorted(len(part) for part in owners) == [3, 4, 4, 4]
    assert sum(len(part) for part in cuts[0]) == 17
    turned = Step(batch[::-1], config, 2, 1, 4, "zyxwv").keys
    assert [sorted((4 - p, i) for p, i in part) for part in turned] == [sorted(part) for part in cuts[0]]
