"""Prompt sources: a JSONL file whose every line is checked before the first prompt is drawn.

Lines are found in bytes, never in decoded text: a BOM, CRLF, blank lines and line separators inside strings then
cannot shift a line number or leave a carriage return in a value. `record_json` is the line as it stands in the file,
so that integers beyond 2**53, "007" and null reach the reward exactly.

The file is open only while it is read: a ledger may have more tables than the process may have files.
"""

from __future__ import annotations

import json
import os
import random
import re
import stat
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import xxhash

from vime_buffer.answer_size import prompt_bytes
from vime_buffer.settings import SourceSettings
from vime_buffer.values import PromptRecord
from vime_service.errors import InvalidArgument

_BOM = b"\xef\xbb\xbf"
_ROLES = frozenset({"system", "user", "assistant", "tool"})
_BLOCK = 1 << 20
_DEEPEST = 100
"""Levels of nesting. Python's own bound depends on its version and on who calls: what one process reads, another would
refuse."""
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_QUOTED = 10
"""Bad lines of a file that are named; the others are counted."""
_WHOLE = 1 << 62
_FORMATS = {
    b"PAR1": "a Parquet file",
    b"\x1f\x8b": "a gzip archive",
    b"PK\x03\x04": "a zip archive",
    b"\x28\xb5\x2f\xfd": "a zstd archive",
    b"BZh": "a bzip2 archive",
    b"\xfd7zXZ": "an xz archive",
    b"ARROW1": "an Arrow file",
    b"\xff\xff\xff\xff": "an Arrow stream",
    b"\xff\xfe": "UTF-16 text",
    b"\xfe\xff": "UTF-16 text",
    b"version https://git-lfs": "a pointer of Git LFS, whose file was not fetched",
}
"""First bytes that no JSONL has, of what is often given a name that ends in .jsonl."""


class SourceUnusable(InvalidArgument):
    """The file cannot be used as it is now; the message is the reason, with file and line."""


class BadLine(ValueError):
    """A line that is no usable record. The message has no line number yet; the reader adds it."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(slots=True)
class Scan:
    """What one pass over a file found."""

    path: Path
    offsets: array[int] = field(default_factory=lambda: array("Q"))
    lengths: array[int] = field(default_factory=lambda: array("Q"))
    bad: Counter[str] = field(default_factory=Counter)
    """Bad lines by reason."""
    quoted: list[tuple[int, int, str]] = field(default_factory=list)
    """Line, byte and sentence of the first bad lines."""
    stamp: tuple[int, ...] = ()
    digest: str = ""
    checked: int = 0
    """Bytes read."""
    whole: bool = True

    def problems(self, *, lenient: bool) -> list[str]:
        """One sentence for each thing that keeps the file from being used."""
        if self.bad and not lenient:
            return self.sentences()
        if self.offsets:
            return []
        return [f"prompt source {self.path} has {f'only {self.bad.total()} bad lines' if self.bad else 'no records'}"]

    def sentences(self) -> list[str]:
        """The first bad lines, and how many more there are."""
        found = [f"{self.path} line {line} (byte {byte}): {what}" for line, byte, what in self.quoted]
        more = self.bad.total() - len(found)
        return [*found, f"{self.path}: and {more} more bad lines"] if more else found


class JsonlSource:
    """Records of one file by index, and their order in every epoch.

    Attributes:
        skipped: bad lines that `lenient` skipped, by reason.
        first_skipped: sentences about the first of them.
        digest: hexadecimal xxh3-128 of the file, and how many of its lines are skipped: both say which record has
            which index.
    """

    def __init__(self, settings: SourceSettings, run_seed: int, largest: int = _WHOLE) -> None:
        """Reads the whole file once.

        Args:
            settings: which file, and what its records must have.
            run_seed: of shuffles.
            largest: bytes that the prompt of one record may take in a message.

        Raises:
            SourceUnusable: the file is missing or empty, or a line is bad and `lenient` is off.
        """
        self.settings = settings
        self._seed = run_seed
        self._order: tuple[int, Sequence[int]] | None = None
        found = scan(settings, largest)
        problems = found.problems(lenient=settings.lenient)
        if problems:
            raise _refused(found, problems, lenient=settings.lenient)
        self._offsets, self._lengths, self._stamp = found.offsets, found.lengths, found.stamp
        self.digest = found.digest
        self.skipped: Mapping[str, int] = found.bad
        self.first_skipped = found.sentences()

    @property
    def records(self) -> int:
        """Number of good records."""
        return len(self._offsets)

    def has(self, epoch: int) -> bool:
        """True if the source has this pass."""
        return self.settings.has(epoch)

    def index_at(self, epoch: int, position: int) -> int:
        """Index of the record that comes at `position` in `epoch`."""
        if not self.settings.shuffle:
            return position
        if self._order is None or self._order[0] != epoch:
            order = array("Q", range(self.records))
            random.Random(self._seed + epoch).shuffle(order)
            self._order = (epoch, order)
        return self._order[1][position]

    def read(self, epoch: int, index: int) -> PromptRecord:
        """The record at `index`.

        Raises:
            SourceUnusable: the file is gone, or changed since it was checked.
        """
        with _opened(self.settings.path) as fd:
            same = _stamp(fd) == self._stamp
            line = os.pread(fd, self._lengths[index], self._offsets[index])
        try:
            if same:
                text, prompt = parse_line(line, self.settings)
                return PromptRecord(self.settings.name, epoch, index, text, prompt)
        except BadLine:  # it was good when it was checked
            pass
        raise _unusable(self.settings.path, "changed while the run uses it")


def scan(settings: SourceSettings, largest: int, at_most: int = _WHOLE) -> Scan:
    """Check a file, line by line.

    Args:
        settings: which file, and what its records must have.
        largest: bytes that the prompt of one record may take in a message.
        at_most: lines that begin behind so many bytes are not looked at.

    Raises:
        SourceUnusable: it cannot be read, is no file of text, or changed meanwhile.
    """
    found = Scan(settings.path)
    hasher = xxhash.xxh3_128()
    with _opened(settings.path) as fd:
        found.stamp = _stamp(fd)
        head = os.pread(fd, 32, 0)
        for magic, what in _FORMATS.items():
            if head.startswith(magic):
                raise _unusable(settings.path, f"is {what}; it must be JSONL, one JSON object on each line")
        for number, (offset, length, line) in enumerate(_lines(fd, found.stamp[1], hasher, largest), start=1):
            if offset >= at_most:
                found.whole = False
                break
            found.checked = offset + length
            if line is not None and not line.strip():
                continue
            if settings.limit and len(found.offsets) >= settings.limit:
                continue  # the rest is read for the digest only
            try:
                _check_line(line, length, settings, largest)
            except BadLine as error:
                found.bad[error.reason] += 1
                if len(found.quoted) < _QUOTED:
                    found.quoted.append((number, offset, str(error)))
                continue
            found.offsets.append(offset)
            found.lengths.append(length)
        if _stamp(fd) != found.stamp:
            raise _unusable(settings.path, "changed while it was read")
    found.digest = f"{hasher.hexdigest()}-{found.bad.total()}"
    return found


def same_records(known: str, digest: str) -> bool:
    """True if both digests mean the same records in the same order. Older ledgers know the file's part alone."""
    return known in (digest, digest.partition("-")[0])


def _refused(found: Scan, problems: list[str], *, lenient: bool) -> SourceUnusable:
    line: dict[str, int] = {}
    if found.quoted and not lenient:
        line = {"line": found.quoted[0][0], "byte": found.quoted[0][1]}
    more = f"; and {found.bad.total() - 1} more bad lines" if len(problems) > 1 else ""
    counts = {"records": len(found.offsets), "skipped": found.bad.total()}
    return SourceUnusable(problems[0] + more, field="source.path", **counts, **line)


def _unusable(path: Path, what: str) -> SourceUnusable:
    return SourceUnusable(f"prompt source {path} {what}", field="source.path")


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """A descriptor of a regular file.

    Raises:
        SourceUnusable: there is none, or the system refuses to open or to read it.
    """
    try:
        # Without waiting: opening a pipe would last until somebody writes into it.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            mode = os.fstat(fd).st_mode
            if stat.S_ISDIR(mode):
                raise _unusable(path, "is a folder")
            if not stat.S_ISREG(mode):
                raise _unusable(path, "is no regular file")
            yield fd
        finally:
            os.close(fd)
    except OSError as error:
        raise _unusable(path, f"cannot be read: {error.strerror or error}") from None


def _stamp(fd: int) -> tuple[int, ...]:
    now = os.fstat(fd)
    return now.st_ino, now.st_size, now.st_mtime_ns


def _check_line(line: bytes | None, length: int, settings: SourceSettings, largest: int) -> None:
    if line is not None:
        text, prompt = parse_line(line, settings)
        needed = prompt_bytes(text, prompt)
    if line is None or needed > largest:
        has = f"a line of {length} bytes" if line is None else f"needs {needed} bytes in a message"
        raise BadLine("too_large", f"{has}, one record may have at most {largest}")


def parse_line(line: bytes, settings: SourceSettings) -> tuple[str, str | list[Mapping[str, object]] | list[int]]:
    """The record's text and its prompt.

    Raises:
        BadLine: it is no JSON object, lacks a key, or its prompt is no prompt.
    """
    try:
        text = line.decode("utf-8").strip(" \t\r\n")
    except UnicodeDecodeError as error:
        raise BadLine("encoding", f"not UTF-8 at byte {error.start} of the line") from None
    try:
        record = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise BadLine("json", f"not valid JSON: {error.msg} at column {error.colno}") from None
    except BadLine:
        raise
    except ValueError as error:  # an integer of thousands of digits
        raise BadLine("json", f"not usable JSON: {error}") from None
    except RecursionError:
        raise BadLine("too_deep", f"nested too deeply: at most {_DEEPEST} levels may be") from None
    if not isinstance(record, dict):
        raise BadLine("no_object", f"a record must be a JSON object, not {_kind(record)}")
    _check_depth(text, record)
    _check_text(text, record)
    for key in (settings.prompt_key, *settings.required_keys):
        if key not in record:
            raise BadLine("missing_key", f'key "{key}" is missing')
    return text, _prompt(record[settings.prompt_key], settings.prompt_key)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Of a key that is there twice every language takes another one."""
    made = dict(pairs)
    if len(made) < len(pairs):
        twice = next(key for key, n in Counter(key for key, _ in pairs).items() if n > 1)
        raise BadLine("duplicate_key", f"key {twice!a} is there twice")
    return made


def _no_constant(name: str) -> NoReturn:
    raise BadLine("json", f"not valid JSON: {name}")


_DECODER = json.JSONDecoder(parse_constant=_no_constant, object_pairs_hook=_object)


def _check_depth(text: str, record: Any) -> None:
    if text.count("[") + text.count("{") <= _DEEPEST:  # brackets inside strings count too: this only saves the walk
        return
    level, depth = [record], 1
    while level := [item for value in level for item in _inside(value)]:
        depth += 1
        if depth > _DEEPEST:
            raise BadLine("too_deep", f"nested too deeply: at most {_DEEPEST} levels may be")


def _inside(value: dict[str, Any] | list[Any]) -> list[Any]:
    return [item for item in (value.values() if isinstance(value, dict) else value) if isinstance(item, (dict, list))]


def _check_text(text: str, record: dict[str, Any]) -> None:
    r"""JSON may spell half of a surrogate pair (`"\ud83d"`); no UTF-8 text can carry it."""
    if not _SURROGATE.search(text):
        return
    for key, value in record.items():
        try:
            json.dumps({key: value}, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(error.object[error.start]):04x}"
            raise BadLine(
                "lone_surrogate", f"key {key!a} holds {half}, half of a surrogate pair: no text can carry it"
            ) from None


def _prompt(value: Any, key: str) -> str | list[Mapping[str, object]] | list[int]:
    if isinstance(value, str):
        if not value:
            raise BadLine("prompt", f'"{key}" is empty')
        return value
    if not isinstance(value, list):
        raise BadLine("prompt", f'"{key}" must be text, a list of messages or a list of token ids, not {_kind(value)}')
    if not value:
        raise BadLine("prompt", f'"{key}" is empty')
    if all(isinstance(item, dict) for item in value):
        return [_message(item, f"{key}[{position}]") for position, item in enumerate(value)]
    if all(type(item) is int for item in value):
        for position, item in enumerate(value):
            if not 0 <= item < 2**32:
                raise BadLine("prompt", f"{key}[{position}] is {item}: token ids are from 0 to {2**32 - 1}")
        return list(value)
    raise BadLine("prompt", f'"{key}" must be a list of messages or of token ids, all of one kind')


def _message(message: dict[str, Any], where: str) -> Mapping[str, object]:
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise BadLine("prompt", f"{where}.role must be one of {', '.join(sorted(_ROLES))}, not {str(role)[:80]!r}")
    content = message.get("content")
    if content is None and role == "assistant" and message.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise BadLine("prompt", f"{where}.content must be text (media is not supported), not {_kind(content)}")
    for name, kind, called in (("tool_call_id", str, "text"), ("tool_calls", list, "a list")):
        if not isinstance(message.get(name) or kind(), kind):
            raise BadLine("prompt", f"{where}.{name} must be {called}, not {_kind(message[name])}")
    return {**message, "content": content}


def _kind(value: Any) -> str:
    """A value's kind, in JSON's words."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _lines(fd: int, size: int, hasher: Any, longest: int) -> Iterator[tuple[int, int, bytes | None]]:
    """Offset, length and bytes of each line without its line feed; None for the bytes of one above `longest`.

    A BOM at the start belongs to no line.
    """
    parts: list[bytes] = []
    start = length = position = 0
    while position < size and (block := os.pread(fd, min(_BLOCK, size - position), position)):
        hasher.update(block)
        position += len(block)
        if position == len(block) and block.startswith(_BOM):
            block, start = block[len(_BOM) :], len(_BOM)
        *ends, rest = block.split(b"\n")
        for end in ends:
            length += len(end)
            yield start, length, (b"".join([*parts, end]) if length <= longest else None)
            parts, start, length = [], start + length + 1, 0
        length += len(rest)
        parts = [*parts, rest] if length <= longest else []  # a line that cannot pass is not collected
    if length:
        yield start, length, (b"".join(parts) if length <= longest else None)
