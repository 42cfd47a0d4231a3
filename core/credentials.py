"""What a process proves itself by, and how it knows others: its certificate, its key, and the CA of the cluster.

The files are looked at with every new connection, so a renewed certificate, or a CA that is added or taken away, counts
from the next one on without a restart; connections that stand keep what they began with. Files that are half written,
or no good, change nothing: what was read before serves on, and the log says why.

Whoever is told apart: a certificate names its process by a DNS name (``worker.baton``), and both sides of a connection
ask for one of a known CA. Addresses do not count: they change, and say nothing of what somebody may do.
"""

import logging
import os
import ssl
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature

from core.errors import ConfigError
from core.security_config import Identity, SecurityConfig, TlsFiles

log = logging.getLogger(__name__)

Stamp = tuple[tuple[int, int, int], ...]
"""Of each file: when it changed, its size, its inode. A renewal by renaming or by a moved link shows as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """The three files as they were read together, each in PEM. They fit each other."""

    cert: bytes
    key: bytes = field(repr=False)
    ca: bytes
    expires: datetime
    client: ssl.SSLContext
    """For HTTP/2, of a connection that we make: verifies the peer, whose name is given with each."""
    data_client: ssl.SSLContext
    """The same for a data connection between workers."""
    data_server: ssl.SSLContext
    """For one that is made to us: asks for a certificate."""


class Credentials:
    """One process's. From any thread."""

    def __init__(self, files: TlsFiles, identity: Identity) -> None:
        """Raises ConfigError that names the file, and says what is wrong with it."""
        self.identity = identity
        self.files = files
        self._lock = threading.Lock()
        self._looked_at = self._stamp()
        self._material = self._read()

    def name(self, identity: Identity) -> str:
        """What the certificate of such a process has to say."""
        return f"{identity}.{self.files.domain}"

    def identities(self, names: Iterable[str]) -> frozenset[Identity]:
        """What a peer is that proved these names."""
        known = {self.name(identity): identity for identity in Identity}
        return frozenset(known[name] for name in names if name in known)

    def current(self) -> Material:
        """What new connections use."""
        with self._lock:
            try:
                stamp = self._stamp()
                if stamp != self._looked_at:
                    self._looked_at = stamp
                    self._material = self._read()
                    log.info("certificate renewed", extra={"expires": self._material.expires.isoformat()})
            except ConfigError as error:
                log.warning("certificate not renewed", extra={"reason": error.message})
            return self._material

    @property
    def expires(self) -> datetime:
        """When the certificate that new connections use ends."""
        return self._material.expires

    def _paths(self) -> tuple[str, str, str]:
        return self.files.cert, self.files.key, self.files.ca

    def _stamp(self) -> Stamp:
        try:
            stats = [os.stat(path) for path in self._paths()]
        except OSError as error:
            raise _unreadable(error) from None
        return tuple((one.st_mtime_ns, one.st_size, one.st_ino) for one in stats)

    def _read(self) -> Material:
        try:
            cert, key, ca = (Path(path).read_bytes() for path in self._paths())
        except OSError as error:
            raise _unreadable(error) from None
        chain, authorities = _certificates(self.files.cert, cert), _certificates(self.files.ca, ca)
        _check(chain, authorities, self.files, self.name(self.identity))
        client, data_client = self._context(ssl.PROTOCOL_TLS_CLIENT), self._context(ssl.PROTOCOL_TLS_CLIENT)
        client.set_alpn_protocols(["h2"])
        data_server = self._context(ssl.PROTOCOL_TLS_SERVER)
        data_server.verify_mode = ssl.CERT_REQUIRED
        return Material(
            cert=cert,
            key=key,
            ca=ca,
            expires=min(one.not_valid_after_utc for one in chain),
            client=client,
            data_client=data_client,
            data_server=data_server,
        )

    def _context(self, protocol: int) -> ssl.SSLContext:
        files, context = self.files, ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3  # both ends are ours
        try:
            context.load_verify_locations(files.ca)
            context.load_cert_chain(files.cert, files.key, password=lambda: "")  # without it a terminal is asked
        except OSError as error:  # ssl's errors, too
            reason = getattr(error, "reason", None) or error.strerror or "unreadable"
            raise ConfigError(
                f"security: {files.cert} and {files.key} are no certificate with its key ({reason}): both must be PEM, "
                "the key without a password and the certificate's own"
            ) from None
        return context


def open_credentials(security: SecurityConfig, identity: Identity) -> Credentials | None:
    """None without TLS. Raises ConfigError."""
    files = security.files(identity)
    return None if files is None else Credentials(files, identity)


def names_of(certificate: x509.Certificate) -> list[str]:
    """The DNS names that it proves."""
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return []
    return extension.value.get_values_for_type(x509.DNSName)


def describe(certificate: x509.Certificate) -> str:
    """``names worker.baton, valid from ... to ...``: what an operator has to know of one that was refused."""
    names = ", ".join(names_of(certificate)) or "nobody (no DNS name in it)"
    since, until = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return f"it names {names}, and is valid from {since:%Y-%m-%d %H:%M} to {until:%Y-%m-%d %H:%M} UTC"


def describe_der(certificate: bytes) -> str:
    """The same of one that a peer has shown."""
    try:
        return describe(x509.load_der_x509_certificate(certificate))
    except ValueError:
        return "it is no certificate"


def _unreadable(error: OSError) -> ConfigError:
    return ConfigError(f"security: cannot read {error.filename}: {error.strerror}; check the path and its permissions")


def _certificates(path: str, pem: bytes) -> list[x509.Certificate]:
    try:
        found = x509.load_pem_x509_certificates(pem)
    except ValueError:
        found = []
    if not found:
        raise ConfigError(f"security: {path} has no certificate in PEM")
    return found


def _check(chain: list[x509.Certificate], authorities: list[x509.Certificate], files: TlsFiles, name: str) -> None:
    """What OpenSSL would only tell a peer of ours, and not as exactly."""
    now = datetime.now(UTC)
    for certificate in chain:
        _check_dates(certificate, files.cert, now)
    if name not in names_of(chain[0]):
        raise ConfigError(
            f"security: {files.cert} is not this process's certificate: it should name {name} as a DNS name, and "
            f"{describe(chain[0])}"
        )
    signers = [one for one in authorities if any(is_signed_by(certificate, one) for certificate in chain)]
    if not signers:
        raise ConfigError(
            f"security: no CA in {files.ca} has signed {files.cert} or a certificate that it brings along"
        )
    if all(one.not_valid_after_utc <= now for one in signers):
        _check_dates(signers[0], files.ca, now)


def _check_dates(certificate: x509.Certificate, path: str, now: datetime) -> None:
    since, until = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now >= until:
        raise ConfigError(f"security: a certificate in {path} expired at {until:%Y-%m-%d %H:%M} UTC; renew it")
    if now < since:
        raise ConfigError(
            f"security: a certificate in {path} is valid from {since:%Y-%m-%d %H:%M} UTC only; is the clock right?"
        )


def is_signed_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    """Its very key has, not only one of the same name."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True
