"""Contracts as messages, stubs and servers made at run time from a descriptor image, beside the generated ones.

An image of `protos/released/` is a program of yesterday. `of_tomorrow` makes one newer than today: each message
has a field more, each enum a value more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor, MethodDescriptor, ServiceDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorSet
from google.protobuf.descriptor_pool import Default, DescriptorPool
from google.protobuf.message import Message

ROOT = Path(__file__).resolve().parents[2]
IMAGES = sorted((ROOT / "protos" / "released").glob("*.binpb"))
TOMORROWS_FIELD = "of_tomorrow"
TOMORROWS_NUMBER = 5000
TOMORROWS_VALUE = 77


class Contracts:
    """All packages of one image, in a pool of their own."""

    def __init__(self, image: FileDescriptorSet) -> None:
        self._pool = DescriptorPool()
        self._files = [file for file in image.file if file.package.startswith("vime.")]
        for file in image.file:  # an image lists files after what they import
            self._pool.Add(file)

    @classmethod
    def read(cls, path: Path) -> Contracts:
        """The contracts of an image file."""
        return cls(FileDescriptorSet.FromString(path.read_bytes()))

    @classmethod
    def today(cls) -> Contracts:
        """The contracts that the installed stubs were made from."""
        return cls(todays_files())

    def message(self, full_name: str) -> type[Any]:
        """The class of a message."""
        return message_factory.GetMessageClass(self._pool.FindMessageTypeByName(full_name))

    def services(self) -> Iterator[ServiceDescriptor]:
        """Every gRPC service."""
        for file in self._files:
            for service in file.service:
                yield self._pool.FindServiceByName(f"{file.package}.{service.name}")

    def service(self, full_name: str) -> ServiceDescriptor:
        """One gRPC service."""
        return self._pool.FindServiceByName(full_name)

    def enums(self) -> Iterator[EnumDescriptor]:
        """Every enum."""
        for file in self._files:
            for enum in file.enum_type:
                yield self._pool.FindEnumTypeByName(f"{file.package}.{enum.name}")

    def stub(self, channel: grpc.aio.Channel, full_name: str) -> Stub:
        """A client of a service."""
        return Stub(self, channel, self.service(full_name))

    def server(self, full_name: str, answer: Callable[[str, Any], Any]) -> grpc.GenericRpcHandler:
        """A server of a service. `answer(method, request)` gives one response, or a list of them for a stream."""
        handlers = {method.name: self._handler(method, answer) for method in self.service(full_name).methods}
        return grpc.method_handlers_generic_handler(full_name, handlers)

    def _handler(self, method: MethodDescriptor, answer: Callable[[str, Any], Any]) -> grpc.RpcMethodHandler[Any, Any]:
        async def unary(request: Any, _: Any) -> Any:
            return answer(method.name, request)

        async def stream(request: Any, _: Any) -> Any:
            for response in answer(method.name, request):
                yield response

        make: Any = (
            grpc.unary_stream_rpc_method_handler if method.server_streaming else grpc.unary_unary_rpc_method_handler
        )
        return make(
            stream if method.server_streaming else unary,
            request_deserializer=message_factory.GetMessageClass(method.input_type).FromString,
            response_serializer=_bytes_of,
        )


class Stub:
    """`await stub.Method(field=value, timeout=…)`; a streaming method gives the call, to iterate over."""

    def __init__(self, contracts: Contracts, channel: grpc.aio.Channel, service: ServiceDescriptor) -> None:
        self._contracts, self._channel, self._service = contracts, channel, service

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = self._service.methods_by_name[name]
        request_class = message_factory.GetMessageClass(method.input_type)

        def call(request: Message | None = None, timeout: float = 10.0, **fields: Any) -> Any:
            return call_of(self._channel, method)(request or request_class(**fields), timeout=timeout)

        return call


def call_of(channel: grpc.aio.Channel, method: MethodDescriptor) -> Any:
    """A method as a callable of the channel."""
    make: Any = channel.unary_stream if method.server_streaming else channel.unary_unary
    return make(
        path_of(method),
        request_serializer=_bytes_of,
        response_deserializer=message_factory.GetMessageClass(method.output_type).FromString,
    )


def path_of(method: MethodDescriptor) -> str:
    """`/package.Service/Method`."""
    return f"/{method.containing_service.full_name}/{method.name}"


def todays_files() -> FileDescriptorSet:
    """The descriptors of the installed stubs, each file after what it imports."""
    found: dict[str, Any] = {}

    def add(name: str) -> None:
        if name in found:
            return
        file = Default().FindFileByName(name)
        for imported in file.dependencies:
            add(imported.name)
        found[name] = file

    folder = ROOT / "protos"
    for path in sorted((folder / "vime").rglob("*.proto")):
        name = str(path.relative_to(folder))
        __import__(name.removesuffix(".proto").replace("/", ".") + "_pb2")
        add(name)
    files = FileDescriptorSet()
    for file in found.values():
        file.CopyToProto(files.file.add())
    return files


def of_tomorrow(today: FileDescriptorSet) -> FileDescriptorSet:
    """A later state of the contracts: a field more in every message, a value more in every enum."""
    later = FileDescriptorSet.FromString(today.SerializeToString())
    for file in later.file:
        if not file.package.startswith("vime."):
            continue
        for message in _all_messages(file.message_type):
            message.field.add(
                name=TOMORROWS_FIELD,
                number=TOMORROWS_NUMBER,
                type=FieldDescriptorProto.TYPE_STRING,
                label=FieldDescriptorProto.LABEL_OPTIONAL,
            )
        for enum in file.enum_type:
            enum.value.add(name=f"{enum.value[0].name.removesuffix('UNSPECIFIED')}TOMORROW", number=TOMORROWS_VALUE)
    return later


def _all_messages(messages: Any) -> Iterator[DescriptorProto]:
    for message in messages:
        if not message.options.map_entry:
            yield message
            yield from _all_messages(message.nested_type)


def mark(message: Message, text: str = "news") -> None:
    """Set tomorrow's field in a message and in every message inside it."""
    if TOMORROWS_FIELD in message.DESCRIPTOR.fields_by_name:
        setattr(message, TOMORROWS_FIELD, text)
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for inner in value if _repeated(field) else [value]:
            mark(inner, text)


def fill(message: Message, depth: int = 4) -> None:
    """Set every field, enums to a value that only tomorrow knows; of a oneof the last field stays."""
    for field in message.DESCRIPTOR.fields:
        if field.message_type is not None:
            if field.message_type.GetOptions().map_entry or depth == 0:
                continue
            inner = getattr(message, field.name)
            fill(inner.add() if _repeated(field) else inner, depth - 1)
            if not _repeated(field):
                inner.SetInParent()
            continue
        value = _value_of(field)
        if _repeated(field):
            getattr(message, field.name).append(value)
        else:
            setattr(message, field.name, value)


def _value_of(field: FieldDescriptor) -> Any:
    if field.enum_type is not None:
        return TOMORROWS_VALUE
    kinds: dict[int, Any] = {
        FieldDescriptor.CPPTYPE_STRING: b"news" if field.type == FieldDescriptor.TYPE_BYTES else "news",
        FieldDescriptor.CPPTYPE_BOOL: True,
        FieldDescriptor.CPPTYPE_FLOAT: 0.5,
        FieldDescriptor.CPPTYPE_DOUBLE: 0.5,
    }
    return kinds.get(field.cpp_type, 1)


def _repeated(field: FieldDescriptor) -> bool:
    return bool(field.is_repeated)


def _bytes_of(message: Message) -> bytes:
    return message.SerializeToString()
