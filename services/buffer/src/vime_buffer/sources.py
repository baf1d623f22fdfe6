"""Prompt sources: a JSONL file whose every line is checked before the first prompt is drawn.

Lines are found in bytes, never in decoded text: a BOM, CRLF, blank lines and line separators inside strings then
cannot shift a line number or leave a carriage return in a value. `record_json` is the line as it stands in the file,
so that integers beyond 2**53, "007" and null reach the reward exactly.
"""

from __future__ import annotations

import json
import os
import random
import stat
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import xxhash

from vime_buffer.settings import SourceSettings
from vime_buffer.values import PromptRecord
from vime_service.errors import DataLoss, InvalidArgument

_BOM = b"\xef\xbb\xbf"
_ROLES = frozenset({"system", "user", "assistant", "tool"})
_BLOCK = 1 << 20


class BadLine(ValueError):
    """A line that is no usable record. The message has no line number yet; the reader adds it."""


class JsonlSource:
    """Records of one file by index, and their order in every epoch.

    Attributes:
        records: number of good records.
        skipped: bad lines that `lenient` skipped.
        digest: hexadecimal xxh3-128 of the file.
    """

    def __init__(self, settings: SourceSettings, run_seed: int) -> None:
        """Reads the whole file once.

        Raises:
            InvalidArgument: the file is missing or empty, or a line is bad and `lenient` is off.
        """
        self.settings = settings
        self._seed = run_seed
        self._offsets = array("Q")
        self._lengths = array("Q")
        self.skipped = 0
        self._order: tuple[int, Sequence[int]] | None = None
        try:
            # Without waiting: opening a pipe would last until somebody writes into it.
            self._fd = os.open(settings.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise InvalidArgument(
                f"prompt source {settings.path} cannot be read: {error.strerror}", field="source.path"
            ) from None
        try:
            if not stat.S_ISREG(os.fstat(self._fd).st_mode):
                raise InvalidArgument(f"prompt source {settings.path} is no regular file", field="source.path")
            self._stamp = self._stat()
            self.digest = self._scan()
        except BaseException:
            os.close(self._fd)
            raise

    @property
    def records(self) -> int:
        """Number of good records."""
        return len(self._offsets)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def has(self, epoch: int) -> bool:
        """True if the source has this pass."""
        return self.settings.epochs == 0 or epoch < self.settings.epochs

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
            DataLoss: the file changed while it was in use.
        """
        if self._stat() != self._stamp:
            raise DataLoss(
                f"prompt source {self.settings.path} changed while the run uses it", source=self.settings.path
            )
        line = os.pread(self._fd, self._lengths[index], self._offsets[index])
        text, prompt = parse_line(line, self.settings)
        return PromptRecord(self.settings.name, epoch, index, text, prompt)

    def _stat(self) -> tuple[int, int, int]:
        now = os.fstat(self._fd)
        return now.st_ino, now.st_size, now.st_mtime_ns

    def _scan(self) -> str:
        hasher = xxhash.xxh3_128()
        good = 0
        for number, (offset, line) in enumerate(_lines(self._fd, hasher), start=1):
            if not line.strip():
                continue
            if self.settings.limit and good >= self.settings.limit:
                continue  # the rest is read for the digest only
            try:
                parse_line(line, self.settings)
            except BadLine as error:
                self._bad(number, offset, error)
                continue
            good += 1
            self._offsets.append(offset)
            self._lengths.append(len(line))
        if not good:
            found = f"only {self.skipped} bad lines" if self.skipped else "no records"
            raise InvalidArgument(
                f"prompt source {self.settings.path} has {found}", field="source.path", records=0, skipped=self.skipped
            )
        return hasher.hexdigest()

    def _bad(self, number: int, offset: int, error: BadLine) -> None:
        if self.settings.lenient:
            self.skipped += 1
            return
        raise InvalidArgument(
            f"{self.settings.path} line {number} (byte {offset}): {error}",
            field="source.path",
            line=number,
            byte=offset,
        ) from None


def parse_line(line: bytes, settings: SourceSettings) -> tuple[str, str | list[Mapping[str, object]] | list[int]]:
    """The record's text and its prompt.

    Raises:
        BadLine: it is no JSON object, lacks a key, or its prompt is no prompt.
    """
    try:
        text = line.decode("utf-8").strip(" \t\r\n")
    except UnicodeDecodeError as error:
        raise BadLine(f"not UTF-8 at byte {error.start} of the line") from None
    try:
        record = json.loads(text, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise BadLine(f"not valid JSON: {error.msg} at column {error.colno}") from None
    except BadLine:
        raise
    except ValueError as error:  # an integer of thousands of digits
        raise BadLine(f"not usable JSON: {error}") from None
    except RecursionError:
        raise BadLine("nested too deeply") from None
    if not isinstance(record, dict):
        raise BadLine(f"a record must be a JSON object, not {type(record).__name__}")
    for key in (settings.prompt_key, *settings.required_keys):
        if key not in record:
            raise BadLine(f'key "{key}" is missing')
    return text, _prompt(record[settings.prompt_key], settings.prompt_key)


def _prompt(value: Any, key: str) -> str | list[Mapping[str, object]] | list[int]:
    if isinstance(value, str):
        if not value:
            raise BadLine(f'"{key}" is empty')
        return value
    if not isinstance(value, list):
        raise BadLine(f'"{key}" must be text, a list of messages or a list of token ids')
    if not value:
        raise BadLine(f'"{key}" is empty')
    if all(isinstance(item, dict) for item in value):
        return [_message(item, f"{key}[{position}]") for position, item in enumerate(value)]
    if all(type(item) is int and 0 <= item < 2**32 for item in value):
        return list(value)
    raise BadLine(f'"{key}" must be a list of messages or of token ids, all of one kind')


def _message(message: dict[str, Any], where: str) -> Mapping[str, object]:
    role = message.get("role")
    if role not in _ROLES:
        raise BadLine(f"{where}.role must be one of {', '.join(sorted(_ROLES))}, not {role!r}")
    content = message.get("content")
    if content is None and role == "assistant" and message.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise BadLine(f"{where}.content must be text (media is not supported), not {type(content).__name__}")
    return {**message, "content": content}


def _no_constant(name: str) -> NoReturn:
    raise BadLine(f"not valid JSON: {name}")


def _lines(fd: int, hasher: Any) -> Iterator[tuple[int, bytes]]:
    """Offset and bytes of each line without its line feed; a BOM at the start belongs to no line."""
    rest, start, position = b"", 0, 0
    while block := os.pread(fd, _BLOCK, position):
        hasher.update(block)
        if position == 0 and block.startswith(_BOM):
            block, start, position = block[len(_BOM) :], len(_BOM), len(_BOM)
        position += len(block)
        *whole, rest = (rest + block).split(b"\n")
        for line in whole:
            yield start, line
            start += len(line) + 1
    if rest:
        yield start, rest
