"""Why a process ended, from what it wrote: its own last word on it, not the last line that happens to stand there."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path

from vime_client.redaction import without_credentials

_TAIL_BYTES = 256 * 1024
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# What vLLM, torch and our own logs set before a line.
_PREFIX = re.compile(
    r"^(?:\([\w.]+ pid=\d+\)\s?)?(?:\[rank\d+\]:\s?)?"
    r"(?:(?:ERROR|WARNING|INFO|DEBUG|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ?)?"
)
# What Python sets before the lines of a group of exceptions, and between its members.
_MARGIN = re.compile(r"^ +[|+](?:-[-+]*(?: \d+ -+)?| ?)")
_TRACE = "Traceback (most recent call last):"
_SENTENCE = re.compile(r"^vime-[\w-]+: (?P<text>.+)")
_ERROR_LINE = re.compile(r"^\d\d:\d\d:\d\d (?:ERROR|CRITICAL)\s+[\w-]+: (?P<text>.+)")
_BARE = re.compile(r"^(?P<text>[\w.]*(?:Error|Exception): .+)")
_FATAL = re.compile(r"Fatal|FATAL|fatal error|terminate called|[Aa]ssertion|Segmentation|Aborted")
# Lines that only point to the cause.
_REFERRAL = re.compile(
    r"root cause|stack ?trace|see (?:the )?(?:above|log|error)|Failed core proc|Engine core init|EngineDeadError|"
    r"EngineCore encountered|died unexpectedly|ChildFailedError",
    re.IGNORECASE,
)


def last_lines(log: Path, count: int, start: int = 0) -> list[str]:
    """The last lines of a log that are not empty, none from before byte `start`."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(start, size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    return [line.rstrip() for line in lines if line.strip()][-count:]


def exit_text(code: int) -> str:
    """How a process ended, for people."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def cause_of_end(log: Path, code: int, start: int = 0) -> str:
    """Why a process ended with `code`, in one line, from what it wrote into `log` since byte `start`."""
    if code == -signal.SIGKILL:  # it had no time to say anything: whatever stands there is of something else
        return "killed from outside; if nobody did, the machine was out of memory"
    return cause_in(last_lines(log, 4000, start), crashed=code < 0)


def cause_in(lines: Iterable[str], *, crashed: bool = False) -> str:
    """The last exception, sentence or error of a log that is more than a pointer to another; else its last line.

    Args:
        lines: what the process wrote, in order.
        crashed: it was ended by a signal, so that only what speaks of a crash can be its cause.
    """
    kept = [_PREFIX.sub("", _ANSI.sub("", line)).rstrip() for line in lines]
    kept = [line for line in kept if line]
    said = [] if crashed else [*_exceptions(kept), *_matches(_SENTENCE, kept)]
    said.sort()
    for told in (said, *([] if crashed else [list(_matches(p, kept)) for p in (_ERROR_LINE, _BARE)])):
        for _, text in reversed(told):
            if not _REFERRAL.search(text):
                return without_credentials(text)
    if crashed:
        fatal = [line for line in kept if _FATAL.search(line)]
        return without_credentials(fatal[-1].strip()) if fatal else "its log says nothing of it"
    if said:
        return without_credentials(said[-1][1])
    return without_credentials(kept[-1].strip()) if kept else "it wrote nothing"


def _exceptions(lines: list[str]) -> Iterator[tuple[int, str]]:
    """The line that ends each stack, with its place."""
    inside = group = False
    for number, raw in enumerate(lines):
        group = raw[0].isspace() and (group or "+ Exception Group Traceback" in raw)
        line = _MARGIN.sub("", raw) if group else raw
        if line.endswith(_TRACE):
            inside = True
        elif inside and line and not line[0].isspace():
            inside = False
            # Some say in the first line only that there is more: "1 validation error for VllmConfig".
            more = lines[number + 1 : number + 3] if line.endswith(":") or " validation error" in line else []
            yield number, " ".join([line, *(part.strip() for part in more)])


def _matches(pattern: re.Pattern[str], lines: list[str]) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(lines):
        if match := pattern.match(line):
            yield number, match["text"]
