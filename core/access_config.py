"""The section ``gateway.access``: who may use the gateway, and where keys, rates and usage are kept."""

from pathlib import Path
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

DATABASE_SCHEMES = ("postgresql",)
STORE_SCHEMES = ("redis", "rediss", "valkey", "valkeys")
DATABASE_PASSWORD = "BATON_DATABASE_PASSWORD"
STORE_PASSWORD = "BATON_LIMITS_PASSWORD"
ADMIN_KEY = "BATON_ADMIN_KEY"
"""Environment variables that hold secrets, where no file is named for them."""


class AccessConfig(BaseModel):
    """No secret stands here: configurations are printed, logged and passed on command lines."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    database: str | None = None
    """Where keys and usage are kept: a file (SQLite), or postgresql://USER@HOST/NAME. Null: nobody is asked for a key,
    and only this machine is served."""
    database_password_file: str | None = None
    """Else the environment's BATON_DATABASE_PASSWORD."""
    keys_file: str | None = None
    """A YAML file with more keys (gateway/access/key_file.py), looked at anew while the gateway runs: for platforms
    whose secrets are files. Usage is kept in ``database`` all the same."""
    limits_store: str = "memory"
    """Where rates, requests at once and budgets are counted: ``memory`` (each gateway process for itself) or
    redis://HOST:PORT/DB (valkey:// too), which any number of gateways share."""
    limits_password_file: str | None = None
    """Else the environment's BATON_LIMITS_PASSWORD."""
    on_store_loss: Literal["open", "closed"] = "open"
    """While a store does not answer. ``open``: each gateway counts for itself, and keys that it knows stay good.
    ``closed``: requests are refused with 503. A key that is not known is never let in."""
    store_timeout_s: float = Field(default=0.5, gt=0, le=30)
    """A call to ``limits_store`` that takes longer has failed."""
    database_timeout_s: float = Field(default=5, gt=0, le=60)
    key_cache_s: float = Field(default=5, ge=0, le=300)
    """How long a key is believed without a look into the database: a revoked key is refused after so long at most."""
    usage_flush_s: float = Field(default=1, gt=0, le=60)
    """How often usage is written: what a killed gateway (not one that is stopped) loses at most."""
    projected_tokens: int = Field(default=256, ge=1)
    """Answer tokens reserved for a request that does not say how many it wants."""
    admin_key_file: str | None = None
    """The key of the admin API and of /metrics; else the environment's BATON_ADMIN_KEY. Neither: no admin API."""
    open_metrics: bool = False
    """Serve /metrics without a key."""

    @property
    def has_keys(self) -> bool:
        """Whether requests need a key."""
        return self.database is not None

    @model_validator(mode="after")
    def _keys_file_has_a_database(self) -> Self:
        if self.keys_file is not None and self.database is None:
            raise ValueError(
                "keys_file needs a database beside it, where usage is kept: set gateway.access.database, a file will do"
            )
        return self

    @field_validator("database")
    @classmethod
    def _database(cls, value: str | None) -> str | None:
        if value is None or "://" not in value:
            return value if value is None else str(Path(value).absolute())  # processes may run in other folders
        return _check_url(value, DATABASE_SCHEMES, "database_password_file", DATABASE_PASSWORD)

    @field_validator("limits_store")
    @classmethod
    def _limits_store(cls, value: str) -> str:
        if value == "memory":
            return value
        return _check_url(value, STORE_SCHEMES, "limits_password_file", STORE_PASSWORD)


def _check_url(url: str, schemes: tuple[str, ...], password_file: str, password_name: str) -> str:
    """The URL, if its scheme is known and it holds no password. Its text is in no message: it may hold one."""
    try:
        parts = urlsplit(url)
        has_place = bool(parts.hostname) and parts.port != 0
    except ValueError:
        has_place = False
    if not has_place:
        raise ValueError("must be a URL such as SCHEME://HOST:PORT/NAME")
    if parts.scheme not in schemes:
        raise ValueError(f"must be a URL that begins with {' or '.join(f'{scheme}://' for scheme in schemes)}")
    if parts.password is not None or "password" in parts.query:
        raise ValueError(
            f"must hold no password, for it is printed and logged: put the password into a file and name it as "
            f"gateway.access.{password_file}, or set the environment variable {password_name}"
        )
    return url
