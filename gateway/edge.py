"""The outermost ring: an id on every answer, one log line for every request, one error shape for everything."""

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable

from starlette.routing import Route, Router

from core.errors import Cancelled, InternalError, ServingError
from core.ids import new_request_id
from gateway.access.caller import ANYBODY
from gateway.http import (
    ClientGone,
    Message,
    MethodNotAllowed,
    NotFound,
    Receive,
    Scope,
    Send,
    end_events,
    header,
    send_error,
    stream_failure,
)
from gateway.metrics import GatewayMetrics

access_log = logging.getLogger("gateway.access")
log = logging.getLogger(__name__)

Application = Callable[[Scope, Receive, Send], Awaitable[None]]
EXCHANGE = "baton.exchange"
CLIENT_ID = re.compile(r"[\x21-\x7e]{1,128}")
CLIENT_GONE_STATUS = 499
PROBES = frozenset({"/health", "/ready", "/metrics", "/console"})
"""Asked every few seconds by machines, or the files of a page: not worth a line each."""


class Exchange:
    """One HTTP request and its answer, as the edge sees it. Handlers add `fields` for the log line, and `headers`,
    which go out with whatever is answered."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self.request_id = new_request_id()
        self.route = "other"
        self.status = 0
        self.is_stream = False
        self.gone = ""
        """Why nobody is there to be answered."""
        self.failure: Callable[[ServingError], bytes] = stream_failure
        """How a stream that has begun tells of an error."""
        self.fields: dict[str, object] = {}
        self.headers: dict[bytes, bytes] = {}
        self.caller = ANYBODY
        self._client_id = header(scope, b"x-request-id")
        self._send = send
        self.started = time.monotonic()

    @property
    def is_logged(self) -> bool:
        return access_log.isEnabledFor(self._level)

    @property
    def _level(self) -> int:
        return logging.DEBUG if self.route in PROBES else logging.INFO

    @property
    def has_started(self) -> bool:
        return self.status != 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            own = (*self.headers.items(), (b"x-request-id", self.request_id.encode()))
            message["headers"] = [*message["headers"], *own]
        await self._send(message)

    def write_log(self, scope: Scope) -> None:
        if not self.is_logged:
            return
        # A caller's own id is a label: logged if it is printable, never used as a key.
        client_id = self._client_id if CLIENT_ID.fullmatch(self._client_id) else None
        access_log.log(
            self._level,
            "request",
            extra={
                "request_id": self.request_id,
                "client_request_id": client_id,
                "method": scope["method"],
                "path": scope["path"][:256],
                "status": self.status,
                "duration_ms": round(1e3 * (time.monotonic() - self.started), 1),
                **self.fields,
            },
        )


class Edge:
    """Wraps the application. Anything but HTTP is closed."""

    def __init__(self, app: Application, metrics: GatewayMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = Exchange(scope, send)
        scope[EXCHANGE] = exchange
        try:
            await self._app(scope, receive, exchange.send)
        finally:
            exchange.status = exchange.status or CLIENT_GONE_STATUS
            self._metrics.responses(exchange.route, str(exchange.status)).inc()
            if exchange.gone:
                self._metrics.aborts.labels(exchange.gone).inc()
            exchange.write_log(scope)


Handle = Callable[[Exchange, Scope, Receive, Send], Awaitable[None]]
Door = Callable[[Exchange, Scope], Awaitable[None]]
"""Lets a request through to its handler, or raises. It stands before the handler, not before a path: no spelling of a
path leads round it."""


async def open_door(exchange: Exchange, scope: Scope) -> None:
    """For everybody."""


class Endpoint:
    """A route's door and handler, with the errors of every kind turned into answers. A plain ASGI application."""

    def __init__(self, route: str, door: Door, handle: Handle) -> None:
        self._route = route
        self._door = door
        self._handle = handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope[EXCHANGE]
        exchange.route = self._route
        try:
            await self._door(exchange, scope)
            await self._handle(exchange, scope, receive, send)
        except ClientGone as gone:
            self._note(exchange, Cancelled("the client closed the connection"))
            exchange.gone = gone.reason
            exchange.status = CLIENT_GONE_STATUS
        except ServingError as error:
            self._note(exchange, error)
            await self._send_error(exchange, send, error)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            log.error("handler failed", extra={"request_id": exchange.request_id}, exc_info=error)
            await self._send_error(exchange, send, InternalError("internal error"))

    def _note(self, exchange: Exchange, error: ServingError) -> None:
        exchange.fields |= {"error": error.slug, "reason": error.message[:300]}

    async def _send_error(self, exchange: Exchange, send: Send, error: ServingError) -> None:
        if error.http_status >= 500 and isinstance(error, InternalError):
            # What broke inside is for our log; the caller gets the id to ask about.
            error = InternalError(f"internal error; request id {exchange.request_id}")
        if not exchange.has_started:
            await send_error(send, error)
        elif exchange.is_stream:
            await end_events(send, exchange.failure(error))  # the status line is gone


class Table:
    """A router's routes; those whose path is no pattern are looked up instead of tried in turn."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._exact: dict[tuple[str, str], Application] = {}
        for route in router.routes:
            if isinstance(route, Route) and "{" not in route.path:
                for method in route.methods or ():
                    self._exact.setdefault((method, route.path), route.app)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_exact = scope["type"] == "http" and not scope.get("root_path")
        app = self._exact.get((scope["method"], scope["path"])) if is_exact else None
        await (app or self._router)(scope, receive, send)


async def not_found(exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
    raise NotFound(f"no such path: {scope['path'][:128]}")


def method_not_allowed(allowed: str) -> Handle:
    async def refuse(exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        error = MethodNotAllowed(f"{scope['method']} is not allowed here; use {allowed}")
        exchange.fields["error"] = error.slug
        await send_error(send, error, ((b"allow", allowed.encode()),))

    return refuse
