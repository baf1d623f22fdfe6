"""From where to resume: the newest committed checkpoint of a run folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Resume:
    """Where training goes on. Without a checkpoint: the starting model, step 0."""

    path: str | None = None
    step: int = 0
    incarnation: int = 0

    @property
    def step_or_none(self) -> int | None:
        """Step of the checkpoint; None when there is none."""
        return None if self.path is None else self.step


def find_resume(folder: Path) -> Resume:
    """The checkpoint that the pointer names; the starting model where there is no pointer.

    Raises ValueError if the pointer names a checkpoint that is not there or cannot be read: training from scratch
    over a run that has trained would lose it silently.
    """
    pointer = folder / "latest"
    if not pointer.is_file():
        return Resume()
    checkpoint = folder / pointer.read_text(encoding="utf-8").strip()
    state_file = checkpoint / "state.json"
    try:
        state = json.loads(state_file.read_text(encoding="utf-8"))
        return Resume(str(checkpoint), int(state["step"]), int(state["incarnation"]))
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(f"checkpoint {checkpoint}, named by {pointer}, cannot be resumed from: {error!r}") from error
