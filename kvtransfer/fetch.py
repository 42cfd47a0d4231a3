"""What a fetch is asked and what it answers."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from core.errors import (
    BackendFailed,
    Cancelled,
    DigestMismatch,
    LayoutMismatch,
    OutOfBlocks,
    PeerLost,
    ServingError,
    StaleLease,
    TransferStalled,
)
from core.handoff import HandoffOutcome, LeaseRef, TransferMode

T = TypeVar("T")
Then = Callable[[Sequence[int]], bytes]
"""What is made of local blocks once they have arrived: their digests."""

_ERRORS: dict[HandoffOutcome, type[ServingError]] = {
    HandoffOutcome.STALE_LEASE: StaleLease,
    HandoffOutcome.DIGEST_MISMATCH: DigestMismatch,
    HandoffOutcome.PEER_LOST: PeerLost,
    HandoffOutcome.STALLED: TransferStalled,
    HandoffOutcome.ABORTED: Cancelled,
    HandoffOutcome.INCOMPATIBLE: LayoutMismatch,
    HandoffOutcome.NO_CAPACITY: OutOfBlocks,
    HandoffOutcome.BACKEND_FAILED: BackendFailed,
}


class Addition(NamedTuple):
    """Blocks that are added to an open fetch; both lists begin with the same token."""

    remote_blocks: Sequence[int]
    local_blocks: Sequence[int]


AddBlocks = Callable[[Sequence[Addition], bool, Then], "list[Future[bytes | None]]"]
"""See :meth:`Transfer.more`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchRequest:
    """READ the peer's blocks of a sequence into ours, then the lease slot. What both lists have slots for is moved, by
    the position of its tokens."""

    transfer_id: int
    """Unique in this process."""
    remote_blocks: tuple[int, ...]
    local_blocks: tuple[int, ...]
    lease: LeaseRef
    slot: int
    first_remote_block: int = 0
    """Place of ``remote_blocks[0]`` within the sequence, in blocks of the peer."""
    first_local_block: int = 0
    """Place of ``local_blocks[0]``, in blocks of ours."""
    deadline_s: float
    """From now; a fetch that is not over by then is ABORTED."""
    is_open: bool = False
    """Blocks will be added (:meth:`Transfer.more`); the slot is read after the last of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchTimes:
    """Seconds. ``post_s`` lies within ``wire_s``: on one machine posting *is* the copy."""

    queue_s: float = 0.0
    """Until the first operation was posted."""
    post_s: float = 0.0
    """Spent in posting calls, of all operations."""
    wire_s: float = 0.0
    """From the first post to the arrival of the last chunk."""
    slot_s: float = 0.0
    """The slot read."""
    total_s: float = 0.0
    late_post_s: float = 0.0
    """Of ``post_s``, what was spent once all that there is to read was known: somebody waits for it."""
    late_move_s: float = 0.0
    """From then until the last chunk arrived, but for posting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchPart:
    """One addition to an open fetch, in seconds before the end of the fetch."""

    begun_s: float
    """When its first operation was posted; 0 where none was."""
    arrived_s: float | None
    """When the last byte was there; None where it never was."""
    num_bytes: int
    num_descriptors: int
    is_early: bool
    """Begun before all that there is to read was known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchResult:
    """``OK`` means: all data arrived, and then the slot still showed the granted lease and epoch. Digests are yet to
    be checked (:func:`kvtransfer.validate.check_read`)."""

    transfer_id: int
    outcome: HandoffOutcome
    detail: str
    backend: str
    mode: TransferMode
    num_bytes: int
    """That arrived, also when the outcome is not OK."""
    num_copies: int
    snapshot: bytes | None
    """The slot as read after the data was complete; None when it never was."""
    early_bytes: int = 0
    """That had arrived before the last blocks of an open fetch were added."""
    is_data_complete: bool
    """Every block arrived. With PEER_LOST and equal digests the data may be used (design.md 4)."""
    times: FetchTimes
    parts: tuple[FetchPart, ...] = ()
    """As they were added."""

    def error(self) -> ServingError | None:
        """The typed error of the outcome; None for OK."""
        return None if self.outcome is HandoffOutcome.OK else error_of(self.outcome, self.detail)


def error_of(outcome: HandoffOutcome, detail: str) -> ServingError:
    """The typed error of an outcome other than OK."""
    return _ERRORS[outcome](detail or outcome.value)


def outcome_of(error: BaseException) -> HandoffOutcome:
    """What is told to the holder when a claim ends by ``error``."""
    for outcome, cls in _ERRORS.items():
        if isinstance(error, cls):
            return outcome
    return HandoffOutcome.ABORTED


class Transfer:
    """A fetch under way. Both futures always end, and cannot be cancelled from outside: use :meth:`abandon`."""

    def __init__(self, transfer_id: int) -> None:
        self.transfer_id = transfer_id
        self.result: Future[FetchResult] = pinned_future()
        """Never raises: the outcome is in the value."""
        self.quiet: Future[None] = pinned_future()
        """No operation can touch the local blocks any more; custody has ended."""
        self._abandon: Callable[[], object] | None = None
        self._more: AddBlocks | None = None
        self._granted: Callable[[], object] | None = None

    def bind(self, *, abandon: Callable[[], object], more: "AddBlocks", granted: Callable[[], object]) -> None:
        """For the transfer thread: how it is told."""
        self._abandon, self._more, self._granted = abandon, more, granted

    def granted(self) -> None:
        """The rest of an open fetch is about to be added: what has arrived by now was early (any thread)."""
        if self._granted is not None:
            self._granted()

    def more(self, parts: Sequence[Addition], *, then: Then, is_last: bool = False) -> "list[Future[bytes | None]]":
        """Add blocks to an open fetch (any thread), which move part by part; the local ones are in custody when this
        returns. ``is_last``: nothing follows these, which may be nothing either.

        Of each part: what ``then`` made of its local blocks, on a thread beside the transfers, as soon as they had
        arrived; None when the fetch ended before. Raises LayoutMismatch for block ids outside the geometries; then
        nothing has changed.
        """
        assert self._more is not None, "the fetch was not begun"
        return self._more(parts, is_last, then)

    def abandon(self) -> None:
        """Nobody wants the result (any thread, idempotent). ``result`` ends soon, ``quiet`` when it is true."""
        if self._abandon is not None:
            self._abandon()


def pinned_future() -> "Future[T]":
    """A future that a waiter cannot cancel: asyncio passes the cancellation of a wrapped future on, ours must go
    on."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()
    return future
