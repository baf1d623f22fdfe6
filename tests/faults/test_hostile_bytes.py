"""Whatever arrives on a port: nothing of it runs, nothing crashes, and the service still answers (K40)."""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import threading
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.contract.kept_contracts import Contracts, fill, path_of
from tests.faults.test_security import SERVICES
from tests.in_process import KINDS, RUN, System, service, system

from vime.buffer.v1.table_service_pb2 import CreateTableRequest, GetTableRequest
from vime.buffer.v1.table_service_pb2_grpc import TableServiceStub
from vime.common.v1.tensor_pb2 import PayloadHandle
from vime.rollout.v1.engine_service_pb2 import PullUpdateRequest
from vime.rollout.v1.engine_service_pb2_grpc import EngineServiceStub
from vime_client.channel import ChannelSettings, open_channel
from vime_client.errors import RpcError, rpc_errors
from vime_rollout.engines.fake import make_weights
from vime_service.bulk import Manifest, VersionKey
from vime_service.bulk.layout import BucketLayout
from vime_service.bulk.wire import manifest_to_proto

T = TypeVar("T")
ONCE = ChannelSettings(max_attempts=1)
CONTRACTS = Contracts.today()
METHODS = [(kind, method) for kind in KINDS for name in SERVICES[kind] for method in CONTRACTS.service(name).methods]
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
OUR_FAULT = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS)
FUZZ = settings(
    max_examples=150, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


class Target:
    """The four services in a thread of their own, so that generated examples can call them one after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.marker = folder / "marker"
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._stop = asyncio.Event()
        self.system: System
        self.channels: dict[str, grpc.aio.Channel] = {}
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._live(),), daemon=True)
        self._thread.start()
        assert self._ready.wait(120)

    def run(self, work: Awaitable[T], seconds: float = 30.0) -> T:
        """Run a coroutine beside the services."""
        return asyncio.run_coroutine_threadsafe(_awaited(work), self._loop).result(seconds)

    def close(self) -> None:
        """Stop the services."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)
        assert not self._thread.is_alive()

    async def _live(self) -> None:
        async with system(self.folder) as self.system:
            for kind in KINDS:
                self.channels[kind] = open_channel(self.system.address(kind), ONCE)
            self._ready.set()
            await self._stop.wait()
            for channel in self.channels.values():
                await channel.close()

    async def send(self, kind: str, method: MethodDescriptor, request: bytes) -> grpc.StatusCode:
        """Send bytes as a request; the status of the answer."""
        channel = self.channels[kind]
        make: Any = channel.unary_stream if method.server_streaming else channel.unary_unary
        call = make(path_of(method))(request, timeout=0.5)
        try:
            await (call.read() if method.server_streaming else call)
        except grpc.aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK

    async def well(self) -> None:
        """Every service is ready, and nothing has run that came in."""
        for kind in KINDS:
            request = health_pb2.HealthCheckRequest(service="ready")
            answer = await health_pb2_grpc.HealthStub(self.channels[kind]).Check(request, timeout=5)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING, kind
            assert self.system.services[kind].failure is None
        assert not self.marker.exists()


async def _awaited(work: Awaitable[T]) -> T:
    return await work


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    running = Target(tmp_path_factory.mktemp("target"))
    yield running
    running.close()


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch {self.marker}",)


def bombs(marker: Path) -> list[bytes]:
    """The bomb as each protocol of pickle writes it."""
    return [pickle.dumps(Bomb(marker), protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]


def test_the_bomb_works(tmp_path: Path) -> None:
    for number, bomb in enumerate(bombs(tmp_path / "marker")):
        pickle.loads(bomb)
        assert (tmp_path / "marker").exists(), number
        (tmp_path / "marker").unlink()


# ------------------------------------------------------------------ pickles


def _load(message: Message, bomb: bytes) -> int:
    """Put the bomb into every bytes and every string field, at any depth; how many."""
    count = 0
    for field, value in message.ListFields():
        repeated = field.is_repeated
        if field.message_type is not None:
            if field.message_type.GetOptions().map_entry:
                continue
            count += sum(_load(inner, bomb) for inner in (value if repeated else [value]))
        elif field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
            loaded = bomb if field.type == FieldDescriptor.TYPE_BYTES else bomb.decode("latin-1")
            if repeated:
                getattr(message, field.name)[:] = [loaded]
            else:
                setattr(message, field.name, loaded)
            count += 1
    return count


def test_k40_a_pickle_in_every_field_of_every_call_is_never_run(target: Target) -> None:
    loaded = 0
    in_bytes: set[str] = set()
    requests: list[tuple[str, MethodDescriptor, bytes]] = []
    for kind, method in METHODS:
        for bomb in (bombs(target.marker)[0], bombs(target.marker)[-1]):
            requests.append((kind, method, bomb))
            for inline in (True, False):
                request = CONTRACTS.message(method.input_type.full_name)()
                fill(request)
                loaded += _load(request, bomb)
                if inline:
                    in_bytes |= _use_inline(request, bomb)
                requests.append((kind, method, request.SerializeToString()))
    assert loaded > 700
    assert in_bytes == {"vime.common.v1.TensorRef.inline"}  # every field of bytes that the contracts have
    assert in_bytes == {
        field.full_name
        for _, method in METHODS
        for field in _fields(method.input_type)
        if field.type == FieldDescriptor.TYPE_BYTES
    }

    async def send_all() -> list[grpc.StatusCode]:
        return list(await asyncio.gather(*(target.send(*request) for request in requests)))

    statuses = target.run(send_all(), 120)
    blamed = {path_of(m) for (_, m, _), status in zip(requests, statuses, strict=True) if status in OUR_FAULT}
    assert not blamed
    target.run(target.well())


def _use_inline(message: Message, bomb: bytes) -> set[str]:
    """`fill` leaves the last field of a oneof: set those of bytes instead."""
    found: set[str] = set()
    for field in message.DESCRIPTOR.fields:
        if field.type == FieldDescriptor.TYPE_BYTES:
            setattr(message, field.name, bomb)
            found.add(field.full_name)
    for field, value in message.ListFields():
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for inner in value if field.is_repeated else [value]:
                found |= _use_inline(inner, bomb)
    return found


def _fields(message: Any, seen: set[str] | None = None) -> Iterator[FieldDescriptor]:
    seen = set() if seen is None else seen
    if message.full_name in seen:
        return
    seen.add(message.full_name)
    for field in message.fields:
        yield field
        if field.message_type is not None:
            yield from _fields(field.message_type, seen)


def _pull(step: int, key: str) -> PullUpdateRequest:
    manifest = Manifest.of(VersionKey(RUN, 1, step), make_weights(1).items(), BucketLayout(64 << 10))
    payload = PayloadHandle(scheme="file", key=key, nbytes=6)
    return PullUpdateRequest(manifest=manifest_to_proto(manifest), payload=payload)


async def test_a_pickle_as_a_payload_of_weights_is_refused(tmp_path: Path) -> None:
    async with service("rollout", tmp_path) as running, open_channel(running.address, ONCE) as channel:
        for number, bomb in enumerate(bombs(tmp_path / "marker")):
            (tmp_path / f"{number}.safetensors").write_bytes(bomb)
            with pytest.raises(RpcError, match="is not a safetensors file"), rpc_errors():
                await EngineServiceStub(channel).PullUpdate(_pull(1, f"{number}.safetensors"), timeout=10)
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("key", ["../secret", "/etc/passwd", "a/../../secret", "link/secret", "a\0b"])
async def test_a_payload_key_never_leaves_its_folder(tmp_path: Path, key: str) -> None:
    folder, outside = tmp_path / "payloads", tmp_path / "outside"
    for made in (folder, outside):
        made.mkdir()
    for place in (outside / "secret", tmp_path / "secret"):
        place.write_bytes(b"secret")
    (folder / "link").symlink_to(outside)
    async with service("rollout", folder) as running, open_channel(running.address, ONCE) as channel:
        with pytest.raises(RpcError, match=r"leaves the payload store|is no path") as caught, rpc_errors():
            await EngineServiceStub(channel).PullUpdate(_pull(1, key), timeout=10)
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "{}/../outside.jsonl", "{}/link", "{}/a\0b", "{}/" + "x" * 5000, "{}/bomb", "{}", "{}/pipe"]
)
async def test_a_prompt_source_is_a_file_of_json_inside_the_configured_folders(tmp_path: Path, path: str) -> None:
    folder = tmp_path / "prompts"
    folder.mkdir()
    (tmp_path / "outside.jsonl").write_text('{"prompt": "secret"}\n')
    (folder / "link").symlink_to(tmp_path / "outside.jsonl")
    os.mkfifo(folder / "pipe")
    (folder / "bomb").write_bytes(bombs(tmp_path / "marker")[-1])
    async with service("buffer", folder) as running, open_channel(running.address, ONCE) as channel:
        tables = TableServiceStub(channel)
        config = (await tables.GetTable(GetTableRequest(name="train"), timeout=5)).table.config
        config.name, config.source.path, config.source.name = "unscored", path.format(folder), "other"
        with pytest.raises(RpcError) as caught, rpc_errors():
            await tables.CreateTable(CreateTableRequest(config=config), timeout=5)
    assert caught.value.code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.PERMISSION_DENIED)
    assert "secret" not in caught.value.message
    assert not (tmp_path / "marker").exists()


# ------------------------------------------------------------------ fuzz


def _valid(method: MethodDescriptor) -> bytes:
    request = CONTRACTS.message(method.input_type.full_name)()
    fill(request)
    return request.SerializeToString()


@given(data=st.data())
@FUZZ
def test_no_bytes_to_any_method_crash_a_service_or_are_called_its_fault(target: Target, data: st.DataObject) -> None:
    kind, method = data.draw(st.sampled_from(METHODS))
    request = bytearray(data.draw(st.sampled_from([b"", _valid(method)])))
    for _ in range(data.draw(st.integers(0, 4))):
        place = data.draw(st.integers(0, len(request)))
        piece = data.draw(st.binary(max_size=40))
        if data.draw(st.booleans()):
            request[place : place + len(piece)] = piece
        else:
            del request[place : place + len(piece)]
    status = target.run(target.send(kind, method, bytes(request)))
    assert status not in OUR_FAULT, (path_of(method), bytes(request))


@given(data=st.data())
@FUZZ
def test_messages_with_any_values_in_their_fields_are_answered_or_refused(target: Target, data: st.DataObject) -> None:
    kind, method = data.draw(st.sampled_from(METHODS))
    request = CONTRACTS.message(method.input_type.full_name)()
    _draw_into(request, data, depth=3)
    status = target.run(target.send(kind, method, request.SerializeToString()))
    assert status not in OUR_FAULT, (path_of(method), request)


_BITS = {
    FieldDescriptor.CPPTYPE_UINT32: st.sampled_from([0, 1, 2, 7, 2**31, 2**32 - 1]),
    FieldDescriptor.CPPTYPE_UINT64: st.sampled_from([0, 1, 2, 2**40, 2**63, 2**64 - 1]),
    FieldDescriptor.CPPTYPE_INT32: st.sampled_from([0, 1, -1, 2**31 - 1, -(2**31), 999_999_999]),
    FieldDescriptor.CPPTYPE_INT64: st.sampled_from([0, 1, -1, 2**63 - 1, -(2**63)]),
    FieldDescriptor.CPPTYPE_ENUM: st.sampled_from([0, 1, 2, 77, -1]),
    FieldDescriptor.CPPTYPE_FLOAT: st.floats(width=32),
    FieldDescriptor.CPPTYPE_DOUBLE: st.floats(),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
}
_TEXTS = st.one_of(
    st.sampled_from(["run", "train", "eval/x", "e0", "127.0.0.1:1", "../x", "{}", "[]", '{"a": NaN}', "\0", "file"]),
    st.text(max_size=20),
)


def _draw_into(message: Any, data: st.DataObject, depth: int) -> None:
    for field in message.DESCRIPTOR.fields:
        if not data.draw(st.booleans()):
            continue
        if field.message_type is not None:
            if depth and not field.message_type.GetOptions().map_entry:
                inner = getattr(message, field.name)
                inner = inner.add() if field.is_repeated else inner
                inner.SetInParent()
                _draw_into(inner, data, depth - 1)
            continue
        texts = st.binary(max_size=20) if field.type == FieldDescriptor.TYPE_BYTES else _TEXTS
        values: st.SearchStrategy[Any] = _BITS.get(field.cpp_type, texts)
        if field.is_repeated:
            getattr(message, field.name).extend(data.draw(st.lists(values, max_size=3)))
        else:
            setattr(message, field.name, data.draw(values))


@pytest.mark.parametrize("number", [2**31, 2**32 - 1, 2**63, 2**64 - 1])
def test_numbers_at_the_edge_of_their_type_are_refused_and_are_no_fault_of_ours(target: Target, number: int) -> None:
    for kind, method in METHODS:
        request = CONTRACTS.message(method.input_type.full_name)()
        fill(request)
        _set_numbers(request, number)
        for field in ("run_id", "table"):
            if field in request.DESCRIPTOR.fields_by_name:
                setattr(request, field, RUN if field == "run_id" else "train")
        status = target.run(target.send(kind, method, request.SerializeToString()))
        assert status not in OUR_FAULT, path_of(method)


def _set_numbers(message: Message, number: int) -> None:
    sizes = {FieldDescriptor.CPPTYPE_UINT32: 32, FieldDescriptor.CPPTYPE_UINT64: 64}
    for field, value in message.ListFields():
        if field.cpp_type in sizes:
            fitting = min(number, 2 ** sizes[field.cpp_type] - 1)
            if field.is_repeated:
                getattr(message, field.name)[:] = [fitting]
            else:
                setattr(message, field.name, fitting)
        elif field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for inner in value if field.is_repeated else [value]:
                _set_numbers(inner, number)


@given(
    data=st.binary(max_size=3000),
    start=st.sampled_from([b"", PREFACE, PREFACE + bytes(9), b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01"]),
)
@settings(parent=FUZZ, max_examples=60)
def test_no_bytes_on_a_port_crash_a_service(target: Target, data: bytes, start: bytes) -> None:
    for kind in KINDS:
        host, _, port = target.system.address(kind).rpartition(":")
        with socket.create_connection((host, int(port)), timeout=5) as raw:
            raw.settimeout(5)
            try:
                raw.sendall(start + data)
            except ConnectionError:  # it was refused before it was over
                continue


def test_after_all_that_every_service_still_works(target: Target) -> None:
    target.run(target.well())
