"""What a recipe may say about the algorithm: a setting that would be ignored is refused, never dropped."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from vime_trainer.algorithm_config import AlgorithmConfig, build_value_loss, critic_config
from vime_trainer.config import TrainerSettings
from vime_trainer.engine.config import OptimizerConfig
from vime_trainer.tools import fresh_model


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"critic": {"lr": 1e-4}}, "critic has no effect with estimator = 'grpo', which has no critic"),
        ({"reference_refresh_interval": 5}, "reference_refresh_interval = 5 has no effect"),
        ({"estimator": "opd"}, "estimator = 'opd' with opd_kl_coef = 0 has nothing to learn from"),
        ({"objective": "sft", "kl_loss_coef": 0.1}, "kl_loss_coef = 0.1 has no effect with objective = 'sft'"),
        ({"objective": "sft", "estimator": "rloo"}, "estimator = 'rloo' has no effect with objective = 'sft'"),
        ({"overlong": {"max_length": 4, "cache": 5}}, "cache = 5 must not exceed max_length = 4"),
        (
            {"use_rollout_logprobs": True, "correction": {"kind": "tis"}},
            "correction has no effect with use_rollout_logprobs = true",
        ),
        ({"objective": "reinforce", "correction": {"kind": "tis"}}, "correction has no effect with objective = 'reinf"),
        ({"correction": {"kind": "tis", "level": "sequence"}}, "level = 'sequence' has no effect with kind = 'tis'"),
        ({"correction": {"kind": "icepop", "mode": "mask"}}, "mode = 'mask' has no effect with kind = 'icepop'"),
        ({"correction": {"kind": "none", "high": 3.0}}, "high = 3.0 has no effect with kind = 'none'"),
        ({"correction": {"renormalize": True}}, "renormalize = true has no effect with kind = 'none'"),
        ({"correction": {"kind": "mis", "low": 0.1}}, "low = 0.1 has no effect with mode = 'truncate'"),
        (
            {"correction": {"kind": "tis", "renormalize": True}},
            "renormalize = true has no effect with kind = 'tis'",
        ),
        ({"objective": "reinforce", "eps_clip": 0.2}, "eps_clip = 0.2 has no effect with objective = 'reinforce'"),
        ({"objective": "reinforce", "eps_clip_high": 0.3}, "eps_clip_high = 0.3 has no effect with objective = 'reinf"),
        ({"objective": "cispo", "eps_clip_c": 3.0}, "eps_clip_c = 3.0 has no effect with objective = 'cispo'"),
        ({"kl_loss_type": "k2"}, "kl_loss_type = 'k2' has no effect with kl_loss_coef = 0"),
        ({"fixed_length": 32}, "fixed_length = 32 has no effect with reducer = 'token_mean'"),
        (
            {"estimator": "opd", "opd_kl_coef": 1.0, "overlong": {"max_length": 4, "cache": 1}},
            "overlong has no effect with estimator = 'opd', which reads no reward",
        ),
        ({"overlong": {"max_length": 4, "cache": 1, "factor": math.inf}}, "factor\n  Input should be a finite number"),
        ({"entropy_coef": math.inf}, "entropy_coef\n  Input should be a finite number"),
        ({"kl_loss_coef": math.nan}, "kl_loss_coef\n  Input should be a finite number"),
    ],
)
def test_a_setting_that_would_be_ignored_or_ruin_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        AlgorithmConfig.model_validate(settings)


def test_all_settings_that_do_nothing_are_told_together() -> None:
    with pytest.raises(ValidationError) as caught:
        AlgorithmConfig.model_validate({"objective": "reinforce", "eps_clip": 0.3, "kl_loss_type": "k1", "critic": {}})
    assert [error["loc"] for error in caught.value.errors()] == [("eps_clip",), ("kl_loss_type",), ("critic",)]


@pytest.mark.parametrize(
    "settings", [{}, {"objective": "sft"}, {"objective": "reinforce"}, {"correction": {"kind": "icepop", "low": 0.4}}]
)
def test_settings_that_are_written_out_are_accepted_again(settings: dict[str, Any]) -> None:
    made = AlgorithmConfig.model_validate(settings)
    assert AlgorithmConfig.model_validate(made.model_dump(mode="json")) == made


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"min_lr": 1e-6}, "min_lr = 1e-06 has no effect with schedule = 'constant'"),
        ({"lr": "2e-4"}, "lr\n  Input should be a valid number"),
        ({"lr": True}, "lr\n  Input should be a valid number"),
        ({"lr": math.inf}, "lr\n  Input should be a finite number"),
        ({"lr": 7.0}, "lr\n  Input should be less than or equal to 1"),
        ({"weight_decay": math.inf}, "weight_decay\n  Input should be a finite number"),
        ({"eps": math.nan}, "eps\n  Input should be a finite number"),
    ],
)
def test_an_optimizer_that_would_ruin_the_weights_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        OptimizerConfig.model_validate(settings)


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
