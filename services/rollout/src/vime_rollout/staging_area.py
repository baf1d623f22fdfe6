"""The directory that holds this process's staged weights. It goes with the process, also when that was killed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from vime_service.bulk import FileStaging, Manifest

_PREFIX = "vime-rollout-"


class StagingArea:
    """`<root>/vime-rollout-<pid>/`, one file per staged version."""

    def __init__(self, root: Path) -> None:
        """Make the directory, and remove those of processes that are gone."""
        remove_stale(root)
        self.path = staging_path(root, os.getpid())
        self.path.mkdir(mode=0o700, parents=True)
        self._made = 0

    def reserve(self, manifest: Manifest) -> FileStaging:
        """Memory for a manifest's tensors. Raises `StagingError` naming both numbers when there is too little."""
        self._made += 1
        return FileStaging(self.path / f"weights-{self._made}", manifest.plan.total_bytes)

    def close(self) -> None:
        """Remove the directory and everything in it."""
        shutil.rmtree(self.path, ignore_errors=True)


def staging_path(root: Path, pid: int) -> Path:
    """The directory of the process `pid`."""
    return root / f"{_PREFIX}{pid}"


def remove_stale(root: Path) -> list[Path]:
    """Remove the directories of processes that no longer live; which those were."""
    stale = [path for path in root.glob(f"{_PREFIX}*") if not _lives(path.name.removeprefix(_PREFIX))]
    for path in stale:
        shutil.rmtree(path, ignore_errors=True)
    return stale


def _lives(pid: str) -> bool:
    return not pid.isdigit() or Path(f"/proc/{pid}").exists()
