"""P's leases: who may read which blocks, until when. Sans-I/O; every method takes ``now``. Used by one thread.

::

                 claim (remembered)
                    .--.
    open -> FILLING -'  `-> seal -> SEALED -> claim -> CLAIMED      (seal goes to CLAIMED at once when already claimed)
               |                      |  ^--- unclaim ---|
               |                      |                  +-- release by the holder --> RELEASED
               |                      +------------------+-- lease time over -------> EXPIRED
               +----------------------+------------------+-- revoke ---------------> REVOKED
               `-- request deadline -------------------------------------------------> EXPIRED

Whatever ends a lease bumps the epoch in its slot *before* the blocks are handed back to the caller in
:class:`EndedLease`, so whoever still reads them finds out. A message that names an unknown or old (lease, epoch), or
comes from a reader that is not the holder, changes nothing. Tombstones answer late and doubled messages with the
first verdict for ``tombstone_s``.

FILLING ends with the request's deadline, the other live states with the lease time, which the holder renews; a renewal
never passes the deadline.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from core.errors import LeaseExpired, OutOfBlocks, StaleLease
from core.handoff import LeaseRef
from core.ids import HandoffId, Incarnation, LeaseId
from kvtransfer.slot import LeaseState, SlotMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """One incarnation of a decode worker, reading for one attempt of a request."""

    incarnation: Incarnation
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseView:
    """A live lease as of now."""

    ref: LeaseRef
    slot: int
    handoff_id: HandoffId
    state: LeaseState
    reader: Reader | None
    blocks: tuple[int, ...]
    """Empty until sealed."""
    expires_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedLease:
    """A lease that just ended; its epoch is bumped. The caller gives ``blocks`` back to the pool (``end_lease``).

    ``blocks`` is empty when the lease never was sealed: the sequence that fills them still owns them, and is to be
    aborted.
    """

    ref: LeaseRef
    handoff_id: HandoffId
    state: LeaseState
    reason: str
    reader: Reader | None
    blocks: tuple[int, ...]
    num_bytes: int


class Verdict(Enum):
    """What a message about a lease did."""

    APPLIED = "applied"
    DUPLICATE = "duplicate"
    """The lease has ended before; nothing changed."""
    NOT_HOLDER = "not_holder"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseStats:
    """Counters are totals since start."""

    num_live: int
    num_blocks: int
    held_bytes: int
    num_tombstones: int
    opened: int
    refused: int
    renewals: int
    released: int
    expired: int
    revoked: int
    late_messages: int
    """Messages dropped because they were unknown, old, doubled or from somebody who is not the holder."""


@dataclass(slots=True, kw_only=True)
class _Lease:
    ref: LeaseRef
    slot: int
    handoff_id: HandoffId
    num_blocks: int
    deadline_at: float
    expires_at: float
    state: LeaseState = LeaseState.FILLING
    reader: Reader | None = None
    blocks: tuple[int, ...] = ()


@dataclass(slots=True)
class _Tombstone:
    until: float
    reason: str
    lease_id: LeaseId | None = None
    error: type[LeaseExpired | OutOfBlocks] = LeaseExpired


@dataclass(slots=True)
class _Counts:
    by_state: Counter[LeaseState] = field(default_factory=Counter)
    opened: int = 0
    refused: int = 0
    renewals: int = 0
    late: int = 0


class LeaseTable:
    """All leases of one prefill worker."""

    def __init__(
        self,
        slots: SlotMemory,
        *,
        block_bytes: int,
        lease_s: float,
        quota_bytes: int,
        tombstone_s: float | None = None,
    ) -> None:
        """``quota_bytes`` bounds what is held, from ``open`` on. ``tombstone_s`` is at least (and by default) 2 lease
        times."""
        self._slots = slots
        self._block_bytes = block_bytes
        self._lease_s = lease_s
        self._quota_bytes = quota_bytes
        self._tombstone_s = max(2 * lease_s, tombstone_s or 0.0)
        self._free_slots = deque(range(slots.num_slots))
        self._leases: dict[LeaseId, _Lease] = {}
        self._by_handoff: dict[HandoffId, LeaseId] = {}
        self._tombstones: dict[HandoffId, _Tombstone] = {}
        self._ended_ids: dict[LeaseId, float] = {}
        self._next_id = 1
        self._held_blocks = 0
        self._counts = _Counts()

    # -- P's own side -------------------------------------------------------------------------------------------------

    def open(self, handoff_id: HandoffId, *, num_blocks: int, deadline_s: float, now: float) -> LeaseView:
        """Begin a lease for a prompt of ``num_blocks`` blocks, before its first chunk is computed.

        Raises OutOfBlocks when the quota or the slots are used up and LeaseExpired when the hand-off was aborted or
        ended before; a refusal leaves no state.
        """
        tombstone = self._tombstones.get(handoff_id)
        if tombstone is not None and tombstone.until > now:
            self._counts.refused += 1
            raise LeaseExpired(f"hand-off {handoff_id} is over: {tombstone.reason}")
        if handoff_id in self._by_handoff:
            raise ValueError(f"hand-off {handoff_id} already has a lease")
        wanted = (self._held_blocks + num_blocks) * self._block_bytes
        if wanted > self._quota_bytes or not self._free_slots:
            self._counts.refused += 1
            what = (
                "lease slot" if not self._free_slots else f"room: {wanted} of {self._quota_bytes} bytes would be held"
            )
            raise OutOfBlocks(f"no {what} for finished KV; decode workers are not fetching fast enough")
        lease_id, slot = LeaseId(self._next_id), self._free_slots.popleft()
        self._next_id += 1
        lease = _Lease(
            ref=LeaseRef(lease_id=lease_id, epoch=self._slots.begin(slot, lease_id)),
            slot=slot,
            handoff_id=handoff_id,
            num_blocks=num_blocks,
            deadline_at=now + deadline_s,
            expires_at=now + deadline_s,
        )
        self._leases[lease_id] = lease
        self._by_handoff[handoff_id] = lease_id
        self._held_blocks += num_blocks
        self._counts.opened += 1
        return _view(lease)

    def set_ready(self, lease_id: LeaseId, num_blocks: int) -> bool:
        """So many complete, fenced blocks may be read early. False when the lease has ended."""
        lease = self._leases.get(lease_id)
        if lease is None:
            return False
        self._slots.set_ready(lease.slot, num_blocks)
        return True

    def seal(self, lease_id: LeaseId, blocks: Sequence[int], *, digest: int, now: float) -> LeaseView | None:
        """All blocks are complete and pinned; ``digest`` is that of the digest list
        (:func:`kvtransfer.digest.combine`).

        None when the lease has ended meanwhile: the blocks stay the caller's. From here on the lease time counts.
        """
        lease = self._leases.get(lease_id)
        if lease is None:
            return None
        if lease.state is not LeaseState.FILLING:
            raise ValueError(f"lease {lease_id} is sealed already")
        if len(blocks) > lease.num_blocks:
            raise ValueError(f"lease {lease_id} was opened for {lease.num_blocks} blocks, {len(blocks)} are sealed")
        self._held_blocks -= lease.num_blocks - len(blocks)
        lease.num_blocks = len(blocks)
        lease.blocks = tuple(blocks)
        lease.expires_at = min(now + self._lease_s, lease.deadline_at)
        self._slots.set_ready(lease.slot, len(blocks))
        self._slots.set_digest(lease.slot, digest)
        self._set_state(lease, LeaseState.CLAIMED if lease.reader else LeaseState.SEALED)
        return _view(lease)

    def set_digest(self, lease_id: LeaseId, digest: int) -> None:
        """Of the digest list that the holder was granted: it reads only what it lacks. Before it is told the grant."""
        lease = self._leases.get(lease_id)
        if lease is not None:
            self._slots.set_digest(lease.slot, digest)

    def revoke(
        self,
        handoff_id: HandoffId,
        reason: str,
        *,
        now: float,
        error: type[LeaseExpired | OutOfBlocks] = LeaseExpired,
    ) -> EndedLease | None:
        """End the lease (cancelled, preempted, draining). Without one a tombstone is left, so that a late ``open`` is
        refused. A late ``claim`` raises ``error``."""
        lease_id = self._by_handoff.get(handoff_id)
        if lease_id is None:
            self._tombstones.setdefault(handoff_id, _Tombstone(now + self._tombstone_s, reason))
            return None
        ended = self._end(self._leases[lease_id], LeaseState.REVOKED, reason, now)
        self._tombstones[handoff_id].error = error
        return ended

    def expire(self, now: float) -> list[EndedLease]:
        """Called by a timer: ends what is over, forgets old tombstones."""
        over = [lease for lease in self._leases.values() if lease.expires_at <= now]
        ended = [
            self._end(
                lease, LeaseState.EXPIRED, "deadline" if lease.expires_at >= lease.deadline_at else "lease time", now
            )
            for lease in over
        ]
        for handoff_id in [key for key, stone in self._tombstones.items() if stone.until <= now]:
            stone = self._tombstones.pop(handoff_id)
            if stone.lease_id is not None:
                self._ended_ids.pop(stone.lease_id, None)
        return ended

    # -- what readers ask ---------------------------------------------------------------------------------------------

    def find(self, handoff_id: HandoffId) -> LeaseView | None:
        lease_id = self._by_handoff.get(handoff_id)
        return None if lease_id is None else _view(self._leases[lease_id])

    def claim(self, handoff_id: HandoffId, reader: Reader, *, now: float) -> LeaseView | None:
        """Make ``reader`` the holder; the claims before it stop counting. Legal while FILLING, idempotent.

        None: the hand-off is not known (yet); the caller keeps the message for up to ``lease_s``. Raises LeaseExpired
        when it is over (OutOfBlocks if its room was needed) and StaleLease when a newer attempt, or another reader of
        the same attempt, holds it.
        """
        lease_id = self._by_handoff.get(handoff_id)
        if lease_id is None:
            tombstone = self._tombstones.get(handoff_id)
            if tombstone is None:
                return None
            self._counts.late += 1
            raise tombstone.error(f"hand-off {handoff_id} is over: {tombstone.reason}")
        lease = self._leases[lease_id]
        if lease.expires_at <= now:
            raise LeaseExpired(f"hand-off {handoff_id} is over: lease time")
        holder = lease.reader
        if holder is not None and holder != reader and holder.attempt >= reader.attempt:
            self._counts.late += 1
            raise StaleLease(f"hand-off {handoff_id} is held for attempt {holder.attempt}")
        lease.reader = reader
        if lease.state is not LeaseState.FILLING:
            lease.expires_at = min(now + self._lease_s, lease.deadline_at)
            self._set_state(lease, LeaseState.CLAIMED)
        return _view(lease)

    def renew(self, ref: LeaseRef, incarnation: Incarnation, *, now: float) -> Verdict:
        """The holder still wants the blocks."""
        lease, verdict = self._lookup(ref)
        if lease is None:
            return verdict
        if lease.reader is None or lease.reader.incarnation != incarnation:
            return self._late(Verdict.NOT_HOLDER)
        self._counts.renewals += 1
        if lease.state is not LeaseState.FILLING and lease.expires_at > now:
            lease.expires_at = max(lease.expires_at, min(now + self._lease_s, lease.deadline_at))
        return Verdict.APPLIED

    def release(self, ref: LeaseRef, reader: Reader, *, reason: str, now: float) -> tuple[Verdict, EndedLease | None]:
        """The holder is done. Only the first release by the holder ends the lease."""
        lease, verdict = self._lookup(ref)
        if lease is None:
            return verdict, None
        if lease.reader != reader:
            return self._late(Verdict.NOT_HOLDER), None
        state = LeaseState.REVOKED if lease.state is LeaseState.FILLING else LeaseState.RELEASED
        return Verdict.APPLIED, self._end(lease, state, reason, now)

    def unclaim(self, ref: LeaseRef, reader: Reader) -> Verdict:
        """The holder gives its claim up and leaves the lease to others, for what is left of its time."""
        lease, verdict = self._lookup(ref)
        if lease is None:
            return verdict
        if lease.reader != reader:
            return self._late(Verdict.NOT_HOLDER)
        self._drop_claim(lease)
        return Verdict.APPLIED

    def drop_reader(self, incarnation: Incarnation) -> int:
        """That incarnation is gone: it holds nothing any more. Its leases can be claimed by others until they
        expire."""
        dropped = [x for x in self._leases.values() if x.reader is not None and x.reader.incarnation == incarnation]
        for lease in dropped:
            self._drop_claim(lease)
        return len(dropped)

    # -- reports ------------------------------------------------------------------------------------------------------

    @property
    def num_live(self) -> int:
        return len(self._leases)

    @property
    def held_bytes(self) -> int:
        return self._held_blocks * self._block_bytes

    def next_expiry(self) -> float | None:
        """When the next live lease ends if nothing happens."""
        return min((lease.expires_at for lease in self._leases.values()), default=None)

    def stats(self) -> LeaseStats:
        counts = self._counts
        return LeaseStats(
            num_live=len(self._leases),
            num_blocks=self._held_blocks,
            held_bytes=self.held_bytes,
            num_tombstones=len(self._tombstones),
            opened=counts.opened,
            refused=counts.refused,
            renewals=counts.renewals,
            released=counts.by_state[LeaseState.RELEASED],
            expired=counts.by_state[LeaseState.EXPIRED],
            revoked=counts.by_state[LeaseState.REVOKED],
            late_messages=counts.late,
        )

    # -- inside -------------------------------------------------------------------------------------------------------

    def _lookup(self, ref: LeaseRef) -> tuple[_Lease | None, Verdict]:
        lease = self._leases.get(ref.lease_id)
        if lease is not None and lease.ref == ref:
            return lease, Verdict.APPLIED
        ended = lease is None and ref.lease_id in self._ended_ids
        return None, self._late(Verdict.DUPLICATE if ended else Verdict.UNKNOWN)

    def _drop_claim(self, lease: _Lease) -> None:
        lease.reader = None
        if lease.state is LeaseState.CLAIMED:
            self._set_state(lease, LeaseState.SEALED)

    def _late(self, verdict: Verdict) -> Verdict:
        self._counts.late += 1
        return verdict

    def _set_state(self, lease: _Lease, state: LeaseState) -> None:
        lease.state = state
        self._slots.set_state(lease.slot, state)

    def _end(self, lease: _Lease, state: LeaseState, reason: str, now: float) -> EndedLease:
        self._slots.end(lease.slot, state)
        lease.state = state
        lease_id = lease.ref.lease_id
        del self._leases[lease_id], self._by_handoff[lease.handoff_id]
        self._free_slots.append(lease.slot)
        self._held_blocks -= lease.num_blocks
        until = now + self._tombstone_s
        self._tombstones[lease.handoff_id] = _Tombstone(until, reason, lease_id)
        self._ended_ids[lease_id] = until
        self._counts.by_state[state] += 1
        return EndedLease(
            ref=lease.ref,
            handoff_id=lease.handoff_id,
            state=state,
            reason=reason,
            reader=lease.reader,
            blocks=lease.blocks,
            num_bytes=len(lease.blocks) * self._block_bytes,
        )


def _view(lease: _Lease) -> LeaseView:
    return LeaseView(
        ref=lease.ref,
        slot=lease.slot,
        handoff_id=lease.handoff_id,
        state=lease.state,
        reader=lease.reader,
        blocks=lease.blocks,
        expires_at=lease.expires_at,
    )
