"""Text of users and of their exceptions, made fit to be sent and shown: valid, one line, of bounded length.

Protobuf takes no lone surrogate, and Python's strings may hold some: JSON's `"\\ud83d"` is one. So whatever did not
come out of a message passes through here before it goes into one.
"""

from __future__ import annotations

LINE_LIMIT = 300
"""Characters of a line for people."""


def one_line(text: str, limit: int = LINE_LIMIT) -> str:
    """`text` as one valid line, cut at `limit` characters; a lone surrogate is shown as `\\udXXX`."""
    flat = " ".join(text[: 16 * limit].split())  # more than that is never shown, whatever it is
    shown = flat.encode("utf-8", "backslashreplace").decode("utf-8")
    return shown if len(shown) <= limit and len(text) <= 16 * limit else shown[: limit - 1] + "…"


def is_valid(text: str) -> bool:
    """False if a message cannot hold `text`."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def told(error: BaseException) -> str:
    """Class and message of an exception, whatever its `__str__` does."""
    try:
        message = str(error)
        return one_line(f"{type(error).__name__}: {message}" if message else type(error).__name__)
    except BaseException as worse:  # noqa: BLE001 - it is the user's code; the class says enough
        return f"{type(error).__name__} (its message raises {type(worse).__name__})"
