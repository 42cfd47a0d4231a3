"""A client of a gateway on a real socket, strict about every answer that it reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx


@dataclass
class Caller:
    """Asks one gateway by HTTP."""

    http: httpx.AsyncClient

    async def post(self, path: str, body: object, **kwargs: Any) -> httpx.Response:
        """`body` is JSON, or bytes as they are."""
        if not isinstance(body, bytes):
            body = json.dumps(body).encode()
        headers = {"content-type": "application/json", **kwargs.pop("headers", {})}
        return await self.http.post(path, content=body, headers=headers, **kwargs)

    async def good(self, path: str, body: object, **kwargs: Any) -> dict[str, Any]:
        answer = await self.post(path, body, **kwargs)
        assert answer.status_code == 200, answer.text
        return strict_json(answer)

    async def refused(self, path: str, body: object, status: int = 400, **kwargs: Any) -> dict[str, Any]:
        """The error object of an answer that must be one, of the shape that all have."""
        answer = await self.post(path, body, **kwargs)
        assert answer.status_code == status, (answer.status_code, answer.text[:500], str(body)[:300])
        return error_of(answer)

    async def events(self, path: str, body: Mapping[str, Any]) -> list[Any]:
        """The decoded events of a stream that ends in good order; `[DONE]` is checked and left out."""
        answer = await self.post(path, {**body, "stream": True})
        assert answer.status_code == 200, answer.text
        lines = answer.content.decode().split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""], lines[-3:]
        return [json.loads(line.removeprefix("data: "), parse_constant=_no_number) for line in lines[:-2]]


def strict_json(answer: httpx.Response) -> dict[str, Any]:
    """As a reader that knows no NaN and no Infinity sees it."""
    value: dict[str, Any] = json.loads(answer.content, parse_constant=_no_number)
    return value


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """Checks what every error has: four members, an id, no trace of our insides."""
    error: dict[str, Any] = strict_json(answer)["error"]
    assert set(error) == {"message", "type", "param", "code"}, error
    assert error["message"] and len(error["message"]) < 2048
    assert all(value is None or isinstance(value, str) for value in error.values())
    assert not any(word in error["message"] for word in ("Traceback", "site-packages", ".py", "pydantic"))
    assert len(answer.headers["x-request-id"]) == 32
    return error


def _no_number(word: str) -> None:
    raise AssertionError(f"{word} is not JSON")
