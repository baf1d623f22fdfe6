"""The run folder: whether a run may begin in it, and what it remembers of the run before."""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vime_client.launcher.client import is_running
from vime_client.launcher.ports import all_free, choose_ports
from vime_client.launcher.state import is_held, read_state
from vime_client.logs import get_logger
from vime_client.report.history import read_history

Mode = Literal["new", "fresh", "resume"]
_log = get_logger(__name__)


class FolderRefused(Exception):
    """The run cannot begin in this folder; the message says what can be done instead."""


@dataclass(frozen=True)
class RunFolder:
    """A folder that a run may begin in."""

    path: Path
    """The folder."""
    run_id: str
    """Names the run in weight versions; stays the same when it is resumed."""
    made: bool
    """True if there was no such folder."""
    before: frozenset[Path] | None = None
    """What lay in the places that a start writes to; None for a run that is resumed, of which all stays."""
    aside: Path | None = None
    """Where the run that had its place is now."""

    def undo(self) -> None:
        """Nothing ran in it: whoever comes next finds what was there before. Never raises: its caller has a reason."""
        if self.before is None:
            return
        for place in _written(self.path) - self.before:
            if place.is_dir() and not place.is_symlink():
                shutil.rmtree(place, ignore_errors=True)  # never raises, see above
            else:
                with contextlib.suppress(OSError):  # likewise
                    place.unlink()
        if self.aside is not None:
            try:
                self.aside.rename(self.path)
            except OSError as error:
                _log.warning("the old run could not be put back", path=str(self.aside), error=str(error))


def open_folder(path: Path, mode: Mode, base_dir: Path) -> RunFolder:
    """Make or take over the folder of a run whose recipe lies in `base_dir`.

    Raises:
        FolderRefused: a run is there already, or there is none to resume.
    """
    there = holds_run(path)
    if is_running(path):
        raise FolderRefused(f"{path.name} is running now; look at it with --join, or stop it first")
    if mode == "resume":
        if not there:
            raise FolderRefused(f"there is no run in {path} to resume; start it without --resume")
        run = read_run(path)
        state = read_state(path)
        if state is not None and state.ended and state.started != run.get("counted"):
            # `counted` is the start whose time is in `seconds_before`: a resume that is refused comes here once more
            run["seconds_before"] = float(run.get("seconds_before", 0.0)) + state.ended - state.started
            run["counted"] = state.started
            _write(path / "services" / "run.json", run)
        return RunFolder(path, str(run["run_id"]), made=False)
    if there and mode == "new" and (_trained(path) or is_held(path, "driver")):
        raise FolderRefused(
            f"{path} holds a run already; continue it with --resume, begin anew with --fresh "
            "(the old folder is kept beside it), or choose another name with --name"
        )
    aside = path.rename(_aside(path)) if there else None
    run_id = f"{path.name}-{secrets.token_hex(4)}"
    folder = RunFolder(path, run_id, made=not path.exists(), before=_written(path), aside=aside)
    run = {"run_id": run_id, "created": time.time(), "seconds_before": 0.0, "base_dir": str(base_dir)}
    try:
        (path / "services").mkdir(parents=True, exist_ok=True)
        _write(path / "services" / "run.json", run)
    except BaseException:  # Ctrl-C, too, must leave what was there before
        folder.undo()
        raise
    return folder


def holds_run(path: Path) -> bool:
    """True if a run was begun in this folder."""
    return (path / "services" / "run.json").exists() or (path / "metrics.jsonl").exists()


def _trained(path: Path) -> bool:
    """True if the run has something to lose: a run that failed before its first step keeps its name from nobody."""
    return (path / "checkpoints" / "latest").exists() or bool(read_history(path).steps)


def read_run(path: Path) -> dict[str, Any]:
    """What is remembered of the run.

    Raises:
        FolderRefused: nothing readable is.
    """
    try:
        run: dict[str, Any] = json.loads((path / "services" / "run.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError) as error:
        raise FolderRefused(f"{path} cannot be resumed: services/run.json is missing or broken") from error
    return run


def ports_of(path: Path, names: list[str], fixed: Mapping[str, int]) -> dict[str, int]:
    """The run's ports: those it had, if they are free, else new ones; kept in `services/ports.json`.

    Raises:
        PortBusy: a port that the recipe fixes is in use.
    """
    file = path / "services" / "ports.json"
    try:
        before: dict[str, int] = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        before = {}
    same = set(before) == set(names) and all(before[name] == port for name, port in fixed.items() if name in before)
    ports = before if same and all_free(before.values()) else choose_ports(names, fixed)
    _write(file, ports)
    return ports


def _written(path: Path) -> frozenset[Path]:
    """What there is of the folder, and of what a start that is refused can have written into it."""
    places = (path, path / "config.toml", path / "services", path / "logs", *path.glob("services/*"))
    return frozenset(place for place in places if place.exists() or place.is_symlink())


def _aside(path: Path) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    return aside


def _write(path: Path, data: Mapping[str, Any]) -> None:
    new = path.with_suffix(".new")
    new.write_text(json.dumps(data, indent=1), encoding="utf-8")
    new.replace(path)
