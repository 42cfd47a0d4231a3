"""Certificates of a cluster for one test, good ones and bad ones."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from core.made_certificates import Signed, issue, make_authority
from core.security_config import Identity, TlsFiles

DOMAIN = "baton"


class MadeCluster:
    """A CA, and a folder with a certificate of it for each identity."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.authority = make_authority()
        self.trust(self.authority)
        for identity in Identity:
            self.write(identity, issue(self.authority, [f"{identity}.{DOMAIN}"]))

    @property
    def overrides(self) -> tuple[str, ...]:
        """The settings of a cluster that uses them."""
        cert, key, ca = (f"{self.folder}/{name}" for name in ("{role}.pem", "{role}.key", "ca.pem"))
        return "security.tls=files", f"security.cert={cert}", f"security.key={key}", f"security.ca={ca}"

    def files(self, name: str) -> TlsFiles:
        folder = self.folder
        return TlsFiles(cert=f"{folder}/{name}.pem", key=f"{folder}/{name}.key", ca=f"{folder}/ca.pem", domain=DOMAIN)

    def write(self, name: str, signed: Signed) -> None:
        """Files are replaced whole, one after the other, as renewals do."""
        _replace(self.folder / f"{name}.key", signed.key_pem)
        _replace(self.folder / f"{name}.pem", signed.pem)

    def trust(self, *authorities: Signed) -> None:
        _replace(self.folder / "ca.pem", b"".join(one.pem for one in authorities))

    def expired(self, name: str) -> Signed:
        return issue(self.authority, [name], since=datetime.now(UTC) - timedelta(days=9), days=8)


def _replace(path: Path, content: bytes) -> None:
    fresh = path.with_suffix(".fresh")
    fresh.write_bytes(content)
    fresh.replace(path)
