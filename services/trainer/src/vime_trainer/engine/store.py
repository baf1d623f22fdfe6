"""Where checkpoints live: directories that appear whole, one pointer, and retention that cannot remove the last good
one.

    root/latest                     name of the committed checkpoint; replaced by an atomic rename
    root/step_000012/               a checkpoint; never changed after its rename
    root/step_000012.tmp-4711/      a save in progress, or one that was torn: ignored, removed by the next save

Order of a save: write into the temporary directory, fsync each file and the directory, write the manifest, rename the
directory, fsync, replace the pointer, fsync, only then prune. A crash at any moment leaves the pointer on a complete
checkpoint.
"""

import hashlib
import json
import logging
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vime_trainer.engine.errors import CheckpointError

logger = logging.getLogger(__name__)

MANIFEST, POINTER = "manifest.json", "latest"
_STEP = re.compile(r"step_(\d{6,})(?:-r\d+)?")
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Committed:
    """A checkpoint that `latest` has pointed to."""

    path: Path
    step: int
    kept_steps: tuple[int, ...]
    """Steps that can still be resumed from, oldest first."""

    @property
    def oldest_kept_step(self) -> int:
        """Smallest step that can still be resumed from."""
        return self.kept_steps[0]


class Store:
    """The directory of one run's checkpoints. One process commits; others may write files into a save in progress."""

    def __init__(self, root: Path, keep_last: int) -> None:
        if keep_last < 1:
            raise ValueError(f"keep_last = {keep_last} must be at least 1: the last good checkpoint is never removed")
        self.root, self._keep_last = root, keep_last

    def begin(self, step: int, token: str) -> Path:
        """A fresh temporary directory for `step`; removes what torn saves left behind.

        `token` makes its name unique.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        self._remove_leftovers()
        work = self.working_directory(step, token)
        work.mkdir()
        return work

    def working_directory(self, step: int, token: str) -> Path:
        """The name that `begin` gives."""
        return self.root / f"step_{step:06d}.tmp-{token}"

    def commit(self, work: Path, step: int, facts: dict[str, Any]) -> Committed:
        """Make a written directory the latest checkpoint. `facts` go into the manifest beside the files' digests."""
        files = {f.name: {"bytes": f.stat().st_size, "blake2b": _digest(f)} for f in sorted(work.iterdir())}
        manifest = json.dumps({"step": step, "files": files, **facts}, indent=1, allow_nan=False)
        _write_synced(work / MANIFEST, manifest)
        for file in work.iterdir():
            _sync(file)
        _sync(work)
        final = self._free_name(step)
        work.rename(final)
        _sync(self.root)
        self._point_to(final)
        self._prune()
        return self.committed()

    def abandon(self, work: Path) -> None:
        """Remove a save that failed; what was committed before stays."""
        shutil.rmtree(work, ignore_errors=True)

    def latest(self) -> Path | None:
        """The committed checkpoint; None if none was ever committed.

        Raises CheckpointError if the pointer leads nowhere.
        """
        pointer = self.root / POINTER
        if not pointer.exists():
            return None
        name = pointer.read_text().strip()
        if not _STEP.fullmatch(name):
            raise CheckpointError(f"{pointer} holds {name!r}, which is no checkpoint's name")
        path = self.root / name
        if not (path / MANIFEST).exists():
            raise CheckpointError(f"{pointer} names {name}, but {path / MANIFEST} does not exist")
        return path

    def verify(self) -> None:
        """Compare the latest checkpoint's files with its manifest.

        Raises CheckpointError naming the first that differs.
        """
        path = self.latest()
        if path is not None:
            for file, facts in read_manifest(path)["files"].items():
                self._check_file(path / file, facts)

    def committed(self) -> Committed:
        """What `latest` points to, and how far back one can go. Raises CheckpointError if nothing was committed."""
        path = self.latest()
        if path is None:
            raise CheckpointError(f"{self.root} holds no committed checkpoint")
        return Committed(path, step_of(path), tuple(sorted({step_of(d) for d in self._complete()})))

    def _check_file(self, file: Path, facts: dict[str, Any]) -> None:
        if not file.exists():
            raise CheckpointError(f"{file} is in the manifest, but not on disk")
        size = file.stat().st_size
        if size != facts["bytes"]:
            raise CheckpointError(f"{file} has {size} bytes, {facts['bytes']} were written")
        if _digest(file) != facts["blake2b"]:
            raise CheckpointError(f"{file} is not what was written: its digest differs from the manifest's")

    def _complete(self) -> list[Path]:
        found = [d for d in self.root.iterdir() if _STEP.fullmatch(d.name) and (d / MANIFEST).exists()]
        return sorted(found, key=lambda d: (step_of(d), d.name))

    def _pointed(self) -> str | None:
        pointer = self.root / POINTER
        return pointer.read_text().strip() if pointer.exists() else None

    def _remove_leftovers(self) -> None:
        """Torn saves, half-removed directories, and steps beyond the pointer: those were never committed or are
        lost."""
        pointed = self._pointed()
        limit = step_of(self.root / pointed) if pointed is not None else -1
        for entry in self.root.iterdir():
            torn = ".tmp-" in entry.name or entry.name.endswith(".trash")
            beyond = _STEP.fullmatch(entry.name) is not None and step_of(entry) > limit
            if entry.is_dir() and (torn or beyond):
                logger.warning("removing the uncommitted checkpoint %s", entry)
                self._remove(entry)

    def _prune(self) -> None:
        pointed = self._pointed()
        others = [d for d in self._complete() if d.name != pointed]
        for old in others[: max(0, len(others) - (self._keep_last - 1))]:
            self._remove(old)

    def _remove(self, directory: Path) -> None:
        # Renamed first: a removal cut short must not leave something that looks like a checkpoint.
        trash = directory if directory.name.endswith(".trash") else directory.with_name(directory.name + ".trash")
        if trash != directory:
            shutil.rmtree(trash, ignore_errors=True)
            directory.rename(trash)
        shutil.rmtree(trash, ignore_errors=True)

    def _free_name(self, step: int) -> Path:
        """The same step may be saved again after a resume from an older one.

        The old directory may still be pointed to.
        """
        path, again = self.root / f"step_{step:06d}", 0
        while path.exists():
            again += 1
            path = self.root / f"step_{step:06d}-r{again}"
        return path

    def _point_to(self, path: Path) -> None:
        fresh = self.root / (POINTER + ".new")
        _write_synced(fresh, path.name + "\n")
        fresh.replace(self.root / POINTER)
        _sync(self.root)


def step_of(directory: Path) -> int:
    """The step in a checkpoint's name. Raises CheckpointError for other names."""
    match = _STEP.fullmatch(directory.name)
    if match is None:
        raise CheckpointError(f"{directory.name!r} is no checkpoint's name")
    return int(match.group(1))


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a complete checkpoint."""
    manifest: dict[str, Any] = json.loads((path / MANIFEST).read_text())
    return manifest


def _digest(file: Path) -> str:
    hasher = hashlib.blake2b(digest_size=16)
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            hasher.update(chunk)
    return hasher.hexdigest()


def _write_synced(file: Path, text: str) -> None:
    with file.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
