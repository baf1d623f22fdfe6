"""`services/state.json`: what the supervisor tells others, and the locks that say who is alive."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Literal

from pydantic import Field, ValidationError

from vime_client.config_loading import ConfigModel

Phase = Literal["starting", "running", "finished", "incomplete", "failed", "stopped"]
ENDED: frozenset[Phase] = frozenset({"finished", "incomplete", "failed", "stopped"})
"""Phases of a run that is over."""


class ServiceState(ConfigModel):
    """One service as the supervisor sees it."""

    state: Literal["waiting", "running", "stopped", "gave_up"]
    """Whether its process runs."""
    pid: int = 0
    """Process id; 0 if there is none."""
    deaths: int = 0
    """How often it died."""
    ready: bool = False
    """True once it said that it can do its work."""
    last_end: str = ""
    """How its last process ended."""
    cause: str = ""
    """Why it did, from its log."""


class RunState(ConfigModel):
    """The run as the supervisor sees it."""

    pid: int
    """The supervisor."""
    phase: Phase
    """`starting` until all are ready; `finished`, `incomplete` (in good order, but its work is not done) and `failed`
    end a run, `stopped` interrupts it."""
    reason: str = ""
    """Why it failed or is incomplete, in one sentence."""
    failed_service: str = ""
    """The service that ended it, if one did."""
    log: str = ""
    """The log that holds the cause, if one does."""
    activity: str = ""
    """What it waits for, for people."""
    services: dict[str, ServiceState] = Field(default={})
    """By name."""
    started: float = 0.0
    """When this supervisor started; seconds since 1970."""
    ended: float = 0.0
    """When the run ended; 0 while it goes on."""


def state_path(run_dir: Path) -> Path:
    """Where the state is."""
    return run_dir / "services" / "state.json"


def write_state(run_dir: Path, state: RunState) -> None:
    """Replace the state in one step: a reader sees the old or the new one."""
    path = state_path(run_dir)
    new = path.with_suffix(".new")
    new.write_text(state.model_dump_json(indent=1), encoding="utf-8")
    new.replace(path)


def read_state(run_dir: Path) -> RunState | None:
    """The last state, or None if there is none that can be read."""
    try:
        return RunState.model_validate_json(state_path(run_dir).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValidationError):
        return None


class AlreadyHeld(Exception):
    """Another process holds the lock."""


@contextmanager
def hold(run_dir: Path, name: Literal["supervisor", "driver"]) -> Iterator[None]:
    """Hold the lock that says "I am alive"; the kernel lets it go when the process dies, however it dies.

    A run has one supervisor and any number of drivers.

    Raises:
        AlreadyHeld: the run has a supervisor.
    """
    with _open(run_dir, name) as file:
        kind = fcntl.LOCK_EX if name == "supervisor" else fcntl.LOCK_SH
        for attempt in range(20):  # someone who looks holds it for a moment
            try:
                fcntl.flock(file, kind | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if attempt == 19:
                    raise AlreadyHeld(f"{run_dir} has a {name} already") from None
                time.sleep(0.05)
        yield


def is_held(run_dir: Path, name: Literal["supervisor", "driver"]) -> bool:
    """True if a living process holds the lock."""
    if not (run_dir / "services" / f"{name}.lock").exists():
        return False
    with _open(run_dir, name) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _open(run_dir: Path, name: str) -> IO[str]:
    folder = run_dir / "services"
    folder.mkdir(parents=True, exist_ok=True)
    return os.fdopen(os.open(folder / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), "r+")
