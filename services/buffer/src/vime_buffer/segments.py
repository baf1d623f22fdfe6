"""Payloads in append-only segment files.

    segment-00000007.seg =  "VIMESEG1" number:u64            16 bytes, once
                            { "VREC" length:u32 xxh3_64:u64 payload }*

The ledger alone says which bytes count: a record exists when a committed row points at it. What lies behind the last
such record is a torn tail, of a crash between the append and the commit, and is cut off when the folder is opened.
One thread appends; any thread reads.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Collection, Mapping
from pathlib import Path

import xxhash

from vime_buffer.values import Place
from vime_service.errors import DataLoss, StorageFailed

_FILE_MAGIC = b"VIMESEG1"
_RECORD_MAGIC = b"VREC"
_FILE_HEADER = struct.Struct("<8sQ")
_RECORD_HEADER = struct.Struct("<4sIQ")


def storage_failed(path: Path, error: OSError, doing: str) -> StorageFailed:
    """What a caller is told when the operating system refuses."""
    why = error.strerror or str(error)
    return StorageFailed(f"cannot {doing} {path}: {why}; older data is intact", path=path, errno=error.errno or 0)


class Segments:
    """The folder of segment files."""

    def __init__(self, folder: Path, segment_bytes: int, live_ends: Mapping[int, int]) -> None:
        """Open the folder, cut the torn tail, delete segments that nothing lives in.

        Args:
            folder: made if it is not there.
            segment_bytes: size at which the next segment is begun.
            live_ends: for every segment that rows point into, the end of its last live record.

        Raises:
            StorageFailed: the folder cannot be used.
        """
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._fd: int | None = None
        self._dirty = False
        self._failed: StorageFailed | None = None
        self._number = 0
        self._end = 0
        self._synced_end = 0
        self.torn_bytes = 0
        try:
            make_folder(folder)
            present = sorted(self._present())
            self._sizes: dict[int, int] = {}
            for number in present:
                if number not in live_ends:
                    self._unlink(number)
                else:
                    self._sizes[number] = self._path(number).stat().st_size
        except OSError as error:
            raise storage_failed(folder, error, "use") from None
        newest = max([*present, *live_ends, 0])
        if newest in live_ends:
            self._cut(newest, live_ends[newest])
        # Appending to an old file could hide that its bytes changed; a new file costs one fsync in a process's life.
        self._next = newest + 1

    @property
    def total_bytes(self) -> int:
        """Bytes of all segment files, dead ones of half-live segments included: what the disk has to bear."""
        return sum(self._sizes.values()) + self._end

    # -------------------------------------------------------------- writing (one thread)

    def append(self, payload: bytes) -> Place:
        """Write a record; it is durable after `sync`.

        Raises:
            StorageFailed: the disk is full or not writable. Nothing of the record counts.
        """
        header = _RECORD_HEADER.pack(_RECORD_MAGIC, len(payload), xxhash.xxh3_64_intdigest(payload))
        fd = self._writable(len(header) + len(payload))
        try:
            self._dirty = True
            _write_all(fd, header + payload, self._end)
        except OSError as error:
            raise storage_failed(self._path(self._number), error, "write to") from None
        place = Place(self._number, self._end, len(payload))
        self._end += len(header) + len(payload)
        return place

    def sync(self) -> None:
        """Make every appended record durable.

        Raises:
            StorageFailed: nothing appended since the last sync may be pointed at; the file is left behind, because
                after a failed fsync the system may have dropped its dirty pages.
        """
        if self._failed is not None:  # of a file that was full and left meanwhile
            raise self._failed
        if not self._dirty or self._fd is None:
            return
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            self._failed = storage_failed(self._path(self._number), error, "sync")
            self._leave()
            raise self._failed from None
        self._dirty = False
        self._synced_end = self._end

    def roll_back(self) -> None:
        """Forget what was appended since the last sync: its transaction failed."""
        self._failed = None
        self._end = self._synced_end
        if self._dirty and self._fd is not None:
            try:
                os.ftruncate(self._fd, self._end)
            except OSError:
                self._leave()  # a tail that could not be cut must not be appended to
        self._dirty = False

    def mark(self) -> tuple[int, int]:
        """Where the next record goes; for `forget`."""
        return self._number, self._end

    def forget(self, mark: tuple[int, int]) -> None:
        """Forget what was appended since `mark`: one operation of several failed."""
        number, end = mark
        if number == self._number and self._fd is not None:
            self._end = end
        # Otherwise a new file was begun: what the operation wrote stays behind as bytes that nobody points at.

    def delete_dead(self, live: Collection[int]) -> list[int]:
        """Delete the segments that no row points into; their numbers. The one being written is left first, if dead."""
        keep = set(live)
        if self._fd is not None and self._number not in keep:
            if self._end > _FILE_HEADER.size:
                self._leave()
            else:
                keep.add(self._number)
        try:
            dead = [number for number in self._present() if number not in keep]
        except OSError:
            return []  # nothing is lost: the next open deletes them
        return [number for number in dead if self._unlink(number)]

    def close(self) -> None:
        """Close the file that is written to."""
        self._leave()

    # -------------------------------------------------------------- reading (any thread)

    def read(self, place: Place) -> bytes:
        """The payload at `place`.

        Raises:
            DataLoss: the bytes are missing or fail their check; names segment and offset.
            StorageFailed: the system refuses to read them now. That says nothing about the bytes.
        """
        path = self._path(place.segment)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                data = os.pread(fd, _RECORD_HEADER.size + place.nbytes, place.offset)
            finally:
                os.close(fd)
        except OSError as error:
            if isinstance(error, FileNotFoundError) and self._folder.is_dir():
                raise self._corrupted(place, f"cannot be opened: {error.strerror}") from None
            raise storage_failed(path, error, "read") from None
        if len(data) < _RECORD_HEADER.size + place.nbytes:
            raise self._corrupted(place, f"ends after {len(data)} of {_RECORD_HEADER.size + place.nbytes} bytes")
        magic, length, digest = _RECORD_HEADER.unpack_from(data)
        payload = data[_RECORD_HEADER.size :]
        if magic != _RECORD_MAGIC or length != place.nbytes:
            raise self._corrupted(place, f"has a damaged header (length {length}, expected {place.nbytes})")
        actual = xxhash.xxh3_64_intdigest(payload)
        if actual != digest:
            raise self._corrupted(place, f"fails its check: digest {actual:016x}, recorded {digest:016x}")
        return payload

    # -------------------------------------------------------------- files

    def _corrupted(self, place: Place, what: str) -> DataLoss:
        name = self._path(place.segment).name
        return DataLoss(f"the record at offset {place.offset} of {name} {what}", segment=name, offset=place.offset)

    def _path(self, number: int) -> Path:
        return self._folder / f"segment-{number:08d}.seg"

    def _present(self) -> list[int]:
        names = [path.stem.removeprefix("segment-") for path in self._folder.glob("segment-*.seg")]
        return [int(name) for name in names if name.isdecimal()]

    def _writable(self, nbytes: int) -> int:
        full = self._end > _FILE_HEADER.size and self._end + nbytes > self._segment_bytes
        if self._fd is not None and not full:
            return self._fd
        self.sync()
        self._leave()
        number = self._next
        path = self._path(number)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise storage_failed(path, error, "create") from None
        try:
            _write_all(fd, _FILE_HEADER.pack(_FILE_MAGIC, number), 0)
            os.fsync(fd)
            _sync_folder(self._folder)
        except OSError as error:
            os.close(fd)
            self._unlink(number)
            raise storage_failed(path, error, "begin") from None
        self._next = number + 1
        self._fd, self._number = fd, number
        self._end = self._synced_end = _FILE_HEADER.size
        return fd

    def _leave(self) -> None:
        if self._fd is not None:
            self._sizes[self._number] = self._end
            os.close(self._fd)
        self._fd, self._dirty = None, False
        self._end = self._synced_end = 0

    def _cut(self, number: int, end: int) -> None:
        path = self._path(number)
        try:
            size = path.stat().st_size
            if size > end:
                os.truncate(path, end)
                self.torn_bytes = size - end
                self._sizes[number] = end
        except FileNotFoundError:
            return  # reading its groups says CORRUPTED; everything else goes on
        except OSError as error:
            raise storage_failed(path, error, "cut the torn tail of") from None

    def _unlink(self, number: int) -> bool:
        try:
            self._path(number).unlink(missing_ok=True)
        except OSError:
            return False  # a read-only folder; the bytes stay, nobody points at them
        self._sizes.pop(number, None)
        return True


def record_end(place: Place) -> int:
    """Offset of the byte behind the record at `place`."""
    return place.offset + _RECORD_HEADER.size + place.nbytes


RECORD_OVERHEAD = _RECORD_HEADER.size
"""Bytes that a record adds to its payload."""


def _write_all(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def make_folder(folder: Path) -> None:
    """Make a folder that is still there after a power cut."""
    if not folder.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
