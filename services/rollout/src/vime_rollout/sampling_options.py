"""The engine options of `SamplingParams.extra_json`: which there are, of which type, in which range.

vLLM's core decodes what the front end sends by type, and one that is wrong hangs it for all: nothing goes there that is
not listed here. The list stands in README.md, too, and a test compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from vime_service.errors import InvalidArgument

MAX_BIASED, MAX_BAD_WORDS, MAX_WORD = 1024, 128, 256


class _Wrong(Exception):
    """What a value should have been."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the range of an option depends on."""

    vocab_size: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Option:
    """One option.

    Attributes:
        says: type and range, for people.
        read: the engine's value of a JSON value; raises `_Wrong`.
        exact: it leaves the sampled distribution as the trainer computes it.
    """

    says: str
    read: Callable[[Any, Bounds], Any]
    exact: bool = False


def read_options(given: Mapping[str, Any], bounds: Bounds) -> dict[str, Any]:
    """The options as the engine takes them.

    Raises:
        InvalidArgument: one is not known, or its value is of another type or out of range.
    """
    read: dict[str, Any] = {}
    for name, value in given.items():
        option = OPTIONS.get(name)
        if option is None:
            known = ", ".join(OPTIONS)
            raise InvalidArgument(f"extra_json sets {name[:64]!r}, allowed are: {known}", field="sampling.extra_json")
        try:
            read[name] = option.read(value, bounds)
        except _Wrong as wrong:
            raise InvalidArgument(
                f"extra_json: {name} = {repr(value)[:64]}{wrong}, it must be {option.says}", field="sampling.extra_json"
            ) from None
    return read


def _flag(value: Any, _: Bounds) -> bool:
    if not isinstance(value, bool):
        raise _Wrong
    return value


def _number(low: float, high: float, *, above_low: bool = False) -> Callable[[Any, Bounds], float]:
    def read(value: Any, _: Bounds) -> float:
        number = not isinstance(value, bool) and isinstance(value, int | float)
        if not number or not low <= value <= high or (above_low and value == low):
            raise _Wrong
        return float(value)

    return read


def _id(value: Any, bounds: Bounds) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < bounds.vocab_size:
        raise _Wrong(f" has {repr(value)[:64]}, and the vocabulary {bounds.vocab_size} ids")
    return value


def _min_tokens(value: Any, bounds: Bounds) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= bounds.max_tokens:
        raise _Wrong
    return value


def _ids(value: Any, bounds: Bounds) -> list[int]:
    if not isinstance(value, list) or not 1 <= len(value) <= bounds.vocab_size:
        raise _Wrong
    return [_id(entry, bounds) for entry in value]


def _biases(value: Any, bounds: Bounds) -> dict[int, float]:
    if not isinstance(value, dict) or len(value) > MAX_BIASED:
        raise _Wrong
    number = _number(-100, 100)
    return {_id(int(key) if _is_number(key) else key, bounds): number(bias, bounds) for key, bias in value.items()}


def _is_number(key: str) -> bool:
    return key.isascii() and key.isdecimal() and len(key) < 20


def _words(value: Any, _: Bounds) -> list[str]:
    if not isinstance(value, list) or len(value) > MAX_BAD_WORDS:
        raise _Wrong
    for word in value:
        if not isinstance(word, str) or not 1 <= len(word) <= MAX_WORD or not _is_text(word):
            raise _Wrong
    return value


def _is_text(word: str) -> bool:
    try:
        word.encode()
    except UnicodeEncodeError:  # half a surrogate pair, which JSON can spell
        return False
    return bool(word.strip())  # vLLM takes blanks off


OPTIONS: Mapping[str, Option] = MappingProxyType(
    {
        "skip_special_tokens": Option("true or false: text without special tokens", _flag, exact=True),
        "include_stop_str_in_output": Option("true or false: text with the stop string", _flag, exact=True),
        "min_tokens": Option("a whole number from 0 to max_tokens", _min_tokens),
        "min_p": Option("a number from 0 to 1", _number(0, 1)),
        "presence_penalty": Option("a number from -2 to 2", _number(-2, 2)),
        "frequency_penalty": Option("a number from -2 to 2", _number(-2, 2)),
        "repetition_penalty": Option("a number above 0, up to 10", _number(0, 10, above_low=True)),
        "logit_bias": Option(f"an object of at most {MAX_BIASED} token ids with a number from -100 to 100", _biases),
        "allowed_token_ids": Option("a list of token ids, at least one", _ids),
        "bad_words": Option(
            f"a list of at most {MAX_BAD_WORDS} texts of 1 to {MAX_WORD} characters, not blank", _words
        ),
    }
)
