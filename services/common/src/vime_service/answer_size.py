"""What one answer carries: it is filled by bytes as well as by count, and refused with both numbers where it cannot be.

Whoever answers with a list uses one of these, so that no answer is made that the message cap then throws away:

- pages: `page_within`; a page ends where the message is full;
- answers that are all or nothing: `check_answer` before the work is done, `check_whole` where there is none to spare;
- answers whose items are handed out for good: `Room`, asked before an item is.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from vime_service.errors import InvalidArgument, MessageTooLarge

FRAME_BYTES = 1024
"""Everything of an answer, or of an item, that does not grow with what it holds."""


class Sized(Protocol):
    """A message."""

    def ByteSize(self) -> int:
        """Its size on the wire."""
        ...


MessageT = TypeVar("MessageT", bound=Sized)


class Room:
    """What is left of an answer.

    Args:
        limit: the message cap in bytes.
    """

    def __init__(self, limit: int) -> None:
        self._left = limit - FRAME_BYTES

    def takes(self, nbytes: int) -> bool:
        """True, and the bytes are taken, if the item still fits."""
        if nbytes > self._left:
            return False
        self._left -= nbytes
        return True


async def page_within(limit: int, size: int, page: Callable[[int], Awaitable[MessageT]]) -> MessageT:
    """The page of up to `size` items, or the longest shorter one found that fits into a message.

    Args:
        limit: the message cap in bytes.
        size: items wanted, at least 1.
        page: makes the page of so many items.

    Raises:
        MessageTooLarge: one item alone does not fit.
    """
    while True:
        answer = await page(size)
        actual = answer.ByteSize()
        if actual <= limit:
            return answer
        if size == 1:
            check_whole("one item", answer, limit)
        size = max(1, min(size - 1, size * limit // actual))


def check_whole(what: str, answer: Sized, limit: int) -> None:
    """Refuse to send an answer that has to be whole, in words instead of the transport's.

    Raises:
        MessageTooLarge: naming both numbers.
    """
    actual = answer.ByteSize()
    if actual > limit:
        raise MessageTooLarge(
            f"the answer has {actual} bytes ({what}), a message has at most {limit}", limit=limit, actual=actual
        )


def check_answer(field: str, what: str, needed: int, limit: int) -> None:
    """Refuse a request whose answer could not pass, before it is worked on.

    Raises:
        InvalidArgument: naming both numbers.
    """
    if needed > limit:
        raise InvalidArgument(
            f"the answer may have {needed} bytes ({what}), a message has at most {limit}",
            field=field,
            needed=needed,
            limit=limit,
        )
