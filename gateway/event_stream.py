"""One answer as an event stream: one write at a time, and whatever comes meanwhile makes up the next one."""

import asyncio
from collections.abc import Coroutine

from gateway.answers import Answer
from gateway.edge import Exchange
from gateway.http import ClientStalled, Scope, Send, end_events, send_event, start_events, writer_of

KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: clients skip it."""


class EventStream:
    """Sends an answer while it grows. The status line waits for the first tokens, so that an error before them has a
    true status; but not for longer than `keep_alive_s`, and a pause that long is filled by a comment.

    ::

        silent --delta or comment--> writing ---- nothing new ---> idle --delta--> idle (written at once) | writing
                                   | the client has not read for `patience_s`
                                   '--> ClientStalled: the connection is aborted
    """

    def __init__(
        self,
        exchange: Exchange,
        scope: Scope,
        send: Send,
        answer: Answer,
        *,
        patience_s: float,
        keep_alive_s: float,
    ) -> None:
        self._exchange = exchange
        self._send = send
        self._answer = answer
        self._patience_s = patience_s
        self._keep_alive_s = keep_alive_s
        self._writer = writer_of(scope)
        self._news = asyncio.Event()
        self._is_idle = False
        self._has_written = False
        """Since the last look, past this task."""
        answer.on_change = self._on_change
        self._lanes = answer.lanes if self._writer is not None else []

    async def run(self, work: Coroutine[object, object, None]) -> None:
        """Sends what `work` adds to the answer, to its end. Raises its error after what came before it was sent."""
        working = asyncio.ensure_future(work)
        working.add_done_callback(lambda _: self._news.set())
        try:
            while not working.done():
                self._is_idle = self._exchange.is_stream
                self._open_lanes()
                is_silent = not await self._has_news()
                self._is_idle = False
                self._close_lanes()
                if is_silent:
                    await self._begin()
                    await self._patiently(send_event(self._send, KEEP_ALIVE))
                await self._flush()
            working.result()
        finally:
            self._is_idle = False
            self._close_lanes()
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
        await self._flush()
        await self._patiently(end_events(self._send, self._answer.closing()))

    async def _has_news(self) -> bool:
        """Waits for them; false when nothing was sent for too long."""
        while True:
            self._has_written, num_taken = False, self._num_taken()
            try:
                async with asyncio.timeout(self._keep_alive_s):
                    await self._news.wait()
                return True
            except TimeoutError:
                if not self._has_written and self._num_taken() == num_taken:
                    return False

    def _num_taken(self) -> int:
        """Tokens that may have gone by a lane."""
        return sum(len(lane.accepted) for lane in self._lanes)

    def _open_lanes(self) -> None:
        """While nothing waits to be sent and the client reads."""
        writer = self._writer
        if self._lanes and self._is_idle and writer is not None and writer.is_ready and not self._news.is_set():
            writer.on_blocked = self._close_lanes
            for lane in self._lanes:
                lane.open_client(writer)

    def _close_lanes(self) -> None:
        for lane in self._lanes:
            lane.close_client()

    def _on_change(self) -> None:
        """While nothing waits to be sent, a delta needs no task to be woken."""
        writer = self._writer
        if self._is_idle and writer is not None and writer.is_ready and not self._news.is_set():
            frames = self._answer.frames()
            if frames:
                writer.write(frames)
                self._has_written = True
            self._open_lanes()
        else:
            self._close_lanes()
            self._news.set()

    async def _flush(self) -> None:
        self._news.clear()
        if not self._answer.has_changed:
            return
        frames = self._answer.frames()
        await self._begin()
        if frames:
            await self._patiently(send_event(self._send, frames))

    async def _begin(self) -> None:
        """The status line, once."""
        if not self._exchange.is_stream:
            self._exchange.is_stream = True
            self._exchange.failure = self._answer.failure
            await start_events(self._send)

    async def _patiently(self, sending: Coroutine[object, object, None]) -> None:
        try:
            async with asyncio.timeout(self._patience_s):
                await sending
        except TimeoutError:
            if self._writer is not None:
                self._writer.abort()
            raise ClientStalled from None
