"""One call of gRPC on an HTTP/2 stream: messages behind a length, and a status in the trailers."""

import asyncio
import struct
import urllib.parse
from collections import deque
from collections.abc import Callable
from functools import partial

from core.errors import InternalError, ServingError
from rpc.errors import (
    CANCELLED,
    DEADLINE_EXCEEDED,
    INTERNAL,
    METADATA_KEY,
    OK,
    RESOURCE_EXHAUSTED,
    UNAVAILABLE,
    UNKNOWN,
    from_status,
)
from rpc.frames import CANCEL
from rpc.http2 import STREAM_WINDOW, Connection, Headers

MAX_MESSAGE_BYTES = 64 << 20
MAX_WAITING = 64
"""Messages of a stream that nobody has taken yet; the peer may send no more until somebody does."""

_OF_RESET = {CANCEL: CANCELLED, 7: UNAVAILABLE, 11: RESOURCE_EXHAUSTED}
_PREFIX = struct.Struct(">BL")
_ERROR = METADATA_KEY.encode()


class Call:
    """One call: messages as they come, and in the end a status.

    ::

        running --trailers, reset, lost connection, deadline, cancel--> over (once; what came before can still be taken)
    """

    def __init__(
        self, connection: Connection, peer: str, deadline: float | None, take: Callable[[bytes], None] | None = None
    ) -> None:
        """``take`` is given each message where it arrives, instead of `next`; what it raises (a typed error) ends the
        call."""
        self._loop = asyncio.get_running_loop()
        self._connection = connection
        self._peer = peer
        self._deadline = deadline
        self._number = 0
        self._messages: deque[bytes] = deque()
        self._take = self._messages.append if take is None else take
        self._partial = bytearray()
        self._needed = _PREFIX.size
        self._num_uncredited = 0
        self._is_over = False
        self.error: ServingError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer = None if deadline is None else self._loop.call_at(deadline, self._on_deadline)

    def begin(self, block: bytes, message: bytes | None) -> None:
        """Sends the headers; with a message, it is the only one."""
        data = b"" if message is None else _PREFIX.pack(0, len(message)) + message
        self._number = self._connection.begin(self, block, data, is_end=message is not None)

    async def send(self, message: bytes) -> None:
        """One more message. Returns when the peer has room for it."""
        if self._is_over:
            return
        sent = self._loop.create_future()
        data = _PREFIX.pack(0, len(message)) + message
        self._connection.send(self._number, data, on_sent=partial(_set, sent))
        await sent

    def end_sending(self) -> None:
        if not self._is_over:
            self._connection.send(self._number, b"", is_end=True)

    async def next(self) -> bytes | None:
        """The next message; None when the call is over and has none left. Then `error` says how it ended."""
        while not self._messages:
            if self._is_over:
                return None
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        message = self._messages.popleft()
        self._credit()
        return message

    async def ended(self) -> None:
        """Waits for the end, takes nothing."""
        while not self._is_over:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def cancel(self, error: ServingError | None = None) -> None:
        """Tells the peer that nobody waits any more. Has no effect on a call that is over."""
        if not self._is_over:
            self._connection.reset(self._number)
            self._end(error)

    # -- the stream's events ------------------------------------------------------------------------------------------

    def on_headers(self, headers: Headers, *, is_end: bool) -> None:
        if not is_end:
            if headers.get(b":status") != b"200":
                self.cancel(InternalError(f"{self._peer} answered as no gRPC server does"))
            return
        try:
            code = int(headers.get(b"grpc-status", b""))
        except ValueError:
            code = UNKNOWN
        if code == OK:
            self._end(None)
        else:
            message = urllib.parse.unquote(headers.get(b"grpc-message", b"").decode("latin-1"))
            self._fail(code, message, headers.get(_ERROR))

    def on_data(self, data: bytes, *, is_end: bool) -> None:
        self._num_uncredited += len(data)
        if self._partial:
            self._partial += data
            if len(self._partial) < self._needed:
                self._credit()
                return
            data = bytes(self._partial)
            self._partial.clear()
        position = 0
        while True:
            left, self._needed = len(data) - position, _PREFIX.size
            if left < self._needed:
                break
            is_compressed, length = _PREFIX.unpack_from(data, position)
            if is_compressed or length > MAX_MESSAGE_BYTES:
                self.cancel(InternalError(f"{self._peer} sent a message that is compressed or too long"))
                return
            self._needed += length
            if left < self._needed:
                break
            try:
                self._take(data[position + _PREFIX.size : position + self._needed])
            except ServingError as error:
                self.cancel(error)
            if self._is_over:
                return
            position += self._needed
        if left:
            self._partial += data[position:]
        self._credit()
        if is_end:
            self._fail(INTERNAL, "it ended the call without a status")
        elif self._messages:
            self._wake()

    def on_reset(self, code: int) -> None:
        self._fail(_OF_RESET.get(code, INTERNAL), f"it reset the call ({code})")

    def on_broken(self, reason: str) -> None:
        self._fail(UNAVAILABLE, reason)

    # -- the end ------------------------------------------------------------------------------------------------------

    def _credit(self) -> None:
        """The peer may send on while what it sent is being taken, or is no whole message yet."""
        if self._num_uncredited > STREAM_WINDOW // 2 and len(self._messages) < MAX_WAITING:
            self._connection.credit(self._number, self._num_uncredited)
            self._num_uncredited = 0

    def _on_deadline(self) -> None:
        self.cancel(from_status(DEADLINE_EXCEEDED, "", None, worker_id=self._peer))

    def _fail(self, code: int, message: str, encoded: bytes | None = None) -> None:
        # The server's own timer may be the first to ring.
        if code == CANCELLED and self._deadline is not None and self._loop.time() >= self._deadline:
            code = DEADLINE_EXCEEDED
        self._end(from_status(code, message, encoded, worker_id=self._peer))

    def _end(self, error: ServingError | None) -> None:
        if self._is_over:
            return
        self._is_over = True
        self.error = error
        if self._timer is not None:
            self._timer.cancel()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None:
            _set(self._waiter)


def _set(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
