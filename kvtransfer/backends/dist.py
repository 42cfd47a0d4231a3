"""Transfers by a collective library: one two-rank process group of ``torch.distributed`` for each pair, over gloo.

For hosts between which a collective library's fabric is the one that is tuned. The owner gathers the runs of a request
into a staging buffer and sends it in chunks; D receives the chunks into a staging buffer of its own, so only D's own
copy ever writes into D's blocks, and a link that is given up is quiet at once. Sends and receives match by a number
that both sides count, never by names: a pair that matches by request ids hangs when one side lost a request.

The two processes meet over the data connection of the link, which was greeted with the token of the owner's
incarnation: no rendezvous server, and nothing that outlives the link. Nothing wakes a thread that waits in a group
except the end of the peer's half: the owner destroys its half when the data connection closes, and where the owner is
stopped, ``STUCK_S`` ends the wait of a thread that by then has nothing but its staging buffer.
"""

import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch._C._distributed_c10d import Store, Work

from core.errors import BackendFailed, ServingError
from kvtransfer.backends import wire
from kvtransfer.backends.served import ServedBackend

CHUNK_BYTES = 4 << 20
_NUM_BUFFERS = 2
"""One is copied while the other is under way."""
STUCK_S = 8.0
"""A chunk that takes longer ends its link: below the time that ``close`` waits for the link's thread."""
_RENDEZVOUS_S = 5.0

_Gloo: Any = torch.distributed.ProcessGroupGloo
"""Torch's annotations do not know the methods of its groups."""

_ENTRY = struct.Struct("<HI")
_MAX_KEY_BYTES, _MAX_VALUE_BYTES = 256, 1 << 16
_END = ""
"""The key that ends a rendezvous: from then on the connection carries requests and replies."""


def dist_backend(host: str) -> ServedBackend:
    """``host`` is the address that this worker binds and advertises."""
    return ServedBackend("dist", host=host, make_lane=GlooLane)


class GlooLane:
    """Bytes cross in a process group of the two workers; the data connection carries what was asked and answered."""

    shares_connection = False

    def __init__(self, sock: socket.socket, *, is_owner: bool) -> None:
        """Blocks until the other side is there, too. Raises OSError or BackendFailed."""
        self._peer = 1 if is_owner else 0
        self._num_chunks = 0
        self._lock = threading.Lock()
        self._is_detached = False
        self._buffers = [torch.empty(CHUNK_BYTES, dtype=torch.uint8) for _ in range(_NUM_BUFFERS)]
        self._views = [buffer.numpy().data for buffer in self._buffers]
        meeting = _Meeting(sock)
        options = _Gloo._Options()
        options._timeout = timedelta(seconds=STUCK_S)
        options._threads = 1
        try:
            options._devices = [_device(sock.getsockname()[0])]
            self._group: Any = _Gloo(meeting, 1 - self._peer, 2, options)
        except RuntimeError as error:
            raise meeting.failure or BackendFailed(f"no gloo group with the peer: {_reason(error)}") from error
        meeting.end()

    def send(self, views: list[memoryview]) -> None:
        under_way: list[Work | None] = [None] * _NUM_BUFFERS
        for turn, chunk in enumerate(_chunks(views)):
            index = turn % _NUM_BUFFERS
            _finish(under_way[index])
            filled = 0
            for part in chunk:
                self._views[index][filled : filled + len(part)] = part
                filled += len(part)
            under_way[index] = self._post(index, filled, is_send=True)
        for work in under_way:
            _finish(work)

    def receive(self, views: list[memoryview]) -> None:
        chunks = _chunks(views)
        waiting: list[tuple[int, list[memoryview], Work]] = []
        for index in range(_NUM_BUFFERS):
            self._expect(index, chunks, waiting)
        while waiting:
            index, chunk, work = waiting.pop(0)
            _finish(work)
            self._deliver(index, chunk)
            self._expect(index, chunks, waiting)

    def detach(self) -> bool:
        with self._lock:
            self._is_detached = True
        return True

    def close(self) -> None:
        self._group = None  # ends its connection, which wakes the peer

    def _deliver(self, index: int, chunk: list[memoryview]) -> None:
        taken = 0
        with self._lock:
            if self._is_detached:
                raise ConnectionError("the link was given up")
            for part in chunk:
                part[:] = self._views[index][taken : taken + len(part)]
                taken += len(part)

    def _expect(
        self, index: int, chunks: Iterator[list[memoryview]], waiting: list[tuple[int, list[memoryview], Work]]
    ) -> None:
        chunk = next(chunks, None)
        if chunk is not None:
            waiting.append((index, chunk, self._post(index, sum(map(len, chunk)), is_send=False)))

    def _post(self, index: int, num_bytes: int, *, is_send: bool) -> Work:
        assert self._group is not None, "the lane is closed"
        self._num_chunks += 1
        tensors = [self._buffers[index][:num_bytes]]
        try:
            start = self._group.send if is_send else self._group.recv
            work: Work = start(tensors, self._peer, self._num_chunks % (1 << 31))
        except RuntimeError as error:
            raise ConnectionError(_reason(error)) from error
        return work


class _Meeting(Store):
    """The keys that the two halves of a group tell each other before it stands, over the data connection.

    ::

        either side    length of the key, length of the value, key, value
    """

    def __init__(self, sock: socket.socket) -> None:
        super().__init__()
        self._sock = sock
        self._values: dict[str, bytes] = {}
        self.failure: OSError | ServingError | None = None
        """What went wrong here, if anything did: the group reports it as an error of its own."""

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._values[key] = data
        name = key.encode()
        self._sock.sendall(_ENTRY.pack(len(name), len(data)) + name + data)

    def get(self, key: str) -> bytes:
        while key not in self._values:
            self._take()
        return self._values[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def end(self) -> None:
        """Both sides have what they need: nothing of the meeting is left on the connection."""
        self.set(_END, b"")
        del self._values[_END]
        self.get(_END)

    def _take(self) -> None:
        try:
            key_bytes, value_bytes = _ENTRY.unpack(wire.receive(self._sock, _ENTRY.size, within_s=_RENDEZVOUS_S))
            if key_bytes > _MAX_KEY_BYTES or value_bytes > _MAX_VALUE_BYTES:
                raise BackendFailed("what was received is no entry of a rendezvous")
            key = wire.receive(self._sock, key_bytes, within_s=_RENDEZVOUS_S).decode(errors="replace")
            self._values[key] = bytes(wire.receive(self._sock, value_bytes, within_s=_RENDEZVOUS_S))
        except (OSError, ServingError) as error:
            self.failure = error
            raise


_devices: dict[str, object] = {}
_devices_lock = threading.Lock()


def _device(host: str) -> object:
    """The gloo device of an address of this host; it has one thread, which serves every pair."""
    with _devices_lock:
        if host not in _devices:
            _devices[host] = _Gloo.create_device(hostname=host)
        return _devices[host]


def _chunks(views: list[memoryview]) -> Iterator[list[memoryview]]:
    """The bytes of ``views`` in order, cut where ``CHUNK_BYTES`` are full. Both sides cut alike."""
    chunk: list[memoryview] = []
    room = CHUNK_BYTES
    for view in views:
        while len(view) >= room:
            chunk.append(view[:room])
            view = view[room:]
            yield chunk
            chunk, room = [], CHUNK_BYTES
        if view:
            chunk.append(view)
            room -= len(view)
    if chunk:
        yield chunk


def _finish(work: Work | None) -> None:
    if work is None:
        return
    try:
        work.wait()
    except RuntimeError as error:
        raise ConnectionError(_reason(error)) from error


def _reason(error: RuntimeError) -> str:
    """Gloo's message, without the path of its source file."""
    return str(error).partition("] ")[2] or str(error)
