"""What the console's page reads: the feed of the cluster, one request, and its session."""

import asyncio

import orjson

from core.config import LimitsConfig
from core.errors import QueueFull, ServingError
from gateway.access.gate import Gate
from gateway.console.sessions import cookie
from gateway.console.values import news_value, record_value
from gateway.edge import Exchange
from gateway.http import (
    ClientStalled,
    NotFound,
    Receive,
    Scope,
    Send,
    end_events,
    header,
    send_bytes,
    send_event,
    send_json,
    start_events,
    until_disconnect,
)
from gateway.ports import NewsPort

MAX_VIEWERS = 16
"""Pages that one gateway process feeds at once: each is a stream from the router."""
INTERVAL_S = 1.0
AGAIN_S = 1.0
"""A router that is away is asked again after this."""
NO_STORE = (b"cache-control", b"no-store")


class ConsoleRoutes:
    def __init__(self, router: NewsPort, gate: Gate, limits: LimitsConfig) -> None:
        self._router = router
        self._gate = gate
        self._patience_s = limits.slow_reader_s
        self._num_viewers = 0
        self._stopped: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def stop(self) -> None:
        """Ends every feed: pages come back to whichever gateway serves then."""
        if not self._stopped.done():
            self._stopped.set_result(None)

    async def open_session(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        """Behind the door of the admin key: from now on a cookie will do."""
        is_secure = "https" in (scope["scheme"], header(scope, b"x-forwarded-proto"))
        headers = ((b"set-cookie", cookie(self._gate.new_session(), is_secure=is_secure)), NO_STORE)
        await send_bytes(send, 204, b"", headers)

    async def show_session(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        """Behind the console's door: says that it is open."""
        await send_json(send, 200, {"needs_key": self._gate.needs_key}, (NO_STORE,))

    async def end_session(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        await send_bytes(send, 204, b"", ((b"set-cookie", cookie("", is_secure=False)), NO_STORE))

    async def show_request(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        """Everything that is known of one request, and of the further prompts of its call."""
        request_id = scope["path_params"]["request_id"]
        found = await self._router.find_records(request_id, 0)
        if not found.records:
            raise NotFound(
                f"the router has no record of {request_id[:64]!r}: it keeps the last {found.max_kept}, and a record "
                "comes some moments after its request has ended"
            )
        await send_json(send, 200, {"requests": [record_value(record) for record in found.records]}, (NO_STORE,))

    async def feed(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        """Server-sent events: ``news`` as long as somebody looks, and ``away`` while the router does not answer."""
        if self._num_viewers >= MAX_VIEWERS:
            raise QueueFull(f"{MAX_VIEWERS} consoles look at this gateway already: close one of them")
        self._num_viewers += 1
        try:
            await until_disconnect(scope, receive, self._follow(exchange, send))
        finally:
            self._num_viewers -= 1

    async def _follow(self, exchange: Exchange, send: Send) -> None:
        """Ends when the gateway stops."""
        exchange.is_stream = True
        await start_events(send)
        following = asyncio.ensure_future(self._tell(send))
        try:
            await asyncio.wait({following, self._stopped}, return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                following.result()
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        await end_events(send)

    async def _tell(self, send: Send) -> None:
        while True:
            try:
                is_first = True
                async for news in self._router.watch(INTERVAL_S):
                    value = {"is_first": is_first, **news_value(news)}
                    await self._patiently(send, b"event: news\ndata: " + orjson.dumps(value) + b"\n\n")
                    is_first = False
                reason = "the router has ended the feed"
            except ServingError as error:
                reason = error.message
            await self._patiently(send, b"event: away\ndata: " + orjson.dumps({"reason": reason}) + b"\n\n")
            await asyncio.sleep(AGAIN_S)

    async def _patiently(self, send: Send, frame: bytes) -> None:
        try:
            async with asyncio.timeout(self._patience_s):
                await send_event(send, frame)
        except TimeoutError:
            raise ClientStalled from None
