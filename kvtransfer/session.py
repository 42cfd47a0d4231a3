"""One fetch at D as a sans-I/O state machine: ``handle(event, now) -> effects``. The transfer thread performs the
effects.

::

    NEW -- Start --> POSTING -- last chunk posted --> WIRE -- all arrived --> VALIDATING -- slot read --> OK
     |                ^ |                             ^ |                        |    `-- epoch changed --> REJECTED
     |           More | |                        Last | | all arrived, more      |
     |                | |                             | v will be announced      |
     |                `-|--------- More | Last ---- EXPECTING                    |
     |                  `---------------+---------------+------------------------'
     |                                  | Abort | Failed | stall | deadline
     |                                  v
     |                              DRAINING -- every operation terminal --> FAILED | ABORTED
     `-- Abort | deadline -----------------------------------------------> FAILED | ABORTED

    A fetch that is *open* grows while the source is still filled: More adds chunks (in POSTING, WIRE and EXPECTING),
    and the last More closes it. Only then, and after all data, is the slot read. Without chunks a closed fetch goes
    straight to VALIDATING. BackendClosed ends every phase: nothing is pending then.

NEW is "queued": it ends with Start, Abort or the deadline. POSTING, WIRE and VALIDATING end with their operations,
the stall limit or the deadline. EXPECTING, where nothing is in flight, ends with More, Abort or the deadline: how long
the source takes is no stall. DRAINING has no deadline on purpose: only the truth about the operations ends it (alarm
and restart are the worker's, by the quarantine gauge).

Two things are told apart: the *result* (``Finish``, once, as soon as the outcome is known) and *quiet* (``Quiet``,
once, when no operation can touch the local blocks any more). Quiet never comes before Finish.
"""

from dataclasses import dataclass
from enum import Enum

from core.errors import StaleLease
from core.handoff import HandoffOutcome, LeaseRef
from kvtransfer.custody import CustodyEnd
from kvtransfer.slot import parse_slot
from kvtransfer.validate import check_slot

SLOT_READ = -1
"""Key of the slot read; chunks have keys 0, 1, ..."""


class Phase(Enum):
    NEW = "new"
    POSTING = "posting"
    WIRE = "wire"
    EXPECTING = "expecting"
    VALIDATING = "validating"
    DRAINING = "draining"
    OK = "ok"
    FAILED = "failed"
    ABORTED = "aborted"
    REJECTED = "rejected"

    @property
    def is_final(self) -> bool:
        return self in (Phase.OK, Phase.FAILED, Phase.ABORTED, Phase.REJECTED)


# -- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """Resources are there: operations may be posted."""


@dataclass(frozen=True, slots=True)
class More:
    """``num_chunks`` more chunks may be read; there will be none after those that are ``is_last``."""

    num_chunks: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class Done:
    key: int


@dataclass(frozen=True, slots=True)
class SlotRead:
    """The slot read is done; the 64 bytes it brought."""

    snapshot: bytes


@dataclass(frozen=True, slots=True)
class Failed:
    """An operation is terminal without success (or was refused before it was posted)."""

    key: int
    cause: HandoffOutcome
    detail: str


@dataclass(frozen=True, slots=True)
class Abort:
    """The request is over, or the peer is (``outcome``)."""

    outcome: HandoffOutcome = HandoffOutcome.ABORTED
    detail: str = "given up by the request"


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed. Send it after all observations: observe first, judge second.

    ``progress_at``: when any operation of the link was last done. What waits behind others has not stalled.
    """

    progress_at: float = 0.0


@dataclass(frozen=True, slots=True)
class BackendClosed:
    """The backend was destroyed: nothing is pending any more."""


Event = Start | More | Done | SlotRead | Failed | Abort | Tick | BackendClosed


# -- effects ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Post:
    """Post chunk ``key``, or the slot read."""

    key: int


@dataclass(frozen=True, slots=True)
class Finish:
    outcome: HandoffOutcome
    detail: str


@dataclass(frozen=True, slots=True)
class Quiet:
    why: CustodyEnd


Effect = Post | Finish | Quiet


class Session:
    """Progress of one fetch. Not thread-safe."""

    def __init__(
        self,
        num_chunks: int,
        *,
        lease: LeaseRef | None,
        now: float,
        deadline_at: float,
        stall_s: float,
        window: int = 2,
        is_open: bool = False,
    ) -> None:
        """``lease`` None accepts any slot that is one (a probe). ``window`` chunks are in flight at most. ``is_open``:
        more chunks will be told by :class:`More`."""
        self.phase = Phase.NEW
        self.outcome: HandoffOutcome | None = None
        self.detail = ""
        self.snapshot: bytes | None = None
        self.num_arrived = 0
        self.queued_at = now
        self.started_at: float | None = None
        self.arrived_at: float | None = None
        self.finished_at: float | None = None
        self._num_chunks = num_chunks
        self.lease = lease
        self._deadline_at = deadline_at
        self._stall_s = stall_s
        self._window = window
        self._is_open = is_open
        self._next_chunk = 0
        self._in_flight: set[int] = set()
        self._progress_at = now
        self._peer_dead = False

    @property
    def is_data_complete(self) -> bool:
        """Every chunk there will be has arrived. Without a valid slot only digests can vouch for it."""
        return not self._is_open and self.num_arrived == self._num_chunks

    def is_stalled(self, now: float) -> bool:
        """Operations are in flight and nothing has come for the stall time, as of the last Tick."""
        return bool(self._in_flight) and now - self._progress_at >= self._stall_s

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Events after the end, or about operations that are not in flight, change nothing."""
        if self.phase.is_final:
            return []
        match event:
            case Start():
                return self._start(now)
            case More(num_chunks, is_last):
                return self._more(num_chunks, is_last, now)
            case Done(key):
                return self._done(key, now)
            case SlotRead(snapshot):
                return self._slot_read(snapshot, now)
            case Failed(key, cause, detail):
                if key not in self._in_flight:
                    return []
                self._in_flight.remove(key)
                self._peer_dead |= cause is HandoffOutcome.PEER_LOST
                return self._give_up(cause, detail, now)
            case Abort(outcome, detail):
                return self._give_up(outcome, detail, now)
            case Tick(progress_at):
                self._progress_at = max(self._progress_at, progress_at)
                return self._tick(now)
            case BackendClosed():
                had_posted = self.started_at is not None
                self._in_flight.clear()
                effects = self._finish(HandoffOutcome.BACKEND_FAILED, "the transfer backend was closed", now)
                return effects + self._end(CustodyEnd.BACKEND_CLOSED if had_posted else CustodyEnd.NEVER_POSTED)

    # -- transitions --------------------------------------------------------------------------------------------------

    def _start(self, now: float) -> list[Effect]:
        if self.phase is not Phase.NEW:
            return []
        self.phase = Phase.POSTING
        self.started_at = self._progress_at = now
        return self._fill_window(now)

    def _more(self, num_chunks: int, is_last: bool, now: float) -> list[Effect]:
        if not self._is_open or self.phase is Phase.DRAINING:
            return []
        self._num_chunks += num_chunks
        self._is_open = not is_last
        if self.phase is Phase.NEW:
            return []
        if not self._in_flight:
            self._progress_at = now
        self.phase = Phase.POSTING
        return self._fill_window(now)

    def _fill_window(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        while self._next_chunk < self._num_chunks and len(self._in_flight) < self._window:
            self._in_flight.add(self._next_chunk)
            effects.append(Post(self._next_chunk))
            self._next_chunk += 1
        if self._next_chunk < self._num_chunks:
            return effects
        self.phase = Phase.WIRE
        if self.is_data_complete:
            # Only now: the slot must be read after the data is complete.
            self.phase = Phase.VALIDATING
            self.arrived_at = now
            self._in_flight.add(SLOT_READ)
            effects.append(Post(SLOT_READ))
        elif self.num_arrived == self._num_chunks:
            self.phase = Phase.EXPECTING
        return effects

    def _done(self, key: int, now: float) -> list[Effect]:
        if key not in self._in_flight or key == SLOT_READ:
            return []
        self._in_flight.remove(key)
        self._progress_at = now
        self.num_arrived += 1
        if self.phase is Phase.DRAINING:
            return self._drained()
        return self._fill_window(now)

    def _slot_read(self, snapshot: bytes, now: float) -> list[Effect]:
        if SLOT_READ not in self._in_flight:
            return []
        self._in_flight.remove(SLOT_READ)
        if self.phase is Phase.DRAINING:
            return self._drained()
        self.snapshot = snapshot
        try:
            if self.lease is None:
                parse_slot(snapshot)
            else:
                check_slot(self.lease, snapshot)
        except StaleLease as error:
            self.phase = Phase.REJECTED
            effects = self._finish(HandoffOutcome.STALE_LEASE, error.message, now)
            return [*effects, Quiet(CustodyEnd.TERMINAL)]
        self.phase = Phase.OK
        return [*self._finish(HandoffOutcome.OK, "", now), Quiet(CustodyEnd.COMPLETE)]

    def _tick(self, now: float) -> list[Effect]:
        if self.phase is Phase.DRAINING:
            return []
        if now >= self._deadline_at:
            return self._give_up(HandoffOutcome.ABORTED, "the deadline has passed", now)
        if self.is_stalled(now):
            return self._give_up(HandoffOutcome.STALLED, f"no progress for {self._stall_s:g} s", now)
        return []

    def _give_up(self, outcome: HandoffOutcome, detail: str, now: float) -> list[Effect]:
        effects = self._finish(outcome, detail, now)
        if self.phase is Phase.NEW:
            return effects + self._end(CustodyEnd.NEVER_POSTED)
        self.phase = Phase.DRAINING
        return effects + self._drained()

    def _drained(self) -> list[Effect]:
        if self._in_flight:
            return []
        return self._end(CustodyEnd.PEER_DEAD if self._peer_dead else CustodyEnd.TERMINAL)

    def _finish(self, outcome: HandoffOutcome, detail: str, now: float) -> list[Effect]:
        if self.outcome is not None:
            return []
        self.outcome, self.detail, self.finished_at = outcome, detail, now
        return [Finish(outcome, detail)]

    def _end(self, why: CustodyEnd) -> list[Effect]:
        self.phase = Phase.ABORTED if self.outcome is HandoffOutcome.ABORTED else Phase.FAILED
        return [Quiet(why)]
