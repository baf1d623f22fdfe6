"""Who may call what: tokens with rights per method, TLS, client certificates, and settings that are refused."""

from __future__ import annotations

import datetime
import ipaddress
import logging
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from pydantic import ValidationError

from vime_client.channel import ChannelError, ChannelSettings, TlsClientConfig, open_channel, secure_or_insecure_channel
from vime_client.errors import RpcError, rpc_errors
from vime_client.health import wait_until_ready
from vime_service import Gate, Grant, ServerConfig, StartupError, TlsServerConfig, serving

TOKEN = "s3cret-of-the-worker"
ECHO = "/vime.test.Echo/Echo"


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    file = tmp_path / "worker.token"
    file.write_text(TOKEN + "\n")
    return file


async def _refusal(channel: Any, method: str = ECHO) -> RpcError:
    with pytest.raises(RpcError) as caught, rpc_errors():
        await channel.unary_unary(method)(b"x", timeout=5)
    return caught.value


async def test_a_token_opens_the_methods_it_was_granted_and_no_others(
    echo: Any, token_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "wrong").write_text("s3cret-of-nobody-here")
    grants = (Grant(name="worker", token_file=token_file, methods=("/vime.test.Echo/E*",)),)
    config = ServerConfig(grants=grants, grace_seconds=0.1)
    caplog.set_level(logging.DEBUG)
    async with serving("echo", "vime-service", config, echo.register) as service:
        async with secure_or_insecure_channel(service.address, token_file=token_file) as known:
            assert await known.unary_unary(ECHO)(b"hello") == b"hello"
            denied = await _refusal(known, "/vime.test.Echo/Hang")
            assert (denied.code, denied.reason) == (grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED")
            assert denied.metadata == {"method": "/vime.test.Echo/Hang", "caller": "worker"}
        async with open_channel(service.address) as nobody:
            assert (await _refusal(nobody)).code is grpc.StatusCode.UNAUTHENTICATED
            await wait_until_ready(nobody, "echo", 5)  # probes carry no token
        async with secure_or_insecure_channel(service.address, token_file=tmp_path / "wrong") as stranger:
            assert (await _refusal(stranger)).reason == "UNAUTHENTICATED"
    assert TOKEN not in caplog.text
    assert TOKEN not in repr(config)


async def test_a_token_never_travels_in_plaintext_to_another_machine(token_file: Path) -> None:
    with pytest.raises(ChannelError, match=r"refusing to send a token in plaintext to 10\.0\.0\.7:4000"):
        secure_or_insecure_channel("10.0.0.7:4000", token_file=token_file)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read"),
        ("", "is unset or empty"),
        ("  \n", "is unset or empty"),
        ("s3cret-of-the\nworker-of-all", "more than one word"),
        ("s3cret of the worker", "more than one word"),
        ("s3cret-of-the-wörker", "more than one word"),
        ("x", "at least 16 characters, not 1"),
        ("s3cret-of-worke", "at least 16 characters, not 15"),
    ],
)
def test_a_token_that_cannot_be_used_stops_the_start(tmp_path: Path, content: str | None, says: str) -> None:
    if content is not None:
        (tmp_path / "t").write_text(content)
    with pytest.raises(StartupError, match=f'grant "worker": .*{says}'):
        Gate([Grant(name="worker", token_file=tmp_path / "t")])


async def test_rights_of_two_tokens_in_one_call_do_not_add_up(echo: Any, token_file: Path) -> None:
    config = ServerConfig(grants=(Grant(name="worker", token_file=token_file),), grace_seconds=0.1)
    async with serving("echo", "vime-service", config, echo.register) as service, open_channel(service.address) as both:
        header = ("authorization", f"Bearer {TOKEN}")
        assert await both.unary_unary(ECHO)(b"hello", metadata=[header], timeout=5) == b"hello"
        with pytest.raises(RpcError, match="one authorization header, not 2") as caught, rpc_errors():
            await both.unary_unary(ECHO)(b"x", metadata=[header, header], timeout=5)
        assert caught.value.code is grpc.StatusCode.UNAUTHENTICATED


def test_two_grants_may_not_share_a_token(token_file: Path) -> None:
    grants = [Grant(name=name, token_file=token_file) for name in ("worker", "trainer")]
    with pytest.raises(StartupError, match='grants "worker" and "trainer" have the same token'):
        Gate(grants)


def test_a_grant_names_exactly_one_credential(token_file: Path) -> None:
    with pytest.raises(ValidationError, match=r'grant "w" must name exactly one of .*; it has 0'):
        Grant(name="w")
    with pytest.raises(ValidationError, match="it has 2"):
        Grant(name="w", token_file=token_file, token_env="W")


def test_a_grant_for_a_certificate_needs_an_authority() -> None:
    with pytest.raises(ValidationError, match=r"server\.tls\.client_ca_file is not set"):
        ServerConfig(grants=(Grant(name="router", certificate_name="router.vime"),))


class Authority:
    """A certificate authority that signs what a test needs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test authority")])
        self.file = folder / "ca.pem"
        self.file.write_bytes(self._sign(self._name, self._key.public_key(), authority=True))

    def issue(self, name: str) -> tuple[Path, Path]:
        key = ec.generate_private_key(ec.SECP256R1())
        certificate, private = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate.write_bytes(self._sign(subject, key.public_key(), authority=False))
        pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        private.write_bytes(key.private_bytes(pem, pkcs8, serialization.NoEncryption()))
        return certificate, private

    def _sign(self, subject: x509.Name, public_key: Any, *, authority: bool) -> bytes:
        now = datetime.datetime.now(datetime.UTC)
        names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(hours=1))
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        )
        if not authority:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


async def test_client_certificates_identify_services_to_each_other(echo: Any, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.issue("echo.vime")
    tls = TlsServerConfig(certificate_file=certificate, private_key_file=key, client_ca_file=authority.file)
    grants = (Grant(name="router", certificate_name="router.vime", methods=(ECHO,)),)
    # Routable, and accepted: encrypted, and every caller is known.
    config = ServerConfig(host="0.0.0.0", tls=tls, grants=grants, grace_seconds=0.1)
    async with serving("echo", "vime-service", config, echo.register) as service:
        address = service.address.replace("0.0.0.0", "localhost")

        def channel_as(name: str | None) -> Any:
            pair = authority.issue(name) if name else (None, None)
            client = TlsClientConfig(ca_file=authority.file, certificate_file=pair[0], private_key_file=pair[1])
            return open_channel(address, ChannelSettings(tls=client, max_attempts=1))

        async with channel_as("router.vime") as router:
            assert await router.unary_unary(ECHO)(b"hello") == b"hello"
            denied = await _refusal(router, "/vime.test.Echo/Hang")
            assert denied.code is grpc.StatusCode.PERMISSION_DENIED
        async with channel_as("stranger.vime") as stranger:
            assert (await _refusal(stranger)).code is grpc.StatusCode.UNAUTHENTICATED
        async with channel_as(None) as nobody:
            assert (await _refusal(nobody)).code is grpc.StatusCode.UNAVAILABLE  # the handshake fails
        async with open_channel(address, ChannelSettings(max_attempts=1)) as plain:
            assert (await _refusal(plain)).code is grpc.StatusCode.UNAVAILABLE


async def test_a_token_works_over_tls(echo: Any, tmp_path: Path, token_file: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.issue("echo.vime")
    config = ServerConfig(
        tls=TlsServerConfig(certificate_file=certificate, private_key_file=key),
        grants=(Grant(name="worker", token_file=token_file),),
        grace_seconds=0.1,
    )
    async with serving("echo", "vime-service", config, echo.register) as service:
        tls = TlsClientConfig(ca_file=authority.file)
        async with secure_or_insecure_channel(service.address, tls, token_file) as channel:
            assert await channel.unary_unary(ECHO)(b"hello") == b"hello"


def test_a_missing_certificate_file_is_named(tmp_path: Path) -> None:
    from vime_service.auth import server_credentials

    tls = TlsServerConfig(certificate_file=tmp_path / "no.pem", private_key_file=tmp_path / "no.key")
    with pytest.raises(StartupError, match=r"tls\.private_key_file .*no\.key cannot be read: No such file"):
        server_credentials(tls)
