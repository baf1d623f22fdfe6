"""RouterService: what the directory tells, and which heartbeats it takes."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from vime_router_fake_engine import FakeEngine, version

from vime.common.v1.engine_pb2 import EngineInfo, EngineState, EngineStatus
from vime.common.v1.weight_version_pb2 import WeightVersion
from vime.router.v1 import router_service_pb2 as router_pb
from vime_client.errors import RpcError, rpc_errors
from vime_router.breaker import Breaker
from vime_router.config import RouterSection
from vime_router.convert import report_of
from vime_router.directory import Ages, Directory
from vime_router.fleet import Fleet
from vime_router.servicer import RouterServicer
from vime_service.clock import ManualClock
from vime_service.errors import InvalidArgument, MessageTooLarge

DEAD = router_pb.EngineHealth.ENGINE_HEALTH_DEAD


async def test_a_death_that_list_members_notices_still_ends_its_calls() -> None:
    clock, ended = ManualClock(), []
    directory = Directory(clock, Ages(suspect=3.0, dead=10.0, forget=100.0, deaf=60.0))
    policy, limits = RouterSection().new_policy(), (clock, 3, 5.0)
    fleet = Fleet(
        directory, policy, lambda: Breaker(*limits), lambda report, why: ended.append((report.engine_id, why))
    )
    fleet.hear(report_of(router_pb.HeartbeatRequest(status=FakeEngine("e0", served=version(1)).known_at("h:1"))))
    clock.advance(11.0)
    caller = router_pb.ListMembersRequest(caller_version=WeightVersion(run_id="run", incarnation=1, step=0))
    before = directory.generation
    assert directory.members() == []
    listed = await RouterServicer(fleet, 1.0).ListMembers(caller, None)
    assert list(listed.members) == []
    assert listed.generation == before + 1
    assert ended == [("e0", "its heartbeats stopped")]


async def test_members_are_the_updatable_engines_that_live_and_the_generation_tells_changes(harness: Any) -> None:
    caller = router_pb.ListMembersRequest(caller_version=WeightVersion(run_id="run", incarnation=2, step=0))
    engine = FakeEngine("e0", served=version(1, incarnation=2))
    await harness.join(engine, FakeEngine("teacher", served=version(0), model_id="big", updatable=False))
    first = await harness.directory.ListMembers(caller, timeout=5)
    assert [member.info.engine_id for member in first.members] == ["e0"]
    assert first.members[0].info == engine.info
    await harness.join(FakeEngine("e1"))
    second = await harness.directory.ListMembers(caller, timeout=5)
    assert [member.info.engine_id for member in second.members] == ["e0", "e1"]
    assert second.generation > first.generation
    caller.caller_version.incarnation = 1
    with pytest.raises(RpcError) as caught, rpc_errors():
        await harness.directory.ListMembers(caller, timeout=5)
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.ABORTED, "STALE_INCARNATION")
    assert (caught.value.metadata["incarnation"], caught.value.metadata["current"]) == ("1", "2")


async def test_engines_are_listed_in_pages(harness: Any) -> None:
    await harness.join(*(FakeEngine(f"e{i}", served=version(1)) for i in range(5)))
    pages, token = [], ""
    while True:
        response = await harness.directory.ListEngines(
            router_pb.ListEnginesRequest(page_size=2, page_token=token), timeout=5
        )
        pages.append([engine.status.info.engine_id for engine in response.engines])
        token = response.next_page_token
        if not token:
            break
    assert pages == [["e0", "e1"], ["e2", "e3"], ["e4"]]


async def test_an_engine_that_is_silent_for_long_is_listed_as_dead(make_router: Any) -> None:
    harness = await make_router(suspect_after_periods=1, dead_after_periods=3)
    engine = FakeEngine("e0", served=version(1))
    await engine.start()
    harness.stack.push_async_callback(engine.kill)
    await engine.beat(harness.channel)
    await asyncio.sleep(0.6)
    found = (await harness.engines())["e0"]
    assert found.health == DEAD
    assert found.heartbeat_age.ToTimedelta().total_seconds() >= 0.3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"engine_id": ""}, r"status\.info\.engine_id is empty"),
        ({"boot_id": ""}, r"status\.info\.boot_id is empty"),
        ({"address": "nowhere"}, 'address "nowhere" must have the form host:port'),
        ({"model_id": ""}, r"status\.info\.model_id is empty"),
    ],
)
async def test_a_heartbeat_that_does_not_say_who_is_refused(harness: Any, change: dict[str, str], message: str) -> None:
    fields = {"engine_id": "e0", "boot_id": "b", "address": "127.0.0.1:1", "model_id": "tiny", **change}
    status = EngineStatus(info=EngineInfo(**fields, updatable=True), state=EngineState.ENGINE_STATE_SERVING)
    with pytest.raises(RpcError, match=message) as caught, rpc_errors():
        await harness.directory.Heartbeat(router_pb.HeartbeatRequest(status=status), timeout=5)
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert await harness.engines() == {}


async def test_listings_are_filled_by_bytes_and_a_status_has_a_bound(harness: Any) -> None:
    status = FakeEngine("e0", served=version(1)).known_at("h:1")
    status.detail = "x" * (64 << 10)
    with pytest.raises(InvalidArgument, match=r"status has \d+ bytes, at most 65536"):
        report_of(router_pb.HeartbeatRequest(status=status))
    clock = ManualClock()
    directory = Directory(clock, Ages(suspect=3.0, dead=10.0, forget=100.0, deaf=60.0))
    fleet = Fleet(directory, RouterSection().new_policy(), lambda: Breaker(clock, 3, 5.0), lambda *_: None)
    for n in range(9):
        status = FakeEngine(f"e{n}", served=version(1)).known_at(f"h:{n + 1}")
        status.detail = "x" * 50_000
        fleet.hear(report_of(router_pb.HeartbeatRequest(status=status)))
    servicer = RouterServicer(fleet, 1.0, 256 << 10)
    found, token = [], ""
    while token or not found:
        page = await servicer.ListEngines(router_pb.ListEnginesRequest(page_token=token), None)
        assert page.ByteSize() <= 256 << 10
        found += [engine.status.info.engine_id for engine in page.engines]
        token = page.next_page_token
    assert found == [f"e{n}" for n in range(9)]
    caller = router_pb.ListMembersRequest(caller_version=WeightVersion(run_id="run", incarnation=1, step=0))
    with pytest.raises(MessageTooLarge, match=r"45\d+ bytes \(9 members\), a message has at most 262144"):
        await servicer.ListMembers(caller, None)
