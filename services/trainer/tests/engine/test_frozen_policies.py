"""The reference policy and its refresh; the teacher."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vime_trainer.algorithms.losses import PolicyLossConfig
from vime_trainer.engine.config import EngineConfig, OptimizerConfig
from vime_trainer.engine.engine import Engine
from vime_trainer.engine.errors import UnsupportedModelError
from vime_trainer.engine.objective import PolicyLoss
from vime_trainer.engine.sample import Sample

pytestmark = pytest.mark.engine
Maker = Callable[..., Sample]
LOSS = PolicyLoss(PolicyLossConfig(reducer="token_mean"))


def make(path: Path, interval: int) -> Engine:
    return Engine.from_hf(
        path,
        EngineConfig(
            keep_reference=True, reference_refresh_interval=interval, optimizer=OptimizerConfig(lr=1e-2, beta2=0.9)
        ),
    )


def distance(engine: Engine, samples: list[Sample]) -> float:
    own, reference = engine.score(samples), engine.score(samples, weights="reference")
    return max(float((a - b).abs().max()) for a, b in zip(own, reference, strict=True))


def test_the_policy_becomes_the_reference_after_every_interval(moe_dir: Path, sample_maker: Maker) -> None:
    engine, samples = make(moe_dir, 2), [sample_maker(4, 5, seed=i) for i in range(3)]
    seen = []
    for _ in range(4):
        engine.train_step(samples, LOSS)
        seen.append(distance(engine, samples))
    assert seen[1] == seen[3] == 0.0
    assert min(seen[0], seen[2]) > 1e-4


def test_a_skipped_step_does_not_age_the_reference(moe_dir: Path, sample_maker: Maker) -> None:
    engine, samples = make(moe_dir, 2), [sample_maker(4, 5, seed=i) for i in range(3)]
    empty = [sample_maker(4, 5, loss_mask=torch.zeros(5, dtype=torch.bool))]
    engine.train_step(samples, LOSS)
    assert engine.train_step(empty, LOSS).skipped
    assert distance(engine, samples) > 1e-4
    engine.train_step(samples, LOSS)
    assert distance(engine, samples) == 0.0


def test_a_refreshed_reference_and_its_age_survive_a_checkpoint(
    moe_dir: Path, tmp_path: Path, sample_maker: Maker
) -> None:
    engine, samples = make(moe_dir, 2), [sample_maker(4, 5, seed=i) for i in range(3)]
    for _ in range(3):
        engine.train_step(samples, LOSS)
    engine.save_checkpoint(tmp_path / "c", 3, {})
    resumed = make(moe_dir, 2)
    resumed.load_checkpoint(tmp_path / "c")
    old, new = (e.score(samples, weights="reference") for e in (engine, resumed))
    assert all(torch.equal(a, b) for a, b in zip(old, new, strict=True))
    assert distance(resumed, samples) == distance(engine, samples) > 1e-4
    resumed.train_step(samples, LOSS)
    assert distance(resumed, samples) == 0.0


def test_without_a_refresh_the_reference_is_the_starting_model_after_a_resume(
    moe_dir: Path, tmp_path: Path, sample_maker: Maker
) -> None:
    engine, samples = make(moe_dir, 0), [sample_maker(4, 5, seed=i) for i in range(3)]
    begin = engine.score(samples)
    engine.train_step(samples, LOSS)
    saved = engine.save_checkpoint(tmp_path / "c", 1, {})
    assert not (saved.path / "reference.safetensors").exists()
    resumed = make(moe_dir, 0)
    resumed.load_checkpoint(tmp_path / "c")
    assert all(torch.equal(a, b) for a, b in zip(begin, resumed.score(samples, weights="reference"), strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_teacher_scores_with_its_own_weights_and_leaves_the_students_alone(
    moe_dir: Path,
    moe_config: dict[str, Any],
    tmp_path: Path,
    model_writer: Callable[..., Path],
    weight_maker: Callable[..., dict[str, torch.Tensor]],
    sample_maker: Maker,
    dtype: str,
) -> None:
    other = model_writer(tmp_path / "teacher", moe_config, weight_maker(moe_config, seed=5))
    settings, samples = EngineConfig(dtype=dtype), [sample_maker(4, n, seed=n) for n in (5, 3)]
    alone, teacher = Engine.from_hf(moe_dir, settings), Engine.from_hf(other, settings)
    student = Engine.from_hf(moe_dir, settings, teacher=other)
    expected = teacher.score(samples, replay=False)
    assert all(
        torch.equal(a, b)
        for a, b in zip(expected, student.score(samples, replay=False, weights="teacher"), strict=True)
    )
    for _ in range(2):
        assert alone.train_step(samples, LOSS).loss == student.train_step(samples, LOSS).loss
    for (name, a), (_, b) in zip(alone.export(), student.export(), strict=True):
        assert torch.equal(a, b), name


def test_a_teacher_of_another_shape_is_refused_by_what_differs(moe_dir: Path, dense_dir: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="must have the policy's shape; it differs in architecture"):
        Engine.from_hf(moe_dir, EngineConfig(), teacher=dense_dir)
    with pytest.raises(ValueError, match="there is no teacher policy"):
        Engine.from_hf(dense_dir, EngineConfig()).score([], weights="teacher")
