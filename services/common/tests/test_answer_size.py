"""Answers are filled by bytes as well as by count."""

from __future__ import annotations

import pytest
from google.protobuf.wrappers_pb2 import BytesValue

from vime_service.answer_size import FRAME_BYTES, Room, page_within
from vime_service.errors import MessageTooLarge


@pytest.mark.parametrize("wanted", [1, 7, 100])
async def test_a_page_shrinks_until_it_fits(wanted: int) -> None:
    asked = []

    async def page(size: int) -> BytesValue:
        asked.append(size)
        return BytesValue(value=b"x" * 100 * size)

    answer = await page_within(1000, wanted, page)
    assert len(answer.value) == 100 * min(wanted, 9)
    assert len(asked) <= 2 + (wanted > 7)
    with pytest.raises(MessageTooLarge, match=r"102 bytes \(one item\), a message has at most 101"):
        await page_within(101, wanted, page)


def test_room_is_taken_once() -> None:
    room = Room(FRAME_BYTES + 10)
    assert [room.takes(nbytes) for nbytes in (6, 5, 4, 1, 0)] == [True, False, True, False, True]
