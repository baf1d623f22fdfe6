"""How a channel behaves, as configuration. Free of gRPC, so that a command line can read it and answer at once."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from vime_client.config_loading import ConfigModel, Seconds

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Cap of one message, both directions. 16384 tokens x 48 layers x top-8 routes in int16 are 12.6 MB."""

UNTRACED = (
    "/grpc.*",
    "*/Heartbeat",
    "*/KeepAlive",
    "*/NextCommand",
    "*/ReportResult",
    "*/GetStatus",
    "*/GetEvalRound",
    "*/ListEngines",
    "*/Watch*",
)
"""Calls that are made on a clock rather than for a reason: their spans would bury those that tell something."""


class TlsClientConfig(ConfigModel):
    """What a client needs to trust a server, and to show who it is."""

    ca_file: Path
    """PEM file of the authority that signed the server's certificate."""
    certificate_file: Path | None = None
    """PEM certificate chain of this client, where the server asks for one (mTLS)."""
    private_key_file: Path | None = None
    """PEM private key of `certificate_file`."""
    server_name: str | None = None
    """Name in the server's certificate, where it differs from the address."""


class Credentials(ConfigModel):
    """Whom a client trusts, and how it shows who it is."""

    tls: TlsClientConfig | None = None
    """Set for TLS; unset means plaintext."""
    token_file: Path | None = None
    """File that holds the bearer token. Only over TLS, or to loopback."""
    token_env: str | None = None
    """Environment variable that holds the bearer token; `token_file` wins."""

    def once(self) -> ChannelSettings:
        """Settings of a channel with these credentials that repeats no call by itself."""
        return ChannelSettings(max_attempts=1, tls=self.tls, token_file=self.token_file, token_env=self.token_env)


class ChannelSettings(Credentials):
    """How calls of one channel behave."""

    timeout_s: Seconds = 60.0
    """Deadline of a unary call that names none."""
    stream_timeout_s: Seconds = 3600.0
    """Deadline of a streaming call that names none."""
    method_timeouts_s: dict[str, Seconds] = Field(default_factory=dict)
    """Deadlines by method; keys are globs over `/package.Service/Method`, the first that matches wins."""
    max_attempts: int = Field(default=5, ge=1, le=5)
    """Attempts of a call that meets UNAVAILABLE; 1 switches retries off. gRPC reads more than 5 as 5."""
    initial_backoff_s: Seconds = 0.1
    """First wait between attempts; doubles each time, with jitter."""
    max_backoff_s: Seconds = 2.0
    """Longest wait between attempts, and between attempts to connect."""
    connect_timeout_s: Seconds = 5.0
    """How long one attempt to connect may take; a busy peer needs a while for its first HTTP/2 frame."""
    keepalive_s: Seconds = 20.0
    """A ping after this much silence finds a connection that is half open."""
    keepalive_timeout_s: Seconds = 10.0
    """A ping unanswered for this long ends the connection."""
    max_message_bytes: int = Field(default=MAX_MESSAGE_BYTES, gt=0)
    """Largest message sent or received."""
    untraced_methods: tuple[str, ...] = UNTRACED
    """Globs over `/package.Service/Method` that get no span of their own."""
