"""One answer as an event stream: one write at a time, and whatever comes meanwhile makes up the next one."""

import asyncio
from collections.abc import Coroutine

from gateway.answers import Answer
from gateway.edge import Exchange
from gateway.http import DIRECT_WRITER, ClientStalled, Scope, Send, Writer, end_events, send_event, start_events


class EventStream:
    """Sends an answer while it grows. The status line waits for the first tokens, so that an error before them has a
    true status.

    ::

        silent --first delta--> writing --------- nothing new ----> idle --delta--> idle (written at once) | writing
                                   | the client has not read for `patience_s`
                                   '--> ClientStalled: the connection is aborted
    """

    def __init__(self, exchange: Exchange, scope: Scope, send: Send, answer: Answer, *, patience_s: float) -> None:
        self._exchange = exchange
        self._send = send
        self._answer = answer
        self._patience_s = patience_s
        self._writer: Writer | None = scope.get("extensions", {}).get(DIRECT_WRITER)
        self._news = asyncio.Event()
        self._is_idle = False
        answer.on_change = self._on_change

    async def run(self, work: Coroutine[object, object, None]) -> None:
        """Sends what `work` adds to the answer, to its end. Raises its error after what came before it was sent."""
        working = asyncio.ensure_future(work)
        working.add_done_callback(lambda _: self._news.set())
        try:
            while not working.done():
                self._is_idle = self._exchange.is_stream
                await self._news.wait()
                self._is_idle = False
                await self._flush()
            working.result()
        finally:
            self._is_idle = False
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
        await self._flush()
        await self._patiently(end_events(self._send, self._answer.closing()))

    def _on_change(self) -> None:
        """While nothing waits to be sent, a delta needs no task to be woken."""
        writer = self._writer
        if self._is_idle and writer is not None and writer.is_ready and not self._news.is_set():
            frames = self._answer.frames()
            if frames:
                writer.write(frames)
        else:
            self._news.set()

    async def _flush(self) -> None:
        self._news.clear()
        if not self._answer.has_changed:
            return
        frames = self._answer.frames()
        if not self._exchange.is_stream:
            self._exchange.is_stream = True
            self._exchange.failure = self._answer.failure
            await start_events(self._send)
        if frames:
            await self._patiently(send_event(self._send, frames))

    async def _patiently(self, sending: Coroutine[object, object, None]) -> None:
        try:
            async with asyncio.timeout(self._patience_s):
                await sending
        except TimeoutError:
            if self._writer is not None:
                self._writer.abort()
            raise ClientStalled from None
