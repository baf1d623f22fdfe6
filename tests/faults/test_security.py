"""Security by default: loopback or credentials, certificates between the services, rights per role and method."""

from __future__ import annotations

import asyncio
import datetime
import re
import subprocess
import sys
import tomllib
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import tomli_w
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.contract.kept_contracts import Contracts, call_of, path_of
from tests.faults.certificates import Authority
from tests.in_process import KINDS, RUN, model_of, service, settings_of

from vime.common.v1.trajectory_pb2 import SamplingParams
from vime_client.buffer import BufferClient
from vime_client.channel import ChannelSettings, open_channel
from vime_client.channel_settings import Credentials, TlsClientConfig
from vime_client.errors import RpcError, rpc_errors
from vime_client.generation import GenerationClient
from vime_client.launcher import plan
from vime_service import Grant, ServerConfig, Service, TlsServerConfig
from vime_trainer.adapters.fleet import GrpcFleet
from vime_trainer.adapters.ledger import GrpcLedger
from vime_trainer.loop.publisher import PublishConfig
from vime_trainer.loop.versions import Version

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "security.md"
DENIED = (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED)
ROLES = ("worker", "trainer", "engine", "router", "driver", "operator")
SERVICES = {
    "buffer": ("vime.buffer.v1.PromptService", "vime.buffer.v1.BatchService", "vime.buffer.v1.TableService"),
    "router": ("vime.router.v1.RouterService", "vime.rollout.v1.GenerationService"),
    "rollout": ("vime.rollout.v1.EngineService", "vime.rollout.v1.GenerationService"),
    "trainer": ("vime.trainer.v1.TrainerService", "vime.trainer.v1.RankService"),
}


# ------------------------------------------------------------------ what is refused to start


@pytest.mark.parametrize("kind", KINDS)
def test_a_service_listens_on_loopback_unless_it_is_told_otherwise(kind: str, tmp_path: Path) -> None:
    config = model_of(kind).model_validate(settings_of(kind, tmp_path))
    assert config.server.host == "127.0.0.1"
    config.server.check_exposure()
    assert plan.HOST == "127.0.0.1"


@pytest.mark.parametrize("kind", KINDS)
def test_a_program_that_others_could_reach_without_credentials_ends_with_one_sentence(
    kind: str, tmp_path: Path
) -> None:
    file = tmp_path / f"{kind}.toml"
    file.write_text(tomli_w.dumps({**settings_of(kind, tmp_path), "log": {"stderr": False}}))
    command = [sys.executable, "-m", f"vime_{kind}", "--config", str(file), "--set", "server.host=0.0.0.0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert done.stderr == (
        f"vime-{kind}: refusing to listen on 0.0.0.0:0: other machines can reach it, and server.tls and server.grants "
        "are not set; listen on 127.0.0.1, or set both\n"
    )


async def test_encryption_without_grants_and_grants_without_encryption_are_refused_too(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.issue("buffer")
    tls = TlsServerConfig(certificate_file=certificate, private_key_file=key)
    (tmp_path / "token").write_text("0123456789abcdef")
    grants = (Grant(name="worker", token_file=tmp_path / "token"),)
    for missing, config in (
        ("server.grants is not set", ServerConfig(host="0.0.0.0", tls=tls)),
        ("server.tls is not set", ServerConfig(host="0.0.0.0", grants=grants)),
    ):
        with pytest.raises(Exception, match=missing):
            async with service("buffer", tmp_path, config):
                pass


# ------------------------------------------------------------------ the guide's blocks, running


def guide(folder: Path) -> dict[str, Any]:
    """The settings of docs/security.md by service, with this test's folder for certificates and free ports."""
    blocks = re.findall(r"```toml\n# (\w+)\.toml\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    assert [name for name, _ in blocks] == list(KINDS)
    found = {name: tomllib.loads(text.replace("/etc/vime/", f"{folder}/")) for name, text in blocks}
    for settings in found.values():
        assert settings["server"]["host"] == "0.0.0.0"
        settings["server"] |= {"port": 0, "grace_seconds": 0.1}
    return found


@asynccontextmanager
async def secured(folder: Path) -> AsyncIterator[Mapping[str, Service]]:
    """All four services with the guide's settings."""
    settings = guide(folder)
    running: dict[str, Service] = {}
    async with AsyncExitStack() as stack:
        for kind in KINDS:
            known = {name: local(running[name]) for name in ("buffer", "router") if name in running}
            own = settings[kind].get(kind, {})
            if kind == "rollout":
                own["router"]["tls"]["server_name"] = "localhost"
            if kind == "router":
                own["engines"]["tls"]["server_name"] = "localhost"  # the engine tells 0.0.0.0, its port being free
            server = ServerConfig.model_validate(settings[kind]["server"])
            running[kind] = await stack.enter_async_context(service(kind, folder, server, own, **known))
        yield running


def local(running: Service) -> str:
    """A service's address as its certificate names it."""
    return running.address.replace("0.0.0.0", "localhost")


def as_role(folder: Path, role: str) -> ChannelSettings:
    """A channel's settings with a role's certificate."""
    files = {"certificate_file": folder / f"{role}.pem", "private_key_file": folder / f"{role}.key"}
    return Credentials(tls=TlsClientConfig(ca_file=folder / "ca.pem", **files)).once()


@pytest.fixture
async def services(tmp_path: Path) -> AsyncIterator[Mapping[str, Service]]:
    authority = Authority(tmp_path)
    for role in ("buffer", *ROLES):
        authority.issue(role)
    async with secured(tmp_path) as running:
        yield running


PATIENT_S = 4.0


async def allowed(channel: grpc.aio.Channel, full_name: str) -> set[str]:
    """Methods of a service that this caller may use, by calling each with an empty request."""
    contracts = Contracts.today()
    found: set[str] = set()

    async def ask(method: Any, timeout: float = 0.5) -> None:
        call = call_of(channel, method)(contracts.message(method.input_type.full_name)(), timeout=timeout)
        try:
            await (call.read() if method.server_streaming else call)
        except grpc.aio.AioRpcError as error:
            if error.code() in DENIED:
                return
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and timeout < PATIENT_S:
                return await ask(method, PATIENT_S)  # a long poll, or a denial that a busy machine was late with
            if "connect" in str(error.details()).lower():  # never got as far as being allowed
                raise
        found.add(method.name)

    await asyncio.gather(*(ask(method) for method in contracts.service(full_name).methods))
    return found


async def test_every_role_may_call_what_the_guide_grants_it_and_nothing_else(
    services: Mapping[str, Service], tmp_path: Path
) -> None:
    contracts = Contracts.today()

    def names(full_name: str) -> set[str]:
        return {method.name for method in contracts.service(full_name).methods}

    granted = {
        ("worker", "vime.buffer.v1.PromptService"): names("vime.buffer.v1.PromptService"),
        ("trainer", "vime.buffer.v1.BatchService"): names("vime.buffer.v1.BatchService"),
        ("trainer", "vime.buffer.v1.TableService"): {"GetTable", "ListGroups"},
        ("worker", "router", "vime.rollout.v1.GenerationService"): names("vime.rollout.v1.GenerationService"),
        ("engine", "vime.router.v1.RouterService"): {"Heartbeat"},
        ("trainer", "vime.router.v1.RouterService"): {"ListMembers"},
        ("router", "rollout", "vime.rollout.v1.GenerationService"): names("vime.rollout.v1.GenerationService"),
        ("trainer", "vime.rollout.v1.EngineService"): names("vime.rollout.v1.EngineService"),
        ("driver", "vime.trainer.v1.TrainerService"): names("vime.trainer.v1.TrainerService"),
        ("trainer", "vime.trainer.v1.RankService"): names("vime.trainer.v1.RankService"),
    }
    for role in ROLES:
        for kind in KINDS:
            async with open_channel(local(services[kind]), as_role(tmp_path, role)) as channel:
                for full_name in SERVICES[kind]:
                    wanted = granted.get((role, full_name), granted.get((role, kind, full_name), set()))
                    if role == "operator":
                        wanted = names(full_name)
                    assert await allowed(channel, full_name) == wanted, (role, kind, full_name)
    assert all(running.failure is None for running in services.values())


async def test_the_real_clients_work_together_over_mutual_tls(services: Mapping[str, Service], tmp_path: Path) -> None:
    async with (
        BufferClient(local(services["buffer"]), as_role(tmp_path, "worker")) as buffer,
        GenerationClient(local(services["router"]), as_role(tmp_path, "worker")) as engine,
        open_channel(local(services["buffer"]), as_role(tmp_path, "trainer")) as to_buffer,
        open_channel(local(services["router"]), as_role(tmp_path, "trainer")) as to_router,
    ):
        ledger = GrpcLedger(to_buffer)
        opened = await ledger.open_incarnation(RUN, 0, 0, "r")
        await ledger.announce(Version(RUN, opened.incarnation, 0))
        (leased,) = await buffer.lease_prompts("w", 1, 1.0)
        assert leased.lease.prompt.text
        assert (await ledger.counts())["buffer/prompts_open"] == 1

        # The engine's heartbeat reached the router as "engine", and the router calls it as "router".
        answer = await engine.generate([5], SamplingParams(max_tokens=3), [1], timeout_s=10)
        assert answer.engine_id == "e0"
        settings = as_role(tmp_path, "trainer")
        fleet = GrpcFleet(to_router, PublishConfig(), settings.model_copy(update={"tls": _named(settings)}))
        (member,) = await fleet.members(Version(RUN, opened.incarnation, 1))
        await fleet.abort(member, Version(RUN, opened.incarnation, 1), "only to see that it may")
        await fleet.close()


def _named(settings: ChannelSettings) -> TlsClientConfig:
    assert settings.tls is not None
    return settings.tls.model_copy(update={"server_name": "localhost"})


async def test_strangers_are_refused_by_the_handshake(services: Mapping[str, Service], tmp_path: Path) -> None:
    other = Authority(tmp_path / "other")
    foreign = other.issue("worker")
    own = Authority(tmp_path / "own")  # signs with another key than the authority that the services trust
    nobody = TlsClientConfig(ca_file=tmp_path / "ca.pem")
    strangers: dict[str, TlsClientConfig | None] = {
        "no certificate": nobody,
        "of another authority": TlsClientConfig(
            ca_file=tmp_path / "ca.pem", certificate_file=foreign[0], private_key_file=foreign[1]
        ),
        "who trusts another authority": TlsClientConfig(ca_file=own.file),
        "in plaintext": None,
    }
    for who, tls in strangers.items():
        async with open_channel(local(services["buffer"]), ChannelSettings(max_attempts=1, tls=tls)) as channel:
            stub = Contracts.today().stub(channel, "vime.buffer.v1.TableService")
            with pytest.raises(RpcError) as caught, rpc_errors(who):
                await stub.GetTable(name="train", timeout=5)
            assert caught.value.code is grpc.StatusCode.UNAVAILABLE, who


async def test_a_certificate_that_has_run_out_opens_nothing(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    for role in ("buffer", "trainer", "operator"):
        authority.issue(role)
    authority.issue("worker", ends_in=-datetime.timedelta(minutes=1))
    server = ServerConfig.model_validate(guide(tmp_path)["buffer"]["server"])
    async with service("buffer", tmp_path, server) as running:
        async with BufferClient(local(running), as_role(tmp_path, "worker")) as buffer:
            with pytest.raises(RpcError) as caught:
                await buffer.draw("w", 1, 0.0)
        assert caught.value.code is grpc.StatusCode.UNAVAILABLE
        async with open_channel(local(running), as_role(tmp_path, "operator")) as channel:
            assert "ListTables" in await allowed(channel, "vime.buffer.v1.TableService")


# ------------------------------------------------------------------ tokens


@pytest.fixture
async def with_tokens(tmp_path: Path) -> AsyncIterator[Mapping[str, Service]]:
    """Buffer and engine on loopback, with the guide's rights and a token for each role."""
    running: dict[str, Service] = {}
    async with AsyncExitStack() as stack:
        for kind in ("buffer", "rollout"):
            grants = []
            for grant in guide(tmp_path)[kind]["server"]["grants"]:
                token = tmp_path / f"{grant['name']}.token"
                token.write_text(f"token-of-{grant['name']}-0123456789")
                del grant["certificate_name"]
                grants.append(Grant.model_validate({**grant, "token_file": token}))
            config = ServerConfig(grants=tuple(grants), grace_seconds=0.1)
            running[kind] = await stack.enter_async_context(service(kind, tmp_path, config))
        yield running


async def test_a_workers_token_opens_prompts_and_neither_batches_nor_engines(
    with_tokens: Mapping[str, Service], tmp_path: Path
) -> None:
    worker = Credentials(token_file=tmp_path / "worker.token").once()
    async with open_channel(with_tokens["buffer"].address, worker) as channel:
        assert await allowed(channel, "vime.buffer.v1.PromptService")
        assert await allowed(channel, "vime.buffer.v1.BatchService") == set()
        assert await allowed(channel, "vime.buffer.v1.TableService") == set()
    async with open_channel(with_tokens["rollout"].address, worker) as channel:
        assert await allowed(channel, "vime.rollout.v1.EngineService") == set()
        assert await allowed(channel, "vime.rollout.v1.GenerationService") == set()


@pytest.mark.parametrize("token", [None, "token-of-worker-0123456788", "token-of-worker-01234567890", "x"])
async def test_no_token_and_a_wrong_one_are_unauthenticated_before_anything_is_parsed(
    with_tokens: Mapping[str, Service], tmp_path: Path, token: str | None
) -> None:
    (tmp_path / "given").write_text(token or "")
    settings = Credentials(token_file=tmp_path / "given" if token else None).once()
    contracts = Contracts.today()
    async with open_channel(with_tokens["buffer"].address, settings) as channel:
        for full_name in SERVICES["buffer"]:
            for method in contracts.service(full_name).methods:
                make = channel.unary_stream if method.server_streaming else channel.unary_unary
                call = make(path_of(method))(b"\xff no message at all", timeout=5)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await (call.read() if method.server_streaming else call)
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED, method.full_name
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
