"""HTTP/2 as bytes (RFC 9113): the frames, and headers as we write them (RFC 7541)."""

import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME = struct.Struct(">HBBBL")  # length in two parts, type, flags, stream
SETTING = struct.Struct(">HL")
LONG = struct.Struct(">L")
GOAWAY_START = struct.Struct(">LL")
MAX_FRAME = 1 << 14
MAX_STREAM = (1 << 31) - 1

DATA, HEADERS, RST_STREAM, SETTINGS, PUSH_PROMISE = 0, 1, 3, 4, 5
PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
HEADER_TABLE_SIZE, ENABLE_PUSH, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE = 1, 2, 4, 5
CANCEL = 8


class Malformed(Exception):
    """The peer does not speak HTTP/2 as we know it."""


def frame(kind: int, flags: int, number: int, payload: bytes) -> bytes:
    length = len(payload)
    return FRAME.pack(length >> 8, length & 0xFF, kind, flags, number) + payload


def without_padding(flags: int, payload: bytes) -> bytes:
    if not flags & PADDED:
        return payload
    num_padding = payload[0]
    if num_padding >= len(payload):
        raise Malformed("more padding than frame")
    return payload[1 : len(payload) - num_padding]


def literal(name: bytes, value: bytes) -> bytes:
    """A header in a block (RFC 7541, 6.2.2): never indexed by the peer, so it means the same in every block."""
    return b"\0" + _length(len(name)) + name + _length(len(value)) + value


def _length(number: int) -> bytes:
    """An integer in a prefix of seven bits."""
    if number < 127:
        return bytes((number,))
    coded = bytearray((127,))
    number -= 127
    while number >= 128:
        coded.append(number & 127 | 128)
        number >>= 7
    coded.append(number)
    return bytes(coded)
