"""Typed reads from a JSON file of a model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from modelfiles.errors import ModelFileError


class JsonFile:
    """Typed reads from one JSON object; every complaint names the file and the key."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ModelFileError(
                str(path), f"cannot be read ({error.strerror})", "check the path and its rights"
            ) from None
        except ValueError:
            raise ModelFileError(str(path), "is not valid JSON", "download the file again") from None
        if not isinstance(value, dict):
            raise ModelFileError(str(path), "is not a JSON object", "download the file again")
        self.values: Mapping[str, object] = value

    def _wrong(self, key: str, wanted: str) -> ModelFileError:
        return ModelFileError(
            str(self.path), f"'{key}' is missing or not {wanted}", "use a complete Hugging Face folder"
        )

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key, default)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._wrong(key, "an integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key, default)
        if value is None:
            value = default
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise self._wrong(key, "a number")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        return None if self.values.get(key) is None else self.number(key)

    def optional_integer(self, key: str) -> int | None:
        return None if self.values.get(key) is None else self.integer(key)

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def table(self, key: str) -> Mapping[str, object] | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._wrong(key, "an object")
        return value

    def texts(self, key: str) -> list[str] | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise self._wrong(key, "a list of texts")
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        """A list, or nothing."""
        value = self.values.get(key) or []
        if not isinstance(value, list) or not all(isinstance(one, int) and not isinstance(one, bool) for one in value):
            raise self._wrong(key, "a list of integers")
        return tuple(value)

    def token_ids(self, key: str) -> tuple[int, ...]:
        value = self.values.get(key)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(one, int) and not isinstance(one, bool) for one in ids):
            raise self._wrong(key, "a token id or a list of them")
        return tuple(ids)
