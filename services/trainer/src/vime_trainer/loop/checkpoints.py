"""From where to resume: the newest committed checkpoint of a run folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vime_trainer.engine.errors import CheckpointError
from vime_trainer.engine.store import Store, read_manifest


@dataclass(frozen=True)
class Resume:
    """Where training goes on. Without a checkpoint: the starting model, step 0."""

    path: str | None = None
    step: int = 0
    incarnation: int = 0
    oldest_kept_step: int = 0
    """The oldest step that can still be resumed from."""

    @property
    def step_or_none(self) -> int | None:
        """Step of the checkpoint; None when there is none."""
        return None if self.path is None else self.step


def find_resume(folder: Path) -> Resume:
    """The checkpoint that the pointer names; the starting model where nothing was committed.

    Raises CheckpointError if the pointer leads nowhere or the checkpoint says nothing of its run: training from
    scratch over a run that has trained would lose it silently.
    """
    store = Store(folder, keep_last=1)
    path = store.latest()
    if path is None:
        return Resume()
    state = read_manifest(path).get("state", {})
    try:
        step, incarnation = int(state["step"]), int(state["incarnation"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"checkpoint {path} does not say its step and incarnation: {error!r}") from error
    return Resume(str(path), step, incarnation, store.committed().oldest_kept_step)
