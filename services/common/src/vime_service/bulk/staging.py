"""Memory that holds a received version until it is committed: private, or a file that another process can map."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Protocol

import torch

from vime_service.bulk.errors import StagingError


class Staging(Protocol):
    """`nbytes` of memory that the receiver fills."""

    @property
    def buffer(self) -> torch.Tensor:
        """The memory, flat uint8."""

    def close(self) -> None:
        """Give the memory back. Calling it again does nothing."""


class MemoryStaging:
    """Private host memory."""

    def __init__(self, nbytes: int) -> None:
        self.buffer = torch.empty(nbytes, dtype=torch.uint8)

    def close(self) -> None:
        self.buffer = torch.empty(0, dtype=torch.uint8)


class FileStaging:
    """A file (in `/dev/shm`, or any directory) that the engine's worker maps; deleted on `close`.

    The room is allocated up front: a full tmpfs is then an error here, not a SIGBUS at some later write.
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        self.path = path
        free = shutil.disk_usage(path.parent).free
        if free < nbytes:
            raise StagingError(f"{path.parent} has {free} bytes free, staging needs {nbytes}")
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            os.posix_fallocate(fd, 0, nbytes)
        except OSError as error:
            path.unlink()
            raise StagingError(f"cannot allocate {nbytes} bytes in {path.parent}: {error}") from error
        finally:
            os.close(fd)
        self.buffer = map_file(path, nbytes)

    def close(self) -> None:
        self.buffer = torch.empty(0, dtype=torch.uint8)
        self.path.unlink(missing_ok=True)


def map_file(path: Path, nbytes: int) -> torch.Tensor:
    """Map the first `nbytes` of a staged file, shared, flat uint8."""
    size = path.stat().st_size
    if size < nbytes:
        raise StagingError(f"{path} has {size} bytes, {nbytes} are expected")
    return torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8)
