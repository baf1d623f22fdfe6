"""Logs: one JSON object per line into a file, one short line for people on stderr, and no secret in either.

log = get_logger(__name__)
log.info("lease expired", group_id="g7", attempt=2)
"""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
from collections.abc import Mapping, MutableMapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from vime_client.config_loading import ConfigModel
from vime_client.redaction import ENVIRONMENT, STARS, is_secret, without_credentials

_STANDARD = frozenset({"exc_info", "stack_info", "stacklevel", "extra"})
_SECRET_TEXT = re.compile(r"(?i)\b(bearer\s+|(?:api[_-]?key|password|secret|auth[_-]?token)\s*[=:]\s*)[^\s,;\"']+")


class LogConfig(ConfigModel):
    """Where log lines go."""

    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Least important level that is kept."""
    file: Path | None = None
    """File that gets one JSON object per line; unset: none."""
    stderr: bool = True
    """Also write short lines for people to stderr."""


class Logger(logging.LoggerAdapter[logging.Logger]):
    """A logger whose keyword arguments are fields: `log.info("published", step=7)`."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Move everything that is no argument of `logging` into the record's fields."""
        standard = {key: value for key, value in kwargs.items() if key in _STANDARD}
        fields = {key: value for key, value in kwargs.items() if key not in _STANDARD}
        standard["extra"] = {**(standard.get("extra") or {}), "fields": fields}
        return msg, standard


def get_logger(name: str) -> Logger:
    """The logger of a module. Works before `setup_logging`, then with Python's defaults."""
    return Logger(logging.getLogger(name), {})


def setup_logging(service: str, config: LogConfig | None = None) -> None:
    """Send all logging of this process where `config` says. Called again, it replaces what it set up before.

    Raises:
        OSError: the log file cannot be opened.
    """
    config = config or LogConfig()
    root = logging.getLogger()
    for handler in [h for h in root.handlers if getattr(h, "_vime", False)]:
        root.removeHandler(handler)
        handler.close()
    root.setLevel(config.level)
    if config.file is not None:
        config.file.parent.mkdir(parents=True, exist_ok=True)
        _add(root, _file(config.file), JsonFormatter(service))
    if config.stderr:
        _add(root, logging.StreamHandler(sys.stderr), HumanFormatter(service))


def register_secret(value: str) -> None:
    """Star `value` out of everything logged from now on, wherever it stands."""
    if len(value) >= 4:  # a shorter one would star out ordinary words
        with _secrets_lock:
            _secrets.add(value)


def redact(text: str) -> str:
    """`text` without registered secrets and without anything that looks like a credential."""
    for secret in tuple(_secrets):
        text = text.replace(secret, STARS)
    return without_credentials(_SECRET_TEXT.sub(lambda match: match.group(1) + STARS, text))


class JsonFormatter(logging.Formatter):
    """One JSON object per record: ts, level, service, logger, msg, trace_id, span_id, fields, error."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line of JSON."""
        entry: dict[str, Any] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "service": self._service,
            "logger": record.name,
            "msg": redact(record.getMessage()),
            **_trace_ids(),
        }
        fields = getattr(record, "fields", None)
        if fields:
            entry["fields"] = _redacted(fields)
        if record.exc_info and record.exc_info[0] is not None:
            entry["error"] = redact(self.formatException(record.exc_info))
        return json.dumps(entry, ensure_ascii=False, default=lambda value: redact(str(value)))


class HumanFormatter(logging.Formatter):
    """A short line for people: time, level, service, message, fields; the stack below it where there is one."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """The record as text."""
        time = datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S")
        fields = " ".join(f"{k}={v}" for k, v in _redacted(getattr(record, "fields", None) or {}).items())
        line = f"{time} {record.levelname:<7} {self._service}: {redact(record.getMessage())}"
        if fields:
            line += f"  ({fields})"
        if record.exc_info and record.exc_info[0] is not None:
            line += "\n" + redact(self.formatException(record.exc_info))
        return line


_secrets: set[str] = set()
_secrets_lock = threading.Lock()


def _file(path: Path) -> logging.Handler:
    """A file that takes text with lone surrogates too: a line that says what was wrong must not be lost for it."""
    return logging.FileHandler(path, mode="a", encoding="utf-8", errors="backslashreplace")


def _add(root: logging.Logger, handler: logging.Handler, formatter: logging.Formatter) -> None:
    handler.setFormatter(formatter)
    handler._vime = True  # type: ignore[attr-defined]  # marks what a second set-up replaces
    root.addHandler(handler)


def _redacted(value: Any, key: str = "") -> Any:
    if isinstance(value, Mapping):
        hidden = key == ENVIRONMENT
        return {str(k): STARS if hidden else _redacted(v, str(k)) for k, v in value.items()}
    if is_secret(key):
        return STARS
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, (list, tuple)):
        return [_redacted(item) for item in value]
    return value if isinstance(value, (int, float, bool)) or value is None else redact(str(value))


def _trace_ids() -> dict[str, str]:
    from opentelemetry import trace

    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return {}
    return {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}
