"""Configuration of a service: the shared loader, and the sections that every service has."""

from __future__ import annotations

from vime_client.config_loading import ConfigError, ConfigModel, Seconds, SecondsOrNone, describe, load_config, to_toml

__all__ = ["ConfigError", "ConfigModel", "Seconds", "SecondsOrNone", "describe", "load_config", "to_toml"]
