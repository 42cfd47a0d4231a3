"""TLS on a data connection: a socket whose bytes are encrypted, for two threads at one end.

One thread may be blocked in reading while another one sends: OpenSSL's own sockets allow only one of them at a time, so
here TLS works on buffers, under a lock that nobody holds while he waits for the network. Bytes that the kernel would
not take are kept, and go first at the next sending.
"""

import socket
import ssl
import threading
import time
from collections.abc import Iterable
from typing import Any

from core.credentials import Credentials
from core.errors import BackendFailed
from core.security_config import Identity

_PIECE_BYTES = 1 << 18
_RECORD_BYTES = 1 << 14
"""Of TLS, the largest."""


class SecureSocket(socket.socket):
    """Takes the place of ``plain``, which is not to be used any more. Then ``shake_hands``. Flags other than
    MSG_DONTWAIT mean nothing here: callers go on where less has come than they asked for."""

    def __init__(self, plain: socket.socket, context: ssl.SSLContext, *, server_name: str | None) -> None:
        """``server_name``: whose certificate the other side has to show; None at the side that was dialled."""
        timeout = plain.gettimeout()
        super().__init__(plain.family, plain.type, plain.proto, fileno=plain.detach())
        self.settimeout(timeout)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server_name is None, server_hostname=server_name
        )
        self._lock = threading.Lock()
        """Over all of TLS and ``_unsent``."""
        self._unsent = bytearray()

    @property
    def is_sending(self) -> bool:
        """Something waits for the kernel: ``send`` nothing to go on."""
        return bool(self._unsent)

    def shake_hands(self, *, within_s: float) -> None:
        """Raises OSError, that of a certificate that is no good included."""
        until = time.monotonic() + within_s
        while True:
            self.settimeout(max(until - time.monotonic(), 1e-3))
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self._push()
                if not self._fill():
                    raise ConnectionResetError("the peer has closed the connection") from None
            except ssl.SSLError:
                self._push()  # it is told why
                raise
            if time.monotonic() >= until:
                raise TimeoutError("the peer does not finish the handshake")
        self._push()
        self.settimeout(None)

    def names(self) -> list[str]:
        """The DNS names that the peer has proven."""
        shown: Any = self._tls.getpeercert() or {}
        return [name for kind, name in shown.get("subjectAltName", ()) if kind == "DNS"]

    # -- as of a plain socket -----------------------------------------------------------------------------------------

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        view = memoryview(buffer).cast("B")
        while True:
            with self._lock:
                try:
                    return self._tls.read(nbytes or len(view), view)  # type: ignore[return-value]
                except ssl.SSLWantReadError:
                    pass
                except ssl.SSLZeroReturnError:
                    return 0
            if not self._fill():
                return 0

    def recvmsg_into(self, buffers: Iterable[Any], ancbufsize: int = 0, flags: int = 0) -> Any:
        views = list(buffers)
        if len(views[0]) >= _RECORD_BYTES:
            return self.recv_into(views[0]), [], 0, None
        # Small ones together, for each reading costs as much as thousands of bytes.
        scratch = memoryview(bytearray(min(sum(map(len, views)), _RECORD_BYTES)))
        num_received, position = self.recv_into(scratch), 0
        for view in views:
            part = scratch[position : min(position + len(view), num_received)]
            view[: len(part)] = part
            position += len(part)
            if position >= num_received:
                break
        return num_received, [], 0, None

    def sendmsg(self, buffers: Iterable[Any], ancdata: Any = (), flags: int = 0, address: Any = None) -> int:
        num_sent, small = 0, bytearray()
        for buffer in buffers:
            num_sent += len(buffer)
            if len(buffer) < _RECORD_BYTES:
                small += buffer  # together: each encryption makes a record
                if len(small) < _PIECE_BYTES:
                    continue
                buffer = b""
            self.sendall(small)
            small.clear()
            self.sendall(buffer)
        self.sendall(small)
        return num_sent

    def sendall(self, data: Any, flags: int = 0) -> None:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _PIECE_BYTES):
            with self._lock:
                self._encrypt(view[start : start + _PIECE_BYTES])
            self._push()

    def send(self, data: Any, flags: int = 0) -> int:
        """With MSG_DONTWAIT: all of ``data`` or, while older bytes wait, BlockingIOError."""
        if not flags & socket.MSG_DONTWAIT:
            self.sendall(data)
            return len(data)
        with self._lock:
            self._push_now()
            if self._unsent:
                raise BlockingIOError("the kernel takes nothing more now")
            self._encrypt(memoryview(data))
            self._push_now()
        return len(data)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _encrypt(self, view: memoryview) -> None:
        while view:
            view = view[self._tls.write(view) :]
        self._unsent += self._outgoing.read()

    def _push_now(self) -> None:
        """What the kernel takes."""
        while self._unsent:
            try:
                del self._unsent[: super().send(self._unsent, socket.MSG_DONTWAIT)]
            except BlockingIOError:
                return

    def _push(self) -> None:
        """All of it, with waiting. Only for an end whose one thread sends."""
        with self._lock:
            self._unsent += self._outgoing.read()
            data = bytes(self._unsent)
            self._unsent.clear()
        super().sendall(data)

    def _fill(self) -> bool:
        """Wait for more of the peer's. False at its end."""
        data = super().recv(_PIECE_BYTES)
        if not data:
            return False
        with self._lock:
            self._incoming.write(data)
        return True


class DataSecurity:
    """What both ends of a data connection prove: that they are workers of this cluster."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._name = credentials.name(Identity.WORKER)

    def dialled(self, plain: socket.socket) -> SecureSocket:
        """The end that was dialled."""
        return SecureSocket(plain, self._credentials.current().data_server, server_name=None)

    def dialling(self, plain: socket.socket) -> SecureSocket:
        return SecureSocket(plain, self._credentials.current().data_client, server_name=self._name)

    def check(self, sock: SecureSocket) -> None:
        """Of who has dialled. Raises BackendFailed."""
        names = sock.names()
        if self._name not in names:
            said = ", ".join(names) or "nobody"
            raise BackendFailed(f"data connections are for {self._name}; the caller's certificate names {said}")
