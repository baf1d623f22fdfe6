"""How long to wait for a process that starts: as long as it does something.

A machine under load makes the same start ten times slower. A process that computes or reads is alive; one that does
neither for the time given has nothing to wait for. What never ends is bounded by ten times that time.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from vime_client.clock import Clock

_LONGEST = 10
_LOOK_S = 2.0
_BUSY = 0.02
"""Share of one processor that is more than the polling of a process that only waits."""
_READ_BYTES = 50 * 2**20
"""Reading so much counts as a second of computing: loading a model may wait for nothing but the disk."""
_TICKS = os.sysconf("SC_CLK_TCK")


class Patience:
    """Whether to wait on for some processes."""

    def __init__(self, idle_s: float, clock: Clock) -> None:
        """`idle_s`: how long they may do nothing."""
        self.idle_s = idle_s
        self._clock = clock
        self._start = self._looked = self._worked = clock.now()
        self._spent = 0.0

    @property
    def waited_s(self) -> float:
        """Since the start."""
        return self._clock.now() - self._start

    @property
    def seen_idle_s(self) -> float:
        """Since they last did something."""
        return self._clock.now() - self._worked

    def is_over(self, pids: Iterable[int]) -> bool:
        """Look what these and their descendants did; True if they did nothing for too long, or nothing ends it."""
        now = self._clock.now()
        if now - self._looked >= min(_LOOK_S, self.idle_s / 4):
            spent = _effort(pids)
            if abs(spent - self._spent) > _BUSY * (now - self._looked):  # less: one of them ended, others began
                self._worked = now
            self._spent, self._looked = spent, now
        return self.seen_idle_s > self.idle_s or self.waited_s > _LONGEST * self.idle_s

    def why(self) -> str:
        """What to say when it is over."""
        if self.seen_idle_s > self.idle_s:
            return f"nothing was done for {self.idle_s:g} s"
        return f"it took longer than {_LONGEST * self.idle_s:g} s"


async def waits_for(task: asyncio.Future[Any], pid: int, patience: Patience) -> bool:
    """Wait for a task on what process `pid` does; False if patience is over before it is done."""
    while not task.done():
        await asyncio.wait({task}, timeout=min(0.5, patience.idle_s / 4))
        if not task.done() and patience.is_over([pid]):
            return False
    return True


def _effort(pids: Iterable[int]) -> float:
    """Processor seconds of these processes and all below them, and what they read; 0 where there is no /proc."""
    wanted, children, own = set(pids), dict[int, list[int]](), dict[int, float]()
    for pid, parent, seconds in _processes():
        children.setdefault(parent, []).append(pid)
        own[pid] = seconds
    total, left = 0.0, list(wanted)
    while left:
        pid = left.pop()
        total += own.get(pid, 0.0) + _read(pid)
        left += [child for child in children.get(pid, []) if child not in wanted]
    return total


def _processes() -> Iterator[tuple[int, int, float]]:
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_bytes().rpartition(b")")[2].split()  # a name may be cut within a character
        except (FileNotFoundError, ProcessLookupError):
            continue
        # utime, stime, and those of children that ended
        yield int(entry.parent.name), int(fields[1]), sum(int(field) for field in fields[11:15]) / _TICKS


def _read(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:  # gone, or not ours to look at
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("read_bytes:")) / _READ_BYTES
