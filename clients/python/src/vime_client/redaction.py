"""Which settings and log fields are secrets, by their names, and what is shown instead of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

STARS = "[redacted]"
"""Stands where a secret was."""
_SECRET = re.compile(
    r"(^|_|-)(secret|password|passwd|passphrase|api_?key|access_?key|authorization|private_key|token)$", re.IGNORECASE
)
# `first_token` is a position, `token` and `auth_token` are secrets.
_NOT_SECRET = frozenset({"first_token", "last_token", "eos_token", "bos_token", "pad_token", "next_page_token"})


def is_secret(key: str) -> bool:
    """True if what is called `key` must be shown to nobody."""
    return key not in _NOT_SECRET and _SECRET.search(key) is not None


def starred(settings: Any, key: str = "") -> Any:
    """Settings with stars for the text of secrets, at any depth."""
    if isinstance(settings, Mapping):
        return {name: starred(value, str(name)) for name, value in settings.items()}
    if isinstance(settings, (list, tuple)):
        return [starred(value, key) for value in settings]
    return STARS if isinstance(settings, str) and settings and is_secret(key) else settings


def starred_keys(settings: Any, prefix: str = "") -> Iterator[str]:
    """Dotted keys of settings that hold stars instead of a secret."""
    if isinstance(settings, Mapping):
        for name, value in settings.items():
            yield from starred_keys(value, f"{prefix}.{name}" if prefix else str(name))
    elif isinstance(settings, (list, tuple)):
        if any(True for value in settings for _ in starred_keys(value, prefix)):
            yield prefix
    elif settings == STARS:
        yield prefix
