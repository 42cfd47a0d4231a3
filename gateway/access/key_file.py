"""Keys that a file holds: for platforms whose secrets are files (Kubernetes, systemd), beside those of the database.

::

    keys:
      - key: sk-baton-0123456789ab-...      # or, so that the file holds no secret, `id` and `sha256` of it
        tenant: acme
        requests_per_minute: 600            # any of the terms that `baton keys create` knows

The file is the whole truth about its keys: one that is taken out of it is refused, one that is put in is good, without
a restart. A file that cannot be read any more, or holds a mistake, is logged and what it said before stays.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Self

import yaml
from pydantic import Field, ValidationError, model_validator

from core.errors import ConfigError
from gateway.access.keyring import KeyFinder
from gateway.access.keys import KEY_ID, KeyRecord, KeyTerms, hash_secret, split_key
from gateway.schemas import Body

log = logging.getLogger(__name__)

Stamp = tuple[int, int, int]
"""What changes when a file is written or replaced."""


class _Entry(KeyTerms):
    key: str | None = Field(default=None, repr=False)
    id: Annotated[str, Field(pattern=rf"^{KEY_ID.pattern}$")] | None = None
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """As ``baton keys make`` prints it."""
    expires_at: int | None = None
    """Unix seconds."""

    @model_validator(mode="after")
    def _one_proof(self) -> Self:
        if (self.key is None) == (self.id is None or self.sha256 is None) or (self.key and (self.id or self.sha256)):
            raise ValueError("say either 'key', or 'id' and 'sha256'")
        if self.key is not None and split_key(self.key) is None:
            raise ValueError("'key' is not of the form sk-baton-(12 hex digits)-(43 characters)")
        return self

    def record(self) -> KeyRecord:
        if self.key is not None:
            parts = split_key(self.key)
            assert parts is not None, "validated"
            key_id, secret_hash = parts[0], hash_secret(*parts)
        else:
            assert self.id is not None and self.sha256 is not None, "validated"
            key_id, secret_hash = self.id, bytes.fromhex(self.sha256)
        terms = KeyTerms.model_validate(self.model_dump(exclude={"key", "id", "sha256", "expires_at"}))
        return KeyRecord(
            key_id=key_id,
            secret_hash=secret_hash,
            terms=terms,
            created_at=0,
            expires_at=self.expires_at,
            revoked_at=None,
        )


class _File(Body, extra="forbid"):
    keys: Annotated[tuple[_Entry, ...], Field(strict=False)] = ()


class KeyFile:
    """A :class:`gateway.access.keyring.KeyFinder` that looks into the file and then asks the next finder."""

    def __init__(self, path: str, rest: KeyFinder) -> None:
        """Raises ConfigError with the remedy."""
        self._path = Path(path)
        self._rest = rest
        self._stamp = self._look()
        self._keys = self._read()

    @property
    def has_keys(self) -> bool:
        return bool(self._keys)

    async def find_key(self, key_id: str) -> KeyRecord | None:
        """A look at the file's stamp for each lookup: whoever asks keeps the answer for ``key_cache_s``."""
        try:
            stamp = self._look()
            if stamp != self._stamp:
                self._stamp = stamp  # a file with a mistake is told of once
                self._keys = self._read()
                log.info("keys were read anew", extra={"path": str(self._path), "num_keys": len(self._keys)})
        except ConfigError as error:
            log.error("keys stay as they were", extra={"reason": error.message})
        return self._keys.get(key_id) or await self._rest.find_key(key_id)

    def _look(self) -> Stamp:
        try:
            status = self._path.stat()
        except OSError as error:
            raise _cannot(self._path, error.strerror or str(error)) from None
        return status.st_mtime_ns, status.st_ino, status.st_size

    def _read(self) -> Mapping[str, KeyRecord]:
        try:
            data = yaml.safe_load(self._path.read_text(encoding="utf-8"))
            entries = _File.model_validate({} if data is None else data).keys
        except OSError as error:
            raise _cannot(self._path, error.strerror or str(error)) from None
        except UnicodeDecodeError:
            raise _cannot(self._path, "it is not UTF-8 text") from None
        except yaml.YAMLError as error:  # its own text would show what stands there: a key
            mark = getattr(error, "problem_mark", None)
            where = "" if mark is None else f" in line {mark.line + 1}"
            raise _cannot(self._path, f"it is not YAML{where}") from None
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"]) or "the file"
            raise _cannot(self._path, f"{where}: {first['msg'].removeprefix('Value error, ')}") from None
        records = [entry.record() for entry in entries]
        found = {record.key_id: record for record in records}
        if len(found) < len(records):
            raise _cannot(self._path, "two keys have the same id")
        return found


def _cannot(path: Path, reason: str) -> ConfigError:
    return ConfigError(f"cannot use the keys in {path} (gateway.access.keys_file): {reason}")
