"""What an address `host:port` says: its parts, and whether it can be reached from another machine."""

from __future__ import annotations

import ipaddress


def split_address(address: str) -> tuple[str, int]:
    """`host:port` (IPv6 as `[::1]:port`) as its two parts.

    Raises:
        ValueError: there is no port, or it is not in 0..65535.
    """
    host, colon, port = address.removeprefix("dns:///").rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f'address "{address}" must have the form host:port with a port of 0 to 65535')
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    """The two parts as `host:port`, with the brackets that IPv6 needs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """True if `host` can only be this machine. Names other than `localhost` count as routable: DNS may change."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
