"""Settings that must deadlock are refused at start, with both numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from vime_buffer.config import BufferConfig, BufferSettings
from vime_buffer.settings import BOUNDS_IN_A_ROW, TableSettings, changed_fields, check_table
from vime_buffer.testing import table, write_prompts
from vime_service.config import ConfigError, load_config
from vime_service.errors import ImpossibleConfig, InexactSampling, InvalidArgument


@pytest.fixture
def prompts(tmp_path):
    return write_prompts(tmp_path / "train.jsonl", 4)


@pytest.mark.parametrize(
    ("settings", "numbers"),
    [
        ({"groups_per_step": 16, "capacity": 8}, ("16", "8")),  # K28: a batch that could never fill
        ({"publish_interval": 3, "max_staleness": 1}, ("3", "1")),
        ({"lease_ttl": 10, "generation_deadline": 30}, ("10", "30")),
        ({"lease_ttl": 30, "generation_deadline": 30}, ("30", "30")),
        ({"lease_ttl": 60, "max_lease": 59}, ("59", "60")),
    ],
)
def test_k28_impossible_settings_are_refused_with_both_numbers(prompts, settings, numbers):
    with pytest.raises(ImpossibleConfig) as caught:
        table(prompts, **settings)
    assert all(number in caught.value.message for number in numbers)
    assert {v.removesuffix(".0") for v in caught.value.metadata.values()} == set(numbers)


@pytest.mark.parametrize("attempts", [0, -1])
def test_unbounded_attempts_cannot_be_written(prompts, attempts):
    with pytest.raises(ValueError, match="max_attempts"):
        table(prompts, max_attempts=attempts)


@pytest.mark.parametrize(
    ("sampling", "field"),
    [({"temperature": 0.0}, "temperature"), ({"top_p": 0.9}, "top_p"), ({"top_k": 20}, "top_k")],
)
def test_sampling_that_the_trainer_cannot_reproduce_is_refused_for_training_only(prompts, sampling, field):
    with pytest.raises(InexactSampling, match=field):
        table(prompts, sampling={"max_tokens": 8, **sampling})
    table(prompts, name="eval/x", sampling={"max_tokens": 8, **sampling})


@pytest.mark.parametrize("setting", ["groups_per_step", "max_staleness", "capacity", *BOUNDS_IN_A_ROW])
def test_a_setting_without_effect_on_an_eval_table_is_refused(prompts, setting):
    with pytest.raises(InvalidArgument, match=f"{setting} 4 has no effect"):
        table(prompts, name="eval/x", **{setting: 4})


def test_defaults_that_follow_from_others_are_written_out(prompts):
    settings = table(prompts, groups_per_step=16, max_staleness=1)
    assert settings.capacity == 32
    assert settings.max_drops_in_a_row == 320
    assert settings.source.name == "train"


@pytest.mark.parametrize("name", ["Train", "eval/", "eval/a/b", "train/x", "eval/..", "eval/a b"])
def test_other_table_names_are_refused(prompts, name):
    with pytest.raises(ValueError, match="must be train, sft, unscored or eval"):
        table(prompts, name=name)


def test_the_path_is_no_setting_but_everything_else_is(prompts, tmp_path):
    other = write_prompts(tmp_path / "copy.jsonl", 4)
    moved = table(other, source={"name": "train"})
    assert changed_fields(table(prompts), moved) == []
    assert changed_fields(table(prompts), table(prompts, groups_per_step=3)) == [
        "groups_per_step",
        "capacity",
        "max_drops_in_a_row",
        "max_failures_in_a_row",
        "max_unusable_in_a_row",
    ]


# ------------------------------------------------------------------ the configuration file


CONFIG = """
[buffer]
dir = "ledger"
run_id = "demo"
seed = 3
[buffer.tables.train]
source = { path = "train.jsonl", shuffle = true, required_keys = ["answer"] }
samples_per_prompt = 8
groups_per_step = 16
sampling = { max_tokens = 32, temperature = 1.0 }
require_routes = true
[buffer.tables."eval/heldout"]
source = { path = "heldout.jsonl" }
sampling = { max_tokens = 32, temperature = 0.0 }
eval_interval = 20
"""


def load(tmp_path, text, *overrides):
    write_prompts(tmp_path / "train.jsonl", 4)
    write_prompts(tmp_path / "heldout.jsonl", 4)
    path = tmp_path / "buffer.toml"
    path.write_text(text)
    return load_config(BufferConfig, path, overrides)


def test_a_recipe_loads_with_names_and_paths_resolved(tmp_path):
    config = load(tmp_path, CONFIG).buffer
    assert list(config.tables) == ["train", "eval/heldout"]
    assert config.tables["train"].source.path == tmp_path / "train.jsonl"
    assert config.tables["eval/heldout"].is_eval
    assert config.roots() == (tmp_path,)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            "groups_per_step = 16",
            "group_per_step = 16",
            r'did you mean "buffer.tables.train.groups_per_step"',
        ),
        ("groups_per_step = 16", "groups_per_step = 16\ncapacity = 4", "groups_per_step 16 is above capacity 4"),
        ("groups_per_step = 16", "groups_per_step = 0", "groups_per_step must be set"),
        ("samples_per_prompt = 8", "samples_per_prompt = 0", "samples_per_prompt"),
        ("samples_per_prompt = 8", f'samples_per_prompt = 8\nreward = "{"r" * 129}"', "129 characters, at most 128"),
        ('"heldout.jsonl"', '"heldout.jsonl", name = "train"', 'two sources are called "train"'),
        ("max_tokens = 32, temperature = 1.0", 'max_tokens = 32, extra_json = "[]"', "must be a JSON object"),
    ],
)
def test_a_wrong_configuration_names_the_key_and_the_number(tmp_path, before, after, message):
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, CONFIG.replace(before, after, 1))


def test_overrides_reach_a_table_with_a_slash_in_its_name(tmp_path):
    config = load(tmp_path, CONFIG, "buffer.tables.eval/heldout.eval_interval=5")
    assert config.buffer.tables["eval/heldout"].eval_interval == 5


def test_a_group_must_fit_into_a_message(tmp_path):
    with pytest.raises(ConfigError, match=r"max_group_bytes 50331648 does not fit .*max_message_bytes is 50331649"):
        load(tmp_path, CONFIG, f"server.max_message_bytes={(48 << 20) + 1}")


@pytest.mark.parametrize(
    ("name", "setting", "value"),
    [
        ("train", "eval_hold", False),
        ("train", "max_evictions", 3),
        ("eval/a", "selector", "ready_first"),
        ("eval/a", "max_evictions", 3),
        ("eval/a", "publish_interval", 2),
    ],
)
def test_settings_of_the_other_kind_of_table_are_refused(name: str, setting: str, value: object) -> None:
    groups = {} if name.startswith("eval/") else {"groups_per_step": 2}
    data = {"name": name, "source": {"path": "x"}, "sampling": {"max_tokens": 2}, **groups, setting: value}
    with pytest.raises(InvalidArgument, match=f"{setting} {value} has no effect"):
        check_table(TableSettings.model_validate(data))


def test_what_is_wrong_with_several_tables_is_told_together(tmp_path: Path) -> None:
    table = {"source": {"path": "nothere"}, "sampling": {"max_tokens": 2}}
    tables = {"train": table, "eval/a": {**table, "capacity": 4}}
    with pytest.raises(ValidationError) as caught:
        BufferSettings.model_validate({"dir": tmp_path, "run_id": "r", "tables": tables})
    assert [error["loc"] for error in caught.value.errors()] == [("tables", "train"), ("tables", "eval/a")]
