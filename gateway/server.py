"""The HTTP server: uvicorn, with bounds on what comes before a request reaches the application.

What is no HTTP, too large a head or one that never ends is answered here, in the same shape and with an id as all else.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from typing import Any

import orjson
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from core.config import GatewayConfig
from core.errors import RequestError
from core.ids import new_request_id
from gateway.app import Gateway
from gateway.http import DIRECT_WRITER, error_value
from gateway.tls import Certificate

BACKLOG = 2048
CLOSE_GRACE_S = 2
KEEP_ALIVE_S = 75
LINGER_S = 2.0
TICK_S = 1.0


class MalformedRequest(RequestError):
    slug = "malformed_request"


class HeadersTooLarge(RequestError):
    slug = "headers_too_large"
    http_status = 431


class HeaderTimeout(RequestError):
    slug = "header_timeout"
    http_status = 408
    http_type = "timeout_error"


class Server(uvicorn.Server):
    """Uvicorn without its signal handlers: draining comes first and is ours."""

    def __init__(self, gateway: Gateway, config: GatewayConfig, certificate: Certificate | None = None) -> None:
        self._stop = asyncio.Event()
        super().__init__(_ServerConfig(gateway, config, certificate))

    @property
    def should_exit(self) -> bool:
        return self._stop.is_set()

    @should_exit.setter
    def should_exit(self, value: bool) -> None:
        if value:
            self._stop.set()

    async def main_loop(self) -> None:
        """Only the date of the answers changes while it serves: there is nothing to look for ten times a second."""
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._stop.wait()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _ServerConfig(uvicorn.Config):
    def __init__(self, gateway: Gateway, config: GatewayConfig, certificate: Certificate | None) -> None:
        super().__init__(
            gateway.asgi,
            http=BoundedProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=CLOSE_GRACE_S,
        )
        self.max_header_bytes = config.limits.max_header_bytes
        self.header_timeout_s = config.limits.header_timeout_s
        self._certificate = certificate

    def load(self) -> None:
        super().load()
        self.ssl = self._certificate.context if self._certificate is not None else None


class _Lingering(asyncio.Transport):
    """A transport that is not closed in the face of a client that still sends.

    The kernel answers what comes to a closed socket with a reset, and a reset may destroy the last answer before the
    client has read it. So what a refused client goes on to send is read and dropped, for a short time.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._transport = transport
        self._loop = loop
        self.is_in_mid_message = True
        self._timer: asyncio.TimerHandle | None = None
        self.get_extra_info = transport.get_extra_info  # type: ignore[method-assign]
        self.write = transport.write  # type: ignore[method-assign]
        self.pause_reading = transport.pause_reading  # type: ignore[method-assign]
        self.resume_reading = transport.resume_reading  # type: ignore[method-assign]

    @property
    def is_lingering(self) -> bool:
        return self._timer is not None

    def is_closing(self) -> bool:
        return self.is_lingering or self._transport.is_closing()

    def close(self) -> None:
        if not self.is_in_mid_message:
            self._transport.close()
        elif not self.is_closing():
            self._timer = self._loop.call_later(LINGER_S, self._transport.close)
            if self._transport.can_write_eof():
                self._transport.write_eof()
            self._transport.resume_reading()

    def abort(self) -> None:
        """Closes without a word and without waiting for what was not read."""
        self._transport.abort()

    def end(self) -> None:
        """The connection is lost."""
        if self._timer is not None:
            self._timer.cancel()


class _HeadAndBody:
    """The transport of one answer: its head waits for its first body (as ASGI asks of servers), and both are one write.

    A write of its own costs the kernel's way to the client, and often a packet.
    """

    def __init__(self, cycle: RequestResponseCycle, transport: _Lingering) -> None:
        self._cycle = cycle
        self._transport = transport
        self._head = b""
        self.is_closing = transport.is_closing

    @property
    def is_waiting(self) -> bool:
        """The head is there and not sent: whoever writes past this would write before it."""
        return bool(self._head)

    def write(self, data: bytes) -> None:
        if self._head:
            data = self._head + data
        elif self._cycle.response_started:
            self._head = data
            return
        else:  # "100 Continue"
            self._transport.write(data)
            return
        self._head = b""
        self.write = self._transport.write  # type: ignore[method-assign]
        self._transport.write(data)

    def flush(self) -> None:
        """Nothing follows."""
        if self._head:
            self.write(b"")

    def close(self) -> None:
        self.flush()
        self._transport.close()


class DirectWriter:
    """Writes pieces of a chunked answer straight to its connection, past the coroutines of ASGI (`http.Writer`).

    For event streams: there is one piece for each token, and this is all that there is to do for it.
    """

    begins = tuple(b"%x\r\n" % size for size in range(1024))
    end = b"\r\n"

    def __init__(self, cycle: RequestResponseCycle, transport: _Lingering, answer: _HeadAndBody) -> None:
        self._cycle = cycle
        self._transport = transport
        self._answer = answer
        self.raw = transport.write
        self.on_blocked: Callable[[], None] = _nothing
        self.on_gone: Callable[[], None] = _nothing

    @property
    def is_ready(self) -> bool:
        """The head is sent, and the client has read enough of what came before."""
        cycle = self._cycle
        return bool(cycle.chunked_encoding) and not (
            self._answer.is_waiting
            or cycle.flow.write_paused
            or cycle.disconnected
            or cycle.response_complete
            or self._transport.is_closing()
        )

    def whole_body(self) -> bytes | None:
        cycle = self._cycle
        if cycle.more_body or cycle.disconnected:
            return None
        body, cycle.body = bytes(cycle.body), bytearray()
        return body

    def watch(self, on_gone: Callable[[], None]) -> None:
        self.on_gone = on_gone
        if self._cycle.disconnected:
            on_gone()
        else:
            self._cycle.flow.resume_reading()  # who does not read does not hear of the end

    def write(self, piece: bytes) -> None:
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))

    def abort(self) -> None:
        """The client is not worth waiting for."""
        self._transport.abort()


def _nothing() -> None:
    pass


class BoundedProtocol(HttpToolsProtocol):
    """One connection. The head of a request (its line and headers) is bounded in bytes and in time."""

    config: _ServerConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_in_head = True
        self._num_head_bytes = 0
        self._num_named_bytes = 0
        self._num_silent_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._writers: list[DirectWriter] = []
        """Of the requests of this connection that are not answered yet, in order."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._lingering = _Lingering(transport, self.loop)  # type: ignore[arg-type]
        super().connection_made(self._lingering)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._lingering.end()
        super().connection_lost(exc)
        self._tell_blocked()
        self._tell_gone()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._tell_blocked()

    def _tell_gone(self) -> None:
        for writer in tuple(self._writers):
            writer.on_gone()

    def _tell_blocked(self) -> None:
        for writer in self._writers:
            writer.on_blocked()

    def data_received(self, data: bytes) -> None:
        if self._lingering.is_closing():
            return  # refused already; what still comes is nobody's
        self._lingering.is_in_mid_message = True
        if self._is_in_head:
            if self._head_timer is None:
                self._start_timer()  # an idle connection has woken up
            self._num_head_bytes += len(data)
        self._num_silent_bytes += len(data)
        super().data_received(data)
        # One read may bring the rest of a head and much of a body: only what is surely all head counts here. After the
        # head, bytes that are no body are framing: the names of chunks, and trailers.
        num_bytes = self._num_head_bytes if self._is_in_head else self._num_silent_bytes
        if num_bytes > self.config.max_header_bytes:
            self._refuse(self._too_large())

    # -- the parser's events ------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_named_bytes = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count(len(name) + len(value))

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._num_silent_bytes = 0
        self._stop_timer()
        super().on_headers_complete()
        # The application runs later. A request behind another one is not it yet, but this is its own scope and cycle.
        cycle = self.pipeline[0][0] if self.pipeline else self.cycle
        if cycle is not None and cycle.scope is self.scope:
            writer = DirectWriter(cycle, self._lingering, self._join_head_and_body(cycle))
            self._writers.append(writer)
            self.scope["extensions"] = {DIRECT_WRITER: writer}  # type: ignore[dict-item]

    def _join_head_and_body(self, cycle: RequestResponseCycle) -> _HeadAndBody:
        answer, on_response = _HeadAndBody(cycle, self._lingering), cycle.on_response

        def end() -> None:
            answer.flush()  # that of a HEAD request has no body
            self._writers.pop(0)
            on_response()

        cycle.transport, cycle.on_response = answer, end  # type: ignore[assignment]
        return answer

    def on_body(self, body: bytes) -> None:
        self._num_silent_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._is_in_head = True
        self._num_head_bytes = 0
        self._lingering.is_in_mid_message = False

    # -- refusals -----------------------------------------------------------------------------------------------------

    def send_400_response(self, msg: str) -> None:
        """What the parser could not read. Its reason stays with us."""
        if self._num_named_bytes > self.config.max_header_bytes:
            self._refuse(self._too_large())
        else:
            self._refuse(MalformedRequest("this is not a valid HTTP/1.1 request"))

    def _count(self, num_bytes: int) -> None:
        self._num_named_bytes += num_bytes
        if self._num_named_bytes > self.config.max_header_bytes:
            raise HeadersTooLarge("too large")  # the parser stops and reports an error

    def _too_large(self) -> HeadersTooLarge:
        return HeadersTooLarge(f"the request line and headers are larger than {self.config.max_header_bytes} bytes")

    def _refuse(self, error: RequestError) -> None:
        """Answers and closes. In the middle of an answer there is only the closing."""
        if self.transport.is_closing():
            return
        cycle = self.cycle
        is_between = cycle is None or cycle.response_complete
        if is_between or not cycle.response_started:
            self.transport.write(_raw_answer(error))
        if not is_between:
            cycle.disconnected = True  # to the application the client is gone
            cycle.message_event.set()
            self._tell_gone()
        self.transport.close()

    def _start_timer(self) -> None:
        self._head_timer = self.loop.call_later(self.config.header_timeout_s, self._on_timeout)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_timeout(self) -> None:
        self._head_timer = None
        if self._num_head_bytes:
            seconds = f"{self.config.header_timeout_s:g} s"
            self._refuse(HeaderTimeout(f"the request line and headers did not arrive within {seconds}"))
        else:
            self._lingering.is_in_mid_message = False
            self._lingering.close()  # it never said anything


def _raw_answer(error: RequestError) -> bytes:
    body = orjson.dumps(error_value(error))
    status = HTTPStatus(error.http_status)
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nx-request-id: {new_request_id()}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body
