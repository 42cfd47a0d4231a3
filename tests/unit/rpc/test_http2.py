"""The connection under our gRPC calls, against a peer that is a list of bytes."""

import asyncio
import base64
import json
import struct
from typing import Any

import hpack
import pytest

from core.errors import DeadlineExceeded, InternalError, QueueFull, WorkerLost
from rpc import http2
from rpc.call import MAX_MESSAGE_BYTES, MAX_WAITING, Call
from rpc.channel import Channel, methods_of
from rpc.frames import literal
from rpc.http2 import STREAM_WINDOW, Connection
from rpc.pb import router_pb2

DATA, HEADERS, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 5, 6, 7, 8, 9
END_STREAM = ACK = 0x1
END_HEADERS, PADDED, PRIORITY = 0x4, 0x8, 0x20

Frame = tuple[int, int, int, bytes]


def frame(kind: int, flags: int, number: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + number.to_bytes(4, "big") + payload


def long(value: int) -> bytes:
    return value.to_bytes(4, "big")


def prefixed(message: bytes) -> bytes:
    return b"\0" + long(len(message)) + message


def block(**headers: str) -> bytes:
    """As a strict encoder writes it that was told to keep no table; long values are Huffman coded."""
    encoder = hpack.Encoder()
    encoder.header_table_size = 0
    return encoder.encode(
        [(name.replace("status_", ":status").replace("_", "-"), text) for name, text in headers.items()]
    )


HEAD = frame(HEADERS, END_HEADERS, 1, block(status_="200", content_type="application/grpc"))
TRAILERS = frame(HEADERS, END_HEADERS | END_STREAM, 1, block(grpc_status="0"))


class Wire(asyncio.Transport):
    """What the connection writes, and the peer's side of it."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.is_closed = False
        self.connection = Connection(asyncio.get_running_loop())
        self.connection.connection_made(self)
        self.greeting = self.frames()
        self.say(frame(SETTINGS, 0, 0))
        self.frames()

    def write(self, data: Any) -> None:
        assert not self.is_closed, "written after the end"
        self.written += data

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def say(self, *frames: bytes) -> None:
        self.connection.data_received(b"".join(frames))

    def frames(self) -> list[Frame]:
        """What was written since the last look."""
        data = bytes(self.written).removeprefix(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        self.written.clear()
        found: list[Frame] = []
        while data:
            length, kind, flags, number = (
                int.from_bytes(data[:3], "big"),
                data[3],
                data[4],
                int.from_bytes(data[5:9], "big"),
            )
            found.append((kind, flags, number, data[9 : 9 + length]))
            data = data[9 + length :]
        return found

    def call(self, message: bytes | None = b"ask", timeout_s: float | None = None) -> Call:
        now = asyncio.get_running_loop().time()
        call = Call(self.connection, "peer", None if timeout_s is None else now + timeout_s)
        call.begin(b"", message)
        return call


async def answer_of(call: Call) -> bytes | None:
    async with asyncio.timeout(5):
        await call.ended()
        return await call.next()


async def test_a_call_is_one_message_there_and_one_back() -> None:
    wire = Wire()
    call = wire.call(b"ask")
    assert wire.frames() == [(HEADERS, END_HEADERS, 1, b""), (DATA, END_STREAM, 1, prefixed(b"ask"))]
    wire.say(HEAD, frame(DATA, 0, 1, prefixed(b"answer")), TRAILERS)
    assert await answer_of(call) == b"answer"
    assert call.error is None
    call.cancel()
    assert wire.frames() == [], "a call that is over is not reset"


@pytest.mark.parametrize("size", [1, 3, 9, 14, 1000])
async def test_where_the_bytes_are_cut_does_not_matter(size: int) -> None:
    wire = Wire()
    call = wire.call()
    messages = [b"a", b"", b"b" * 700, b"c" * 20]
    stream = b"".join(map(prefixed, messages))
    pieces = [stream[start : start + 300] for start in range(0, len(stream), 300)]
    spoken = HEAD + b"".join(frame(DATA, 0, 1, piece) for piece in pieces) + TRAILERS
    for start in range(0, len(spoken), size):
        wire.say(spoken[start : start + size])
    await call.ended()
    assert [await call.next() for _ in messages] == messages
    assert await call.next() is None
    assert call.error is None


async def test_a_typed_error_crosses_in_the_trailers() -> None:
    told = {
        "slug": "queue_full",
        "message": "voll: größer ist die Schlange",
        "param": None,
        "code": None,
        "worker_id": "d-1",
    }
    encoded = base64.b64encode(json.dumps(told).encode()).decode().rstrip("=")
    wire = Wire()
    call = wire.call()
    trailers = block(status_="200", grpc_status="8", grpc_message="voll", baton_error_bin=encoded)
    wire.say(frame(HEADERS, END_HEADERS | END_STREAM, 1, trailers))
    await call.ended()
    assert isinstance(call.error, QueueFull)
    assert (call.error.message, call.error.worker_id) == (told["message"], "d-1")


@pytest.mark.parametrize(
    ("code", "error"), [(14, WorkerLost), (1, WorkerLost), (4, DeadlineExceeded), (2, InternalError)]
)
async def test_a_status_without_a_typed_error_is_the_transports(code: int, error: type[Exception]) -> None:
    wire = Wire()
    call = wire.call()
    wire.say(HEAD, frame(HEADERS, END_HEADERS | END_STREAM, 1, block(grpc_status=str(code), grpc_message="a%20word")))
    await call.ended()
    assert type(call.error) is error
    assert call.error.worker_id == "peer"
    if error is not DeadlineExceeded:
        assert "a word" in str(call.error)


@pytest.mark.parametrize(
    ("code", "error"), [(7, WorkerLost), (8, WorkerLost), (1, InternalError), (2, InternalError), (11, InternalError)]
)
async def test_a_reset_ends_the_call(code: int, error: type[Exception]) -> None:
    wire = Wire()
    call = wire.call()
    wire.say(frame(RST_STREAM, 0, 1, long(code)))
    await call.ended()
    assert type(call.error) is error
    wire.say(frame(DATA, 0, 1, prefixed(b"late")), TRAILERS)
    assert await call.next() is None


async def test_headers_in_parts_with_padding_and_priority_are_headers() -> None:
    wire = Wire()
    call = wire.call()
    whole = block(status_="200", content_type="application/grpc")
    padded = bytes((4,)) + bytes(5) + whole[:3] + bytes(4)
    wire.say(
        frame(HEADERS, PADDED | PRIORITY, 1, padded),
        frame(CONTINUATION, 0, 1, whole[3:7]),
        frame(CONTINUATION, END_HEADERS, 1, whole[7:]),
        frame(DATA, PADDED, 1, bytes((2,)) + prefixed(b"x") + bytes(2)),
        frame(0x77, 0, 1, b"a kind that we do not know"),
        TRAILERS,
    )
    assert await answer_of(call) == b"x"


@pytest.mark.parametrize(
    "spoken",
    [
        frame(DATA, PADDED, 1, bytes((9,)) + b"x"),
        frame(PUSH_PROMISE, END_HEADERS, 1, long(2)),
        frame(CONTINUATION, END_HEADERS, 1, b""),
        frame(HEADERS, 0, 1, b"") + frame(DATA, 0, 1, b""),
        frame(HEADERS, END_HEADERS, 1, b"\xff\xff\xff"),
        frame(WINDOW_UPDATE, 0, 1, b"abc"),
        frame(SETTINGS, 0, 0, b"abc"),
        frame(GOAWAY, 0, 0, b""),
        b"HTTP/1.1 400 Bad Request\r\n\r\n" * 3,
        frame(HEADERS, 0, 1, bytes(10000)) + 7 * frame(CONTINUATION, 0, 1, bytes(10000)),
    ],
)
async def test_a_peer_that_speaks_no_http2_is_lost(spoken: bytes) -> None:
    wire = Wire()
    call = wire.call()
    wire.say(spoken)
    await call.ended()
    assert isinstance(call.error, WorkerLost)
    assert wire.is_closed
    assert not wire.connection.is_open


@pytest.mark.parametrize("data", [b"\1" + long(1) + b"x", b"\0" + long(MAX_MESSAGE_BYTES + 1)])
async def test_a_message_that_is_compressed_or_too_long_ends_its_call_only(data: bytes) -> None:
    wire = Wire()
    call, other = wire.call(), wire.call()
    wire.frames()
    wire.say(HEAD, frame(DATA, 0, 1, data))
    await call.ended()
    assert isinstance(call.error, InternalError)
    assert wire.frames() == [(RST_STREAM, 0, 1, long(8))]
    wire.say(frame(HEADERS, END_HEADERS | END_STREAM, 3, block(status_="200", grpc_status="0")))
    await other.ended()
    assert other.error is None


async def test_an_end_without_a_status_is_an_error() -> None:
    wire = Wire()
    call = wire.call()
    wire.say(HEAD, frame(DATA, END_STREAM, 1, prefixed(b"x")))
    assert await answer_of(call) == b"x"
    assert isinstance(call.error, InternalError)


# -- windows ----------------------------------------------------------------------------------------------------------


async def test_a_long_message_waits_for_the_peers_windows() -> None:
    wire = Wire()
    message = bytes(range(256)) * 1000
    wire.call(message)
    sent = wire.frames()
    assert sum(len(payload) for kind, _, _, payload in sent if kind == DATA) == 65535
    assert all(len(payload) <= 16384 for _, _, _, payload in sent)
    wire.say(frame(WINDOW_UPDATE, 0, 1, long(1 << 20)))
    assert wire.frames() == [], "the connection's window is closed still"
    wire.say(frame(WINDOW_UPDATE, 0, 0, long(100)))
    wire.say(frame(WINDOW_UPDATE, 0, 0, long(1 << 20)))
    sent += wire.frames()
    assert b"".join(payload for kind, _, _, payload in sent if kind == DATA) == prefixed(message)
    assert [flags for kind, flags, _, _ in sent if kind == DATA and flags] == [END_STREAM]
    assert sent[-1][1] == END_STREAM


async def test_new_settings_change_the_windows_of_streams_that_run() -> None:
    wire = Wire()
    wire.say(frame(WINDOW_UPDATE, 0, 0, long(1 << 20)), frame(SETTINGS, 0, 0, struct.pack(">HL", 4, 10)))
    wire.frames()
    wire.call(b"x" * 50)
    assert [len(payload) for kind, _, _, payload in wire.frames() if kind == DATA] == [10]
    wire.say(frame(SETTINGS, 0, 0, struct.pack(">HLHL", 4, 100, 5, 20000)))
    assert [len(payload) for kind, _, _, payload in wire.frames() if kind == DATA] == [45]


async def test_a_sender_waits_until_its_message_is_on_its_way() -> None:
    wire = Wire()
    call = wire.call(None)
    sending = asyncio.ensure_future(call.send(bytes(100_000)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not sending.done()
    wire.say(frame(WINDOW_UPDATE, 0, 0, long(1 << 20)), frame(WINDOW_UPDATE, 0, 1, long(1 << 20)))
    async with asyncio.timeout(5):
        await sending
    call.end_sending()
    assert wire.frames()[-1] == (DATA, END_STREAM, 1, b"")


async def test_a_message_longer_than_the_window_arrives() -> None:
    wire = Wire()
    call = wire.call()
    message = prefixed(bytes(STREAM_WINDOW + 100_000))
    left = STREAM_WINDOW
    wire.say(HEAD)
    for start in range(0, len(message), 16384):
        piece = message[start : start + 16384]
        left -= len(piece)
        assert left >= 0, "the peer had to stop"
        wire.say(frame(DATA, 0, 1, piece))
        left += sum(
            int.from_bytes(p, "big") for kind, _, number, p in wire.frames() if (kind, number) == (WINDOW_UPDATE, 1)
        )
    wire.say(TRAILERS)
    answer = await answer_of(call)
    assert answer is not None
    assert len(answer) == STREAM_WINDOW + 100_000


async def test_a_stream_that_nobody_reads_is_bounded() -> None:
    wire = Wire()
    call = wire.call()
    message = frame(DATA, 0, 1, prefixed(bytes(16000)))
    wire.say(HEAD, *[message] * (MAX_WAITING + STREAM_WINDOW // 16000))
    granted = sum(int.from_bytes(p, "big") for kind, _, _, p in wire.frames() if kind == WINDOW_UPDATE)
    assert granted <= STREAM_WINDOW // 2 + 16384, "credit beyond what was taken"
    for _ in range(MAX_WAITING + STREAM_WINDOW // 16000):
        await call.next()
    assert any(kind == WINDOW_UPDATE for kind, _, _, _ in wire.frames())


async def test_the_window_of_the_connection_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http2, "CONNECTION_WINDOW", 100_000)
    wire = Wire()
    wire.call()
    wire.say(HEAD, *[frame(DATA, 0, 1, bytes(10_000))] * 3, *[frame(DATA, 0, 99, bytes(10_000))] * 3)
    credited = [
        int.from_bytes(p, "big")
        for kind, _, number, p in wire.greeting + wire.frames()
        if (kind, number) == (WINDOW_UPDATE, 0)
    ]
    assert credited == [100_000 - 65535, 60_000], "data of streams that are over counts too"


# -- ends -------------------------------------------------------------------------------------------------------------


async def test_a_peer_that_goes_away_finishes_what_it_has_begun() -> None:
    wire = Wire()
    running, unseen = wire.call(), wire.call()
    wire.say(frame(GOAWAY, 0, 0, long(1) + long(0)))
    await unseen.ended()
    assert isinstance(unseen.error, WorkerLost)
    assert not wire.connection.is_open
    assert not wire.is_closed
    wire.say(HEAD, frame(DATA, 0, 1, prefixed(b"x")), TRAILERS)
    assert await answer_of(running) == b"x"
    assert running.error is None
    assert wire.is_closed


async def test_a_connection_without_numbers_left_takes_no_more_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire()
    wire.connection._next_id = (1 << 31) - 1
    assert wire.connection.is_open
    wire.call()
    assert not wire.connection.is_open


@pytest.mark.parametrize("error", [None, ConnectionResetError("reset")])
async def test_a_lost_connection_ends_every_call(error: Exception | None) -> None:
    wire = Wire()
    calls = [wire.call() for _ in range(3)]
    wire.connection.connection_lost(error)
    for call in calls:
        await call.ended()
        assert isinstance(call.error, WorkerLost)
        call.cancel()


async def test_a_connection_that_is_lost_in_the_moment_it_was_made_is_a_lost_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wire = Wire()
    channel = Channel("peer:1", worker_id="peer")

    async def connect() -> Connection:
        asyncio.get_running_loop().call_soon(wire.connection.connection_lost, None)
        return wire.connection

    monkeypatch.setattr(channel, "_connect", connect)
    with pytest.raises(WorkerLost):
        await channel.call(methods_of(router_pb2.DESCRIPTOR, "Router")["Status"], router_pb2.Empty(), timeout_s=5)
    await channel.close()


async def test_a_deadline_is_told_to_the_peer_as_the_end_of_the_call() -> None:
    wire = Wire()
    call = wire.call(timeout_s=0.0)
    wire.frames()
    async with asyncio.timeout(5):
        await call.ended()
    assert isinstance(call.error, DeadlineExceeded)
    assert wire.frames() == [(RST_STREAM, 0, 1, long(8))]


async def test_the_peers_timer_may_be_the_first_to_ring() -> None:
    wire = Wire()
    call = wire.call(timeout_s=0.0)
    wire.say(frame(RST_STREAM, 0, 1, long(8)))
    await call.ended()
    assert isinstance(call.error, DeadlineExceeded)


async def test_a_silent_peer_is_asked_and_then_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("PING_AFTER_S", 0.02), ("PING_TIMEOUT_S", 0.05), ("TICK_S", 0.01)):
        monkeypatch.setattr(http2, name, value)
    wire = Wire()
    call = wire.call()
    for _ in range(3):  # while it answers it is there
        async with asyncio.timeout(5):
            while not any(kind == PING for kind, _, _, _ in wire.frames()):
                await asyncio.sleep(0.001)
        wire.say(frame(PING, ACK, 0, bytes(8)))
    async with asyncio.timeout(5):
        await call.ended()
    assert isinstance(call.error, WorkerLost)
    assert "silent" in call.error.message
    assert wire.is_closed


async def test_who_was_held_up_himself_does_not_call_the_peer_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire()
    call, connection = wire.call(), wire.connection
    assert connection._timer is not None
    connection._timer.cancel()
    now = asyncio.get_running_loop().time()

    class Loop:
        def time(self) -> float:
            return now

        def call_later(self, delay: float, callback: object) -> asyncio.TimerHandle:
            return asyncio.get_running_loop().call_later(3600, lambda: None)

    monkeypatch.setattr(connection, "_loop", Loop())

    def tick(after_s: float = http2.TICK_S) -> bool:
        nonlocal now
        now += after_s
        if connection._timer is not None:
            connection._timer.cancel()
        connection._tick()
        return not wire.is_closed

    assert all(tick() for _ in range(5))
    assert [kind for kind, *_ in wire.frames()].count(PING) == 1
    assert tick(30.0), "a process that was stopped goes on"
    wire.say(frame(PING, ACK, 0, bytes(8)))
    assert all(tick() for _ in range(4))
    assert tick(30.0)
    num_ticks = 0
    while tick():
        num_ticks += 1
    assert 5 <= (num_ticks + 2) * http2.TICK_S <= 7
    await call.ended()
    assert isinstance(call.error, WorkerLost)


async def test_pings_and_settings_are_answered() -> None:
    wire = Wire()
    wire.say(
        frame(PING, 0, 0, b"12345678"), frame(PING, ACK, 0, bytes(8)), frame(SETTINGS, 0, 0), frame(SETTINGS, ACK, 0)
    )
    assert wire.frames() == [(PING, ACK, 0, b"12345678"), (SETTINGS, ACK, 0, b"")]


@pytest.mark.parametrize("length", [0, 1, 126, 127, 128, 254, 255, 300, 20_000])
def test_our_headers_are_read_as_written(length: int) -> None:
    value = b"v" * length
    decoder = hpack.Decoder()
    decoder.max_header_list_size = 1 << 20
    assert [tuple(one) for one in decoder.decode(literal(b"name", value), raw=True)] == [(b"name", value)]
