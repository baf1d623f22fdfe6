"""Programs of a folder, found by their files: list them, run one, print its JSON object as the last line."""

from __future__ import annotations

import ast
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def names(folder: Path) -> list[str]:
    """Names of the programs in `folder`: every module that does not begin with an underscore."""
    return sorted(path.stem for path in folder.glob("*.py") if not path.stem.startswith("_"))


def describe(folder: Path) -> str:
    """One line for each program: its name and the first line of its docstring (read without importing it)."""
    lines = []
    for name in names(folder):
        docstring = ast.get_docstring(ast.parse((folder / f"{name}.py").read_text(encoding="utf-8"))) or ""
        lines.append(f"  {name:<12} {docstring.partition(chr(10))[0]}")
    return "\n".join(lines)


def run(folder: Path, package: str, name: str | None, call: Callable[[Any], dict[str, Any]], how: str) -> int:
    """Run the program called `name` and print what it returns; without a name list what there is.

    Returns the exit code: 1 if the result says that something is wrong (`failed`), 2 for an unknown name.
    """
    if name is None:
        print(f"{how}:\n{describe(folder)}")
        return 0
    if name not in names(folder):
        print(f'there is no "{name}"; there are:\n{describe(folder)}', file=sys.stderr)
        return 2
    result = call(importlib.import_module(f"{package}.{name}"))
    print(json.dumps(result, default=str))
    return 1 if failed(result) else 0


def failed(result: dict[str, Any]) -> bool:
    """True if a fault was not survived: something lost, doubled, mixed or unclear, or a broken law."""
    return (
        any(result.get(count) for count in ("lost", "doubled", "mixed", "unclear_errors"))
        or result.get("laws_held") is False
    )
