"""The serving half of the backends in which the owner of the memory sends: D asks over a data connection, the owner
checks and sends.

The port is reachable by others than the peers of the handshake. A connection is refused unless it presents the token
of this incarnation; connections, those that have not yet greeted, and the frames of each are bounded in number, size
and time. What a peer asks for is checked here once more: runs inside the regions that were declared, and, where a
lease is named, that its slot shows the lease, its epoch and a live state, before the bytes are sent and after.

One thread accepts, and one serves each connection: blocked without the GIL while the kernel copies, and as long as a
peer that was stopped does not read, but no longer than ``STUCK_S``. ``close`` ends them all.
"""

import logging
import secrets
import socket
import threading
import time
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from core.errors import BackendFailed, LayoutMismatch, ServingError, StaleLease
from core.handoff import LeaseRef
from core.ids import format_incarnation
from kvtransfer.backends import wire
from kvtransfer.backends.base import Identity
from kvtransfer.backends.secure import DataSecurity
from kvtransfer.backends.wire import Address, Reply, Request, Status
from kvtransfer.layout import Region
from kvtransfer.memory import CELL_BYTES, REGION_SLOTS, view_memory
from kvtransfer.validate import check_slot

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 256
MAX_GREETING = 32
"""Connections that have not shown their token yet."""
STUCK_S = 30.0
"""A send that moves nothing for so long ends its connection."""
_JOIN_S = 10.0
_ACCEPT_PAUSE_S = 0.05


class Lane(Protocol):
    """How the bytes of one operation cross a connection. Each method is called by the thread of its side, in the same
    order on both."""

    shares_connection: bool
    """The bytes follow the reply on the data connection: the kernel may wait for them before it sends the reply."""

    def send(self, views: list[memoryview]) -> None:
        """Raises OSError or BackendFailed; then the connection is over."""

    def receive(self, views: list[memoryview]) -> None:
        """The other end of ``send``. When it has returned or raised, nothing is written any more."""

    def detach(self) -> bool:
        """From any thread: when True is returned, a ``receive`` that is under way writes nothing to its views any more.
        False if only the end of the connection stops it."""

    def close(self) -> None: ...


class MakeLane(Protocol):
    def __call__(self, sock: socket.socket, *, is_owner: bool) -> Lane:
        """For a connection whose greeting is over; the other side does the same. Raises OSError or BackendFailed."""


class Memory:
    """The regions of this process, as they were declared."""

    def __init__(self, regions: tuple[Region, ...]) -> None:
        self._views = {
            region.memory.name: view_memory(region.memory.address, region.memory.num_bytes).data for region in regions
        }

    def views(self, region: str, runs: NDArray[np.int64] | NDArray[np.uint64]) -> list[memoryview]:
        """The bytes of each run (offset, bytes), all of which lie inside the region."""
        view = self._views[region]
        return [view[offset : offset + size] for offset, size in runs.tolist()]

    def asked(self, request: Request) -> list[memoryview]:
        """What a peer asks for. Raises LayoutMismatch unless all of it lies inside the region."""
        view = self._views.get(request.region)
        if view is None:
            raise LayoutMismatch(f"there is no region {request.region!r} here")
        offsets, sizes = request.runs[:, 0], request.runs[:, 1]
        if (sizes == 0).any() or (sizes > len(view)).any() or (offsets > len(view) - sizes).any():
            raise LayoutMismatch(f"a run leaves the region {request.region!r} of {len(view)} bytes")
        return self.views(request.region, request.runs)

    def check_lease(self, lease: LeaseRef | None, slot: int) -> None:
        """Raises StaleLease unless the slot shows this lease, live, and LayoutMismatch when there is no such slot."""
        if lease is None:
            return
        slots = self._views.get(REGION_SLOTS, memoryview(b""))
        if (slot + 1) * CELL_BYTES > len(slots):
            raise LayoutMismatch(f"there is no lease slot {slot} here")
        check_slot(lease, slots[slot * CELL_BYTES : (slot + 1) * CELL_BYTES].tobytes())


class Owner:
    """Serves the memory of one incarnation until ``close``."""

    def __init__(
        self,
        identity: Identity,
        memory: Memory,
        *,
        name: str,
        host: str,
        make_lane: MakeLane,
        security: DataSecurity | None = None,
    ) -> None:
        """Binds a free port of ``host``. Raises BackendFailed."""
        try:
            self._listener = socket.create_server((host, 0), backlog=MAX_GREETING)
        except OSError as error:
            raise BackendFailed(f"{name} transfers cannot listen on {host}: {error}; see worker.host") from error
        self.address = Address(
            host=host,
            port=self._listener.getsockname()[1],
            token=secrets.token_bytes(16),
            incarnation=identity.incarnation,
        )
        self._memory = memory
        self._name = name
        self._make_lane = make_lane
        self._security = security
        self._lock = threading.Lock()
        self._connections: dict[threading.Thread, socket.socket] = {}
        self._num_greeting = 0
        self._closed = False
        self._acceptor = threading.Thread(target=self._accept, name=f"baton-{name}-accept", daemon=True)
        self._acceptor.start()

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    def close(self) -> bool:
        """End every connection; afterwards the memory is not touched. False if a thread would not end."""
        with self._lock:
            self._closed = True
            for sock in (self._listener, *self._connections.values()):
                wire.shut(sock)
            threads = [self._acceptor, *self._connections]
        for thread in threads:
            thread.join(_JOIN_S)
        return not any(thread.is_alive() for thread in threads)

    # -- the threads --------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._listener.accept()
            except OSError as error:  # closed; given up before it was accepted; no more descriptors
                if not self._closed:
                    log.warning("a data connection was not accepted", extra={"error": str(error)})
                    time.sleep(_ACCEPT_PAUSE_S)
                continue
            if not self._admit(sock):
                sock.close()
        with self._lock:
            self._listener.close()

    def _admit(self, sock: socket.socket) -> bool:
        thread = threading.Thread(target=self._run, args=(sock,), name=f"baton-{self._name}-serve", daemon=True)
        with self._lock:
            if self._closed or self._num_greeting >= MAX_GREETING or len(self._connections) >= MAX_CONNECTIONS:
                return False
            self._num_greeting += 1
            self._connections[thread] = sock
        thread.start()
        return True

    def _run(self, sock: socket.socket) -> None:
        """One connection, from its hello to its end."""
        reason = ""
        try:
            try:
                wire.prepare(sock, send_s=STUCK_S)
                sock = self._secured(sock)
                is_welcome = self._greet(sock)
            finally:
                with self._lock:
                    self._num_greeting -= 1
            if is_welcome:
                self._serve(sock)
        except OSError as error:
            reason = str(error)
        except ServingError as error:
            reason = error.message
        finally:
            with self._lock:  # nobody shuts a descriptor that is another's by now
                self._connections.pop(threading.current_thread()).close()
        log.debug("a data connection has ended", extra={"backend": self._name, "reason": reason})

    def _secured(self, sock: socket.socket) -> socket.socket:
        """The connection, over TLS where the cluster has it. Raises OSError or BackendFailed."""
        if self._security is None:
            return sock
        with self._lock:
            secure = self._connections[threading.current_thread()] = self._security.dialled(sock)
            if self._closed:
                raise ConnectionAbortedError("this worker is stopping")
        secure.shake_hands(within_s=wire.GREETING_S)
        self._security.check(secure)
        return secure

    def _greet(self, sock: socket.socket) -> bool:
        hello = wire.receive_hello(sock)
        if hello.is_for(self.address):
            sock.sendall(Reply(op=0).encode())
            return True
        mine = format_incarnation(self.address.incarnation)
        why = "the token is wrong" if hello.owner == self.address.incarnation else f"this is incarnation {mine}"
        sock.sendall(Reply(op=0, status=Status.REFUSED, detail=why).encode())
        return False

    def _serve(self, sock: socket.socket) -> None:
        lane = self._make_lane(sock, is_owner=True)
        try:
            while True:
                self._answer(sock, lane, wire.receive_request(sock))
        finally:
            lane.close()

    def _answer(self, sock: socket.socket, lane: Lane, request: Request) -> None:
        try:
            views = self._memory.asked(request)
            self._memory.check_lease(request.lease, request.slot)
        except (LayoutMismatch, StaleLease) as error:
            sock.sendall(_verdict(request, error).encode())
            return
        sock.sendall(Reply(op=request.op).encode(), socket.MSG_MORE if lane.shares_connection else 0)
        lane.send(views)
        try:
            self._memory.check_lease(request.lease, request.slot)
        except StaleLease as error:
            sock.sendall(_verdict(request, error).encode())
            return
        sock.sendall(Reply(op=request.op).encode())


def _verdict(request: Request, error: LayoutMismatch | StaleLease) -> Reply:
    status = Status.STALE_LEASE if isinstance(error, StaleLease) else Status.OUTSIDE
    return Reply(op=request.op, status=status, detail=error.message)
