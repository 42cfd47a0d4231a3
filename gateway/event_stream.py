"""One answer as an event stream: one write at a time, and whatever comes meanwhile makes up the next one."""

import asyncio
from collections.abc import Coroutine

from gateway.answers import Answer
from gateway.edge import Exchange
from gateway.http import Send, end_events, send_event, start_events


class EventStream:
    """Sends an answer while it grows. The status line waits for the first tokens, so that an error before them has a
    true status."""

    def __init__(self, exchange: Exchange, send: Send, answer: Answer) -> None:
        self._exchange = exchange
        self._send = send
        self._answer = answer
        self._news = asyncio.Event()
        answer.on_change = self._news.set

    async def run(self, work: Coroutine[object, object, None]) -> None:
        """Sends what `work` adds to the answer, to its end. Raises its error after what came before it was sent."""
        working = asyncio.ensure_future(work)
        working.add_done_callback(lambda _: self._news.set())
        try:
            while not working.done():
                await self._news.wait()
                await self._flush()
            working.result()
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
        await self._flush()
        await end_events(self._send, self._answer.closing())

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
            await send_event(self._send, frames)
