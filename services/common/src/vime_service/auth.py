"""Who may call what: bearer tokens and client certificates, each with the methods it may use.

Tokens come from a file or the environment, never from a command line, which other users can read; they are compared in
constant time, never logged, and known to the log's redaction.
"""

from __future__ import annotations

import fnmatch
import hashlib
import hmac
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, SecretStr, model_validator

from vime_client.config_loading import ConfigModel
from vime_client.logs import register_secret
from vime_client.tokens import TokenError, read_token
from vime_service.errors import PermissionDenied, Unauthenticated

if TYPE_CHECKING:
    import grpc

# Health is for probes, which carry no token; it tells nothing but "up" and "ready".
_OPEN_METHODS = ("/grpc.health.v1.Health/*",)
SHORTEST_TOKEN = 16
"""Characters; in hexadecimal that is 64 bits. A shorter one can be guessed over the wire."""


class StartupError(Exception):
    """The service cannot start. The message is the one sentence to show; no stack."""


class TlsServerConfig(ConfigModel):
    """The server's certificate, and whose certificates it asks for."""

    certificate_file: Path
    """PEM certificate chain of this server."""
    private_key_file: Path
    """PEM private key of `certificate_file`."""
    client_ca_file: Path | None = None
    """PEM file of the authority that signs clients' certificates; set, every client must show one (mTLS)."""


class Grant(ConfigModel):
    """One caller and what it may do. Give exactly one of `token_file`, `token_env`, `certificate_name`."""

    name: str
    """Name of the caller in logs and errors."""
    token_file: Path | None = None
    """File that holds the caller's bearer token."""
    token_env: str | None = None
    """Environment variable that holds the caller's bearer token."""
    certificate_name: str | None = None
    """Common name or alternative name in the caller's certificate (needs `tls.client_ca_file`)."""
    methods: tuple[str, ...] = Field(default=("/vime.*",), min_length=1)
    """Globs over `/package.Service/Method` that the caller may use."""

    @model_validator(mode="after")
    def _one_credential(self) -> Grant:
        given = [c for c in (self.token_file, self.token_env, self.certificate_name) if c is not None]
        if len(given) != 1:
            choices = "token_file, token_env, certificate_name"
            raise ValueError(f'grant "{self.name}" must name exactly one of {choices}; it has {len(given)}')
        return self


class Gate:
    """Decides for each call. Without grants everything is allowed (loopback only: the server sees to that)."""

    def __init__(self, grants: Sequence[Grant] = ()) -> None:
        """Reads the tokens.

        Raises:
            StartupError: a token cannot be read, or two grants share one.
        """
        self._grants = tuple(grants)
        self._tokens: list[tuple[SecretStr, Grant]] = []
        for grant in self._grants:
            token = _token_of(grant)
            if token is None:
                continue
            for other, owner in self._tokens:
                if hmac.compare_digest(other.get_secret_value(), token):
                    raise StartupError(f'grants "{owner.name}" and "{grant.name}" have the same token')
            register_secret(token)
            self._tokens.append((SecretStr(token), grant))

    @property
    def closed(self) -> bool:
        """True if callers must identify themselves."""
        return bool(self._grants)

    def check(self, method: str, context: Any) -> None:
        """Let the call of `method` (`/package.Service/Method`) pass, or raise.

        Raises:
            Unauthenticated: no credential, or a wrong one.
            PermissionDenied: the caller is known and may not use this method.
        """
        if not self._grants or any(fnmatch.fnmatchcase(method, glob) for glob in _OPEN_METHODS):
            return
        callers = [*self._by_certificate(context), *self._by_token(context)]
        if not callers:
            raise Unauthenticated("this server needs a valid bearer token or client certificate")
        if not any(fnmatch.fnmatchcase(method, glob) for grant in callers for glob in grant.methods):
            name = ", ".join(grant.name for grant in callers)
            raise PermissionDenied(f'"{name}" may not call {method}', method=method, caller=name)

    def _by_token(self, context: Any) -> list[Grant]:
        headers = [value for key, value in context.invocation_metadata() or () if key == "authorization"]
        if len(headers) > 1:
            raise Unauthenticated(f"a call has one authorization header, not {len(headers)}: rights do not add up")
        found: list[Grant] = []
        for value in headers:
            scheme, _, token = value.partition(" ") if isinstance(value, str) else ("", "", "")
            if scheme.lower() != "bearer":
                continue
            # Every token is compared, and by digest: the time taken tells neither length nor position.
            given = hashlib.sha256(token.strip().encode()).digest()
            for secret, grant in self._tokens:
                if hmac.compare_digest(hashlib.sha256(secret.get_secret_value().encode()).digest(), given):
                    found.append(grant)
        return found

    def _by_certificate(self, context: Any) -> list[Grant]:
        shown = context.auth_context() or {}
        names = {
            value.decode("utf-8", errors="replace")
            for key in ("x509_common_name", "x509_subject_alternative_name")
            for value in shown.get(key, ())
        }
        return [grant for grant in self._grants if grant.certificate_name in names]


def server_credentials(tls: TlsServerConfig) -> grpc.ServerCredentials:
    """gRPC credentials from the PEM files.

    Raises:
        StartupError: a file cannot be read.
    """
    import grpc  # here: the configuration classes above must load without it

    authority = _read(tls.client_ca_file, "tls.client_ca_file") if tls.client_ca_file else None
    return grpc.ssl_server_credentials(
        [(_read(tls.private_key_file, "tls.private_key_file"), _read(tls.certificate_file, "tls.certificate_file"))],
        root_certificates=authority,
        require_client_auth=authority is not None,
    )


def _token_of(grant: Grant) -> str | None:
    try:
        token = read_token(grant.token_file, grant.token_env)
    except TokenError as error:
        raise StartupError(f'grant "{grant.name}": {error}') from None
    if token is not None and len(token) < SHORTEST_TOKEN:
        raise StartupError(f'grant "{grant.name}": a token has at least {SHORTEST_TOKEN} characters, not {len(token)}')
    return token


def _read(path: Path, what: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StartupError(f"{what} {path} cannot be read: {error.strerror}") from None
