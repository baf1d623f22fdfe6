"""The step of an algorithm on a rank: critic and policy, reference, teacher and demonstrations, on a real engine."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from vime.common.v1 import trajectory_pb2
from vime.common.v1.trajectory_pb2 import Prompt, Sample, SamplingParams, TrajectoryGroup
from vime.trainer.v1 import rank_service_pb2 as pb
from vime_trainer.algorithm_config import AlgorithmConfig, CorrectionSettings, critic_config, needs_reference
from vime_trainer.engine.config import CriticConfig, EngineConfig, OptimizerConfig
from vime_trainer.engine.engine import Engine
from vime_trainer.rank.training import BatchTraining
from vime_trainer.tools import fresh_model

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    fresh_model.write(folder, fresh_model.config(layers=1, hidden=64), seed=0)
    return folder


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    fresh_model.write(folder, fresh_model.config(layers=1, hidden=64), seed=1)
    return folder


def engine(model: Path, algorithm: AlgorithmConfig, teacher: Path | None = None) -> Engine:
    """As `Commands` builds it; without replay, since these samples have no routes."""
    config = EngineConfig(
        routing_replay=False,
        keep_reference=needs_reference(algorithm),
        reference_refresh_interval=algorithm.reference_refresh_interval,
        optimizer=OptimizerConfig(lr=3e-3),
    )
    return Engine.from_hf(model, config, critic_config(algorithm), teacher)


def batch(seed: int = 0, logprobs: bool = True, length: int = 5) -> list[TrajectoryGroup]:
    source = random.Random(seed)
    groups = []
    for g in range(3):
        group = TrajectoryGroup(group_id=f"g{g}", prompt=Prompt(text="1+1="), sampling=SamplingParams(temperature=1.0))
        for i in range(4):
            tokens = [source.randrange(6, 30) for _ in range(length)]
            sample = Sample(
                group_id=f"g{g}",
                sample_index=i,
                prompt_token_ids=[6, 7],
                response_token_ids=tokens,
                rollout_logprobs=[-3.3] * length if logprobs else [],
                status=trajectory_pb2.SAMPLE_STATUS_COMPLETED,
                reward=float(tokens[0] % 2),
            )
            group.samples.append(sample)
        groups.append(group)
    return groups


def run(
    training: BatchTraining, groups: list[TrajectoryGroup], texts: int = 0, lr: float | None = None
) -> pb.TrainResult:
    command = pb.TrainCommand(group_ids=[g.group_id for g in groups], sample_texts=texts, learning_rate=lr)
    return training.run(command, groups, range(len(groups)), 0.0)


def weights(held: Engine) -> list[torch.Tensor]:
    return [tensor.clone() for _, tensor in held.export()]


def changed(before: list[torch.Tensor], held: Engine) -> bool:
    return any(not torch.equal(a, b) for a, (_, b) in zip(before, held.export(), strict=True))


def test_the_critic_is_trained_alone_until_its_warm_up_is_over(model: Path) -> None:
    algorithm = AlgorithmConfig(estimator="ppo", critic=CriticConfig(lr=3e-3, warmup_steps=2, epochs=2, mini_batches=2))
    held = engine(model, algorithm)
    training = BatchTraining(held, algorithm)
    results = []
    for step in range(3):
        before = weights(held)
        results.append(run(training, batch(step)))
        assert changed(before, held) == (step == 2)
        assert not results[-1].skipped
        assert len(results[-1].trained_samples) == 12
        assert results[-1].metrics["train/critic-optimizer_steps"] == 4
        assert "train/train_rollout_logprob_abs_diff" in results[-1].metrics
    first, _, last = (dict(result.metrics) for result in results)
    assert "train/loss" not in first
    assert last["train/optimizer_steps"] == 1
    for name in (
        "train/critic-value_loss",
        "train/critic-value_clipfrac",
        "train/critic-grad_norm",
        "perf/values_time",
    ):
        assert name in last
    assert first["rollout/values"] == 0.0
    assert first["rollout/returns"] == pytest.approx(first["rollout/raw_reward"])  # γ = λ = 1: G = R for every token
    assert first["train/critic-explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert abs(last["rollout/values"]) > 1e-3


def test_a_step_that_the_policy_skips_does_not_change_the_critic_either(model: Path) -> None:
    algorithm = AlgorithmConfig(estimator="ppo", use_rollout_logprobs=True, critic=CriticConfig(lr=3e-3))
    held = engine(model, algorithm)
    groups = batch()
    groups[0].samples[0].rollout_logprobs[0] = -1e4  # a ratio that overflows
    before = weights(held)
    result = run(BatchTraining(held, algorithm), groups)
    assert result.skipped
    assert not changed(before, held)
    assert held.critic is not None
    assert held.critic.batches == 0
    assert not run(BatchTraining(held, algorithm), batch()).skipped
    assert held.critic.batches == 1


@pytest.mark.parametrize("warmup", [0, 1])
def test_values_that_are_not_finite_skip_the_step_and_change_nothing(model: Path, warmup: int) -> None:
    algorithm = AlgorithmConfig(estimator="ppo", critic=CriticConfig(lr=3e-3, warmup_steps=warmup))
    held = engine(model, algorithm)
    assert held.critic is not None
    bias = held.critic._module.get_parameter("output_layer.bias")
    for value, skipped in ((float("inf"), True), (0.0, False)):
        with torch.no_grad():
            bias.fill_(value)
        before = weights(held)
        result = run(BatchTraining(held, algorithm), batch())
        assert (result.skipped, held.critic.batches) == (skipped, int(not skipped))
        assert bool(result.trained_samples) is not skipped
        assert not (skipped and changed(before, held))


def test_values_learn_what_the_reward_depends_on(model: Path) -> None:
    algorithm = AlgorithmConfig(
        estimator="ppo", critic=CriticConfig(lr=3e-3, value_clip=0, warmup_steps=1000, epochs=4)
    )
    training = BatchTraining(engine(model, algorithm), algorithm)
    metrics = [dict(run(training, batch(step % 3)).metrics) for step in range(24)]
    assert metrics[-1]["train/critic-value_loss"] < 0.4 * metrics[0]["train/critic-value_loss"]
    assert metrics[-1]["train/critic-explained_variance"] > 0.4


@pytest.mark.parametrize(
    "algorithm",
    [
        AlgorithmConfig(kl_loss_coef=0.1, kl_loss_type="k3"),
        AlgorithmConfig(kl_loss_coef=0.1, kl_loss_type="k3", reference_refresh_interval=2),
    ],
)
def test_the_kl_to_the_reference_is_0_at_first_and_after_every_refresh_and_positive_between(
    model: Path, algorithm: AlgorithmConfig
) -> None:
    training = BatchTraining(engine(model, algorithm), algorithm)
    kl = [run(training, batch(step)).metrics["train/kl_loss"] for step in range(3)]
    assert kl[0] == pytest.approx(0.0, abs=1e-9)
    assert kl[1] > 1e-5
    if algorithm.reference_refresh_interval:
        assert kl[2] == pytest.approx(0.0, abs=1e-9)
    else:
        assert kl[2] > kl[1]


def test_the_kl_in_the_reward_lowers_the_advantage_of_tokens_that_left_the_reference(model: Path) -> None:
    algorithm = AlgorithmConfig(estimator="reinforce_plus_plus", kl_coef=0.5, whiten=False)
    training = BatchTraining(engine(model, algorithm), algorithm)
    first = run(training, batch(), texts=12)
    second = run(training, batch(), texts=12)

    def advantages(result: pb.TrainResult) -> list[float]:
        return [json.loads(text)["advantage"] for text in result.sample_json]

    rewards = [json.loads(text)["reward"] for text in first.sample_json]
    assert advantages(first) == pytest.approx(rewards, abs=1e-5)  # no KL yet: A of the first token is R
    assert advantages(second) != pytest.approx(rewards, abs=1e-3)


def test_a_student_comes_nearer_to_its_teacher(model: Path, teacher: Path) -> None:
    algorithm = AlgorithmConfig(estimator="opd", opd_kl_coef=1.0)
    held = engine(model, algorithm, teacher)
    training = BatchTraining(held, algorithm)
    results = [dict(run(training, batch(0)).metrics) for _ in range(6)]
    assert results[0]["rollout/opd_reverse_kl"] != 0
    assert "perf/teacher_log_probs_time" in results[0]
    assert results[-1]["rollout/opd_reverse_kl"] < results[0]["rollout/opd_reverse_kl"]


def test_demonstrations_are_learnt_without_logprobs_or_routes(model: Path) -> None:
    algorithm = AlgorithmConfig(objective="sft")
    training = BatchTraining(engine(model, algorithm), algorithm)
    groups = batch(0, logprobs=False)
    losses = [run(training, groups, texts=1).metrics["train/loss"] for _ in range(6)]
    assert losses[0] == pytest.approx(torch.log(torch.tensor(32.0)).item(), abs=0.6)  # a guess over 32 tokens
    assert losses[-1] < 0.8 * losses[0]
    metrics = run(training, groups).metrics
    assert not any("rollout_logprob_abs_diff" in name or "mismatch" in name for name in metrics)


def test_the_mismatch_is_measured_before_the_first_of_several_mini_batches(model: Path) -> None:
    one, three = AlgorithmConfig(), AlgorithmConfig(mini_batches=3)
    gaps = []
    for algorithm in (one, three):
        result = run(BatchTraining(engine(model, algorithm), algorithm), batch())
        gaps.append(result.metrics["train/train_rollout_logprob_abs_diff"])
        assert result.metrics["train/optimizer_steps"] == algorithm.mini_batches
    assert gaps[1] == pytest.approx(gaps[0], rel=1e-5)


def test_long_responses_are_punished_before_the_statistics_and_the_raw_reward_stays(model: Path) -> None:
    algorithm = AlgorithmConfig.model_validate({"overlong": {"max_length": 6, "cache": 4, "factor": 2.0}})
    groups = batch(length=4)
    groups[0].samples[0].response_token_ids.append(9)
    groups[0].samples[0].rollout_logprobs.append(-3.0)
    metrics = run(BatchTraining(engine(model, algorithm), algorithm), groups).metrics
    # -2 · (4 - 2) / 4 for eleven samples of 4 tokens, -2 · (5 - 2) / 4 for the one of 5.
    assert metrics["rollout/overlong_penalty"] == pytest.approx(-(11 * 1.0 + 1.5) / 12)
    assert metrics["rollout/rewards"] == pytest.approx(
        metrics["rollout/raw_reward"] + metrics["rollout/overlong_penalty"]
    )


def test_a_rate_given_with_the_step_is_that_of_this_step_alone(model: Path) -> None:
    held = engine(model, AlgorithmConfig())
    training = BatchTraining(held, AlgorithmConfig())
    moved = []
    for lr in (1e-6, None):
        before = weights(held)
        assert run(training, batch(), lr=lr).metrics["train/lr-pg_0"] == pytest.approx(lr or 3e-3)
        moved.append(max(float((a - b).abs().max()) for a, (_, b) in zip(before, held.export(), strict=True)))
    assert 0 < moved[0] < 2e-6
    assert moved[1] > 1e-3
    assert held.lr == 3e-3


def test_rewards_that_overflow_skip_the_step_and_the_next_one_trains(model: Path) -> None:
    held = engine(model, AlgorithmConfig())
    training = BatchTraining(held, AlgorithmConfig())
    groups, before = batch(), weights(held)
    for sample in groups[0].samples[1:]:
        sample.reward = 1e308
    result = run(training, groups, texts=12)
    assert result.skipped
    assert not result.trained_samples
    assert not changed(before, held)
    assert result.metrics["rollout/non_finite_advantages"] == 4
    assert len(run(training, batch()).trained_samples) == 12


@pytest.mark.parametrize("use_rollout_logprobs", [False, True])
def test_what_stands_at_a_masked_position_of_the_engines_logprobs_reaches_nothing(
    model: Path, use_rollout_logprobs: bool
) -> None:
    algorithm = AlgorithmConfig(
        use_rollout_logprobs=use_rollout_logprobs,
        mini_batches=2,
        correction=CorrectionSettings()
        if use_rollout_logprobs
        else CorrectionSettings(kind="icepop", renormalize=True),
    )
    results = []
    for placeholder in (0.0, float("nan")):
        groups = batch()
        for sample in groups[1].samples:
            sample.loss_mask.extend([True, False, True, True, False])
            sample.rollout_logprobs[1] = sample.rollout_logprobs[4] = placeholder
        found = run(BatchTraining(engine(model, algorithm), algorithm), groups)
        assert not found.skipped
        results.append({name: x for name, x in found.metrics.items() if not name.startswith("perf/")})
    assert results[0] == results[1]


def test_the_likelihood_of_demonstrations_knows_neither_reward_nor_temperature(model: Path) -> None:
    algorithm = AlgorithmConfig(objective="sft")
    results = []
    for temperature in (1.0, 0.5):
        groups = batch(0, logprobs=False)
        for group in groups:
            group.sampling.temperature = temperature
            for sample in group.samples[2:] if temperature != 1 else []:
                sample.ClearField("reward")
        results.append(run(BatchTraining(engine(model, algorithm), algorithm), groups))
    assert results[0].metrics["train/loss"] == results[1].metrics["train/loss"]
    assert len(results[1].trained_samples) == 12


def test_a_sample_without_a_token_to_train_on_is_no_trained_sample(model: Path) -> None:
    algorithm = AlgorithmConfig(mask_truncated=True)
    groups = batch()
    groups[0].samples[0].status = trajectory_pb2.SAMPLE_STATUS_TRUNCATED
    trained = run(BatchTraining(engine(model, algorithm), algorithm), groups).trained_samples
    assert len(trained) == 11
    assert "g0#0" not in trained
