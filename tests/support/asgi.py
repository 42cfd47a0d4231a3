"""Calls an ASGI application directly: no sockets, and the client can leave whenever a test says so."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

App = Callable[
    [MutableMapping[str, Any], Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]], Awaitable[None]
]


@dataclass
class Reply:
    """An answer as it arrives."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    is_complete: bool = False
    chunks: list[bytes] = field(default_factory=list)

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[Any]:
        """The decoded `data:` lines of an event stream; `[DONE]` stays a string. Each line must be UTF-8."""
        frames = self.body.decode().split("\n\n")
        assert frames[-1] == ""
        lines = [frame.removeprefix("data: ") for frame in frames[:-1]]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]


class Call:
    """One request under way. `leave()` closes the client's side."""

    def __init__(self, app: App, method: str, path: str, body: bytes, headers: Mapping[str, str], pieces: int) -> None:
        self.reply = Reply()
        self._left = asyncio.Event()
        self._reads = asyncio.Event()
        self._reads.set()
        self._is_stalled = False
        self._arrived = asyncio.Condition()
        size = max(1, -(-len(body) // pieces))
        self._pieces = [body[at : at + size] for at in range(0, len(body), size)] or [b""]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "path": path.partition("?")[0],
            "raw_path": path.partition("?")[0].encode(),
            "query_string": path.partition("?")[2].encode(),
            "root_path": "",
            "scheme": "http",
            "headers": [(key.lower().encode(), value.encode("latin-1")) for key, value in headers.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        self.task = asyncio.ensure_future(self._serve(app, scope))

    async def _serve(self, app: App, scope: MutableMapping[str, Any]) -> None:
        try:
            await app(scope, self._receive, self._send)
        finally:
            async with self._arrived:
                self._arrived.notify_all()

    async def _receive(self) -> dict[str, Any]:
        if self._pieces and not (self._is_stalled and len(self._pieces) == 1):
            piece = self._pieces.pop(0)
            return {"type": "http.request", "body": piece, "more_body": bool(self._pieces)}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        reply = self.reply
        if message["type"] == "http.response.start":
            reply.status = message["status"]
            reply.headers = {key.decode(): value.decode() for key, value in message["headers"]}
        else:
            assert reply.status, "a body before the status line"
            reply.chunks.append(message.get("body", b""))
            reply.body += message.get("body", b"")
            reply.is_complete = not message.get("more_body", False)
        async with self._arrived:
            self._arrived.notify_all()
        await self._reads.wait()

    def stop_reading(self) -> None:
        """The next piece arrives, and whoever sends it waits."""
        self._reads.clear()

    def read_on(self) -> None:
        self._reads.set()

    async def until(self, text: bytes) -> None:
        """Returns when `text` has arrived in the body (or the call is over)."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: text in self.reply.body or self.task.done())

    def leave(self) -> None:
        self._left.set()

    def stall(self) -> None:
        """The last piece of the body never comes."""
        self._is_stalled = True

    async def end(self) -> Reply:
        await self.task
        return self.reply


class Client:
    """A client of one application."""

    def __init__(self, app: App) -> None:
        self._app = app

    def start(
        self, method: str, path: str, body: object = None, *, headers: Mapping[str, str] | None = None, pieces: int = 1
    ) -> Call:
        raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        return Call(self._app, method, path, raw, {"content-type": "application/json", **(headers or {})}, pieces)

    async def post(self, path: str, body: object, **kwargs: Any) -> Reply:
        return await self.start("POST", path, body, **kwargs).end()

    async def get(self, path: str, **kwargs: Any) -> Reply:
        return await self.start("GET", path, **kwargs).end()
