"""The directory that holds this process's staged weights. It goes with the process, also when that was killed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from vime_service.bulk import FileStaging, Manifest

_PREFIX = "vime-rollout-"


class StagingArea:
    """`<root>/vime-rollout-<pid>/`, one file per staged version, the last of which may be used again.

    Pages of a fresh memory-backed file are slow to touch (about 1 GB/s), so a file that did its work is kept for the
    next version. One of a transfer that failed is not: a late write of that transfer could still reach it.
    """

    def __init__(self, root: Path, keep: bool = True) -> None:
        """Make the directory, and remove those of processes that are gone."""
        remove_stale(root)
        self.path = staging_path(root, os.getpid())
        self.path.mkdir(mode=0o700, parents=True)
        self._keep = keep
        self._spare: FileStaging | None = None
        self._made = 0

    def reserve(self, manifest: Manifest) -> FileStaging:
        """Memory for a manifest's tensors. Raises `StagingError` naming both numbers when there is too little."""
        needed = manifest.plan.total_bytes
        spare, self._spare = self._spare, None
        if spare is not None and spare.buffer.numel() == needed:
            return spare
        if spare is not None:
            spare.close()
        self._made += 1
        return FileStaging(self.path / f"weights-{self._made}", needed)

    def put_back(self, staging: FileStaging) -> None:
        """Keep memory for the next version, or free it."""
        if self._keep and self._spare is None:
            self._spare = staging
        else:
            staging.close()

    def close(self) -> None:
        """Remove the directory and everything in it."""
        self._spare = None
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
