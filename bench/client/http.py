"""HTTP/1.1 by hand, for streamed answers: a few microseconds an event, so that the client is not what is measured.

A connection serves one answer at a time and is used again for the next. When bytes arrive is noted once for each read
of the socket, before anything looks into them.
"""

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

import httptools

OnData = Callable[[bytes, float], None]
"""A piece of the body, and when it arrived."""


class ConnectionLost(OSError):
    """The answer did not come, or not to its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    host: str
    port: int
    is_tls: bool
    prefix: str
    """Of each path."""

    @classmethod
    def of(cls, url: str) -> "Address":
        """``http://host:8000``, with or without a ``/v1`` at its end. Raises ValueError."""
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no http or https URL of a server")
        is_tls = parts.scheme == "https"
        return cls(
            host=parts.hostname,
            port=parts.port or (443 if is_tls else 80),
            is_tls=is_tls,
            prefix=parts.path.rstrip("/").removesuffix("/v1"),
        )


class _Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self.is_reusable = True
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._done: asyncio.Future[int] | None = None
        self._on_data: OnData = lambda data, at: None
        self._at = 0.0
        self._is_complete = False
        self._has_no_length = True
        self.has_heard = False
        """Of the answer that was asked for last."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no instances of it

    def data_received(self, data: bytes) -> None:
        self._at = time.perf_counter()
        if self._parser is None:
            self.close()  # nothing was asked: the server has more to say than we know what to do with
            return
        try:
            self.has_heard = True
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"the answer is not HTTP/1.1: {error}")
            return
        if self._is_complete:
            self._finish()

    def eof_received(self) -> None:
        """An answer without a length ends with its connection."""
        parser, self.is_reusable = self._parser, False
        if parser is not None and self._has_no_length and parser.get_status_code() >= 200:
            self._finish()

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(str(error) if error is not None else "the server closed the connection before the answer's end")

    async def ask(self, message: bytes, on_data: OnData) -> int:
        """Send a request, hear its answer to the end; returns the status. Raises ConnectionLost."""
        assert self._transport is not None and self._parser is None, "one answer at a time"
        self._parser = httptools.HttpResponseParser(self)
        self._on_data, self._is_complete, self._has_no_length = on_data, False, True
        self.has_heard = False
        self._done = asyncio.get_running_loop().create_future()
        if self._transport.is_closing():
            raise ConnectionLost("the server closed the connection")
        self._transport.write(message)
        try:
            return await self._done
        except asyncio.CancelledError:
            self.close()
            raise

    def close(self) -> None:
        self.is_reusable = False
        if self._transport is not None:
            self._transport.abort()

    # -- callbacks of the parser --------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._has_no_length = False

    def on_body(self, body: bytes) -> None:
        self._on_data(body, self._at)

    def on_message_complete(self) -> None:
        assert self._parser is not None
        self.is_reusable = self.is_reusable and self._parser.should_keep_alive()
        self._is_complete = True

    def _finish(self) -> None:
        parser, self._parser = self._parser, None
        if self._done is not None and not self._done.done() and parser is not None:
            self._done.set_result(parser.get_status_code())

    def _fail(self, why: str) -> None:
        self.close()
        self._parser = None
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionLost(why))


class HttpClient:
    """All connections to one server."""

    def __init__(self, url: str, *, headers: Mapping[str, str] | None = None) -> None:
        """Raises ValueError for a URL that is none."""
        self._address = Address.of(url)
        self._head = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        self._idle: list[_Connection] = []
        self._tls = ssl.create_default_context() if self._address.is_tls else None

    async def post(self, path: str, body: bytes, on_data: OnData) -> int:
        """Returns the status when the answer has ended. Raises OSError."""
        return await self._ask("POST", path, body, on_data)

    async def get(self, path: str) -> tuple[int, bytes]:
        pieces: list[bytes] = []
        status = await self._ask("GET", path, b"", lambda data, at: pieces.append(data))
        return status, b"".join(pieces)

    async def _ask(self, method: str, path: str, body: bytes, on_data: OnData) -> int:
        address = self._address
        message = (
            f"{method} {address.prefix}{path} HTTP/1.1\r\nHost: {address.host}:{address.port}\r\n{self._head}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode() + body
        connection = self._idle_one()
        if connection is not None:
            try:
                return await self._finish(connection, message, on_data)
            except ConnectionLost:
                if connection.has_heard:
                    raise
                # The server had closed it while it was idle: nothing was answered, so nothing was done.
        return await self._finish(await self._connect(), message, on_data)

    async def _finish(self, connection: _Connection, message: bytes, on_data: OnData) -> int:
        status = await connection.ask(message, on_data)
        if connection.is_reusable:
            self._idle.append(connection)
        else:
            connection.close()
        return status

    def _idle_one(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_reusable:
                return connection
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(_Connection, self._address.host, self._address.port, ssl=self._tls)
        return made

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()
