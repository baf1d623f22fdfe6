"""A step of the running trainer gives the looking glass's loss and gradient norm for the same trajectories.

The trainer is the real service with a real rank; the glass gets its logprobs from ScoreSamples. The glass knows
d loss / d logprob of every token; the gradient of the weights follows by the chain rule, which an engine of this
process takes with a loss that is linear in the logprobs.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from vime.common.v1 import trajectory_pb2
from vime.common.v1.trajectory_pb2 import Sample, SamplingParams, TrajectoryGroup
from vime.trainer.v1 import trainer_service_pb2 as pb
from vime.trainer.v1.trainer_service_pb2_grpc import TrainerServiceStub
from vime_client.channel import open_channel
from vime_service.server import serving
from vime_service.server_config import ServerConfig
from vime_trainer.algorithms.index import Index
from vime_trainer.algorithms.inspect import inspect_loss
from vime_trainer.algorithms.losses import LossOutput, PolicyBatch
from vime_trainer.algorithms.ranks import Reduce
from vime_trainer.algorithms.reducers import Denominators, denominators
from vime_trainer.config import TrainerConfig
from vime_trainer.engine.config import EngineConfig
from vime_trainer.engine.engine import Engine
from vime_trainer.engine.sample import Sample as EngineSample
from vime_trainer.tools import fresh_model
from vime_trainer.wiring import Wiring

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

START_S, STEP_S = 240, 120
MICRO_BATCH = 32  # positions: several micro-batches, where the glass sees one
RESPONSES = ([3, 5, 2], [4, 1, 6, 2])
REWARDS = ([1.0, 0.0, 1.0], [0.0, 2.0, 0.5, 0.0])


@dataclass(frozen=True)
class Case:
    """One algorithm, as the recipe says it and as the glass's file says it."""

    algorithm: dict[str, Any]
    advantage: dict[str, Any]
    loss: dict[str, Any]
    value_loss: dict[str, Any] | None = None
    ranks: int = 1


ROLLOUT = {"use_rollout_logprobs": True}  # so that ratios differ from 1 and some are clipped
PPO = Case(
    {"estimator": "ppo", "lam": 0.9, "gamma": 0.95, "whiten": True, "reducer": "token_mean", **ROLLOUT},
    {"estimator": "ppo", "lam": 0.9, "gamma": 0.95, "whiten": True},
    {"objective": "clip", "reducer": "token_mean"},
    {"value_clip": 0.2, "reducer": "token_mean"},
)
CASES = {
    "grpo": Case(
        {"estimator": "grpo", "reducer": "token_mean", "eps_clip_high": 0.28, **ROLLOUT},
        {"estimator": "grpo"},
        {"objective": "clip", "reducer": "token_mean", "eps_clip_high": 0.28},
    ),
    "grpo, first step": Case(
        {"estimator": "grpo", "reducer": "sequence_mean"},
        {"estimator": "grpo"},
        {"objective": "clip", "reducer": "sequence_mean"},
    ),
    "dr_grpo": Case(
        {"estimator": "dr_grpo", "reducer": "fixed_length", "fixed_length": 8, **ROLLOUT},
        {"estimator": "dr_grpo"},
        {"objective": "clip", "reducer": "fixed_length", "fixed_length": 8},
    ),
    "rloo": Case(
        {"estimator": "rloo", "reducer": "sequence_mean", **ROLLOUT},
        {"estimator": "rloo"},
        {"objective": "clip", "reducer": "sequence_mean"},
    ),
    "gspo": Case(
        {"estimator": "gspo", "objective": "gspo", "eps_clip": 0.05, "reducer": "sequence_mean", **ROLLOUT},
        {"estimator": "gspo"},
        {"objective": "gspo", "eps_clip": 0.05, "reducer": "sequence_mean"},
    ),
    "cispo with icepop": Case(
        {
            "estimator": "cispo",
            "objective": "cispo",
            "eps_clip": 1.0,
            "reducer": "token_mean",
            "correction": {"kind": "icepop", "low": 0.8, "high": 1.25},
        },
        {"estimator": "cispo"},
        {
            "objective": "cispo",
            "eps_clip": 1.0,
            "reducer": "token_mean",
            "correction": {"preset": "icepop", "low": 0.8, "high": 1.25},
        },
    ),
    "ppo": PPO,
    "ppo on two ranks": replace(PPO, ranks=2),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny mixture of experts with random weights."""
    folder = tmp_path_factory.mktemp("model")
    fresh_model.write(folder, fresh_model.config(layers=2, hidden=64), seed=0)
    return folder


@asynccontextmanager
async def trainer(run_dir: Path, model: Path, case: Case) -> AsyncIterator[TrainerServiceStub]:
    """A trainer service with real ranks."""
    config = TrainerConfig.model_validate(
        {
            "trainer": {
                "run_id": "glass",
                "run_dir": run_dir,
                "model_path": model,
                "buffer_address": "127.0.0.1:1",
                "router_address": "127.0.0.1:1",
                "steps": 1,
                "world_size": case.ranks,
                "engine": {"routing_replay": False, "micro_batch_tokens": MICRO_BATCH},
                "algorithm": case.algorithm,
            }
        }
    )
    wiring = Wiring(config)
    async with serving("trainer", "vime-trainer", ServerConfig(), wiring.register, wiring.start) as service:
        channel = open_channel(service.address)
        try:
            yield TrainerServiceStub(channel)
        finally:
            await channel.close()


def groups() -> list[TrajectoryGroup]:
    """Two uneven groups; the second sample of the first has a tool token in its middle."""
    source = random.Random(3)
    made = []
    for g, (lengths, rewards) in enumerate(zip(RESPONSES, REWARDS, strict=True)):
        group = TrajectoryGroup(group_id=f"g{g}", sampling=SamplingParams(temperature=1.0))
        for i, (length, reward) in enumerate(zip(lengths, rewards, strict=True)):
            group.samples.append(
                Sample(
                    group_id=group.group_id,
                    sample_index=i,
                    prompt_token_ids=[6, 7, 16],
                    response_token_ids=[source.randrange(6, 30) for _ in range(length)],
                    loss_mask=[True, True, False, True, True] if (g, i) == (0, 1) else [],
                    status=trajectory_pb2.SAMPLE_STATUS_COMPLETED,
                    reward=reward,
                )
            )
        made.append(group)
    return made


def samples_of(batch: Sequence[TrajectoryGroup]) -> list[Sample]:
    """All samples, in order."""
    return [sample for group in batch for sample in group.samples]


def document(case: Case, batch: Sequence[TrajectoryGroup], current: list[list[float]]) -> dict[str, Any]:
    """The same numbers as a file of the looking glass."""
    rows = []
    for sample, logprobs in zip(samples_of(batch), current, strict=True):
        row: dict[str, Any] = {
            "id": f"{sample.group_id}#{sample.sample_index}",
            "group_id": sample.group_id,
            "reward": sample.reward,
            "response_token_ids": list(sample.response_token_ids),
            "logprobs": logprobs,
            "rollout_logprobs": list(sample.rollout_logprobs),
        }
        if case.algorithm.get("use_rollout_logprobs"):
            row["old_logprobs"] = list(sample.rollout_logprobs)
        if sample.loss_mask:
            row["loss_mask"] = [int(kept) for kept in sample.loss_mask]
        if case.value_loss is not None:
            row["values"] = [0.0] * len(logprobs)  # a fresh critic's
        rows.append(row)
    settings: dict[str, Any] = {"advantage": case.advantage, "loss": case.loss, "dtype": "float32"}
    if case.value_loss is not None:
        settings["value_loss"] = case.value_loss
    return {"settings": settings, "trajectories": rows}


class Linear:
    """Σ w · log π with given weights: its gradient in the weights of the model is the glass's, by the chain rule."""

    needs_old_logprobs = needs_entropy_gradient = False

    def counts(self, batch: PolicyBatch, trajectories: Index | None, reduce: Reduce) -> Denominators:
        return denominators(batch.loss_mask_BT, trajectories, reduce)

    def share(self, batch: PolicyBatch, counts: Denominators) -> LossOutput:
        slope_BT = torch.where(batch.loss_mask_BT, batch.advantages_BT * batch.logprobs_BT, 0.0)
        return LossOutput(slope_BT.sum().double(), {})


def gradient_norm(model: Path, batch: Sequence[TrajectoryGroup], report: dict[str, Any]) -> float:
    """Norm of the weights' gradient that belongs to the glass's d loss / d logprob."""
    rows = {row["id"]: row["d_loss_d_logprob"] for row in report["trajectories"]}
    samples = [
        EngineSample(
            prompt_token_ids=torch.tensor(list(sample.prompt_token_ids)),
            response_token_ids=torch.tensor(list(sample.response_token_ids)),
            rollout_logprobs=torch.zeros(len(sample.response_token_ids)),
            loss_mask=torch.ones(len(sample.response_token_ids), dtype=torch.bool),
            advantages=torch.tensor(rows[f"{sample.group_id}#{sample.sample_index}"]),
            group_id=sample.group_id,
            sample_index=sample.sample_index,
        )
        for sample in samples_of(batch)
    ]
    engine = Engine.from_hf(model, EngineConfig(routing_replay=False))
    return engine.train_step(samples, Linear()).grad_norm


# CI takes the members that share the least code; `make test-all` takes the whole family.
IN_CI = ("grpo", "gspo", "ppo")


@pytest.mark.parametrize(
    "name", [name if name in IN_CI else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
async def test_a_step_of_the_running_trainer_gives_the_glasss_loss_and_gradient_norm(
    tmp_path: Path, model: Path, name: str
) -> None:
    case, batch, noise = CASES[name], groups(), random.Random(11)
    async with trainer(tmp_path, model, case) as stub:
        lease = await stub.AcquireMode(pb.AcquireModeRequest(holder="test"), timeout=START_S)
        asked = pb.ScoreSamplesRequest(samples=samples_of(batch), replay=False)
        scored = await stub.ScoreSamples(asked, timeout=STEP_S)
        current = [list(score.logprobs) for score in scored.scores]
        for sample, logprobs in zip(samples_of(batch), current, strict=True):
            sample.rollout_logprobs.extend(min(x + noise.uniform(-0.4, 0.4), 0.0) for x in logprobs)
        answer = await stub.TrainStep(
            pb.TrainStepRequest(mode_lease_id=lease.mode_lease_id, groups=batch), timeout=STEP_S
        )
    glass = inspect_loss(document(case, batch, current))
    assert not answer.skipped
    assert len(answer.trained_samples) == 7
    assert answer.metrics["train/loss"] == pytest.approx(glass["loss"]["loss"], rel=1e-5, abs=1e-7)
    expected = gradient_norm(model, batch, glass["loss"])
    assert expected > 1e-3
    assert answer.metrics["train/grad_norm"] == pytest.approx(expected, rel=1e-5)
    for metric in ("pg_clipfrac", "ppo_kl"):
        if glass["loss"]["metrics"].get(metric) is not None:
            assert answer.metrics[f"train/{metric}"] == pytest.approx(
                glass["loss"]["metrics"][metric], rel=1e-4, abs=1e-6
            ), metric
    if "use_rollout_logprobs" in case.algorithm:
        assert glass["loss"]["metrics"]["pg_clipfrac"] > 0  # else the comparison says little
    if case.value_loss is not None:
        assert answer.metrics["train/critic-value_loss"] == pytest.approx(glass["value_loss"]["loss"], rel=1e-5)
