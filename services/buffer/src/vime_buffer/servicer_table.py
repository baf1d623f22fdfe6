"""TableService: what tools and people call, translated."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from vime.buffer.v1 import table_service_pb2 as pb
from vime.buffer.v1 import table_service_pb2_grpc
from vime_buffer import convert
from vime_buffer.buffer import Buffer
from vime_buffer.catalog import check_root
from vime_buffer.settings import TableSettings
from vime_buffer.values import State
from vime_service.answer_size import page_within
from vime_service.deadlines import remaining
from vime_service.errors import InvalidArgument

_PAGE = 100
_MAX_PAGE = 1000
_RESERVE_S = 0.2


class TableServicer(table_service_pb2_grpc.TableServiceServicer):
    """Serves `vime.buffer.v1.TableService`.

    Args:
        buffer: the buffer.
        roots: folders that CreateTable may name sources in.
        message_bytes: cap of one message.
    """

    def __init__(self, buffer: Buffer, roots: Sequence[Path], message_bytes: int) -> None:
        self._buffer = buffer
        self._message_bytes = message_bytes
        self._roots = tuple(roots)

    async def CreateTable(self, request: pb.CreateTableRequest, context: Any) -> pb.CreateTableResponse:
        settings = await self._buffer.create_table(self._settings(request.config))
        return pb.CreateTableResponse(config=convert.settings_to_proto(settings))

    async def ListTables(self, request: pb.ListTablesRequest, context: Any) -> pb.ListTablesResponse:
        async def page(size: int) -> pb.ListTablesResponse:
            views = await self._buffer.tables(request.page_token, size + 1)
            more = len(views) > size
            return pb.ListTablesResponse(
                tables=[convert.view_to_proto(view) for view in views[:size]],
                next_page_token=views[size - 1].settings.name if more else "",
            )

        return await page_within(self._message_bytes, _page_size(request.page_size), page)

    async def GetTable(self, request: pb.GetTableRequest, context: Any) -> pb.GetTableResponse:
        return pb.GetTableResponse(table=convert.view_to_proto(await self._buffer.table(request.name)))

    async def UpdateTable(self, request: pb.UpdateTableRequest, context: Any) -> pb.UpdateTableResponse:
        view = await self._buffer.update_table(self._settings(request.config))
        return pb.UpdateTableResponse(table=convert.view_to_proto(view))

    async def WatchTable(self, request: pb.WatchTableRequest, context: Any) -> AsyncIterator[pb.WatchTableResponse]:
        async for view in self._buffer.watch(request.name, lambda: remaining(context, reserve=_RESERVE_S)):
            yield pb.WatchTableResponse(table=convert.view_to_proto(view))

    async def ListGroups(self, request: pb.ListGroupsRequest, context: Any) -> pb.ListGroupsResponse:
        async def page(size: int) -> pb.ListGroupsResponse:
            rows, token = await self._buffer.list_groups(
                request.table,
                _state(request.state),
                request.train_step if request.HasField("train_step") else None,
                request.eval_step if request.HasField("eval_step") else None,
                request.page_token,
                size,
            )
            groups = [convert.group_row_to_proto(row) for row in rows]
            return pb.ListGroupsResponse(groups=groups, next_page_token=token)

        return await page_within(self._message_bytes, _page_size(request.page_size), page)

    async def DeleteGroups(self, request: pb.DeleteGroupsRequest, context: Any) -> pb.DeleteGroupsResponse:
        deleted = await self._buffer.delete_groups(request.table, list(request.group_ids))
        return pb.DeleteGroupsResponse(deleted=deleted)

    async def ListQuarantined(self, request: pb.ListQuarantinedRequest, context: Any) -> pb.ListQuarantinedResponse:
        async def page(size: int) -> pb.ListQuarantinedResponse:
            rows, token = await self._buffer.list_quarantined(request.table or "train", request.page_token, size)
            groups = [convert.quarantined_to_proto(row) for row in rows]
            return pb.ListQuarantinedResponse(groups=groups, next_page_token=token)

        return await page_within(self._message_bytes, _page_size(request.page_size), page)

    async def GetQuarantined(self, request: pb.GetQuarantinedRequest, context: Any) -> pb.GetQuarantinedResponse:
        response = pb.GetQuarantinedResponse()
        response.group.ParseFromString(await self._buffer.quarantined_payload(request.group_id, request.attempt))
        return response

    def _settings(self, config: pb.TableConfig) -> TableSettings:
        data = convert.settings_from_proto(config)
        if not config.name:
            raise InvalidArgument("config.name is empty", field="config.name")
        source = data.get("source")
        if source and source.get("path"):
            source["path"] = check_root(Path(source["path"]), self._roots)
        try:
            return TableSettings.model_validate(data)
        except ValidationError as error:
            detail = error.errors()[0]
            field = ".".join(str(part) for part in ("config", *detail["loc"]))
            message = str(detail["msg"]).removeprefix("Value error, ")
            if detail["type"] != "value_error":  # our own sentences name the value themselves
                message += f", got {str(detail['input'])[:80]!r}"
            raise InvalidArgument(f"{field}: {message}", field=field) from None


def _page_size(asked: int) -> int:
    return min(asked or _PAGE, _MAX_PAGE)


def _state(value: int) -> State | None:
    if value == pb.GROUP_STATE_UNSPECIFIED:
        return None
    if value not in range(pb.GROUP_STATE_OPEN, pb.GROUP_STATE_EVICTED + 1):
        raise InvalidArgument(f"state {value} is no state of a group", field="state", value=value)
    return State(value)
