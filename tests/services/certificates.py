"""A private certificate authority, as a site runs one, and certificates signed by it."""

from __future__ import annotations

import ipaddress
import ssl
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

if TYPE_CHECKING:
    from pathlib import Path

LOOPBACK_NAMES = ("localhost", "*.localhost", "127.0.0.1")
"""The names of the services' own certificate. A wildcard stands for one label only: `a.b.localhost` is not covered."""


class Certificate(NamedTuple):
    """Two PEM files."""

    chain: Path
    key: Path

    def context(self) -> ssl.SSLContext:
        """A server's side of TLS with this certificate."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.chain, self.key)
        return context


class Authority:
    """A private CA that no system trusts; `ca` is its PEM file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name.from_rfc4514_string("CN=publishd's tests")
        self._count = 0
        usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
        builder = (
            self._builder(self._name, self._key).add_extension(x509.BasicConstraints(True, 0), True).add_extension(usage, True)
        )
        self.ca = folder / "ca.pem"
        self.ca.write_bytes(builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def certificate(self, *names: str, days: int = 2) -> Certificate:
        """A server's certificate for these host names and addresses, valid since some days; with `days` < 1 it has expired."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name.from_rfc4514_string("CN=a service")
        builder = self._builder(subject, key, days).add_extension(x509.BasicConstraints(False, None), True)
        builder = builder.add_extension(x509.SubjectAlternativeName([_general(name) for name in names]), False)
        self._count += 1
        made = Certificate(self._folder / f"{self._count}.pem", self._folder / f"{self._count}.key")
        made.chain.write_bytes(builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        made.key.write_bytes(
            key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        )
        return made

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, days: int = 2) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=2))
            .not_valid_after(now + timedelta(days=days, hours=-1))
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), False)
        )


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """The private CA of this test run."""
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="session")
def loopback_certificate(authority: Authority) -> Certificate:
    """A certificate for `LOOPBACK_NAMES`."""
    return authority.certificate(*LOOPBACK_NAMES)
