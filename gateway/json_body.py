"""From the bytes of a body to a JSON object: strict, bounded in depth, with errors that name the member at fault."""

import json
import math
from collections.abc import Iterator

import orjson

from core.errors import InvalidRequest

MAX_DEPTH = 64
"""Of arrays and objects in one another. A schema of ten nested objects needs about thirty."""


def load_object(raw: bytes) -> dict[str, object]:
    """The body's object. Raises InvalidRequest; never echoes what the caller sent."""
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise _no_number(raw) or InvalidRequest(
            f"the body is not valid JSON (line {error.lineno}, column {error.colno})", code="invalid_json"
        ) from None
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object", code="invalid_json")
    # Few bodies have as many brackets as levels are allowed; only those are walked through.
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH and not _is_shallow(value, MAX_DEPTH):
        raise InvalidRequest(f"the body is nested deeper than {MAX_DEPTH} levels", code="invalid_json")
    return value


def _is_shallow(value: object, levels: int) -> bool:
    members = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    if members is None:
        return True
    return levels > 0 and all(_is_shallow(member, levels - 1) for member in members if isinstance(member, dict | list))


def _no_number(raw: bytes) -> InvalidRequest | None:
    """JSON has no word for infinity or not-a-number, but many writers have. Which member holds one, if that is the
    fault?"""
    try:
        value = json.loads(raw)  # Python reads NaN, Infinity and 1e999
    except (ValueError, RecursionError):
        return None
    for path, member in _members(value, MAX_DEPTH):
        if isinstance(member, float) and not math.isfinite(member):
            return InvalidRequest(f"'{path}': must be a finite number", param=path, code="invalid_value")
    return None


def _members(value: object, levels: int, path: str = "") -> Iterator[tuple[str, object]]:
    yield path, value
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if levels > 0:
        for name, member in pairs:
            yield from _members(member, levels - 1, f"{path}.{str(name)[:64]}".removeprefix("."))
