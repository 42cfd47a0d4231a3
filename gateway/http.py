"""Plain ASGI: reading a body under a limit, sending JSON and event streams, noticing that the client left.

No framework middleware in between: Starlette's convenience class hides disconnects, and then nothing is ever cancelled.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any, Protocol, TypeVar

import orjson

from core.config import LimitsConfig
from core.errors import QuotaExceeded, RequestError, ServingError

Message = MutableMapping[str, Any]
"""An ASGI message; its shape is the ASGI specification's."""
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Header = tuple[bytes, bytes]
T = TypeVar("T")

JSON_TYPE: Header = (b"content-type", b"application/json")
EVENT_HEADERS: tuple[Header, ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
RETRY_AFTER_S = 1
DONE = b"data: [DONE]\n\n"


DIRECT_WRITER = "baton.direct_writer"
"""The extension of an ASGI scope by which our own server lets an answer write pieces at once."""


class Writer(Protocol):
    """What stands in a scope under `DIRECT_WRITER`."""

    raw: Callable[[bytes], None]
    """Writes a whole piece, framed: one of `begins`, so many bytes, and `end`."""
    begins: Sequence[bytes]
    """By the number of bytes."""
    end: bytes
    on_blocked: Callable[[], None]
    """Called when `is_ready` no longer holds although nobody here ended the answer."""

    @property
    def is_ready(self) -> bool: ...
    def whole_body(self) -> bytes | None:
        """The request's, once, if all of it is here."""

    def watch(self, on_gone: Callable[[], None]) -> None:
        """Calls it when the client has left, which may be now."""

    def write(self, piece: bytes) -> None: ...
    def abort(self) -> None: ...


class BodyTooLarge(RequestError):
    slug = "request_too_large"
    http_status = 413


class NotJson(RequestError):
    slug = "unsupported_media_type"
    http_status = 415


class BodyTimeout(RequestError):
    slug = "body_timeout"
    http_status = 408
    http_type = "timeout_error"


class NotFound(RequestError):
    slug = "not_found"
    http_status = 404


class MethodNotAllowed(RequestError):
    slug = "method_not_allowed"
    http_status = 405


class ClientGone(Exception):
    """The client closed its connection; there is nobody to answer."""

    reason = "client_gone"


class ClientStalled(ClientGone):
    """It has not read for too long."""

    reason = "slow_reader"


def header(scope: Scope, name: bytes) -> str:
    """The first header `name` (lower case), or ""."""
    for key, value in scope["headers"]:
        if key == name:
            text: str = value.decode("latin-1")
            return text
    return ""


async def read_json_body(scope: Scope, receive: Receive, limits: LimitsConfig) -> bytes:
    """The body, counted while it is read. Raises BodyTooLarge, BodyTimeout, NotJson, ClientGone."""
    kind = header(scope, b"content-type").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise NotJson("the body must be sent as 'content-type: application/json'")
    if header(scope, b"content-encoding") not in ("", "identity"):
        raise NotJson("compressed bodies are not supported")
    told = header(scope, b"content-length")
    if told.isdecimal() and int(told[:20]) > limits.max_body_bytes:
        raise _too_large(limits.max_body_bytes)  # what a client says of its own excess may be believed
    writer = writer_of(scope)
    body = None if writer is None else writer.whole_body()
    if body is not None:
        if len(body) > limits.max_body_bytes:
            raise _too_large(limits.max_body_bytes)
        return body
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            return await _read_body(receive, limits.max_body_bytes)
    except TimeoutError:
        raise BodyTimeout(f"the body did not arrive within {limits.body_timeout_s:g} s") from None


async def _read_body(receive: Receive, max_bytes: int) -> bytes:
    chunks: list[bytes] = []
    num_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk: bytes = message.get("body", b"")
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise _too_large(max_bytes)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than {max_bytes} bytes")


class Interruption:
    """A way to end this task's work for a reason, which is raised in place of its cancellation. The first counts."""

    __slots__ = ("_is_over", "_reason", "_task")

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "work is done in a task"
        self._task = task
        self._reason: Exception | None = None
        self._is_over = False

    def end(self, reason: Exception) -> None:
        if self._reason is None and not self._is_over:
            self._reason = reason
            self._task.cancel()

    async def guard(self, work: Awaitable[T]) -> T:
        """The result of `work`, or the reason."""
        try:
            return await work
        except asyncio.CancelledError:
            if self._reason is None or self._task.uncancel() > 0:
                raise
            raise self._reason from None
        finally:
            self._is_over = True


async def until_disconnect(
    scope: Scope,
    receive: Receive,
    work: Awaitable[T],
    *,
    stops: set[Interruption] | None = None,
    timeout_s: float | None = None,
) -> T:
    """The result of `work`; or work is cancelled and it raises ClientGone, when the client leaves or takes longer than
    `timeout_s` to read, or the reason of whoever ends the one in `stops`. Call after the body is read."""
    interruption = Interruption()
    stops = set() if stops is None else stops
    stops.add(interruption)
    timer = None
    if timeout_s is not None:
        timer = asyncio.get_running_loop().call_later(timeout_s, interruption.end, ClientGone())
    writer = writer_of(scope)
    watching = None
    if writer is not None:
        writer.watch(lambda: interruption.end(ClientGone()))
    else:
        watching = asyncio.ensure_future(_disconnected(receive))
        watching.add_done_callback(lambda _: interruption.end(ClientGone()))
    try:
        return await interruption.guard(work)
    finally:
        stops.discard(interruption)
        if timer is not None:
            timer.cancel()
        if watching is not None:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def writer_of(scope: Scope) -> Writer | None:
    """What our own server offers."""
    writer: Writer | None = scope.get("extensions", {}).get(DIRECT_WRITER)
    return writer


async def send_bytes(send: Send, status: int, body: bytes, headers: tuple[Header, ...] = (JSON_TYPE,)) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


async def send_json(send: Send, status: int, value: object, headers: tuple[Header, ...] = ()) -> None:
    await send_bytes(send, status, orjson.dumps(value), (JSON_TYPE, *headers))


async def start_events(send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": list(EVENT_HEADERS)})


async def send_event(send: Send, frame: bytes) -> None:
    """Sends one prepared frame (or several at once)."""
    await send({"type": "http.response.body", "body": frame, "more_body": True})


async def end_events(send: Send, frame: bytes = b"") -> None:
    await send({"type": "http.response.body", "body": frame})


def error_value(error: ServingError) -> dict[str, object]:
    """The error object of every answer; all four members are always there."""
    content = {"message": error.message, "type": error.http_type, "param": error.param, "code": error.code}
    return {"error": content}


def error_headers(error: ServingError) -> tuple[Header, ...]:
    headers: list[Header] = []
    if error.http_status in (429, 503) and error.retry_after_s != math.inf:
        wait_s = max(RETRY_AFTER_S, math.ceil(error.retry_after_s or 0))
        headers.append((b"retry-after", str(wait_s).encode()))
    if error.http_status in (408, 413) or error.code == "draining":
        headers.append((b"connection", b"close"))
    if error.http_status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    # The work was long, and a client's blind retry triples it; or trying again cannot help.
    if error.http_status == 504 or error.retry_after_s == math.inf or isinstance(error, QuotaExceeded):
        headers.append((b"x-should-retry", b"false"))
    return tuple(headers)


async def send_error(send: Send, error: ServingError, headers: tuple[Header, ...] = ()) -> None:
    await send_json(send, error.http_status, error_value(error), (*error_headers(error), *headers))


def event_frame(value: object) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


def stream_failure(error: ServingError) -> bytes:
    """The last frames of a stream that breaks: clients raise on an event with a top-level `error`."""
    return event_frame(error_value(error)) + DONE
