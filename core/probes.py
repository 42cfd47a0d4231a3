"""The small HTTP port that every process has: ``/health``, ``/ready``, ``/metrics``. Nobody reports another's numbers.

Plain asyncio, a few lines of HTTP/1.1 and no framework: probes must answer when everything else is busy.
"""

import asyncio
import json
from collections.abc import Callable

from core.config import split_address
from core.errors import ConfigError
from core.telemetry import metrics_type

_MAX_HEAD_BYTES = 8192
_READ_TIMEOUT_S = 5.0


class ProbeServer:
    """Answers probes. ``ready`` returns None when ready, else the reason why not; ``metrics`` the exposition text."""

    def __init__(self, *, ready: Callable[[], str | None], metrics: Callable[[str], bytes]) -> None:
        """``metrics`` is given the Accept header."""
        self._ready = ready
        self._metrics = metrics
        self._server: asyncio.Server | None = None
        self.address = ""

    async def start(self, listen: str) -> str:
        """Bind ``host:port`` (port 0 takes a free one). Raises ConfigError."""
        host, port = split_address(listen)
        try:
            self._server = await asyncio.start_server(self._serve, host, port, limit=_MAX_HEAD_BYTES)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {listen}: {error.strerror or error}; free the port or choose another"
            ) from None
        self.address = f"{host}:{self._server.sockets[0].getsockname()[1]}"
        return self.address

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_READ_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
            parts = head.split(b"\r\n", 1)[0].split()
            path = parts[1].decode("latin-1").partition("?")[0] if len(parts) >= 2 else ""
            status, content_type, body = self._answer(path, _accept(head))
            writer.write(
                f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
                "Connection: close\r\n\r\n".encode()
                + body
            )
            async with asyncio.timeout(_READ_TIMEOUT_S):
                await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            pass  # a probe that does not finish its request gets no answer
        finally:
            writer.close()

    def _answer(self, path: str, accept: str) -> tuple[str, str, bytes]:
        if path == "/health":
            return "200 OK", "application/json", b'{"status":"alive"}'
        if path == "/ready":
            reason = self._ready()
            if reason is None:
                return "200 OK", "application/json", b'{"status":"ready"}'
            body = json.dumps({"status": "not ready", "reason": reason}).encode()
            return "503 Service Unavailable", "application/json", body
        if path == "/metrics":
            return "200 OK", metrics_type(accept), self._metrics(accept)
        return "404 Not Found", "application/json", b'{"error":"not found"}'


def _accept(head: bytes) -> str:
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"accept":
            return value.strip().decode("latin-1")
    return ""
