"""A backend in which the owner of the memory sends. ``tcp`` and ``dist`` are this with different lanes.

D has one data connection and one thread for each link. The thread dials, then takes the answers in the order in which
the requests were posted, straight into D's memory; ``post`` only sends a small frame, and ``poll`` only looks whether
the thread has ended the operation. Measured on loopback, 47 MB in 64 runs: a thread blocked in ``recvmsg_into`` with
``MSG_WAITALL`` moves 1.1 to 1.5 times what reading in ``poll`` does.

What ends the connection ends the link: every operation on it becomes FAILED, but only once the thread is out of the
kernel, so that no byte of a target changes after that. ``abort`` is such an end. A peer that is stopped or whose host
has vanished looks like one that is slow; how long that is borne is the caller's judgement.
"""

import logging
import socket
import threading
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from core.errors import BackendFailed, LayoutMismatch, ServingError
from core.handoff import HandoffOutcome, LinkInfo, PeerInfo, TransferMode
from kvtransfer.backends import wire
from kvtransfer.backends.base import DONE, PENDING, Batch, Identity, Link, Op, OpState, OpStatus, check_bounds
from kvtransfer.backends.owner import Lane, MakeLane, Memory, Owner
from kvtransfer.backends.secure import DataSecurity, SecureSocket
from kvtransfer.backends.wire import Address, Hello, Reply, Request, Status
from kvtransfer.copies import Copies
from kvtransfer.layout import Region

log = logging.getLogger(__name__)

DIAL_S = 5.0
_GIVEN_UP = "the link was given up"
_JOIN_S, _LEAVE_S = 10.0, 1.0

_CAUSES = {
    Status.STALE_LEASE: HandoffOutcome.STALE_LEASE,
    Status.OUTSIDE: HandoffOutcome.INCOMPATIBLE,
    Status.REFUSED: HandoffOutcome.PEER_LOST,
}


@dataclass(slots=True, eq=False)
class ServedOp(Op):
    number: int = 0
    views: list[memoryview] = field(default_factory=list)
    outcome: OpStatus | None = None
    """Set by the link's thread, once; nothing is written afterwards."""


@dataclass(slots=True, eq=False)
class ServedLink(Link):
    address: Address | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Whoever uses ``sock`` beside the link's thread holds it, so that nobody uses a descriptor that is another's."""
    sock: socket.socket | None = None
    is_accepted: bool = False
    """By the owner: requests may be sent."""
    lane: Lane | None = None
    thread: threading.Thread | None = None
    waiting: deque[ServedOp] = field(default_factory=deque)
    """Posted and not yet answered, in order."""
    unsent: bytearray = field(default_factory=bytearray)
    """Requests that the kernel would not take yet."""
    num_posted: int = 0
    is_aborted: bool = False
    is_detached: bool = False
    """The thread may still be in the lane, and touches no memory of the regions any more."""
    ended: OpStatus | None = None
    """Set when no byte comes any more, by the thread when it is over or by an abort that detaches it: the fate of every
    operation that has none of its own."""


class ServedBackend:
    """See the module. ``make_lane`` is how the bytes of an operation cross."""

    def __init__(self, name: str, *, host: str, make_lane: MakeLane, security: DataSecurity | None = None) -> None:
        self.name = name
        self._security = security
        self._host = host
        self._make_lane = make_lane
        self._identity: Identity | None = None
        self._owner: Owner | None = None
        self._regions: dict[str, Region] = {}
        self._memory = Memory(())
        self._links: dict[str, ServedLink] = {}
        self._threads: list[ServedLink] = []
        self._closed = False

    def open(self, identity: Identity, regions: tuple[Region, ...]) -> LinkInfo:
        assert self._identity is None, "the backend is open"
        for region in regions:
            if region.memory.device != "cpu":
                raise BackendFailed(
                    f"transfer.backend {self.name!r} moves host memory only, and the region {region.memory.name!r} is "
                    f"on {region.memory.device}; use nixl"
                )
        self._memory = Memory(regions)
        self._owner = Owner(
            identity, self._memory, name=self.name, host=self._host, make_lane=self._make_lane, security=self._security
        )
        self._identity = identity
        self._regions = {region.memory.name: region for region in regions}
        return LinkInfo(
            backend=self.name,
            agent_name=identity.agent_name,
            metadata=self._owner.address.encode(),
            regions=tuple((r.memory.name, r.memory.address, r.memory.num_bytes) for r in regions),
            mode=TransferMode.SERVE,
        )

    def connect(self, peer: PeerInfo) -> Link:
        """Dials in the background: a peer that is not there shows at the first operation."""
        if peer.link.backend != self.name:
            raise LayoutMismatch(f"transfer backends differ: {self.name!r} != {peer.link.backend!r}")
        known = self._links.get(peer.link.agent_name)
        if known is not None:
            return known
        assert self._identity is not None and not self._closed, "the backend is not open"
        link = ServedLink(peer, address=Address.decode(peer.link.metadata))
        link.thread = threading.Thread(
            target=self._run, args=(link,), name=f"baton-{self.name}-{peer.worker_id}", daemon=True
        )
        self._links[peer.link.agent_name] = link
        self._threads = [each for each in self._threads if each.thread is not None and each.thread.is_alive()]
        self._threads.append(link)
        link.thread.start()
        return link

    def post(self, link: Link, batch: Batch) -> Op:
        assert isinstance(link, ServedLink)
        check_bounds(batch, peer=link.peer, local=self._regions)
        rows = Copies.of(batch.copies).array
        if not 0 < len(rows) <= wire.MAX_RUNS:
            raise LayoutMismatch(f"{len(rows)} runs in one operation; {self.name} takes 1 to {wire.MAX_RUNS}")
        link.num_posted += 1
        op = ServedOp(
            link,
            number=link.num_posted,
            views=self._memory.views(batch.local_region, rows[:, 1:]),
        )
        request = Request(
            op=op.number,
            region=batch.remote_region,
            runs=rows[:, ::2].astype(np.uint64),
            lease=batch.lease,
            slot=batch.slot,
        )
        link.num_pending += 1
        link.waiting.append(op)
        link.unsent += request.encode()
        _flush(link)
        return op

    def poll(self, op: Op) -> OpStatus:
        assert isinstance(op, ServedOp) and isinstance(op.link, ServedLink)
        if op.status.state is not OpState.PENDING:
            return op.status
        ended = op.link.ended  # looked at first: the thread ends operations, then itself
        outcome = op.outcome or ended
        if outcome is None:
            _flush(op.link)
            _look_for_its_end(op.link)
            return PENDING
        op.status = outcome
        op.link.num_pending -= 1
        return outcome

    def abort(self, link: Link) -> bool:
        """See the module."""
        assert isinstance(link, ServedLink)
        with link.lock:
            link.is_aborted = link.is_dead = True
            if link.sock is not None:
                wire.shut(link.sock)
            lane = link.lane
        if lane is not None and lane.detach():
            link.is_detached = True
            link.ended = link.ended or _lost(link, HandoffOutcome.BACKEND_FAILED, _GIVEN_UP)
        return True

    def socket_bytes(self, link: Link) -> int:
        """Nothing is read here: the owner sends."""
        return 0

    def lane(self, link: Link) -> str:
        return self.name

    def explain(self, link: Link) -> str:
        return ""

    def disconnect(self, link: Link) -> None:
        if link.num_pending:
            raise RuntimeError(f"{link.num_pending} operations are pending on {link.peer.link.agent_name}")
        if self._links.get(link.peer.link.agent_name) is link:
            del self._links[link.peer.link.agent_name]
        self.abort(link)

    def close(self) -> bool:
        if self._closed:
            return True
        self._closed = True
        clean = all(link.num_pending == 0 for link in self._links.values())
        for link in self._threads:
            self.abort(link)
        for link in self._threads:
            assert link.thread is not None
            link.thread.join(_LEAVE_S if link.is_detached else _JOIN_S)
            clean &= link.is_detached or not link.thread.is_alive()
        if self._owner is not None:
            clean &= self._owner.close()
        return clean

    # -- the thread of a link -----------------------------------------------------------------------------------------

    def _run(self, link: ServedLink) -> None:
        """Dial, then receive until the connection ends, whoever ends it."""
        cause, detail = HandoffOutcome.PEER_LOST, ""
        try:
            self._converse(link)
        except OSError as error:
            detail = str(error)
        except ServingError as error:
            cause, detail = HandoffOutcome.BACKEND_FAILED, error.message
        with link.lock:
            if link.sock is not None:
                link.sock.close()
                link.sock = None
        if link.is_aborted:
            cause, detail = HandoffOutcome.BACKEND_FAILED, _GIVEN_UP
        link.is_dead = True
        link.ended = link.ended or _lost(link, cause, detail)

    def _converse(self, link: ServedLink) -> None:
        assert link.address is not None and self._identity is not None
        sock = socket.create_connection((link.address.host, link.address.port), timeout=DIAL_S)
        with link.lock:
            link.sock = sock
            if link.is_aborted:
                return
        wire.prepare(sock, send_s=DIAL_S)
        if self._security is not None:
            with link.lock:
                if link.is_aborted:
                    return
                link.sock = sock = secure = self._security.dialling(sock)
            secure.shake_hands(within_s=DIAL_S)
        hello = Hello(token=link.address.token, owner=link.address.incarnation, dialler=self._identity.incarnation)
        sock.sendall(hello.encode())
        accepted = wire.receive_reply(sock, within_s=DIAL_S)
        if accepted.status is not Status.OK:
            raise ConnectionRefusedError(f"it refuses the connection: {accepted.detail}")
        lane = self._make_lane(sock, is_owner=False)
        with link.lock:
            link.lane = lane
            link.is_accepted = not link.is_aborted
        try:
            while True:
                self._receive(link, sock, lane)
        finally:
            lane.close()

    def _receive(self, link: ServedLink, sock: socket.socket, lane: Lane) -> None:
        """The answer to the oldest request."""
        answer = wire.receive_reply(sock)
        if not link.waiting or link.waiting[0].number != answer.op:
            raise BackendFailed("an answer that nobody asked for")
        op = link.waiting[0]
        if answer.status is Status.OK:
            lane.receive(op.views)
            answer = wire.receive_reply(sock)
        link.waiting.popleft()
        op.views = []
        op.outcome = _outcome(answer)


def _lost(link: ServedLink, cause: HandoffOutcome, detail: str) -> OpStatus:
    return OpStatus(OpState.FAILED, cause, f"{link.peer.link.agent_name}: {detail}")


def _outcome(answer: Reply) -> OpStatus:
    if answer.status is Status.OK:
        return DONE
    return OpStatus(OpState.FAILED, _CAUSES[answer.status], answer.detail)


def _look_for_its_end(link: ServedLink) -> None:
    """A lane beside the data connection may not see the peer's death; the connection does."""
    with link.lock:
        if link.sock is None or link.lane is None or link.lane.shares_connection:
            return
        try:
            is_over = not link.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            is_over = True
        lane = link.lane
    if is_over and lane.detach():
        link.is_dead = link.is_detached = True
        link.ended = link.ended or _lost(link, HandoffOutcome.PEER_LOST, "it has closed the connection")


def _flush(link: ServedLink) -> None:
    """Give the kernel what it takes of our requests, without waiting."""
    if not link.is_accepted:
        return
    with link.lock:
        if link.sock is None or not (link.unsent or (isinstance(link.sock, SecureSocket) and link.sock.is_sending)):
            return
        try:
            num_sent = link.sock.send(link.unsent, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            num_sent = len(link.unsent)  # the thread finds the connection ended, too, and says so
    del link.unsent[:num_sent]
