"""Structured logs (shared with the client)."""

from vime_client.logs import LogConfig, Logger, get_logger, redact, register_secret, setup_logging

__all__ = ["LogConfig", "Logger", "get_logger", "redact", "register_secret", "setup_logging"]
