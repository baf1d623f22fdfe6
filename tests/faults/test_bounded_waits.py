"""No wait without a bound: what the finder takes for one, and that the sources have none without a reason."""

from __future__ import annotations

import ast
from pathlib import Path

import grpc
import pytest
from tests.faults.waits import unbounded_waits

from vime_client.channel import ChannelSettings
from vime_client.interceptors import CallPolicy, client_interceptors

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted([*ROOT.glob("services/*/src/**/*.py"), *ROOT.glob("clients/python/src/**/*.py")])

UNBOUNDED = [
    "await event.wait()",
    "await condition.wait_for(lambda: done)",
    "await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)",
    "await asyncio.wait(tasks, timeout=None)",
    "await asyncio.wait_for(work(), None)",
    "await asyncio.wait_for(work(), timeout=30 if quick else None)",
    "await jobs.get()",
    "await jobs.put(job)",
    "await jobs.join()",
    "await lock.acquire()",
    "await process.communicate()",
    "await self.reader.readexactly(4)",
    "await writer.drain()",
    "await self._task",
    "await loop.create_future()",
    "await server.wait_for_termination()",
    "await channel.channel_ready()",
    "await self._llm.resume_generation()",
    "while not ready(): await asyncio.sleep(0.1)",
    "async with asyncio.timeout(None): await event.wait()",
    "lock.acquire(blocking=True)",
    "select.select(a, b, c)",
    "subprocess.run(['true'], check=False)",
    "socket.create_connection(address)",
    "os.waitpid(pid, 0)",
    "fcntl.flock(fd, fcntl.LOCK_EX)",
    "dist.init_process_group('gloo')",
    "thread.join()",
    "thread.join(None)",
    "connection.recv(4)",
    "stopped.wait()",
]
BOUNDED = [
    "await asyncio.wait(tasks, timeout=3)",
    "await asyncio.wait_for(event.wait(), 3)",
    "await asyncio.wait([asyncio.ensure_future(event.wait())], timeout=3)",
    "async with asyncio.timeout(3): await event.wait()",
    "async with asyncio.timeout(3), condition: await condition.wait_for(lambda: done)",
    "async with asyncio.timeout_at(end), lock: await jobs.get()",
    "await stub.GetTable(request)",
    "await self._answer('resume', self._llm.resume_generation())",
    "while not ready(): look(); await asyncio.sleep(0.1)",
    "known.get(name)",
    "', '.join(names)",
    "thread.join(3)",
    "lock.acquire(blocking=False)",
    "lock.acquire(True, 3)",
    "process.communicate(timeout=3)",
    "subprocess.run(['true'], check=False, timeout=3)",
    "os.waitpid(pid, os.WNOHANG)",
    "fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)",
    "dist.init_process_group('gloo', timeout=limit)",
    "stopped.wait(3)",
]


def _in_function(line: str) -> str:
    body = (
        line.replace(": await", ":\n        await")
        .replace("; await", "\n        await")
        .replace(": look", ":\n        look")
    )
    return f"async def work():\n    {body}\n"


@pytest.mark.parametrize("line", UNBOUNDED)
def test_a_wait_without_a_bound_is_found(line: str) -> None:
    assert len(unbounded_waits(_in_function(line))) == 1


@pytest.mark.parametrize("line", BOUNDED)
def test_a_wait_with_a_bound_is_left_alone(line: str) -> None:
    assert unbounded_waits(_in_function(line)) == []


def test_a_bound_of_the_outer_function_bounds_nothing_in_an_inner_one() -> None:
    source = "async def f():\n async with asyncio.timeout(1):\n  async def g():\n   await event.wait()\n"
    assert [finding.line for finding in unbounded_waits(source)] == [4]


def test_what_a_name_was_made_of_decides_whether_it_waits() -> None:
    source = (
        "bound = ContextVar('bound')\nready = queue.SimpleQueue()\nmeeting = threading.Barrier(2, timeout=3)\n"
        "pool = ThreadPoolExecutor(2)\n"
        "def f():\n bound.get()\n ready.put(1)\n meeting.wait()\n pool.shutdown(wait=False)\n"
    )
    assert unbounded_waits(source) == []
    other = source.replace("ContextVar", "Other").replace("SimpleQueue", "Queue").replace(", timeout=3", "")
    assert [finding.line for finding in unbounded_waits(other.replace("wait=False", ""))] == [6, 7, 8, 9]


def test_an_excuse_needs_a_reason_and_a_wait() -> None:
    wait = "async def f():\n    {}\n    await event.wait()\n"
    assert unbounded_waits(wait.format("# unbounded: this is the life of the service")) == []
    assert unbounded_waits(wait.format("# bounded by: the caller's deadline\n    # which gRPC keeps")) == []
    (unreasoned,) = unbounded_waits(wait.format("# unbounded: yes"))
    assert unreasoned.what == "'yes' is no reason"
    (idle,) = unbounded_waits("x = 1  # unbounded: it was removed long ago\n")
    assert idle.what == "excuses a wait that is not there"
    (far,) = [f for f in unbounded_waits("# unbounded: too far away from it\n\n" + wait.format("pass")) if f.line > 1]
    assert far.what == "event.wait()"


def test_no_source_waits_without_a_bound_or_a_reason() -> None:
    assert len(SOURCES) > 200
    found = [
        f"{path.relative_to(ROOT)}:{finding.line}: {finding.what}"
        for path in SOURCES
        for finding in unbounded_waits(path.read_text(encoding="utf-8"))
    ]
    assert found == []


# ------------------------------------------------------------------ what the finder takes for granted


def test_only_one_place_opens_channels() -> None:
    opening = {
        str(path.relative_to(ROOT))
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in ("insecure_channel", "secure_channel")
    }
    assert opening == {"clients/python/src/vime_client/channel.py"}


async def test_every_kind_of_call_gets_a_deadline_if_it_names_none() -> None:
    settings = ChannelSettings()
    policy = CallPolicy(settings.timeout_s, settings.stream_timeout_s, {}, untraced=lambda method: True)
    seen: list[float | None] = []

    async def go_on(details: grpc.aio.ClientCallDetails, request: object) -> object:
        seen.append(details.timeout)
        return object()

    kinds = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
    for interceptor, kind in zip(client_interceptors(policy), kinds, strict=True):
        for named in (None, 7.0):
            details = grpc.aio.ClientCallDetails("/a.B/C", named, None, None, None)
            await getattr(interceptor, f"intercept_{kind}")(go_on, details, b"")
    assert seen == [60.0, 7.0, 3600.0, 7.0, 3600.0, 7.0, 3600.0, 7.0]
