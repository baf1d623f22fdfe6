"""A transport between threads of one process: for tests, and for a trainer that holds its engine in process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from vime_service.bulk.deadline import Deadline
from vime_service.bulk.errors import TransportError
from vime_service.bulk.transport import check_membership


@dataclass
class _Group:
    """One generation: a rendezvous of `size` members, then one bucket at a time."""

    size: int
    ready: threading.Condition = field(default_factory=threading.Condition)
    joined: int = 0
    broken: str = ""
    bucket: torch.Tensor | None = None
    taken: int = 0
    turn: int = 0


class InlineHub:
    """Where the members of one process meet. Make one, and one `InlineTransport` per member."""

    def __init__(self) -> None:
        self._groups: dict[int, _Group] = {}
        self._lock = threading.Lock()

    def group(self, generation: int, size: int) -> _Group:
        """The group of a generation, made by whoever comes first."""
        with self._lock:
            return self._groups.setdefault(generation, _Group(size))


class InlineTransport:
    """One member's end. Same promises as the transports between processes, abort and deadlines included."""

    name = "inline"

    def __init__(self, hub: InlineHub, me: str) -> None:
        self._hub = hub
        self._me = me
        self._generation = 0
        self._rank = -1
        self._turn = 0
        self._group: _Group | None = None

    def form(self, generation: int, members: Sequence[str], deadline: Deadline) -> None:
        """See `Transport.form`."""
        rank = check_membership(self._me, self._generation, generation, members)
        self.abort()
        group = self._hub.group(generation, len(members))
        self._generation, self._rank, self._turn, self._group = generation, rank, 0, group
        started = time.monotonic()
        with group.ready:
            group.joined += 1
            group.ready.notify_all()
            self._await(group, lambda: group.joined == group.size, deadline, "forming", started)

    def broadcast(self, bucket: torch.Tensor, deadline: Deadline) -> None:
        """See `Transport.broadcast`."""
        group, started = self._group, time.monotonic()
        if group is None:
            raise self._failure("broadcast", started, "no group is formed")
        with group.ready:
            turn, self._turn = self._turn, self._turn + 1
            if self._rank == 0:
                group.bucket, group.taken, group.turn = bucket, 0, turn + 1
                group.ready.notify_all()
                self._await(group, lambda: group.taken == group.size - 1, deadline, "broadcast", started)
                return
            self._await(group, lambda: group.turn == turn + 1, deadline, "broadcast", started)
            assert group.bucket is not None
            if group.bucket.shape != bucket.shape:
                reason = f"{group.bucket.numel()} bytes sent, room for {bucket.numel()}"
                self._break(group, reason)
                raise self._failure("broadcast", started, reason)
            bucket.copy_(group.bucket)
            group.taken += 1
            group.ready.notify_all()

    def abort(self) -> None:
        """See `Transport.abort`."""
        group = self._group
        if group is not None:
            with group.ready:
                self._break(group, f"{self._me} aborted")

    def close(self) -> None:
        """See `Transport.close`."""
        self.abort()
        self._group = None

    def _await(self, group: _Group, done: Callable[[], bool], deadline: Deadline, step: str, started: float) -> None:
        while not done():
            if group.broken:
                raise self._failure(step, started, group.broken)
            if not group.ready.wait(deadline.remaining()) and deadline.passed() and not done():
                self._break(group, f"{self._me} waited past its deadline")
                raise self._failure(step, started, "the deadline passed")

    @staticmethod
    def _break(group: _Group, reason: str) -> None:
        group.broken = group.broken or reason
        group.ready.notify_all()

    def _failure(self, step: str, started: float, reason: str) -> TransportError:
        return TransportError(step, self._generation, self._rank, time.monotonic() - started, reason)
