"""A certificate authority that signs what a test needs: one file pair per role, as docs/security.md asks for."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_HOUR = datetime.timedelta(hours=1)


class Authority:
    """Signs certificates into a folder: `ca.pem`, and `<role>.pem` with `<role>.key` for each role."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.file = folder / "ca.pem"
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _named("test authority")
        self.file.write_bytes(self._sign(self._name, self._key.public_key(), authority=True, ends_in=_HOUR))

    def issue(self, role: str, *, ends_in: datetime.timedelta = _HOUR) -> tuple[Path, Path]:
        """A certificate with the common name `<role>.vime` for this machine, and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate, private = self.folder / f"{role}.pem", self.folder / f"{role}.key"
        subject = _named(f"{role}.vime")
        certificate.write_bytes(self._sign(subject, key.public_key(), authority=False, ends_in=ends_in))
        pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        private.write_bytes(key.private_bytes(pem, pkcs8, serialization.NoEncryption()))
        return certificate, private

    def _sign(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey, *, authority: bool, ends_in: datetime.timedelta
    ) -> bytes:
        now = datetime.datetime.now(datetime.UTC)
        names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 2 * _HOUR)
            .not_valid_after(now + ends_in)
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        )
        if not authority:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
