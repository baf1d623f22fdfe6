"""What a recipe may say about the algorithm: a setting that would be ignored is refused, never dropped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from vime_trainer.algorithm_config import AlgorithmConfig, build_value_loss, critic_config
from vime_trainer.config import TrainerSettings
from vime_trainer.tools import fresh_model


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"critic": {"lr": 1e-4}}, "critic is set, but estimator = 'grpo' has none"),
        ({"reference_refresh_interval": 5}, "reference_refresh_interval = 5 has no effect"),
        ({"estimator": "opd"}, "estimator = 'opd' with opd_kl_coef = 0 has nothing to learn from"),
        ({"objective": "sft", "kl_loss_coef": 0.1}, "objective = 'sft' ignores kl_loss_coef"),
        ({"objective": "sft", "estimator": "rloo"}, "objective = 'sft' ignores estimator"),
        ({"overlong": {"max_length": 4, "cache": 5}}, "cache = 5 must not exceed max_length = 4"),
    ],
)
def test_a_setting_that_would_be_ignored_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        AlgorithmConfig.model_validate(settings)


def test_ppo_has_a_critic_without_being_told() -> None:
    chosen = critic_config(AlgorithmConfig(estimator="ppo"))
    assert chosen is not None
    assert chosen.optimizer.lr == chosen.lr == 1e-4
    assert critic_config(AlgorithmConfig()) is None


def test_the_value_clip_of_0_is_no_clip_and_the_reducer_is_the_policys() -> None:
    made = build_value_loss(
        AlgorithmConfig.model_validate({"estimator": "ppo", "critic": {"value_clip": 0}, "reducer": "token_mean"})
    )
    assert made.value_clip is None
    assert made.reducer == "token_mean"


@pytest.mark.parametrize(
    ("teacher", "coef", "words"),
    [
        (True, 0.0, "opd_kl_coef = 0 with the teacher"),
        (False, 1.0, "opd_kl_coef = 1 with no teacher"),
        ("wide", 1.0, "must have the policy's shape; differs: hidden_size"),
    ],
)
def test_teacher_and_distillation_belong_together(tmp_path: Path, teacher: bool | str, coef: float, words: str) -> None:
    fresh_model.write(tmp_path / "model", fresh_model.config(1, 64), 0)
    fresh_model.write(tmp_path / "wide", fresh_model.config(1, 128), 0)
    path = {True: "model", False: None, "wide": "wide"}[teacher]
    settings = {
        "run_id": "r",
        "run_dir": tmp_path,
        "model_path": tmp_path / "model",
        "teacher_path": None if path is None else tmp_path / path,
        "buffer_address": "127.0.0.1:1",
        "router_address": "127.0.0.1:1",
        "steps": 1,
        "algorithm": {"opd_kl_coef": coef},
    }
    with pytest.raises(ValidationError, match=words):
        TrainerSettings.model_validate(settings)


def test_the_table_follows_from_the_objective(tmp_path: Path) -> None:
    fresh_model.write(tmp_path / "model", fresh_model.config(1, 64), 0)
    base = {
        "run_id": "r",
        "run_dir": tmp_path,
        "model_path": tmp_path / "model",
        "buffer_address": "127.0.0.1:1",
        "router_address": "127.0.0.1:1",
        "steps": 1,
    }
    assert TrainerSettings.model_validate(base).table == "train"
    assert TrainerSettings.model_validate(base | {"algorithm": {"objective": "sft"}}).table == "sft"
