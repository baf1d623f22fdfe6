"""What a reward function may return, and what becomes of anything else: it leaves the sample unscored, never 0."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from vime_client.one_line import is_valid, one_line, told

_MOST_PARTS = 64
_LONGEST_PART_NAME = 128
Unscored = Literal[
    "RAISED", "TIMEOUT", "CRASHED", "NOT_FINITE", "NOT_A_NUMBER", "NO_RESPONSE"
]  # names of vime.common.v1.UnscoredReason


@dataclass(frozen=True)
class Score:
    """The score of one sample: a reward, or the reason why there is none."""

    reward: float | None = None
    """The reward; None leaves the sample unscored."""
    unscored: Unscored | None = None
    """Why there is no reward; None exactly if there is one."""
    detail: str = ""
    """One line for people."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Parts of the reward by name, for metrics."""
    seconds: float = 0.0
    """Time the function spent on it."""


def unscored(reason: Unscored, detail: str, seconds: float = 0.0) -> Score:
    """A score without a reward; `detail` becomes one valid line."""
    return Score(None, reason, one_line(detail), {}, seconds)


def scored(reward: float, parts: Mapping[str, float], detail: str, seconds: float) -> Score:
    """A score with a reward, or without one where the reward or its parts cannot be sent and counted.

    At most 64 parts, under valid names of at most 128 characters: the buffer takes no more.
    """
    if not math.isfinite(reward):
        return unscored("NOT_FINITE", f"the reward is {reward}", seconds)
    if len(parts) > _MOST_PARTS:
        return unscored("RAISED", f"the reward has {len(parts)} parts, at most {_MOST_PARTS} are taken", seconds)
    for name in parts:
        if not is_valid(name) or len(name) > _LONGEST_PART_NAME:
            shown = f"{one_line(ascii(name), 40)} of {len(name)} characters"
            most = f"text of at most {_LONGEST_PART_NAME} characters"
            return unscored("RAISED", f"the name of a part is no valid {most}: {shown}", seconds)
    return Score(reward, None, one_line(detail), parts, seconds)


def as_score(value: Any, seconds: float = 0.0) -> Score:
    """Read what a reward function returned: a number, (number, parts) or a mapping with "reward".

    True, ints, Fractions, Decimals and zero-dimensional numpy or torch values are numbers. In a mapping, every other
    entry that is a number is a part, and "parts" may hold more. Never raises, whatever the value does when it is read.
    """
    try:
        return _read(value, seconds)
    except BaseException as error:  # noqa: BLE001 - reading it runs the user's code, which raises anything
        return unscored("RAISED", f"the reward cannot be read: {told(error)}", seconds)


def _read(value: Any, seconds: float) -> Score:
    reward, parts = _split(value)
    number = as_number(reward)
    if number is None:
        return unscored("NOT_A_NUMBER", f"the reward is {_shown(reward)}, not a number", seconds)
    kept, odd = {}, []
    for name, part in parts.items():
        value_of_part = as_number(part)
        if value_of_part is not None and math.isfinite(value_of_part):
            kept[str(name)] = value_of_part
        else:
            odd.append(f"{name}={_shown(part)}")
    return scored(number, kept, "parts left out: " + ", ".join(odd[:_MOST_PARTS]) if odd else "", seconds)


def as_number(value: Any) -> float | None:
    """`value` as a float, or None if it is no real number. Integers beyond the range of floats become infinite."""
    if isinstance(value, (str, bytes, bytearray)) or getattr(value, "shape", ()) != ():
        return None
    if not isinstance(value, numbers.Real) and not hasattr(value, "__float__"):
        return None
    if isinstance(value, numbers.Complex) and not isinstance(value, numbers.Real):
        return None  # numpy's would lose their imaginary part
    try:
        return float(value)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError):
        return None


def _split(value: Any) -> tuple[Any, Mapping[Any, Any]]:
    if isinstance(value, Mapping):
        more = value.get("parts")
        parts = {name: part for name, part in value.items() if name not in ("reward", "parts")}
        # Text and the like beside the reward is for people, not a metric.
        parts = {name: part for name, part in parts.items() if as_number(part) is not None}
        return value.get("reward"), {**parts, **more} if isinstance(more, Mapping) else parts
    if isinstance(value, (tuple, list)) and len(value) == 2 and isinstance(value[1], Mapping):
        return value[0], value[1]
    return value, {}


def _shown(value: Any) -> str:
    return f"{one_line(repr(value), 80)} ({type(value).__name__})"
