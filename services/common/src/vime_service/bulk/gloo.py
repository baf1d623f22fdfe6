"""Weight transfer over gloo (TCP) in a group that touches no global process-group state.

One TCPStore, hosted by the sender, outlives every group; a group of generation g is a `ProcessGroupGloo` under the
prefix `wu/{g}`. gloo reports a dead peer only sometimes, and its `abort` does not end a pending wait, so every step
has a deadline of its own and waits in slices.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from vime_service.bulk.deadline import Deadline
from vime_service.bulk.errors import TransportError
from vime_service.bulk.native_thread import start_native_thread
from vime_service.bulk.transport import check_membership

log = logging.getLogger(__name__)

ABORT_SLICE_S = 0.05


class GlooTransport:
    """One member's end of gloo groups that share a store."""

    name = "gloo"

    def __init__(self, store: TCPStore, me: str, address: str) -> None:
        """Use `host` or `join`.

        Args:
            store: the rendezvous store, a connection of this process's own.
            me: this member's name.
            address: the address of this host that peers can reach.
        """
        self.endpoint = f"{store.host}:{store.port}"
        self._store: TCPStore | None = store
        self._me = me
        self._address = address
        self._generation = 0
        self._rank = -1
        self._group: Any = None
        self._aborted = threading.Event()

    @classmethod
    def host(cls, me: str, address: str, deadline: Deadline, port: int = 0) -> Self:
        """The sender's end: opens the store on `address`, any free port unless one is given. Peers join `endpoint`."""
        return cls(open_store(address, port, deadline, host=True), me, address)

    @classmethod
    def join(cls, me: str, endpoint: str, deadline: Deadline, address: str | None = None) -> Self:
        """A receiver's end: connects to the sender's store. `address` defaults to the interface that reaches it."""
        host, _, port = endpoint.rpartition(":")
        store = open_store(host, int(port), deadline, host=False)
        return cls(store, me, address or _address_towards(host, int(port)))

    def form(self, generation: int, members: Sequence[str], deadline: Deadline) -> None:
        """See `Transport.form`."""
        rank = check_membership(self._me, self._generation, generation, members)
        self._drop_group()
        self._generation, self._rank = generation, rank
        self._aborted = threading.Event()
        started = time.monotonic()
        if self._store is None:
            raise self._failure("forming", started, "the transport is closed")
        prefix = PrefixStore(f"wu/{generation}", self._store)
        gloo: Any = dist.ProcessGroupGloo  # its stub lacks the options
        options = gloo._Options()
        options._timeout = timedelta(seconds=max(deadline.remaining(), 0.001))
        options._devices = [gloo.create_device(hostname=self._address)]
        options._threads = 2
        try:
            prefix.set_timeout(options._timeout)
            self._group = gloo(prefix, rank, len(members), options)
        except RuntimeError as error:  # torch raises its DistStoreError and DistBackendError as RuntimeError
            raise self._failure("forming", started, _first_line(error)) from error

    def broadcast(self, bucket: torch.Tensor, deadline: Deadline) -> None:
        """See `Transport.broadcast`."""
        started = time.monotonic()
        group = self._group
        if group is None:
            raise self._failure("broadcast", started, "no group is formed")
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = timedelta(seconds=max(deadline.remaining(), 0.001))
        try:
            work = group.broadcast([bucket], options)
            self._wait(work, deadline, started)
        except TransportError:
            self._drop_group()
            raise
        except RuntimeError as error:
            self._drop_group()
            raise self._failure("broadcast", started, _first_line(error)) from error

    def abort(self) -> None:
        """See `Transport.abort`."""
        self._aborted.set()

    def close(self) -> None:
        """See `Transport.close`."""
        self.abort()
        self._drop_group()
        self._store = None

    def _wait(self, work: Any, deadline: Deadline, started: float) -> None:
        while not self._aborted.is_set():
            left = deadline.remaining()
            if left == 0.0 and not work.is_completed():
                raise self._failure("broadcast", started, "the deadline passed")
            try:
                work.wait(timedelta(seconds=min(max(left, 0.001), ABORT_SLICE_S)))
            except RuntimeError:
                if work.is_completed():
                    raise
                continue  # only this slice of the wait ran out
            return
        raise self._failure("broadcast", started, "aborted")

    def _drop_group(self) -> None:
        """Let the group go in another thread: its destructor waits for operations still in flight."""
        group, self._group = self._group, None
        if group is not None:
            holder = [group]
            del group
            start_native_thread("gloo-group-drop", holder.clear)

    def _failure(self, step: str, started: float, reason: str) -> TransportError:
        return TransportError(step, self._generation, self._rank, time.monotonic() - started, reason)


def open_store(address: str, port: int, deadline: Deadline, *, host: bool) -> TCPStore:
    """Host a store that listens on `address` alone, on any free port for port 0; or join the one that does.

    Raises:
        TransportError: the port is taken, or no store answers.
    """
    started = time.monotonic()
    timeout = timedelta(seconds=max(deadline.remaining(), 0.001))
    try:
        if not host:
            return TCPStore(address, port, None, False, timeout, wait_for_workers=False)
        # Left to itself the store listens on all interfaces, whatever its address: anyone could write into it.
        family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((address, port), family=family)
        port = listener.getsockname()[1]
        listen_fd = listener.detach()
        return TCPStore(address, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listen_fd)
    except (RuntimeError, OSError) as error:
        step = f"{'opening' if host else 'joining'} the store {address}:{port}"
        raise TransportError(step, 0, 0 if host else -1, time.monotonic() - started, _first_line(error)) from error


def _address_towards(host: str, port: int) -> str:
    """The local address from which `host` is reached. Connecting a datagram socket sends nothing."""
    family, kind, proto, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, proto) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0][:300]
