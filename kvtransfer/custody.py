"""D's custody: blocks that an operation may still write to. Safe from any thread.

Custody is a pin on top of whatever else holds the blocks, so that a cancelled sequence may free them at once without
their being handed out again. It ends only when the transfer is *quiet*: every operation terminal by poll, the peer
dead by poll, or the backend destroyed. Releasing a handle, removing a peer or a timeout do not count (measured: up to
98 % of the bytes still arrive). A transfer whose request is over while operations are pending is in *quarantine*:
nobody waits for its blocks, and they are not usable either.
"""

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class CustodyPool(Protocol):
    """What custody needs of the block pool. Callable from any thread."""

    def take_custody(self, blocks: Sequence[int]) -> None:
        """Pin allocated blocks until ``end_custody``."""

    def end_custody(self, blocks: Sequence[int]) -> None:
        """Drop the pin; a block that nobody else holds becomes free."""


class CustodyEnd(StrEnum):
    """Why custody could end. A closed set: the label of a counter."""

    COMPLETE = "complete"
    """Everything asked for arrived."""
    NEVER_POSTED = "never_posted"
    TERMINAL = "terminal"
    """Failed or given up, and every operation is terminal by poll."""
    PEER_DEAD = "peer_dead"
    BACKEND_CLOSED = "backend_closed"


@dataclass(frozen=True, slots=True, kw_only=True)
class CustodyStats:
    num_transfers: int
    num_blocks: int
    num_quarantined_transfers: int
    num_quarantined_blocks: int
    oldest_quarantine_at: float | None
    """On the clock of the caller of ``quarantine``."""
    ended: tuple[tuple[CustodyEnd, int], ...]
    """Transfers by cause, since start."""


class Custody:
    """The ledger of transfers and their blocks."""

    def __init__(self, pool: CustodyPool) -> None:
        self._pool = pool
        self._lock = threading.Lock()
        self._blocks: dict[int, tuple[int, ...]] = {}
        self._quarantined: dict[int, float] = {}
        self._ended: Counter[CustodyEnd] = Counter()

    def begin(self, transfer_id: int, blocks: Sequence[int]) -> None:
        """Before the first operation can be posted. Raises ValueError when the transfer has custody already."""
        with self._lock:
            if transfer_id in self._blocks:
                raise ValueError(f"transfer {transfer_id} has custody already")
            self._pool.take_custody(blocks)
            self._blocks[transfer_id] = tuple(blocks)

    def extend(self, transfer_id: int, blocks: Sequence[int]) -> bool:
        """More blocks for a transfer under way. False, and nothing has changed, when its custody has ended."""
        with self._lock:
            known = self._blocks.get(transfer_id)
            if known is None:
                return False
            self._pool.take_custody(blocks)
            self._blocks[transfer_id] = (*known, *blocks)
            return True

    def quarantine(self, transfer_id: int, now: float) -> None:
        """The request is over, the operations are not."""
        with self._lock:
            if transfer_id in self._blocks:
                self._quarantined.setdefault(transfer_id, now)

    def end(self, transfer_id: int, why: CustodyEnd) -> None:
        """The transfer is quiet. Exactly once for each ``begin``; anything else raises KeyError."""
        with self._lock:
            blocks = self._blocks.pop(transfer_id)
            self._quarantined.pop(transfer_id, None)
            self._ended[why] += 1
        self._pool.end_custody(blocks)

    def stats(self) -> CustodyStats:
        with self._lock:
            return CustodyStats(
                num_transfers=len(self._blocks),
                num_blocks=sum(len(blocks) for blocks in self._blocks.values()),
                num_quarantined_transfers=len(self._quarantined),
                num_quarantined_blocks=sum(len(self._blocks[transfer]) for transfer in self._quarantined),
                oldest_quarantine_at=min(self._quarantined.values(), default=None),
                ended=tuple((why, self._ended[why]) for why in CustodyEnd),
            )
