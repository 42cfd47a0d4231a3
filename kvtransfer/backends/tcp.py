"""Transfers over plain sockets, sent by the owner of the memory: scatter-gather, no copy of ours at either end.

The sane path on plain Ethernet: UCX emulates one-sided access over TCP at a third to a half of this rate, goes on
writing after a handle was released, and can abort the owner when its reader dies (docs/adr/0014). Here the owner checks
every request, and closing the socket is the end of the bytes.
"""

import socket

from core.credentials import Credentials
from kvtransfer.backends.secure import DataSecurity
from kvtransfer.backends.served import ServedBackend

_MAX_VIEWS = 1024
"""IOV_MAX: buffers of one system call."""


def tcp_backend(host: str, credentials: Credentials | None = None) -> ServedBackend:
    """``host`` is the address that this worker binds and advertises. With ``credentials`` everything crosses in TLS."""
    security = None if credentials is None else DataSecurity(credentials)
    return ServedBackend("tcp", host=host, make_lane=SocketLane, security=security)


class SocketLane:
    """Bytes cross on the data connection itself."""

    shares_connection = True

    def __init__(self, sock: socket.socket, *, is_owner: bool) -> None:
        self._sock = sock

    def send(self, views: list[memoryview]) -> None:
        """Raises BlockingIOError when the peer takes nothing for the send limit of the socket."""
        for start in range(0, len(views), _MAX_VIEWS):
            part = views[start : start + _MAX_VIEWS]
            while part:
                part = _rest(part, self._sock.sendmsg(part, (), socket.MSG_MORE))

    def receive(self, views: list[memoryview]) -> None:
        for start in range(0, len(views), _MAX_VIEWS):
            part = views[start : start + _MAX_VIEWS]
            while part:
                num_received = self._sock.recvmsg_into(part, 0, socket.MSG_WAITALL)[0]
                if num_received == 0:
                    raise ConnectionResetError("the peer has closed the connection")
                part = _rest(part, num_received)

    def detach(self) -> bool:
        return False

    def close(self) -> None:
        """The socket is its connection's."""


def _rest(views: list[memoryview], num_bytes: int) -> list[memoryview]:
    """What is left of ``views`` after their first ``num_bytes``."""
    index = 0
    while index < len(views) and num_bytes >= len(views[index]):
        num_bytes -= len(views[index])
        index += 1
    rest = views[index:]
    if num_bytes:
        rest[0] = rest[0][num_bytes:]
    return rest
