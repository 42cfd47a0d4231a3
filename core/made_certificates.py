"""Certificates made here: a CA of one's own and what it signs, for clusters without another one.

A folder that is made has ``ca.pem`` with ``ca.key``, and for each identity ``IDENTITY.pem`` with ``IDENTITY.key``.
Whoever can read ``ca.key`` can be anybody in that cluster: processes need all but that file.
"""

import fcntl
import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from core.credentials import is_signed_by, names_of
from core.errors import ConfigError
from core.security_config import Identity

AUTHORITY_DAYS, CERTIFICATE_DAYS = 3650, 365
RENEW_DAYS = 30
"""What ends within so many days is made anew."""
_SKEW = timedelta(minutes=5)
"""So far may another machine's clock be behind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signed:
    """A certificate and its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def key_pem(self) -> bytes:
        return self.key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )


def make_authority(name: str = "baton", *, days: float = AUTHORITY_DAYS) -> Signed:
    """A CA that has signed itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.now(UTC)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{name} CA {now:%Y-%m-%d %H:%M:%S.%f}")])
    builder = _builder(subject, key, now - _SKEW, days).issuer_name(subject)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(signs=True), critical=True)
    return Signed(certificate=builder.sign(key, hashes.SHA256()), key=key)


def issue(
    authority: Signed, names: Iterable[str], *, days: float = CERTIFICATE_DAYS, since: datetime | None = None
) -> Signed:
    """A certificate for a process, as client and as server."""
    names, key = list(names), ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])])
    builder = _builder(subject, key, since or datetime.now(UTC) - _SKEW, days)
    alternatives = x509.SubjectAlternativeName([x509.DNSName(name) for name in names])
    purposes = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(signs=False), critical=True)
    builder = builder.add_extension(purposes, critical=False).add_extension(alternatives, critical=False)
    signer = authority.certificate
    return Signed(certificate=builder.issuer_name(signer.subject).sign(authority.key, hashes.SHA256()), key=key)


def make_certificates(folder: Path, *, domain: str) -> list[Path]:
    """Fill a folder, or renew in it what is missing, ends soon or is of another domain. Returns what was written.
    Raises ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise ConfigError(f"cannot make certificates in {folder}: {error.strerror}; choose another folder") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of two that come at once one makes them, and the other finds them
        return _fill(folder, domain)
    except OSError as error:
        raise ConfigError(f"cannot make certificates in {folder}: {error.strerror}; choose another folder") from None
    finally:
        os.close(lock)


def _fill(folder: Path, domain: str) -> list[Path]:
    written: list[Path] = []
    authority = _load(folder, "ca")
    if authority is None or _ends_soon(authority.certificate):
        authority = make_authority(domain)
        written += _write(folder, "ca", authority)
    for identity in Identity:
        name, present = f"{identity}.{domain}", _load(folder, identity)
        if present is None or _ends_soon(present.certificate) or not _is_for(present, name, authority):
            written += _write(folder, identity, issue(authority, [name]))
    return written


def _is_for(present: Signed, name: str, authority: Signed) -> bool:
    """An authority's name has the moment of its making in it: no two share one."""
    return name in names_of(present.certificate) and is_signed_by(present.certificate, authority.certificate)


def _load(folder: Path, name: str) -> Signed | None:
    """None for what is not there, or is not whole."""
    try:
        certificate = x509.load_pem_x509_certificate((folder / f"{name}.pem").read_bytes())
        key = serialization.load_pem_private_key((folder / f"{name}.key").read_bytes(), password=None)
    except (FileNotFoundError, ValueError, TypeError):
        return None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        return None
    return Signed(certificate=certificate, key=key)


def _write(folder: Path, name: str, made: Signed) -> list[Path]:
    """The key first: a certificate without its key is no use to anybody."""
    paths = []
    for path, content in ((folder / f"{name}.key", made.key_pem), (folder / f"{name}.pem", made.pem)):
        fresh = path.with_name(f".{path.name}.fresh")
        fresh.unlink(missing_ok=True)
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
        fresh.replace(path)
        paths.append(path)
    return paths


def _ends_soon(certificate: x509.Certificate) -> bool:
    return certificate.not_valid_after_utc - datetime.now(UTC) < timedelta(days=RENEW_DAYS)


def _builder(
    subject: x509.Name, key: ec.EllipticCurvePrivateKey, since: datetime, days: float
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(since)
        .not_valid_after(since + timedelta(days=days))
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
