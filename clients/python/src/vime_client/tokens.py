"""Bearer tokens from a file or the environment; never from a command line, which other users can read."""

from __future__ import annotations

import os
import re
from pathlib import Path

_TOKEN = re.compile(r"[\x21-\x7e]+")
"""One line of visible ASCII: what an HTTP/2 header carries unchanged."""


class TokenError(ValueError):
    """The named source of a token cannot be used."""


def read_token(file: Path | None, env: str | None = None) -> str | None:
    """The token in `file`, else in the environment variable `env`; None if neither is named.

    Raises:
        TokenError: the named source is missing or empty, or what it holds is no token.
    """
    if file is not None:
        try:
            text = file.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise TokenError(f"token file {file} cannot be read: {error.strerror}") from None
        return _checked(text, f"token file {file}")
    if env is not None:
        return _checked(os.environ.get(env, ""), f"environment variable {env}, which should hold a token,")
    return None


def _checked(text: str, where: str) -> str:
    token = text.strip()
    if not token:
        raise TokenError(f"{where} is unset or empty")
    if not _TOKEN.fullmatch(token):
        raise TokenError(f"{where} holds more than one word of visible ASCII characters")
    return token
