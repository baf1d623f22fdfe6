"""The settings that every service has: where it listens and for whom, how it stops, its logs and its traces."""

from __future__ import annotations

import fnmatch
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from vime_client.addresses import is_loopback, join_address
from vime_client.channel_settings import UNTRACED
from vime_client.config_loading import ConfigModel, Seconds, SecondsOrNone
from vime_client.logs import LogConfig
from vime_client.telemetry import TelemetryConfig
from vime_service.auth import Grant, StartupError, TlsServerConfig

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Documented cap of one message on every hop; above it the sender gets RESOURCE_EXHAUSTED with size and cap."""


class ServerConfig(ConfigModel):
    """The gRPC server of a service."""

    host: str = "127.0.0.1"
    """Address to listen on. Anything but loopback needs `tls` and at least one of `grants`."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port to listen on; 0 lets the system choose, and the choice is printed and written to `port_file`."""
    port_file: Path | None = None
    """File that gets the address as `host:port`, once the server answers."""
    parent_pid: int | None = None
    """Process that started this one; when it is gone, the service stops too. Unset: nobody is watched."""
    grace_seconds: SecondsOrNone = 5.0
    """How long calls in flight may go on after SIGTERM; then their callers get UNAVAILABLE."""
    cleanup_seconds: Seconds = 10.0
    """How long all clean-up after the last call may take together."""
    max_call_seconds: Seconds = 600.0
    """Bound of a call whose caller named no deadline."""
    max_message_bytes: int = Field(default=MAX_MESSAGE_BYTES, gt=0)
    """Largest message taken or sent."""
    max_concurrent_calls: int = Field(default=4096, gt=0)
    """Calls handled at once; more get RESOURCE_EXHAUSTED."""
    reflection: bool = True
    """Serve gRPC reflection, so that tools can list and call methods without the protos."""
    untraced_methods: tuple[str, ...] = UNTRACED
    """Globs over `/package.Service/Method` that get no span."""
    tls: TlsServerConfig | None = None
    """The server's certificate; unset: plaintext."""
    grants: tuple[Grant, ...] = ()
    """Callers and what each may do; empty: everybody may do everything (loopback only)."""

    @model_validator(mode="after")
    def _certificates_are_asked_for(self) -> ServerConfig:
        wanted = [grant.name for grant in self.grants if grant.certificate_name]
        if wanted and (self.tls is None or self.tls.client_ca_file is None):
            raise ValueError(f'grant "{wanted[0]}" names a certificate, but server.tls.client_ca_file is not set')
        return self

    @property
    def address(self) -> str:
        """`host:port` as configured."""
        return join_address(self.host, self.port)

    def check_exposure(self) -> None:
        """Refuse an address that others can reach without encryption and credentials.

        Raises:
            StartupError: naming what is missing.
        """
        if is_loopback(self.host):
            return
        missing = [what for what, there in (("server.tls", self.tls), ("server.grants", self.grants)) if not there]
        if missing:
            raise StartupError(
                f"refusing to listen on {self.address}: other machines can reach it, "
                f"and {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set; "
                "listen on 127.0.0.1, or set both"
            )

    def untraced(self, method: str) -> bool:
        """True if calls of `method` get no span."""
        return any(fnmatch.fnmatchcase(method, glob) for glob in self.untraced_methods)

    def grpc_options(self) -> list[tuple[str, Any]]:
        """The settings as gRPC server arguments."""
        return [
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.max_send_message_length", self.max_message_bytes),
            # Without this, two servers share a busy port and each gets half of the calls.
            ("grpc.so_reuseport", 0),
            # A connection whose other end vanished is found by pings; clients may ping during long calls.
            ("grpc.keepalive_time_ms", 30_000),
            ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.http2.ping_timeout_ms", 10_000),  # what counts for keepalive pings, too; 60 s by default
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
            ("grpc.keepalive_permit_without_calls", 1),
        ]


class ServiceConfig(ConfigModel):
    """Base of each service's configuration: `class BufferConfig(ServiceConfig)` adds its own sections."""

    server: ServerConfig = Field(default_factory=ServerConfig)
    """Where and for whom the service listens."""
    log: LogConfig = Field(default_factory=LogConfig)
    """Where its log lines go."""
    telemetry: TelemetryConfig = Field(default_factory=TelemetryConfig)
    """Where its spans go."""
