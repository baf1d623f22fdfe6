"""What BufferClient sends, beside what it is asked to send."""

from __future__ import annotations

import grpc
import pytest

from vime.buffer.v1 import prompt_service_pb2 as pb
from vime.buffer.v1 import table_service_pb2 as table_pb
from vime_client.buffer import BufferClient, drop_word
from vime_client.testing import FakeBuffer, serving


class Forgetful(FakeBuffer):
    """Its first answer gets lost."""

    def __init__(self) -> None:
        super().__init__([{"prompt": "x"}, {"prompt": "y"}])
        self.requests: list[str] = []

    async def LeasePrompts(self, request: pb.LeasePromptsRequest, context: grpc.aio.ServicerContext) -> object:
        """Refuse once as a broken connection would."""
        self.requests.append(request.request_id)
        if len(self.requests) == 1:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        return await super().LeasePrompts(request, context)


async def test_a_call_and_its_repeats_have_one_request_id_and_the_next_call_another() -> None:
    buffer = Forgetful()
    async with serving(buffer) as address, BufferClient(address) as client:
        for _ in range(2):
            assert len(await client.lease_prompts("me", 1, 1.0)) == 1
    first, repeated, second = buffer.requests
    assert first == repeated != second
    assert first
    assert second


@pytest.mark.parametrize(
    ("reason", "word"),
    [
        ("", ""),
        ("zero_std", "zero_std"),
        ("keepLong", "keeplong"),
        ("too long: 9 > 8", "too_long_9_8"),
        ("é" * 3, "_"),
        ("x" * 99, "x" * 64),
        ("deleted", "filter_deleted"),
    ],
)
def test_a_filter_may_give_its_reason_in_any_words(reason: str, word: str) -> None:
    assert drop_word(reason) == word


async def test_tables_are_read_page_by_page() -> None:
    class Pages(FakeBuffer):
        async def ListTables(self, request: table_pb.ListTablesRequest, context: object) -> table_pb.ListTablesResponse:
            page = int(request.page_token or 0)
            info = table_pb.TableInfo(config=table_pb.TableConfig(name=f"eval/{page}"))
            return table_pb.ListTablesResponse(tables=[info], next_page_token=str(page + 1) if page < 2 else "")

    async with serving(Pages()) as address, BufferClient(address) as client:
        assert list(await client.tables()) == ["eval/0", "eval/1", "eval/2"]


async def test_the_fake_gives_up_at_once_what_can_never_be_generated() -> None:
    buffer = FakeBuffer([{"prompt": "x"}])
    async with serving(buffer) as address, BufferClient(address) as client:
        (lease,) = (await client.lease_prompts("me", 1, 1.0))[:1]
        await client.fail(lease.lease.lease_id, pb.FAILURE_CLASS_INVALID, "too long")
    assert buffer.given_up == ["train-0"]
