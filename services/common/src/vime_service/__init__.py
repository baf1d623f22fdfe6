"""The server half that vime's four services share. Names are loaded when first used: `--help` must not import gRPC."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vime_service.auth import Gate, Grant, StartupError, TlsServerConfig
    from vime_service.clock import Clock, ManualClock, MonotonicClock
    from vime_service.config import ConfigError, ConfigModel, load_config, to_toml
    from vime_service.deadlines import Deadline, patience, remaining
    from vime_service.errors import VimeError
    from vime_service.logging import LogConfig, get_logger, setup_logging
    from vime_service.parent_watch import die_with_parent
    from vime_service.retry import is_transient, whole_step
    from vime_service.runner import run_service, service_cli
    from vime_service.server import Service, serve, serving
    from vime_service.server_config import ServerConfig, ServiceConfig
    from vime_service.telemetry import Metrics, Telemetry, TelemetryConfig, setup_telemetry

_HOMES = {
    "auth": ("Gate", "Grant", "StartupError", "TlsServerConfig"),
    "clock": ("Clock", "ManualClock", "MonotonicClock"),
    "config": ("ConfigError", "ConfigModel", "load_config", "to_toml"),
    "deadlines": ("Deadline", "patience", "remaining"),
    "errors": ("VimeError",),
    "logging": ("LogConfig", "get_logger", "setup_logging"),
    "parent_watch": ("die_with_parent",),
    "retry": ("is_transient", "whole_step"),
    "runner": ("run_service", "service_cli"),
    "server": ("Service", "serve", "serving"),
    "server_config": ("ServerConfig", "ServiceConfig"),
    "telemetry": ("Metrics", "Telemetry", "TelemetryConfig", "setup_telemetry"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [  # noqa: RUF022  by module
    "Gate", "Grant", "StartupError", "TlsServerConfig",
    "Clock", "ManualClock", "MonotonicClock",
    "ConfigError", "ConfigModel", "load_config", "to_toml",
    "Deadline", "patience", "remaining",
    "VimeError",
    "LogConfig", "get_logger", "setup_logging",
    "die_with_parent",
    "is_transient", "whole_step",
    "run_service", "service_cli",
    "Service", "serve", "serving",
    "ServerConfig", "ServiceConfig",
    "Metrics", "Telemetry", "TelemetryConfig", "setup_telemetry",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
