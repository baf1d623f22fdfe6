"""Ports of 127.0.0.1 for the services of one run."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterable, Mapping

# Below Linux's ephemeral ports (32768 and up): the system hands none of these to an outgoing connection while a service
# restarts, so that it finds its port free again.
_FIRST, _LAST = 20000, 32000
_TRIES = 2000


class PortBusy(Exception):
    """A port that the recipe asks for is in use."""


def choose_ports(names: Iterable[str], fixed: Mapping[str, int]) -> dict[str, int]:
    """One free port for each name; `fixed` ones are checked.

    Raises:
        PortBusy: a fixed port is in use, or no port is free.
    """
    held: list[socket.socket] = []
    chosen: dict[str, int] = {}
    draw = random.SystemRandom()
    try:
        for name in names:
            wanted = fixed.get(name)
            for _ in range(1 if wanted else _TRIES):
                port = wanted or draw.randint(_FIRST, _LAST)
                if (bound := _bind(port)) is not None:
                    held.append(bound)
                    chosen[name] = port
                    break
            else:
                where = f"port {wanted} (launcher.ports.{name})" if wanted else f"every port of {_FIRST}-{_LAST}"
                raise PortBusy(f'service "{name}" cannot listen: {where} is in use by another program')
    finally:
        for bound in held:
            bound.close()
    return chosen


def all_free(ports: Iterable[int]) -> bool:
    """True if nobody listens on any of these ports."""
    for port in ports:
        bound = _bind(port)
        if bound is None:
            return False
        bound.close()
    return True


def _bind(port: int) -> socket.socket | None:
    sock = socket.socket()
    # As gRPC does: connections of a service that just ended (TIME_WAIT) do not make its port busy.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(("127.0.0.1", port))
        sock.listen(1)
    except OSError:
        sock.close()
        return None
    return sock
