"""Bearer tokens from a file or the environment; never from a command line, which other users can read."""

from __future__ import annotations

import os
from pathlib import Path


class TokenError(ValueError):
    """The named source of a token cannot be used."""


def read_token(file: Path | None, env: str | None = None) -> str | None:
    """The token in `file`, else in the environment variable `env`; None if neither is named.

    Raises:
        TokenError: the named source is missing or empty.
    """
    if file is not None:
        try:
            token = file.read_text(encoding="utf-8", errors="replace").strip()
        except OSError as error:
            raise TokenError(f"token file {file} cannot be read: {error.strerror}") from None
        if not token or not token.isascii():
            raise TokenError(f"token file {file} is empty or not ASCII")
        return token
    if env is not None:
        token = os.environ.get(env, "").strip()
        if not token or not token.isascii():
            raise TokenError(f"environment variable {env}, which should hold a token, is unset, empty or not ASCII")
        return token
    return None
