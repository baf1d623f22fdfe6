"""Open a channel to a vime service: deadlines, retries, keepalive, message cap, credentials and trace context.

Retries: the channel repeats a call only for UNAVAILABLE and only before the first response (gRPC's own retry, at most
five attempts, all within the call's deadline), and never one of `SENT_ONCE`: before those, wait until the channel is
`connected`, which spares them the failures after which nothing was sent. Everything that needs a whole step again
belongs to `vime_client.retry`; never both around one call.
"""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import json
from pathlib import Path
from typing import Any

import grpc

from vime_client.addresses import is_loopback, split_address
from vime_client.channel_settings import MAX_MESSAGE_BYTES, ChannelSettings, TlsClientConfig
from vime_client.interceptors import CallPolicy, client_interceptors
from vime_client.tokens import TokenError, read_token

__all__ = [
    "MAX_MESSAGE_BYTES",
    "SENT_ONCE",
    "ChannelError",
    "ChannelSettings",
    "TlsClientConfig",
    "channel_options",
    "connected",
    "open_channel",
    "secure_or_insecure_channel",
]

_TRAINER = "vime.trainer.v1.TrainerService"
SENT_ONCE = (
    (_TRAINER, "TrainStep"),
    (_TRAINER, "Publish"),
    (_TRAINER, "SaveCheckpoint"),
    (_TRAINER, "AcquireMode"),
    (_TRAINER, "ReleaseMode"),
)
"""Service and method of calls that do their work anew each time they arrive. UNAVAILABLE may come after the work (only
the answer is lost), so sending one again would train twice, save twice, or be refused for what the first one did."""


class ChannelError(ValueError):
    """The address or the channel's settings cannot be used, or a file they name."""


def open_channel(address: str, settings: ChannelSettings | None = None) -> grpc.aio.Channel:
    """Open a channel to `host:port`. Must be called in a running event loop; close it with `await channel.close()`.

    Raises:
        ChannelError: `address` is not `host:port`, a token would travel in plaintext to another machine, or a
            credential file cannot be read.
    """
    settings = settings or ChannelSettings()
    try:
        host, _port = split_address(address)
    except ValueError as error:
        raise ChannelError(str(error)) from None
    try:
        token = read_token(settings.token_file, settings.token_env)
    except TokenError as error:
        raise ChannelError(str(error)) from None
    interceptors = client_interceptors(_call_policy(settings, token))
    if settings.tls is not None:
        credentials, options = _tls(settings.tls)
        return grpc.aio.secure_channel(
            address, credentials, options=[*channel_options(settings), *options], interceptors=interceptors
        )
    if token is not None and not is_loopback(host):
        raise ChannelError(f"refusing to send a token in plaintext to {address}: set tls, or use a loopback address")
    return grpc.aio.insecure_channel(address, options=channel_options(settings), interceptors=interceptors)


async def connected(channel: grpc.aio.Channel, seconds: float) -> None:
    """Wait until there is a connection, at most so long. The call after it finds out, and says, why there is none.

    Not gRPC's `wait_for_ready`: it lasts as long as the call's deadline, which for a step is half an hour, and tells no
    reason.
    """
    with contextlib.suppress(TimeoutError):  # the call after it says why
        async with asyncio.timeout(seconds):
            await channel.channel_ready()


def secure_or_insecure_channel(
    address: str, tls: TlsClientConfig | None = None, token_file: Path | None = None
) -> grpc.aio.Channel:
    """`open_channel` with default settings and these credentials: TLS if `tls` is given, else plaintext."""
    return open_channel(address, ChannelSettings(tls=tls, token_file=token_file))


def channel_options(settings: ChannelSettings) -> list[tuple[str, Any]]:
    """The settings as gRPC channel arguments."""
    options: list[tuple[str, Any]] = [
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.max_send_message_length", settings.max_message_bytes),
        ("grpc.keepalive_time_ms", round(settings.keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", round(settings.keepalive_timeout_s * 1000)),
        # gRPC (1.85) waits for the answer to a keepalive ping as long as for that to any ping, by default 60 s.
        ("grpc.http2.ping_timeout_ms", round(settings.keepalive_timeout_s * 1000)),
        ("grpc.http2.max_pings_without_data", 0),
        # gRPC's own 1 s to 120 s would leave a restarted service unused for minutes.
        ("grpc.initial_reconnect_backoff_ms", round(settings.initial_backoff_s * 1000)),
        # Despite its name the time one attempt to connect may take; it does not slow reconnecting down.
        ("grpc.min_reconnect_backoff_ms", round(settings.connect_timeout_s * 1000)),
        ("grpc.max_reconnect_backoff_ms", round(settings.max_backoff_s * 1000)),
        ("grpc.enable_retries", int(settings.max_attempts > 1)),
    ]
    if settings.max_attempts > 1:
        options.append(("grpc.service_config", json.dumps(_service_config(settings))))
    return options


def _call_policy(settings: ChannelSettings, token: str | None) -> CallPolicy:
    return CallPolicy(
        timeout_s=settings.timeout_s,
        stream_timeout_s=settings.stream_timeout_s,
        method_timeouts_s=settings.method_timeouts_s,
        untraced=lambda method: any(fnmatch.fnmatchcase(method, glob) for glob in settings.untraced_methods),
        token=token,
    )


def _service_config(settings: ChannelSettings) -> dict[str, Any]:
    retry = {
        "maxAttempts": settings.max_attempts,
        "initialBackoff": f"{settings.initial_backoff_s:.3f}s",
        "maxBackoff": f"{settings.max_backoff_s:.3f}s",
        "backoffMultiplier": 2,
        "retryableStatusCodes": ["UNAVAILABLE"],
    }
    return {
        "methodConfig": [
            {"name": [{}], "retryPolicy": retry},
            {"name": [{"service": service, "method": method} for service, method in SENT_ONCE]},  # the exact name wins
        ],
        # A service that is down for long must not be asked five times by every call.
        "retryThrottling": {"maxTokens": 100, "tokenRatio": 0.5},
    }


def _tls(config: TlsClientConfig) -> tuple[grpc.ChannelCredentials, list[tuple[str, Any]]]:
    if (config.certificate_file is None) != (config.private_key_file is None):
        raise ChannelError("tls.certificate_file and tls.private_key_file must be given together")
    credentials = grpc.ssl_channel_credentials(
        root_certificates=_read(config.ca_file, "tls.ca_file"),
        private_key=_read(config.private_key_file, "tls.private_key_file") if config.private_key_file else None,
        certificate_chain=_read(config.certificate_file, "tls.certificate_file") if config.certificate_file else None,
    )
    return credentials, [("grpc.ssl_target_name_override", config.server_name)] if config.server_name else []


def _read(path: Path, what: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ChannelError(f"{what} {path} cannot be read: {error.strerror}") from None
