"""What a run folder says of its recipe: `config.toml` with all that holds, and those of earlier starts beside it."""

from __future__ import annotations

import json
import shutil
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vime_client.config_loading import to_toml
from vime_client.launcher.plan import RunPlan
from vime_client.private_file import write_private
from vime_client.recipe import Recipe
from vime_client.redaction import restored, starred_keys

_PRIVATE = Path("services") / "recipe.toml"
"""The recipe of the last start with its secrets, for a resume from the folder."""
_TOLD_CHANGES = 8


def write_record(recipe: Recipe, run_dir: Path, defaults: str) -> str:
    """Write `config.toml`, a changed one of an earlier start is kept as `config.N.toml`; the changes, for people."""
    path = run_dir / "config.toml"
    text = to_toml(recipe)
    before = _parsed(path)
    changes = [] if before is None else list(_changes(before, tomllib.loads(text)))
    said = ""
    if changes:
        kept = _next(path)
        shutil.copyfile(path, kept)
        more = f" and {len(changes) - _TOLD_CHANGES} more" if len(changes) > _TOLD_CHANGES else ""
        said = f"changed since the last start: {', '.join(changes[:_TOLD_CHANGES])}{more} (before: {kept.name})"
    new = path.with_suffix(".new")  # a run folder is resumed from this file: it is there and whole at every moment
    new.write_text(text + defaults, encoding="utf-8")
    new.replace(path)
    write_private(run_dir / _PRIVATE, to_toml(recipe, secrets=True))
    return said


def read_steps(run_dir: Path) -> int:
    """Steps that the run is to train in all; 0 if its record does not say."""
    section = (_parsed(run_dir / "config.toml") or {}).get("run", {})
    return int(section.get("steps", 0)) if isinstance(section, dict) else 0


def with_secrets(recipe: Recipe, run_dir: Path) -> Recipe:
    """The recipe with what its run's config.toml leaves out, from the file that only the run's owner reads."""
    settings = recipe.model_dump(mode="json", by_alias=True, exclude_none=True)
    kept = run_dir / _PRIVATE
    if not kept.is_file() or not any(starred_keys(settings)):
        return recipe
    return Recipe.model_validate(restored(settings, tomllib.loads(kept.read_text(encoding="utf-8"))))


def defaults_of(plan: RunPlan, resolved: Mapping[str, str]) -> str:
    """What holds beside the recipe, as comments: the settings that each service added to those it was given.

    Args:
        plan: the run; its services' files say what they were given.
        resolved: what each service made of it (its answer to `--dry-run`), as TOML.
    """
    lines = ["", "# Beside these, the services use (their own settings, and defaults that nobody set):"]
    told = set()
    for service in plan.services:
        kind = service.name.partition("-")[0]
        answer = _toml(resolved.get(service.name, ""))
        if kind in told or answer is None:
            continue
        told.add(kind)
        given = _parsed(Path(service.argv[service.argv.index("--config") + 1])) or {}
        written = dict(_leaves(given))
        lines += [
            f"# {kind}: {key} = {json.dumps(value, ensure_ascii=False)}"
            for key, value in _leaves(answer)
            if key not in written
        ]
        notes = resolved.get(service.name, "").splitlines()
        lines += [f"# {kind}: {note.removeprefix('# ')}" for note in notes if note.startswith("# ")]
    return "\n".join(lines) + "\n"


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    old, new = dict(_leaves(before)), dict(_leaves(after))
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) != new.get(key):
            yield f"{key} {_shown(old, key)} → {_shown(new, key)}"


def _shown(settings: Mapping[str, Any], key: str) -> str:
    text = json.dumps(settings[key], ensure_ascii=False) if key in settings else "unset"
    return text if len(text) <= 60 else text[:57] + "..."


def _leaves(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _parsed(path: Path) -> dict[str, Any] | None:
    return _toml(path.read_text(encoding="utf-8", errors="replace")) if path.is_file() else None


def _toml(text: str) -> dict[str, Any] | None:
    """None for what is no TOML: nothing can be said of it."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return None


def _next(path: Path) -> Path:
    number = 1
    while (kept := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    return kept
