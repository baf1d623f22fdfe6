"""A setting that cannot take effect is an error that names the key, the file with its line, and the nearest key."""

from __future__ import annotations

import contextlib
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, SecretStr, ValidationInfo, field_validator, model_validator

from vime_client.config_loading import ConfigError, ConfigModel, describe, load_config, parse_override, to_toml


class Optimizer(ConfigModel):
    learning_rate: float = Field(default=1e-3, gt=0)
    """Step size."""
    betas: tuple[float, float] = (0.9, 0.95)


class Fifo(ConfigModel):
    kind: Literal["fifo"] = "fifo"


class Windowed(ConfigModel):
    kind: Literal["windowed"] = "windowed"
    width: int = 2


class Source(ConfigModel):
    path: Path

    @field_validator("path")
    @classmethod
    def beside_the_recipe(cls, value: Path, info: ValidationInfo) -> Path:
        base: Path = (info.context or {})["base_dir"]
        return base / value


class Recipe(ConfigModel):
    steps: int = 10
    """How many steps to train."""
    name: str = "run"
    optimizer: Optimizer = Field(default_factory=Optimizer)
    selector: Annotated[Fifo | Windowed, Field(discriminator="kind")] = Fifo()
    sources: list[Source] = Field(default_factory=list)
    tables: dict[str, Optimizer] = Field(default_factory=dict)
    token: SecretStr | None = None

    @model_validator(mode="after")
    def can_end(self) -> Recipe:
        if self.steps > 1000 and self.name == "run":
            raise ValueError(f"{self.steps} steps need a name of their own")
        return self


def _write(folder: Path, text: str) -> Path:
    file = folder / "recipe.toml"
    file.write_text(text)
    return file


def _problems(file: Path | None, *overrides: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load_config(Recipe, file, overrides)
    return caught.value.problems


def test_a_file_and_overrides_make_the_settings(tmp_path: Path) -> None:
    file = _write(tmp_path, 'steps = 3\n[optimizer]\nlearning_rate = 0.5\n[[sources]]\npath = "a.jsonl"\n')
    recipe = load_config(
        Recipe, file, ["steps=4", "optimizer.betas=[0.8, 0.9]", "name=run-7", "sources.0.path=b.jsonl"]
    )
    assert (recipe.steps, recipe.name, recipe.optimizer.learning_rate) == (4, "run-7", 0.5)
    assert recipe.optimizer.betas == (0.8, 0.9)
    assert recipe.sources[0].path == tmp_path / "b.jsonl"  # validators know the recipe's folder


def test_an_unknown_key_names_its_line_and_the_nearest_key(tmp_path: Path) -> None:
    file = _write(tmp_path, "steps = 3\n\n[optimizer]\nlearnin_rate = 0.5\n")
    assert _problems(file) == (
        f'{file}:4: unknown key "optimizer.learnin_rate"; did you mean "optimizer.learning_rate"?',
    )


def test_a_key_in_the_wrong_table_names_the_right_one(tmp_path: Path) -> None:
    file = _write(tmp_path, "[optimizer]\nsteps = 3\n")
    assert _problems(file) == (f'{file}:2: unknown key "optimizer.steps"; did you mean "steps"?',)


def test_a_key_like_no_other_lists_what_is_known(tmp_path: Path) -> None:
    file = _write(tmp_path, "[optimizer]\nzzz = 3\n")
    assert _problems(file)[0].endswith(
        'unknown key "optimizer.zzz"; known here: optimizer.learning_rate, optimizer.betas'
    )


def test_the_branch_of_a_union_is_not_part_of_the_key(tmp_path: Path) -> None:
    file = _write(tmp_path, '[selector]\nkind = "windowed"\nwidht = 3\n')
    assert _problems(file) == (f'{file}:3: unknown key "selector.widht"; did you mean "selector.width"?',)


def test_keys_in_arrays_and_maps_are_found_too(tmp_path: Path) -> None:
    file = _write(tmp_path, '[[sources]]\npath = "x"\n[[sources]]\npaht = "x"\n[tables.eval]\nbeta = 1\n')
    assert _problems(file) == (
        f'{file}:3: "sources.1.path" is required',
        f'{file}:4: unknown key "sources.1.paht"; did you mean "sources.1.path"?',
        f'{file}:6: unknown key "tables.eval.beta"; did you mean "tables.eval.betas"?',
    )


def test_wrong_values_are_one_sentence_each_with_the_value(tmp_path: Path) -> None:
    file = _write(tmp_path, 'steps = "many"\n[optimizer]\nlearning_rate = -1.0\n')
    assert _problems(file) == (
        f"{file}:1: steps: input should be a valid integer, got 'many' (str)",
        f"{file}:3: optimizer.learning_rate: input should be greater than 0, got -1.0 (float)",
    )


def test_a_rule_over_several_settings_speaks_for_itself(tmp_path: Path) -> None:
    file = _write(tmp_path, "steps = 2000\n")
    assert _problems(file) == (f"{file}: 2000 steps need a name of their own",)


def test_a_wrong_override_is_blamed_on_the_command_line() -> None:
    assert _problems(None, "optimizer.lr=3") == (
        '--set: unknown key "optimizer.lr"; known here: optimizer.learning_rate, optimizer.betas',
    )
    assert _problems(None, "steps=many")[0].startswith("--set: steps: input should be a valid integer")
    assert _problems(None, "steps") == ('override "steps" must have the form a.b=c',)
    assert _problems(None, "steps.x=1", "steps.x.y=1") == ('override "steps.x.y=1": steps.x is a value, not a table',)


def test_a_missing_file_and_broken_toml_are_one_sentence(tmp_path: Path) -> None:
    assert _problems(tmp_path / "no.toml") == (f"configuration file {tmp_path / 'no.toml'} does not exist",)
    file = _write(tmp_path, "steps = = 3\n")
    (problem,) = _problems(file)
    assert problem.startswith(f"{file} is not valid TOML: ")
    assert "line 1" in problem


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("0.5", 0.5),
        ("true", True),
        ("[1, 2]", [1, 2]),
        ('"3"', "3"),
        ("a b", "a b"),
        ("", ""),
        ("x=y", "x=y"),
    ],
)
def test_an_override_is_a_toml_value_or_else_text(text: str, value: Any) -> None:
    assert parse_override(f"a.b={text}") == (("a", "b"), value)


def test_a_line_break_smuggles_no_second_key_in() -> None:
    assert parse_override("a=1\nb = 2") == (("a",), "1\nb = 2")


@given(st.text())
def test_any_override_is_accepted_or_refused_in_words(text: str) -> None:
    with contextlib.suppress(ConfigError):  # any other exception fails the test
        load_config(Recipe, None, [text])


def test_the_resolved_settings_read_back_as_they_were_and_hide_secrets(tmp_path: Path) -> None:
    recipe = load_config(Recipe, None, ["token=abc123", "selector.kind=windowed", "optimizer.learning_rate=3e-5"])
    text = to_toml(recipe)
    assert "abc123" not in text
    again = load_config(Recipe, _write(tmp_path, text))
    assert again.model_dump(exclude={"token"}) == recipe.model_dump(exclude={"token"})
    assert tomllib.loads(text)["optimizer"]["learning_rate"] == 3e-5


def test_every_setting_is_described_with_its_default() -> None:
    lines = list(describe(Recipe))
    assert "steps (int, default 10)  How many steps to train." in lines
    assert "optimizer.learning_rate (float, default 0.001)  Step size." in lines


def test_text_that_looks_like_a_number_is_asked_for_in_quotes() -> None:
    assert "--set: name: must be text, in quotes, got 4 (int)" in _problems(None, "name=4")
