"""The checkpoints of a run folder as the driver sees them: how far training came, and going back to an older one."""

from __future__ import annotations

import os
import re
from pathlib import Path

from vime_client.driver.folder import FolderRefused

_CHECKPOINT = re.compile(r"step_(\d{6,})(?:-r\d+)?")


def kept_checkpoints(run_dir: Path) -> dict[int, str]:
    """Folder names of the complete checkpoints, by step; the last of a step where it was saved again."""
    folder = run_dir / "checkpoints"
    found: dict[int, str] = {}
    for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
        match = _CHECKPOINT.fullmatch(entry.name)
        if match and (entry / "manifest.json").is_file():
            found[int(match.group(1))] = entry.name
    return found


def last_step(run_dir: Path) -> int | None:
    """Step of the checkpoint that the run resumes from; None if there is none."""
    try:
        name = (run_dir / "checkpoints" / "latest").read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
    match = _CHECKPOINT.fullmatch(name)
    return int(match.group(1)) if match else None


def trained_model(run_dir: Path) -> Path | None:
    """The newest Hugging Face folder that training wrote; None if there is none."""
    whole = [folder for folder in run_dir.glob("hf/step_*") if folder.name.removeprefix("step_").isdigit()]
    return max(whole, default=None)


def rewind_to(run_dir: Path, step: int) -> None:
    """Point the run at its checkpoint of `step`, in one atomic rename, before anything starts.

    Later checkpoints are of a lineage that is given up; the trainer's next save removes them. The buffer then replays
    its recorded batches from there, or says which steps it can go back to.

    Raises:
        FolderRefused: that checkpoint is not kept; the message names those that are.
    """
    kept = kept_checkpoints(run_dir)
    if step not in kept:
        there = ", ".join(str(s) for s in sorted(kept)) or "none"
        raise FolderRefused(f"{run_dir} keeps no checkpoint of step {step}; it keeps: {there}")
    pointer = run_dir / "checkpoints" / "latest"
    new = pointer.with_name("latest.new")
    with new.open("w", encoding="utf-8") as file:
        file.write(kept[step] + "\n")
        file.flush()
        os.fsync(file.fileno())
    new.replace(pointer)
