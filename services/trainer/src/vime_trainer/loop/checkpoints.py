"""From where to resume: the newest committed checkpoint of a run folder."""

from __future__ import annotations

from dataclasses import dataclass


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
