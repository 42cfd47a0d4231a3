"""The frames of a data connection between two workers: D asks, the owner of the memory answers. No pickle, no lengths
without a limit.

::

    D to owner   hello     magic, version, token of the owner's incarnation, both incarnations
    owner to D   reply     operation 0: OK, or why the connection is refused (and then it is closed)
    D to owner   request   operation, region, lease and slot (or none), number of runs; then the runs (offset, bytes)
    owner to D   reply     OK, or why not (and then nothing follows)
                 payload   the bytes of all runs, in the order asked, by the lane of the backend
                 reply     what the lease slot says after the bytes

Requests are answered in the order in which they came. A hello comes within ``GREETING_S``, and a request whose first
byte has come is complete within ``FRAME_S``; whoever says anything else is disconnected. Little-endian throughout.
"""

import hmac
import socket
import struct
import time
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from core.errors import BackendFailed, LayoutMismatch
from core.handoff import LeaseRef
from core.ids import Incarnation, LeaseId

GREETING_S = 2.0
FRAME_S = 10.0
MAX_RUNS = 1 << 17
"""Of one request: 2 MiB of offsets and lengths, and 16 MiB in runs of 128 bytes."""
_MAX_DETAIL_BYTES = 512

_MAGIC = b"BATONKV1"
_REQUEST_MAGIC = b"READ"
_HELLO = struct.Struct("<8s16sQQ")
_REPLY = struct.Struct("<QHH4x")
_REQUEST = struct.Struct("<4sIQQQII16s")
_ADDRESS = struct.Struct("<16sQH")
_WITH_LEASE = 1
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3))


class Status(IntEnum):
    """Of a reply."""

    OK = 0
    STALE_LEASE = 1
    OUTSIDE = 2
    """The request leaves the owner's regions."""
    REFUSED = 3
    """The connection is not for this incarnation, or not with this token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """How an owner is reached, and the secret that proves that a dialler was told so by the handshake."""

    host: str
    port: int
    token: bytes
    incarnation: Incarnation

    def encode(self) -> bytes:
        return _ADDRESS.pack(self.token, self.incarnation, self.port) + self.host.encode()

    @classmethod
    def decode(cls, metadata: bytes) -> "Address":
        """Raises LayoutMismatch for bytes that are no address."""
        try:
            token, incarnation, port = _ADDRESS.unpack_from(metadata)
            host = metadata[_ADDRESS.size :].decode()
        except (struct.error, UnicodeDecodeError) as error:
            raise LayoutMismatch("the link metadata is no address of a data connection") from error
        return cls(host=host, port=port, token=token, incarnation=Incarnation(incarnation))


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    token: bytes
    owner: Incarnation
    dialler: Incarnation

    def encode(self) -> bytes:
        return _HELLO.pack(_MAGIC, self.token, self.owner, self.dialler)

    def is_for(self, address: Address) -> bool:
        return self.owner == address.incarnation and hmac.compare_digest(self.token, address.token)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    op: int
    status: Status = Status.OK
    detail: str = ""

    def encode(self) -> bytes:
        detail = self.detail.encode()[:_MAX_DETAIL_BYTES]
        return _REPLY.pack(self.op, self.status, len(detail)) + detail


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    op: int
    region: str
    runs: NDArray[np.uint64]
    """[run, (offset, bytes)]"""
    lease: LeaseRef | None = None
    slot: int = 0

    def encode(self) -> bytes:
        lease_id, epoch = (0, 0) if self.lease is None else (self.lease.lease_id, self.lease.epoch)
        flags = 0 if self.lease is None else _WITH_LEASE
        header = _REQUEST.pack(
            _REQUEST_MAGIC, len(self.runs), self.op, lease_id, epoch, self.slot, flags, self.region.encode()
        )
        return header + self.runs.astype("<u8").tobytes()


def receive_hello(sock: socket.socket) -> Hello:
    """Raises BackendFailed for anything else within ``GREETING_S``, OSError when the connection ends."""
    magic, token, owner, dialler = _HELLO.unpack(receive(sock, _HELLO.size, within_s=GREETING_S))
    if magic != _MAGIC:
        raise BackendFailed("what was received is no hello of this protocol")
    return Hello(token=token, owner=Incarnation(owner), dialler=Incarnation(dialler))


def receive_reply(sock: socket.socket, *, within_s: float | None = None) -> Reply:
    """Raises BackendFailed for anything else, OSError when the connection ends."""
    op, status, num_bytes = _REPLY.unpack(receive(sock, _REPLY.size, within_s=within_s))
    if status > max(Status) or num_bytes > _MAX_DETAIL_BYTES:
        raise BackendFailed("what was received is no reply of this protocol")
    detail = receive(sock, num_bytes, within_s=within_s).decode(errors="replace") if num_bytes else ""
    return Reply(op=op, status=Status(status), detail=detail)


def receive_request(sock: socket.socket) -> Request:
    """Wait for the next request as long as it takes. Raises BackendFailed for anything else, OSError when the
    connection ends."""
    first = receive(sock, 1)
    header = first + receive(sock, _REQUEST.size - 1, within_s=FRAME_S)
    magic, num_runs, op, lease_id, epoch, slot, flags, name = _REQUEST.unpack(header)
    if magic != _REQUEST_MAGIC or not 0 < num_runs <= MAX_RUNS or flags > _WITH_LEASE:
        raise BackendFailed("what was received is no request of this protocol")
    runs = np.frombuffer(receive(sock, num_runs * 16, within_s=FRAME_S), dtype="<u8").reshape(num_runs, 2)
    return Request(
        op=op,
        region=name.rstrip(b"\0").decode(errors="replace"),
        runs=runs,
        lease=LeaseRef(lease_id=LeaseId(lease_id), epoch=epoch) if flags & _WITH_LEASE else None,
        slot=slot,
    )


def receive(sock: socket.socket, num_bytes: int, *, within_s: float | None = None) -> bytearray:
    """Exactly so many bytes, within so many seconds altogether. Leaves ``sock`` blocking. Raises OSError when the
    connection or the time is over."""
    data = bytearray(num_bytes)
    view = memoryview(data)
    until = None if within_s is None else time.monotonic() + within_s
    while view:
        if until is not None:
            sock.settimeout(max(until - time.monotonic(), 1e-3))
        num_received = sock.recv_into(view, 0, socket.MSG_WAITALL)
        if num_received == 0:
            raise ConnectionResetError("the peer has closed the connection")
        view = view[num_received:]
        if view and until is not None and time.monotonic() >= until:
            raise TimeoutError("the peer sends too slowly")
    if until is not None:
        sock.settimeout(None)
    return data


def prepare(sock: socket.socket, *, send_s: float) -> None:
    """Small frames leave at once, a host that is gone is noticed, and a send that moves nothing for ``send_s``
    fails."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", int(send_s), 0))


def shut(sock: socket.socket) -> None:
    """End a connection from any thread: whoever is blocked on it wakes up, and closes it."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it never was connected, or the peer was faster
