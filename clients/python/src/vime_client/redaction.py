"""What must be shown to nobody: values of environment tables, secrets by their names, credentials within addresses."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

STARS = "[redacted]"
"""Stands where a secret was."""
ENVIRONMENT = "env"
"""A table of this name holds environment variables. Anything may be a secret there, so only their names are shown."""
_SECRET = re.compile(
    r"(^|_|-)(secret|password|passwd|passphrase|credentials?|cookie|api_?key|access_?key|authorization|private_key|"
    r"token)$",
    re.IGNORECASE,
)
# `token` and `auth_token` are secrets; these are positions and words of a tokenizer.
_NOT_SECRET = re.compile(
    r"(^|_)(first|last|next_page|bos|eos|pad|unk|cls|sep|mask|stop|start|end|image|audio|video)_token$", re.IGNORECASE
)
# user:password@ after a scheme, or before host:port without one; values of telling names in a query. Every name begins
# where no character of one stands before it, or is bounded: long texts of such characters take time by their square.
_IN_ADDRESS = re.compile(
    r"(?P<scheme>\b[a-z][a-z0-9+.-]{0,31}://)[^\s/?#\"'<>]+@"
    r"|(?<![\w/@.%+-])[\w.%+-]+:[^\s/@:\"']+@(?=[\w.-]+:\d)"
    r"|(?P<name>[?&][\w-]*(?:token|key|secret|password|signature|sig)=)[^&\s\"'<>]+",
    re.IGNORECASE,
)


def is_secret(key: str) -> bool:
    """True if what is called `key` must be shown to nobody."""
    return _NOT_SECRET.search(key) is None and _SECRET.search(key) is not None


def is_hidden(key: Sequence[str | int]) -> bool:
    """True if the value at `key` of some settings must be shown to nobody."""
    return ENVIRONMENT in key[:-1] or any(is_secret(str(part)) for part in key[-1:])


def without_credentials(text: str) -> str:
    """`text` with stars for the credentials of every address in it."""

    def stars(match: re.Match[str]) -> str:
        return f"{match['name']}{STARS}" if match["name"] else f"{match['scheme'] or ''}{STARS}@"

    return _IN_ADDRESS.sub(stars, text)


def starred(settings: Any, key: str = "") -> Any:
    """Settings with stars for the values of environment tables, the text of secrets and credentials, at any depth."""
    if isinstance(settings, Mapping):
        hidden = key == ENVIRONMENT
        return {name: STARS if hidden else starred(value, str(name)) for name, value in settings.items()}
    if isinstance(settings, (list, tuple)):
        return [starred(value, key) for value in settings]
    if not isinstance(settings, str) or not settings:
        return settings
    return STARS if is_secret(key) else without_credentials(settings)


def starred_keys(settings: Any, prefix: str = "") -> Iterator[str]:
    """Dotted keys of settings that hold stars instead of a secret."""
    if isinstance(settings, Mapping):
        for name, value in settings.items():
            yield from starred_keys(value, f"{prefix}.{name}" if prefix else str(name))
    elif isinstance(settings, (list, tuple)):
        if any(True for value in settings for _ in starred_keys(value, prefix)):
            yield prefix
    elif isinstance(settings, str) and STARS in settings:
        yield prefix


def restored(settings: Any, kept: Any) -> Any:
    """Settings with the values of `kept`, which has the same shape, where they hold stars; what it lacks stays."""
    if isinstance(settings, Mapping) and isinstance(kept, Mapping):
        return {name: restored(value, kept.get(name)) for name, value in settings.items()}
    if isinstance(settings, list) and isinstance(kept, list) and len(settings) == len(kept):
        return [restored(value, other) for value, other in zip(settings, kept, strict=True)]
    return kept if isinstance(settings, str) and STARS in settings and kept is not None else settings
