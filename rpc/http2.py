"""The client's side of an HTTP/2 connection (RFC 9113), as far as calls of gRPC need it, on the event loop itself.

::

    greeting --the peer's SETTINGS--> open --GOAWAY, or no stream numbers left--> leaving --last stream ends--> lost
        '------------ closed here, broken, silent (`PING_TIMEOUT_S`), not understood ----------------------------^

What is not used is not here: no server push, no priorities, no prior HTTP/1. Header blocks are read without a dynamic
table (we announce one of size 0), so that the same bytes always mean the same headers and are read once.
"""

import asyncio
import struct
from collections.abc import Callable, Mapping
from typing import Protocol, cast

import hpack

from rpc.frames import (
    ACK,
    CANCEL,
    CONTINUATION,
    DATA,
    ENABLE_PUSH,
    END_HEADERS,
    END_STREAM,
    FRAME,
    GOAWAY,
    GOAWAY_START,
    HEADER_TABLE_SIZE,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    LONG,
    MAX_FRAME,
    MAX_FRAME_SIZE,
    MAX_STREAM,
    PING,
    PREFACE,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTING,
    SETTINGS,
    WINDOW_UPDATE,
    Malformed,
    frame,
    without_padding,
)

Headers = Mapping[bytes, bytes]

CONNECTION_WINDOW = 1 << 30
STREAM_WINDOW = 4 << 20
PING_AFTER_S = 2.0
"""A peer that owes us something and has been silent for so long is asked whether it is there."""
PING_TIMEOUT_S = 5.0
TICK_S = 0.5

_MAX_HEADERS = 1 << 16
_MAX_CACHED, _MAX_CACHED_BYTES = 64, 256


class Stream(Protocol):
    """What a connection tells of one of its streams. `on_broken` is the last that it says, and nothing here raises."""

    def on_headers(self, headers: Headers, *, is_end: bool) -> None: ...
    def on_data(self, data: bytes, *, is_end: bool) -> None: ...
    def on_reset(self, code: int) -> None: ...
    def on_broken(self, reason: str) -> None: ...


class _Unsent:
    """What a stream has still to send, and how much of it the peer would take."""

    __slots__ = ("data", "is_end", "on_sent", "window")

    def __init__(self, window: int) -> None:
        self.window = window
        self.data = bytearray()
        self.is_end = False
        self.on_sent: Callable[[], None] | None = None


class Connection(asyncio.Protocol):
    """Made by `loop.create_connection`; then await `greeted`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.greeted: asyncio.Future[None] = loop.create_future()
        """Done when the peer has said its settings. Never fails: see `is_open`."""
        self._transport: asyncio.Transport | None = None
        self.reason = ""
        """Why it is lost."""
        self._is_leaving = False
        self._rest = b""
        self._streams: dict[int, Stream] = {}
        self._next_id = 1
        self._decoder = hpack.Decoder()
        self._decoder.max_allowed_table_size = 0
        self._decoder.header_table_size = 0
        self._known: dict[bytes, Headers] = {}
        self._block: tuple[int, int, bytes] | None = None
        self._num_uncredited = 0
        self._window = self._first_window = 65535
        self._max_frame = MAX_FRAME
        self._unsent: dict[int, _Unsent] = {}
        self._heard_at = 0.0
        self._pinged_at: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._ticked_at = 0.0

    @property
    def is_lost(self) -> bool:
        return self._transport is None and self.greeted.done()

    @property
    def is_open(self) -> bool:
        """New streams may be begun."""
        return self._transport is not None and not self._is_leaving and self._next_id <= MAX_STREAM

    # -- what streams ask ---------------------------------------------------------------------------------------------

    def begin(self, stream: Stream, block: bytes, data: bytes, *, is_end: bool) -> int:
        """A new stream with its header block and its first data. Its number."""
        assert self._transport is not None and len(block) <= MAX_FRAME
        number = self._next_id
        self._next_id += 2
        self._streams[number] = stream
        unsent = self._unsent[number] = _Unsent(self._first_window)
        head = frame(HEADERS, END_HEADERS, number, block)
        if len(data) <= min(self._window, unsent.window, self._max_frame):
            self._window -= len(data)
            unsent.window -= len(data)
            self._transport.write(head + frame(DATA, END_STREAM if is_end else 0, number, data))
        else:
            self._transport.write(head)
            self.send(number, data, is_end=is_end)
        if self._timer is None:
            self._heard_at = self._ticked_at = self._loop.time()
            self._timer = self._loop.call_later(TICK_S, self._tick)
        return number

    def send(
        self, number: int, data: bytes, *, is_end: bool = False, on_sent: Callable[[], None] | None = None
    ) -> None:
        """More data of a stream. ``on_sent`` is called when all of it is with the kernel; not if the stream ends."""
        unsent = self._unsent.get(number)
        if unsent is not None:
            unsent.data += data
            unsent.is_end, unsent.on_sent = is_end, on_sent
            self._send(number, unsent)

    def credit(self, number: int, num_bytes: int) -> None:
        """So much of a stream's data has been taken: the peer may send more."""
        if number in self._streams and self._transport is not None:
            self._transport.write(frame(WINDOW_UPDATE, 0, number, LONG.pack(num_bytes)))

    def reset(self, number: int) -> None:
        """Ends a stream before its end. It is told nothing more."""
        if self._forget(number) and self._transport is not None:
            self._transport.write(frame(RST_STREAM, 0, number, LONG.pack(CANCEL)))

    def close(self, reason: str) -> None:
        """Every stream is broken by it."""
        if self._transport is not None and self._transport.get_extra_info("ssl_object") is None:
            self._transport.close()
        elif self._transport is not None:
            self._transport.abort()  # TLS takes leave by a round trip, for which a loop that ends does not wait
        self._lose(reason)

    # -- the transport's events ---------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = own = cast("asyncio.Transport", transport)  # uvloop's are none by type
        settings = (
            (HEADER_TABLE_SIZE, 0),
            (ENABLE_PUSH, 0),
            (INITIAL_WINDOW_SIZE, STREAM_WINDOW),
        )
        own.write(
            PREFACE
            + frame(SETTINGS, 0, 0, b"".join(SETTING.pack(*setting) for setting in settings))
            + frame(WINDOW_UPDATE, 0, 0, LONG.pack(CONNECTION_WINDOW - 65535))
        )

    def connection_lost(self, error: Exception | None) -> None:
        self._lose("the connection broke" if error is None else f"the connection broke: {error}")

    def data_received(self, data: bytes) -> None:
        self._heard_at = self._loop.time()
        if self._rest:
            data = self._rest + data
        position, size = 0, len(data)
        try:
            while size - position >= FRAME.size:
                high, low, kind, flags, number = FRAME.unpack_from(data, position)
                length = high << 8 | low
                if length > MAX_FRAME:
                    raise Malformed("a frame that is too long")
                end = position + FRAME.size + length
                if end > size:
                    break
                self._take(kind, flags, number & MAX_STREAM, data[position + FRAME.size : end])
                position = end
        except (Malformed, hpack.HPACKError, struct.error, IndexError) as error:
            self._abort(f"the peer sent what is no HTTP/2: {error}")
            return
        self._rest = data[position:] if position < size else b""

    # -- frames -------------------------------------------------------------------------------------------------------

    def _take(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if self._block is not None and kind != CONTINUATION:
            raise Malformed("a header block that does not end")
        if kind == DATA:
            self._take_data(flags, number, payload)
        elif kind == HEADERS:
            payload = without_padding(flags, payload)
            self._take_block(flags, number, flags, payload[5:] if flags & PRIORITY else payload)
        elif kind == CONTINUATION:
            if self._block is None or self._block[0] != number:
                raise Malformed("a continuation of nothing")
            _, first_flags, before = self._block
            self._take_block(flags, number, first_flags, before + payload)
        elif kind == WINDOW_UPDATE:
            self._take_window(number, LONG.unpack(payload)[0] & MAX_STREAM)
        elif kind == RST_STREAM:
            code = LONG.unpack(payload)[0]
            stream = self._forget(number)
            if stream is not None:
                stream.on_reset(code)
        elif kind == PING:
            if not flags & ACK:
                self._write(frame(PING, ACK, 0, payload))
        elif kind == SETTINGS:
            if not flags & ACK:
                self._take_settings(payload)
        elif kind == GOAWAY:
            last, code = GOAWAY_START.unpack_from(payload)
            self._take_goaway(last & MAX_STREAM, code, payload[GOAWAY_START.size :])
        elif kind == PUSH_PROMISE:
            raise Malformed("a promise that nobody asked for")

    def _take_data(self, flags: int, number: int, payload: bytes) -> None:
        self._num_uncredited += len(payload)
        if self._num_uncredited > CONNECTION_WINDOW // 2:
            self._write(frame(WINDOW_UPDATE, 0, 0, LONG.pack(self._num_uncredited)))
            self._num_uncredited = 0
        is_end = bool(flags & END_STREAM)
        stream = self._forget(number) if is_end else self._streams.get(number)
        if stream is not None:
            stream.on_data(without_padding(flags, payload), is_end=is_end)

    def _take_block(self, flags: int, number: int, first_flags: int, block: bytes) -> None:
        """A header block, or its beginning. Also that of a stream that is over must be read."""
        if len(block) > _MAX_HEADERS:
            raise Malformed("headers that are too long")
        self._block = None
        if not flags & END_HEADERS:
            self._block = (number, first_flags, block)
            return
        headers = self._known.get(block)
        if headers is None:
            headers = {_bytes(name): _bytes(value) for name, value in self._decoder.decode(block, raw=True)}
            if len(block) <= _MAX_CACHED_BYTES and len(self._known) < _MAX_CACHED:
                self._known[block] = headers
        is_end = bool(first_flags & END_STREAM)
        stream = self._forget(number) if is_end else self._streams.get(number)
        if stream is not None:
            stream.on_headers(headers, is_end=is_end)

    def _take_settings(self, payload: bytes) -> None:
        for name, value in SETTING.iter_unpack(payload):
            if name == INITIAL_WINDOW_SIZE:
                for unsent in self._unsent.values():
                    unsent.window += value - self._first_window
                self._first_window = value
            elif name == MAX_FRAME_SIZE:
                self._max_frame = value
        self._write(frame(SETTINGS, ACK, 0, b""))
        if not self.greeted.done():
            self.greeted.set_result(None)
        self._send_all()

    def _take_window(self, number: int, num_bytes: int) -> None:
        if number == 0:
            self._window += num_bytes
            self._send_all()
            return
        unsent = self._unsent.get(number)
        if unsent is not None:
            unsent.window += num_bytes
            self._send(number, unsent)

    def _take_goaway(self, last: int, code: int, why: bytes) -> None:
        """The peer takes no more streams. Those behind its last one it has not looked at."""
        self._is_leaving = True
        for number in [number for number in self._streams if number > last]:
            stream = self._forget(number)
            if stream is not None:
                stream.on_broken(f"it is going away ({code} {why[:100].decode('ascii', 'replace')})")
        self._close_if_left()

    # -- sending ------------------------------------------------------------------------------------------------------

    def _send_all(self) -> None:
        for number, unsent in list(self._unsent.items()):
            self._send(number, unsent)

    def _send(self, number: int, unsent: _Unsent) -> None:
        """What the windows allow."""
        data = unsent.data
        while data and (room := min(self._window, unsent.window, self._max_frame)) > 0:
            piece = bytes(data[:room])
            del data[:room]
            self._window -= len(piece)
            unsent.window -= len(piece)
            is_last = unsent.is_end and not data
            self._write(frame(DATA, END_STREAM if is_last else 0, number, piece))
            unsent.is_end = unsent.is_end and not is_last
        if data:
            return
        if unsent.is_end:
            unsent.is_end = False
            self._write(frame(DATA, END_STREAM, number, b""))
        if unsent.on_sent is not None:
            on_sent, unsent.on_sent = unsent.on_sent, None
            on_sent()

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    # -- the end ------------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        """Watches a peer on which somebody waits."""
        now = self._loop.time()
        self._timer = None
        held_up_s, self._ticked_at = now - self._ticked_at - TICK_S, now
        if held_up_s > TICK_S:  # we were not there ourselves: an answer may lie unread
            self._heard_at += held_up_s
            self._pinged_at = None if self._pinged_at is None else self._pinged_at + held_up_s
        if not self._streams:
            self._pinged_at = None
            return
        if self._pinged_at is not None and self._heard_at >= self._pinged_at:
            self._pinged_at = None
        if self._pinged_at is not None and now - self._pinged_at >= PING_TIMEOUT_S:
            self._abort(f"it has been silent for {now - self._heard_at:.0f} s")
            return
        if self._pinged_at is None and now - self._heard_at >= PING_AFTER_S:
            self._pinged_at = now
            self._write(frame(PING, 0, 0, bytes(8)))
        self._timer = self._loop.call_later(TICK_S, self._tick)

    def _forget(self, number: int) -> Stream | None:
        """The stream is over."""
        self._unsent.pop(number, None)
        stream = self._streams.pop(number, None)
        if self._is_leaving:
            self._close_if_left()
        return stream

    def _close_if_left(self) -> None:
        if not self._streams and self._transport is not None:
            self._transport.close()

    def _abort(self, reason: str) -> None:
        if self._transport is not None:
            self._transport.abort()
        self._lose(reason)

    def _lose(self, reason: str) -> None:
        """Once."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._transport, self._rest = None, b""
        self.reason = self.reason or reason
        if not self.greeted.done():
            self.greeted.set_result(None)
        streams = list(self._streams.values())
        self._streams.clear()
        self._unsent.clear()
        for stream in streams:
            stream.on_broken(reason)


def _bytes(value: bytes | str) -> bytes:
    return value if isinstance(value, bytes) else value.encode("latin-1")
