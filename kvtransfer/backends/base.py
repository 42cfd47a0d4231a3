"""The contract of a transfer backend. One thread uses it, after ``open``.

What every backend must hold (tests/contract/test_transfer_backends.py runs on all):

- ``poll`` never raises; FAILED and DONE are terminal, and from then on no byte of the operation's target changes any
  more.
- A peer known to be dead makes every operation on its link FAILED with ``PEER_LOST``.
- Addresses are used only inside the regions that both sides declared; anything else raises LayoutMismatch and posts
  nothing.
- A link belongs to one incarnation. ``disconnect`` refuses while operations are pending: giving a handle up does not
  stop the bytes. ``abort`` says whether it can.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from core.errors import LayoutMismatch
from core.handoff import HandoffOutcome, LeaseRef, LinkInfo, PeerInfo
from core.ids import Incarnation, WorkerId, format_incarnation
from kvtransfer.copies import Copies, Copy
from kvtransfer.layout import Region, region_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    worker_id: WorkerId
    incarnation: Incarnation

    @property
    def agent_name(self) -> str:
        """Unique for each start of a process: a backend must never meet a new process under an old name."""
        return f"{self.worker_id}-{format_incarnation(self.incarnation)}"


class OpState(Enum):
    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class OpStatus:
    """``cause`` and ``detail`` are given with FAILED only. PEER_LOST, BACKEND_FAILED; where the owner sends also its
    refusals STALE_LEASE and INCOMPATIBLE."""

    state: OpState
    cause: HandoffOutcome | None = None
    detail: str = ""


PENDING = OpStatus(OpState.PENDING)
DONE = OpStatus(OpState.DONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Copies that are posted as one operation: READ from the peer's region into ours."""

    remote_region: str
    local_region: str
    copies: Sequence[Copy]
    lease: LeaseRef | None = None
    """Where the owner sends: it checks that ``slot`` shows this lease before and after. One-sided reads ignore it."""
    slot: int = 0

    @property
    def num_bytes(self) -> int:
        return Copies.of(self.copies).num_bytes


@dataclass(slots=True, eq=False)
class Link:
    """A connection to one incarnation. Backends extend it; others read it only."""

    peer: PeerInfo
    num_pending: int = 0
    is_dead: bool = False
    """The peer's process is gone, or the link was aborted: nothing can be moved over it any more."""
    progress_at: float = 0.0
    """When an operation of this link was last done, for the transfer loop."""


@dataclass(frozen=True, slots=True)
class OpStats:
    """What a backend has measured of an operation that is DONE."""

    post_s: float
    """Until the call that posted it returned: where posting *is* the copy, all of it."""
    move_s: float
    num_descriptors: int
    """As they crossed, neighbours merged."""


@dataclass(slots=True, eq=False)
class Op:
    """One posted operation. Backends extend it; ``status`` is that of the last poll."""

    link: Link
    status: OpStatus = field(default=PENDING)
    stats: OpStats | None = None
    """With DONE, where the backend measures."""
    posted_at: float = 0.0
    """``time.perf_counter`` before it was posted, and how long that took: for the transfer loop."""
    post_s: float = 0.0


class Backend(Protocol):
    @property
    def name(self) -> str:
        """As in config, metrics and ``LinkInfo.backend``."""

    def open(self, identity: Identity, regions: tuple[Region, ...]) -> LinkInfo:
        """Register memory; returns what peers need. Raises BackendFailed. Memory stays valid until after ``close``."""

    def connect(self, peer: PeerInfo) -> Link:
        """Idempotent for each incarnation. Raises PeerLost (not reachable; where dialling takes time the first
        operation says so instead) or LayoutMismatch (does not fit)."""

    def post(self, link: Link, batch: Batch) -> Op:
        """Start a READ. May copy synchronously. Raises LayoutMismatch only; every other fault is a FAILED
        operation."""

    def poll(self, op: Op) -> OpStatus:
        """Observe one operation. Never raises, also after it was terminal."""

    def abort(self, link: Link) -> bool:
        """End what is pending on the link without the peer's help, if bytes under way can be stopped: then its
        operations are FAILED soon, by poll, and the link is dead. Otherwise False, and nothing changes. Idempotent."""

    def socket_bytes(self, link: Link) -> int:
        """Where READ is the mode: bytes that came for this link through sockets of this process, so far. Far less than
        what was read, or the reads are emulated."""

    def lane(self, link: Link) -> str:
        """What carries the bytes of this link, as far as can be seen from here. For people."""

    def explain(self, link: Link) -> str:
        """Where reads are emulated: why, as far as can be seen from here. For people; may be empty."""

    def disconnect(self, link: Link) -> None:
        """Forget the peer. Raises RuntimeError while operations are pending. Idempotent."""

    def close(self) -> bool:
        """Destroy everything; afterwards every operation is quiet. False if some were still pending. Idempotent."""


def check_bounds(batch: Batch, *, peer: PeerInfo, local: dict[str, Region]) -> None:
    """Raises LayoutMismatch unless every copy lies inside the regions that both sides declared."""
    if batch.local_region not in local:
        raise LayoutMismatch(f"no local region {batch.local_region!r}")
    local_bytes = local[batch.local_region].memory.num_bytes
    _, remote_bytes = region_of(peer, batch.remote_region)
    rows = Copies.of(batch.copies).array
    if not len(rows):
        return
    if rows[:, :2].min() < 0 or rows[:, 2].min() <= 0:
        raise LayoutMismatch("a copy has a negative offset or no bytes")
    remote_end, local_end = (rows[:, :2] + rows[:, 2:]).max(axis=0)
    if remote_end > remote_bytes:
        raise LayoutMismatch(f"copy leaves {peer.worker_id}'s region {batch.remote_region!r} of {remote_bytes} bytes")
    if local_end > local_bytes:
        raise LayoutMismatch(f"copy leaves the local region {batch.local_region!r} of {local_bytes} bytes")
