"""What holds of every setting of every service, of the worker and of a recipe, those of tomorrow included."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from vime_buffer.config import BufferConfig
from vime_client.channel_settings import ChannelSettings
from vime_client.config_loading import ConfigModel
from vime_client.recipe import Recipe
from vime_client.worker.config import WorkerConfig
from vime_rollout.config import RolloutConfig
from vime_router.config import RouterConfig
from vime_trainer.config import TrainerConfig

ROOTS = [BufferConfig, RouterConfig, RolloutConfig, TrainerConfig, WorkerConfig, Recipe, ChannelSettings]
HOLDERS: dict[Any, Any] = {list: lambda value: [value], tuple: lambda value: [value], dict: lambda value: {"x": value}}


def same(value: Any) -> Any:
    return value


def leaves(annotation: Any) -> Iterator[Any]:
    """The types that an annotation is made of."""
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Annotated:
        yield from leaves(arguments[0])
    elif arguments and typing.get_origin(annotation) is not typing.Literal:
        for argument in arguments:
            yield from leaves(argument)
    else:
        yield annotation


def models() -> list[type[BaseModel]]:
    found: dict[type[BaseModel], None] = dict.fromkeys(ROOTS)
    waiting = list(ROOTS)
    while waiting:
        for field in waiting.pop().model_fields.values():
            for leaf in leaves(field.annotation):
                if isinstance(leaf, type) and issubclass(leaf, BaseModel) and leaf not in found:
                    found[leaf] = None
                    waiting.append(leaf)
    return list(found)


MODELS = models()


def numbers(kind: type) -> list[Any]:
    """(model, field, what holds the number) of every setting that is made of such numbers."""
    return [
        pytest.param(model, name, HOLDERS.get(typing.get_origin(field.annotation), same), id=f"{model.__name__}.{name}")
        for model in MODELS
        for name, field in model.model_fields.items()
        if kind in leaves(field.annotation)
    ]


def refused(model: type[BaseModel], name: str, value: Any) -> bool:
    try:
        model.model_validate({name: value})
    except ValidationError as error:  # of other settings that are missing, too
        return any(detail["loc"][:1] == (name,) for detail in error.errors())
    return False


def test_every_model_of_settings_is_strict_about_numbers() -> None:
    assert len(MODELS) > 30
    assert [model.__name__ for model in MODELS if not issubclass(model, ConfigModel)] == []


@pytest.mark.parametrize(("model", "name", "held"), numbers(float))
def test_a_number_is_finite_and_bounded_and_neither_a_truth_value_nor_text(model: Any, name: str, held: Any) -> None:
    for value in (True, "1", float("inf"), float("-inf"), float("nan"), -1e300, 1e300):
        assert refused(model, name, held(value)), f"{name} = {value!r}"


@pytest.mark.parametrize(("model", "name", "held"), numbers(int))
def test_a_count_is_a_whole_number_of_64_bits_and_nothing_else(model: Any, name: str, held: Any) -> None:
    for value in (True, "1", 1.0, float("inf"), float("nan"), 10**30, -(10**30)):
        assert refused(model, name, held(value)), f"{name} = {value!r}"


@pytest.mark.parametrize(("model", "name", "held"), numbers(bool))
def test_a_truth_value_is_true_or_false(model: Any, name: str, held: Any) -> None:
    for value in (1, 0.0, "true", "yes"):
        assert refused(model, name, held(value)), f"{name} = {value!r}"
