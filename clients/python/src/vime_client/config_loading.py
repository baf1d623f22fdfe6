"""Read a TOML file into a pydantic model: what the services, the worker and the driver share.

One rule for all of them: a setting that cannot take effect is an error that names the key, the file with its line,
and the nearest key that exists. Overrides are written `a.b=c`, where `c` is a TOML value, or text where it is none.
"""

from __future__ import annotations

import difflib
import math
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError

from vime_client.redaction import STARS, is_hidden, starred, without_credentials

Key = tuple[str | int, ...]
"""Where a setting stands: names of tables and keys, or positions in arrays."""


LONGEST_WAIT_S = 7 * 86400.0
"""No setting makes anything wait longer than a week: what waits without end hides that nothing will come."""
Seconds = Annotated[float, Field(gt=0, le=LONGEST_WAIT_S)]
"""A duration in seconds."""
SecondsOrNone = Annotated[float, Field(ge=0, le=LONGEST_WAIT_S)]
"""A duration in seconds, where none at all has a meaning: 0."""


class ConfigModel(BaseModel):
    """Base of every configuration class: unknown keys are refused, values are frozen, field docstrings are kept.

    Numbers are finite numbers: neither a truth value nor text stands for one, and nothing but true and false is a truth
    value. A setting that does nothing beside the others (`idle`) is refused where it is written, and left out of dumps.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        validate_default=True,
        defer_build=True,
        allow_inf_nan=False,
    )

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Strict numbers in every field, whatever holds them: pydantic's strict mode also refuses text for a path."""
        return typing.cast(CoreSchema, _strict_numbers(handler(source)))

    def idle(self) -> Mapping[str, str]:
        """Settings that do nothing as the others stand: name -> the settings that make it so, as they were written."""
        return {}

    def surroundings(self) -> Iterable[tuple[Key, str]]:
        """What these settings ask for and this machine lacks: keys, and a sentence for each. Looked for at a start and
        in a dry run, not wherever settings are read."""
        return ()

    @model_validator(mode="after")
    def _nothing_is_idle(self) -> Self:
        idle = [(name, why) for name, why in self.idle().items() if name in self.model_fields_set]
        refuse(
            [
                ((name,), f"{_setting(name, getattr(self, name))} has no effect with {why}; leave it out")
                for name, why in idle
            ],
            kind="idle",
        )
        return self

    @model_serializer(mode="wrap")
    def _without_idle(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """What a dump says must be accepted when it is read again."""
        idle = self.idle()
        return {name: value for name, value in dump(self).items() if name not in idle}


def refuse(problems: Iterable[tuple[Key, str]], kind: Literal["refused", "idle"] = "refused") -> None:
    """From a validator: refuse several settings at once, each (its key below the validated one, a sentence).

    Raises:
        ValidationError: there is a problem.
    """
    errors = [
        InitErrorDetails(type=PydanticCustomError(kind, "{sentence}", {"sentence": sentence}), loc=key, input=None)
        for key, sentence in problems
    ]
    if errors:
        raise ValidationError.from_exception_data("settings", errors)


ModelT = TypeVar("ModelT", bound=BaseModel)


class ConfigError(ValueError):
    """The configuration cannot be used. `problems` holds one sentence for each thing that is wrong."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


Check = Callable[[ModelT], Iterable[tuple[Key, str]]]
"""Looks at what a model cannot see by itself: problems as (key, sentence)."""


class Written(NamedTuple):
    """Where settings were written: a file and overrides."""

    path: Path | None
    """The TOML file."""
    text: str = ""
    """What it says."""
    overridden: Sequence[Key] = ()
    """Keys that overrides set."""

    def where(self, key: Key) -> str:
        """`file:line` of the line that sets `key`, else of its table; `--set` for what was overridden."""
        if any(key[: len(o)] == o or o[: len(key)] == key for o in self.overridden if key):
            return "--set"
        if self.path is None:
            return "configuration"
        line = _line_of(key, self.text)
        return f"{self.path}:{line}" if line else str(self.path)

    def placed(self, key: Key, sentence: str) -> str:
        """The sentence behind its place and its key."""
        return f"{self.where(key)}: {dotted(key)}: {sentence}" if key else f"{self.where(key)}: {sentence}"

    def key_at(self, line: int) -> Key:
        """The key or table that stands in a line; empty if none does."""
        return next((key for number, key, _ in _lines(self.text) if number == line), ())


def read_written(path: Path | None, overrides: Sequence[str] = ()) -> tuple[dict[str, Any], Written]:
    """The settings of a TOML file with overrides, and where they stand.

    Raises:
        ConfigError: the file is missing or no TOML, or an override has another form.
    """
    text = "" if path is None else _read(path)
    data = _parse(text, path)
    overridden = [_apply_override(data, override) for override in overrides]
    return data, Written(path, text, overridden)


def load_config(
    model: type[ModelT], path: Path | None, overrides: Sequence[str] = (), check: Check[ModelT] | None = None
) -> ModelT:
    """Build `model` from a TOML file and overrides.

    Args:
        model: the configuration class; it must forbid extra keys (`ConfigModel` does).
        path: the TOML file, or None for defaults and overrides alone.
        overrides: each `a.b=c`; later ones win. Validators find the file's folder in the context as `base_dir`.
        check: looks at the settings once they are whole.

    Raises:
        ConfigError: the file is missing or no TOML, or a key or value is wrong; all problems are listed.
    """
    data, written = read_written(path, overrides)
    # Looked for in what was written: what a model only passes on is read by nobody before JSON makes null of it.
    infinite = [_not_finite_sentence(key, value, written) for key, value in _not_finite(data)]
    try:
        config = model.model_validate(data, context={"base_dir": path.parent if path else Path.cwd()})
    except ValidationError as error:
        problems = [_sentence(model, dict(detail), written) for detail in error.errors()]
        raise ConfigError(list(dict.fromkeys([*problems, *infinite]))) from None
    if infinite:
        raise ConfigError(infinite)
    if found := [written.placed(key, sentence) for key, sentence in (check(config) if check else ())]:
        raise ConfigError(found)
    return config


def parse_override(override: str) -> tuple[tuple[str, ...], Any]:
    """Split `a.b=c` into its key and value; the value is TOML, or text where it is no TOML value.

    Raises:
        ConfigError: there is no `=` or a part of the key is empty.
    """
    name, equals, value = override.partition("=")
    key = tuple(part.strip() for part in name.split("."))
    if not equals or not all(key):
        raise ConfigError([f'override "{override}" must have the form a.b=c'])
    return key, _toml_value(value.strip())


def to_toml(config: BaseModel, *, secrets: bool = False) -> str:
    """The resolved configuration as TOML: defaults included, unset (None) settings left out, secrets starred out.

    With `secrets` they are written, too: only for files that nobody else reads (`private_file`).
    """
    import tomli_w

    plain = _without_none(config.model_dump(mode="json", by_alias=True))
    return tomli_w.dumps(plain if secrets else starred(plain), multiline_strings=False)


def describe(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """One line per setting of `model`: key, type, default and the docstring under the field."""
    for name, field in model.model_fields.items():
        key = prefix + (field.alias or name)
        nested = [m for m in _models_in(field.annotation) if not issubclass(m, typing.cast(Any, model))]
        if nested and not _is_collection(field.annotation):
            for inner in nested:
                yield from describe(inner, key + ".")
            continue
        default = "required" if field.is_required() else f"default {field.get_default(call_default_factory=True)!r}"
        yield f"{key} ({_type_name(field.annotation)}, {default})  {' '.join((field.description or '').split())}"


# ------------------------------------------------------------------ reading


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError([f"configuration file {path} does not exist"]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"configuration file {path} cannot be read: {error}"]) from None


def _parse(text: str, path: Path | None) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([f"{path} is not valid TOML: {error}"]) from None


def _toml_value(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    # A line break in the text could smuggle in a second key; then it was no single value.
    return parsed["value"] if len(parsed) == 1 else text


def _apply_override(data: dict[str, Any], override: str) -> Key:
    key, value = parse_override(override)
    found: list[str | int] = []
    table: Any = data
    for depth, part in enumerate(key):
        last = depth == len(key) - 1
        step: str | int = part
        if isinstance(table, list):
            if not part.isdigit() or int(part) >= len(table):
                raise ConfigError([f'override "{override}": {dotted(found)} has {len(table)} entries, no "{part}"'])
            step = int(part)
        elif not isinstance(table, dict):
            raise ConfigError([f'override "{override}": {dotted(found)} is a value, not a table'])
        found.append(step)
        if last:
            table[step] = value
        else:
            table = table.setdefault(step, {}) if isinstance(table, dict) else table[step]
    return tuple(found)


# ------------------------------------------------------------------ saying what is wrong


_LEAKS = {
    "model_type": "must be a table",
    "model_attributes_type": "must be a table",
    "dict_type": "must be a table",
    "string_type": "must be text, in quotes",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "union_tag_not_found": "must be a table that has {discriminator}",
}
"""What pydantic says in the words of Python, by type of error."""


def _sentence(model: type[BaseModel], detail: dict[str, Any], written: Written) -> str:
    key = tuple(_real_keys(model, tuple(detail["loc"])))
    where = written.where(key)
    if detail["type"] == "extra_forbidden":
        hint = _nearest(model, key)
        known = [dotted((*key[:-1], name)) for name in _keys_under(model, key[:-1])]
        tail = f'did you mean "{hint}"?' if hint else f"known here: {', '.join(known) or 'nothing'}"
        return f'{where}: unknown key "{dotted(key)}"; {tail}'
    if detail["type"] == "missing":
        return _missing(model, key, written)
    message = str(detail["msg"])
    message = message.removeprefix("Value error, ").removeprefix("Assertion failed, ")
    if detail["type"] == "idle":
        return f"{where}: {dotted((*key[:-1], message))}"
    if detail["type"] in ("value_error", "assertion_error", "refused"):
        return written.placed(key, message)
    if detail["type"] == "union_tag_invalid":
        tag, known = detail["ctx"]["tag"], detail["ctx"]["expected_tags"].replace("'", "").split(", ")
        return written.placed(key, f'unknown name "{tag}"; {nearest_of(tag, known)}')
    leak = _LEAKS.get(detail["type"])
    message = leak.format(**detail.get("ctx", {})) if leak else f"{message[:1].lower()}{message[1:]}"
    return written.placed(key, f"{message}, got {_shown(detail.get('input'), key)}")


def _missing(model: type[BaseModel], key: Key, written: Written) -> str:
    """What lacks, where its table is written; a named table that stands in no file is told with those that do."""
    parent, siblings = key[:-1], key[:-2]
    names = [found[: len(parent)] for _, found, _ in _lines(written.text) if found[: len(siblings)] == siblings]
    if not parent or parent in names:
        return f'{written.where(key)}: "{dotted(key)}" is required'
    known = dict.fromkeys(str(name[-1]) for name in names if len(name) == len(parent))
    named = siblings and parent[-1] not in _keys_under(model, siblings) and known
    hint = f"; {nearest_of(str(parent[-1]), known)}" if named else ""
    return f'{written.where(parent)}: "{dotted(key)}" is required{hint}'


def _not_finite_sentence(key: Key, value: float, written: Written) -> str:
    return written.placed(key, f"input should be a finite number, got {_shown(value, key)}")


def _not_finite(value: Any, key: Key = ()) -> Iterator[tuple[Key, float]]:
    """The numbers that are infinite or none, wherever they stand."""
    if isinstance(value, dict | list):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _not_finite(inner, (*key, name))
    elif isinstance(value, float) and not math.isfinite(value):
        yield key, value


def nearest_of(wanted: str, known: Iterable[str]) -> str:
    """The name that was probably meant, else all that are known: the end of a sentence about an unknown one."""
    names = list(known)
    near = difflib.get_close_matches(wanted, names, n=1)
    return f'did you mean "{near[0]}"?' if near else f"known: {', '.join(names)}"


def _nearest(model: type[BaseModel], key: Key) -> str | None:
    """The key that was probably meant: the same name in another table, else a similar name in this one."""
    wanted, parent = str(key[-1]), key[:-1]
    for elsewhere in _all_keys(model):
        if elsewhere.rsplit(".", 1)[-1] == wanted:
            return elsewhere
    similar = difflib.get_close_matches(wanted, _keys_under(model, parent), n=1)
    return dotted((*parent, similar[0])) if similar else None


def _setting(name: str, value: Any) -> str:
    """`name = value`, or the name alone of what is no plain value."""
    if not isinstance(value, str | int | float):
        return name
    return f"{name} = {str(value).lower() if isinstance(value, bool) else repr(value)}"


def _shown(value: Any, key: Key) -> str:
    shown = STARS if is_hidden(key) else without_credentials(repr(value))
    return f"{shown if len(shown) <= 80 else shown[:77] + '...'} ({type(value).__name__})"


def _line_of(key: Key, text: str) -> int | None:
    """The line that sets `key`, else the first below it, else its table's; None if none is written plainly."""
    below: int | None = None
    header: tuple[int, int | None] = (0, None)  # how much of the key the nearest table matches, and its line
    for number, found, is_table in _lines(text):
        if key and len(found) > len(key) and found[: len(key)] == key:
            below = below or number
        if found != key[: len(found)]:
            continue
        if not is_table:
            return number
        if len(found) > header[0]:
            header = (len(found), number)
    return header[1] if header[0] == len(key) else below or header[1]


def _lines(text: str) -> Iterator[tuple[int, Key, bool]]:
    """The lines that name a key: number (from 1), key, and whether it is the head of a table."""
    entries: dict[Key, int] = {}  # arrays of tables, and the entry that is open now

    def positioned(names: Sequence[str]) -> Key:
        found: list[str | int] = []
        for name in names:
            found.append(name)
            if tuple(found) in entries:
                found.append(entries[tuple(found)])
        return tuple(found)

    table: Key = ()
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.strip()
        if line.startswith("["):
            names = _split_key(line.split("#")[0].strip("[] "))
            if line.startswith("[["):
                array = (*positioned(names[:-1]), names[-1])
                entries[array] = entries.get(array, -1) + 1
            table = positioned(names)
            yield number, table, True
        elif "=" in line and not line.startswith("#"):
            yield number, (*table, *_split_key(line.split("=", 1)[0].strip())), False


def _split_key(text: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in text.split(".")) if text else ()


def dotted(key: Sequence[str | int]) -> str:
    """The key as people write it."""
    return ".".join(str(part) for part in key)


# ------------------------------------------------------------------ looking into models


def _strict_numbers(schema: Any) -> Any:
    """A core schema whose numbers and truth values are taken as they are written, integers within 64 bits."""
    if isinstance(schema, list | tuple):
        return type(schema)(_strict_numbers(part) for part in schema)
    if not isinstance(schema, dict):
        return schema
    kind = schema.get("type")
    if not isinstance(kind, str):  # fields by name
        return {name: _strict_numbers(part) for name, part in schema.items()}
    changed = {name: part if name in _OPAQUE else _strict_numbers(part) for name, part in schema.items()}
    if kind in ("int", "float", "bool"):
        changed["strict"] = True
    if kind == "int":
        changed |= {bound: end for bound, other, end in _INT64 if bound not in schema and other not in schema}
    return changed


_OPAQUE = frozenset({"default", "metadata", "serialization", "expected", "cls"})
_INT64 = (("ge", "gt", -(2**63)), ("le", "lt", 2**63 - 1))


def _real_keys(model: type[BaseModel], loc: Key) -> Iterator[str | int]:
    """`loc` without the tags that pydantic adds for the branches of a union and the keys of a mapping."""
    annotations: list[Any] = [model]
    for position, part in enumerate(loc):
        following = [inner for a in annotations for inner in _step(a, part)]
        if following or position == len(loc) - 1:
            yield part
            annotations = following
        # Otherwise `part` names a branch of a union (a class name or a tag): nothing that was written in the file.


def _step(annotation: Any, part: str | int) -> Iterator[Any]:
    for candidate in _unwrap(annotation):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            for name, field in candidate.model_fields.items():
                if part in (name, field.alias):
                    yield field.annotation
            continue
        origin, args = typing.get_origin(candidate), typing.get_args(candidate)
        if origin is dict and args and isinstance(part, str):
            yield args[1]
        elif origin in (list, tuple, set, frozenset) and args and isinstance(part, int):
            yield args[0]


def _unwrap(annotation: Any) -> Iterator[Any]:
    """The branches of a union, without Annotated and None."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        yield from _unwrap(typing.get_args(annotation)[0])
    elif origin in (typing.Union, types.UnionType):
        for branch in typing.get_args(annotation):
            yield from _unwrap(branch)
    elif annotation is not type(None):
        yield annotation


def _keys_under(model: type[BaseModel], key: Key) -> list[str]:
    annotations: list[Any] = [model]
    for part in key:
        annotations = [inner for a in annotations for inner in _step(a, part)]
    models = [m for a in annotations for m in _unwrap(a) if isinstance(m, type) and issubclass(m, BaseModel)]
    return [field.alias or name for m in models for name, field in m.model_fields.items()]


def _all_keys(model: type[BaseModel], prefix: str = "", depth: int = 6) -> Iterator[str]:
    for name, field in model.model_fields.items():
        key = prefix + (field.alias or name)
        yield key
        if depth and not _is_collection(field.annotation):
            for inner in _models_in(field.annotation):
                yield from _all_keys(inner, key + ".", depth - 1)


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    return [a for a in _unwrap(annotation) if isinstance(a, type) and issubclass(a, BaseModel)]


def _is_collection(annotation: Any) -> bool:
    return any(typing.get_origin(a) in (dict, list, tuple, set, frozenset) for a in _unwrap(annotation))


def _type_name(annotation: Any) -> str:
    names = [getattr(a, "__name__", str(a)) if typing.get_origin(a) is None else str(a) for a in _unwrap(annotation)]
    return " | ".join(name.replace("typing.", "") for name in names)


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [_without_none(v) for v in value if v is not None]
    return value
