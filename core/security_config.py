"""The section ``security``: who may talk to whom between the processes of a cluster."""

import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

ROLE_MARK = "{role}"


class Identity(StrEnum):
    """Who a process is to the others. A certificate proves it by a DNS name: ``router.baton`` in the domain ``baton``;
    it may have several. A worker is one whatever it serves as, for it may be flipped."""

    ROUTER = "router"
    GATEWAY = "gateway"
    WORKER = "worker"
    OPERATOR = "operator"
    """The command line and launchers: they may drain, scale and flip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """What one process proves itself by, and by what it knows others."""

    cert: str
    key: str
    ca: str
    domain: str


class SecurityConfig(BaseModel):
    """mTLS on every connection between processes: gRPC, and the data connections of the ``tcp`` backend. With it the
    router signs a ticket for every hand-off, and a prefill worker hands out nothing without one."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    tls: Literal["off", "auto", "files"] = "off"
    """``files``: the three below. ``auto``: certificates of a CA that `baton up` makes for this machine. There is no
    falling back: who has no certificate of the CA for its identity is not served."""
    cert: str = ""
    """PEM file: this process's certificate, then those between it and the CA. Such paths may hold ``{role}``, which
    stands for router, gateway, worker or operator: one configuration then serves every process of a machine."""
    key: str = ""
    """PEM file, without a password."""
    ca: str = ""
    """PEM file of every CA whose certificates are good: two, while one is replaced by the other. It should sign for
    nothing but this cluster."""
    domain: str = Field(default="baton", max_length=200)
    """Certificates name their process as IDENTITY.DOMAIN. Clusters that share a CA need different ones."""
    folder: str = "~/.baton/tls"
    """Where ``auto`` keeps the CA and the certificates, for `baton up` and for the other commands."""

    @field_validator("tls", mode="before")
    @classmethod
    def _off_is_a_word(cls, value: object) -> object:
        return "off" if value is False else value  # YAML reads a bare `off` as false

    @field_validator("domain")
    @classmethod
    def _domain(cls, value: str) -> str:
        if not re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*", value):
            raise ValueError(f"{value!r} is no domain: lower-case letters, digits, '-' and '.', such as prod.baton")
        return value

    @model_validator(mode="after")
    def _files(self) -> Self:
        given = [name for name in ("cert", "key", "ca") if getattr(self, name)]
        if self.tls == "files" and len(given) < 3:
            missing = ", ".join(name for name in ("cert", "key", "ca") if name not in given)
            raise ValueError(f"tls is 'files' and security has no {missing}: name the PEM files, or set tls to 'auto'")
        if self.tls != "files" and given:
            raise ValueError(f"{', '.join(given)} given, and tls is '{self.tls}': set tls to 'files', or remove them")
        return self

    @property
    def is_on(self) -> bool:
        return self.tls != "off"

    def files(self, identity: Identity) -> TlsFiles | None:
        """Those of a process; None without TLS."""
        if self.tls == "off":
            return None
        paths = {"cert": self.cert, "key": self.key, "ca": self.ca}
        if self.tls == "auto":
            folder = Path(self.folder).expanduser()
            paths = {"cert": f"{folder}/{identity}.pem", "key": f"{folder}/{identity}.key", "ca": f"{folder}/ca.pem"}
        paths = {name: path.replace(ROLE_MARK, identity) for name, path in paths.items()}
        return TlsFiles(**paths, domain=self.domain)
