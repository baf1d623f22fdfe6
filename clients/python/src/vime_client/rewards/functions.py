"""Find a user's function by name, and call it with the arguments that it asks for. Runs in the reward processes."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from vime_client.one_line import told

_OURS = (os.path.dirname(__file__) + os.sep, "<frozen importlib")


class FunctionError(ValueError):
    """The function cannot be found or cannot be called; the message names the file or module and what it has."""


@dataclass(frozen=True)
class FunctionSpec:
    """Where a function is: `file.py:name` (a path) or `package.module:name`."""

    place: str
    name: str

    def __str__(self) -> str:
        return f"{self.place}:{self.name}"

    @property
    def is_file(self) -> bool:
        """True if `place` is the path of a file."""
        return self.place.endswith(".py")

    @classmethod
    def parse(cls, text: str, base: Path | None = None) -> FunctionSpec:
        """Read `text`; a relative path is taken from `base`.

        Raises:
            FunctionError: there is no `:name`.
        """
        place, colon, name = text.rpartition(":")
        if not colon or not place or not name.isidentifier():
            raise FunctionError(f'"{text}" must have the form file.py:function or module:function')
        if place.endswith(".py") and base is not None:
            place = str((base / place).resolve())
        return cls(place, name)


@dataclass(frozen=True)
class UserFunction:
    """A loaded function and what it asks for."""

    spec: FunctionSpec
    call: Callable[..., Any]
    names: tuple[str, ...]
    required: tuple[str, ...]
    takes_all: bool
    is_async: bool

    @property
    def batch(self) -> bool:
        """True if one call gets all samples of a group, as the argument `samples`."""
        return "samples" in self.names

    def arguments(self, known: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
        """Keyword arguments by name, from what is known about the sample, else from the prompt's record.

        Raises:
            FunctionError: a parameter without a default is found in neither.
        """
        if self.takes_all:
            return {**{k: v for k, v in record.items() if k in self.names}, **known}
        found: dict[str, Any] = {}
        for name in self.names:
            if name in known:
                found[name] = known[name]
            elif name in record:
                found[name] = record[name]
            elif name in self.required:
                raise FunctionError(
                    f'{self.spec.name} asks for "{name}", which is neither a field of the sample '
                    f"({', '.join(sorted(known))}) nor a key of its record ({', '.join(sorted(record)) or 'empty'})"
                )
        return found


def load_function(spec: FunctionSpec) -> UserFunction:
    """Import the file or module and look the function up.

    Raises:
        FunctionError: no such file, module or function, it fails to import, or it takes positional-only arguments.
    """
    module = _load_file(Path(spec.place)) if spec.is_file else _load_module(spec.place)
    call = getattr(module, spec.name, None)
    if not callable(call):
        own = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        near = difflib.get_close_matches(spec.name, own, n=1)
        hint = f'did you mean "{near[0]}"?' if near else f"it defines: {', '.join(own) or 'no function'}"
        raise FunctionError(f"{spec.place} has no function {spec.name}; {hint}")
    return _inspect(spec, call)


def place_of(error: BaseException, file: str) -> str:
    """Where an exception arose, as ` (file.py:12)`: its last line in `file`, else its last at all; "" if nowhere."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_OURS)]
    own = [f for f in frames if f.filename == file] or frames
    return f" ({os.path.basename(own[-1].filename)}:{own[-1].lineno})" if own else ""


def find_modules_in(folder: str) -> None:
    """Let `import` find the user's modules in `folder`: before what is installed, and after the standard library, so
    that a `random.py` there cannot take the place of Python's own in this process."""
    if folder in sys.path:
        return
    standard = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    standard |= {os.path.join(path, "lib-dynload") for path in standard}
    after = max((place for place, path in enumerate(sys.path) if path in standard), default=-1)
    sys.path.insert(after + 1, folder)


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise FunctionError(f"reward file {path} does not exist")
    name = f"vime_user_{path.stem}_{abs(hash(str(path)))}"
    if name in sys.modules:
        return sys.modules[name]
    module_spec = importlib.util.spec_from_file_location(name, path)
    if module_spec is None or module_spec.loader is None:
        raise FunctionError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module
    find_modules_in(str(path.parent))  # helpers beside the file
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise FunctionError(f"{path} cannot be imported: {told(error)}{place_of(error, str(path))}") from error
    return module


def _load_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise FunctionError(f"module {name} cannot be imported: {told(error)}") from error


def _inspect(spec: FunctionSpec, call: Callable[..., Any]) -> UserFunction:
    try:
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError) as error:
        raise FunctionError(f"{spec} has no readable signature: {error}") from error
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
    if positional:
        raise FunctionError(f"{spec} takes {', '.join(positional)} by position only; rewards are called by keyword")
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return UserFunction(
        spec=spec,
        call=call,
        names=tuple(p.name for p in named),
        required=tuple(p.name for p in named if p.default is p.empty),
        takes_all=any(p.kind is p.VAR_KEYWORD for p in parameters),
        is_async=inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(type(call).__call__),
    )
