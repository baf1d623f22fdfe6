"""Read a TOML file into a pydantic model: what the services, the worker and the driver share.

One rule for all of them: a setting that cannot take effect is an error that names the key, the file with its line,
and the nearest key that exists. Overrides are written `a.b=c`, where `c` is a TOML value, or text where it is none.
"""

from __future__ import annotations

import difflib
import tomllib
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from vime_client.redaction import STARS, is_hidden, starred, without_credentials

Key = tuple[str | int, ...]
"""Where a setting stands: names of tables and keys, or positions in arrays."""


class ConfigModel(BaseModel):
    """Base of every configuration class: unknown keys are refused, values are frozen, field docstrings are kept."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, defer_build=True
    )


ModelT = TypeVar("ModelT", bound=BaseModel)


class ConfigError(ValueError):
    """The configuration cannot be used. `problems` holds one sentence for each thing that is wrong."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


def load_config(model: type[ModelT], path: Path | None, overrides: Sequence[str] = ()) -> ModelT:
    """Build `model` from a TOML file and overrides.

    Args:
        model: the configuration class; it must forbid extra keys (`ConfigModel` does).
        path: the TOML file, or None for defaults and overrides alone.
        overrides: each `a.b=c`; later ones win. Validators find the file's folder in the context as `base_dir`.

    Raises:
        ConfigError: the file is missing or no TOML, or a key or value is wrong; all problems are listed.
    """
    text = "" if path is None else _read(path)
    data = _parse(text, path)
    overridden = [_apply_override(data, override) for override in overrides]
    try:
        return model.model_validate(data, context={"base_dir": path.parent if path else Path.cwd()})
    except ValidationError as error:
        problems = [_sentence(model, dict(detail), text, path, overridden) for detail in error.errors()]
        raise ConfigError(list(dict.fromkeys(problems))) from None


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
                raise ConfigError([f'override "{override}": {_dotted(found)} has {len(table)} entries, no "{part}"'])
            step = int(part)
        elif not isinstance(table, dict):
            raise ConfigError([f'override "{override}": {_dotted(found)} is a value, not a table'])
        found.append(step)
        if last:
            table[step] = value
        else:
            table = table.setdefault(step, {}) if isinstance(table, dict) else table[step]
    return tuple(found)


# ------------------------------------------------------------------ saying what is wrong


def _sentence(
    model: type[BaseModel], detail: dict[str, Any], text: str, path: Path | None, overridden: Sequence[Key]
) -> str:
    loc: Key = tuple(detail["loc"])
    key = tuple(_real_keys(model, loc))
    where = _where(key, text, path, overridden)
    if detail["type"] == "extra_forbidden":
        hint = _nearest(model, key)
        known = [_dotted((*key[:-1], name)) for name in _keys_under(model, key[:-1])]
        tail = f'did you mean "{hint}"?' if hint else f"known here: {', '.join(known) or 'nothing'}"
        return f'{where}: unknown key "{_dotted(key)}"; {tail}'
    if detail["type"] == "missing":
        return f'{where}: "{_dotted(key)}" is required'
    message = str(detail["msg"])
    message = message.removeprefix("Value error, ").removeprefix("Assertion failed, ")
    if detail["type"] in ("value_error", "assertion_error"):
        return f"{where}: {_dotted(key)}: {message}" if key else f"{where}: {message}"
    return f"{where}: {_dotted(key)}: {message[:1].lower()}{message[1:]}, got {_shown(detail.get('input'), key)}"


def _nearest(model: type[BaseModel], key: Key) -> str | None:
    """The key that was probably meant: the same name in another table, else a similar name in this one."""
    wanted, parent = str(key[-1]), key[:-1]
    for elsewhere in _all_keys(model):
        if elsewhere.rsplit(".", 1)[-1] == wanted:
            return elsewhere
    similar = difflib.get_close_matches(wanted, _keys_under(model, parent), n=1)
    return _dotted((*parent, similar[0])) if similar else None


def _shown(value: Any, key: Key) -> str:
    shown = STARS if is_hidden(key) else without_credentials(repr(value))
    return f"{shown if len(shown) <= 80 else shown[:77] + '...'} ({type(value).__name__})"


def _where(key: Key, text: str, path: Path | None, overridden: Sequence[Key]) -> str:
    if any(key[: len(o)] == o or o[: len(key)] == key for o in overridden if key):
        return "--set"
    if path is None:
        return "configuration"
    line = _line_of(key, text)
    return f"{path}:{line}" if line else str(path)


def _line_of(key: Key, text: str) -> int | None:
    """The line that sets `key`, else that of the table it belongs in; None if neither is written plainly."""
    entries: dict[Key, int] = {}  # arrays of tables, and the entry that is open now

    def positioned(names: Sequence[str]) -> Key:
        found: list[str | int] = []
        for name in names:
            found.append(name)
            if tuple(found) in entries:
                found.append(entries[tuple(found)])
        return tuple(found)

    table: Key = ()
    header: tuple[int, int | None] = (0, None)  # how much of the key the nearest table matches, and its line
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.strip()
        if line.startswith("["):
            names = _split_key(line.split("#")[0].strip("[] "))
            if line.startswith("[["):
                array = (*positioned(names[:-1]), names[-1])
                entries[array] = entries.get(array, -1) + 1
            table = positioned(names)
            if key[: len(table)] == table and len(table) > header[0]:
                header = (len(table), number)
        elif "=" in line and not line.startswith("#"):
            full = (*table, *_split_key(line.split("=", 1)[0].strip()))
            if full == key[: len(full)]:
                return number
    return header[1]


def _split_key(text: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in text.split(".")) if text else ()


def _dotted(key: Sequence[str | int]) -> str:
    return ".".join(str(part) for part in key)


# ------------------------------------------------------------------ looking into models


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
