"""Both transports behind one fixture: whatever one passes, the other must."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from vime_service.bulk import Deadline, Transport
from vime_service.bulk.gloo import GlooTransport
from vime_service.bulk.inline import InlineHub, InlineTransport

Fabric = Callable[[list[str]], dict[str, Transport]]


@pytest.fixture(params=["inline", "gloo"])
def fabric(request: pytest.FixtureRequest) -> Iterator[Fabric]:
    """Make connected transports for the named members, the first of which sends."""
    made: list[Transport] = []

    def inline(names: list[str]) -> dict[str, Transport]:
        hub = InlineHub()
        return {name: InlineTransport(hub, name) for name in names}

    def gloo(names: list[str]) -> dict[str, Transport]:
        sender = GlooTransport.host(names[0], "127.0.0.1", Deadline.after(10))
        rest = {name: GlooTransport.join(name, sender.endpoint, Deadline.after(10)) for name in names[1:]}
        return {names[0]: sender, **rest}

    def make(names: list[str]) -> dict[str, Transport]:
        transports = inline(names) if request.param == "inline" else gloo(names)
        made.extend(transports.values())
        return transports

    yield make
    for transport in reversed(made):
        transport.close()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool
