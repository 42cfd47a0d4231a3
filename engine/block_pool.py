"""Who holds each KV block: the one place where blocks change hands.

A block has three counters; it is free only when all are zero. It counts once, as the first that applies::

    custody > 0     a transfer may still write (or serve) it, whatever became of its request
    in use  > 0     a sequence reads or writes it
    leased  > 0     held for another worker to read
    (cached)        kept for its content; the prefix cache will live here, today nothing is cached
    free            on the free list

Reservations are promises on top: ``reserved <= free + cached`` always holds, so a promised block can always be had.
"""

import threading
from collections.abc import Iterable, Sequence

from core.errors import OutOfBlocks
from core.kv import BlockCounts


class Reservation:
    """A promise of ``remaining`` blocks. Spent by :meth:`BlockPool.allocate`, ended by :meth:`release` (idempotent)."""

    __slots__ = ("_pool", "_remaining")

    def __init__(self, pool: "BlockPool") -> None:
        self._pool = pool
        self._remaining = 0

    @property
    def remaining(self) -> int:
        return self._remaining

    def grow(self, target: int) -> bool:
        """Take whatever is not promised to others until ``remaining`` is ``target``; True when it is. Never takes
        back.
        """
        return self._pool._grow(self, target)

    def release(self) -> None:
        self._pool._release(self)


class BlockPool:
    """All blocks of one worker. Thread-safe: each method is one short critical section and all or nothing."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0, "a pool has blocks"
        self.num_blocks = num_blocks
        self._lock = threading.Lock()
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the block freed last is warm in the cache
        self._in_use = [0] * num_blocks
        self._leases = [0] * num_blocks
        self._custody = [0] * num_blocks
        self._num_in_use = 0
        self._num_leased = 0
        self._num_custody = 0
        self._num_reserved = 0

    def reserve(self, num_blocks: int) -> Reservation:
        """Promise ``num_blocks`` blocks. Raises :class:`OutOfBlocks` when that many are not to be had."""
        reservation = Reservation(self)
        with self._lock:
            self._need(num_blocks)
            reservation._remaining = num_blocks
            self._num_reserved += num_blocks
        return reservation

    def allocate(self, num_blocks: int, reservation: Reservation | None = None) -> list[int]:
        """``num_blocks`` blocks, now in use: first from the reservation, then from what is promised to nobody.

        Raises :class:`OutOfBlocks` and changes nothing when there are not enough.
        """
        with self._lock:
            promised = min(num_blocks, reservation._remaining) if reservation is not None else 0
            self._need(num_blocks - promised)
            if reservation is not None:
                reservation._remaining -= promised
            self._num_reserved -= promised
            blocks = [self._free.pop() for _ in range(num_blocks)]
            for block in blocks:
                self._in_use[block] = 1
            self._num_in_use += num_blocks
            return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """Drop one use of each block. A block that is leased or in custody stays out of the free list until that
        ends.
        """
        with self._lock:
            self._drop(blocks, self._in_use, "freed twice")

    def lease(self, blocks: Sequence[int]) -> None:
        """Hold blocks for a reader. They must be held already (in use, leased or in custody)."""
        with self._lock:
            self._add(blocks, self._leases)

    def end_lease(self, blocks: Sequence[int]) -> None:
        with self._lock:
            self._drop(blocks, self._leases, "is not leased")

    def take_custody(self, blocks: Sequence[int]) -> None:
        """Mark blocks as the target or source of a transfer. They must be held already."""
        with self._lock:
            self._add(blocks, self._custody)

    def end_custody(self, blocks: Sequence[int]) -> None:
        """Every operation on the blocks is terminal."""
        with self._lock:
            self._drop(blocks, self._custody, "is not in custody")

    def counts(self) -> BlockCounts:
        with self._lock:
            return BlockCounts(
                total=self.num_blocks,
                custody=self._num_custody,
                in_use=self._num_in_use,
                leased=self._num_leased,
                cached=0,
                free=len(self._free),
                reserved=self._num_reserved,
            )

    @property
    def num_unpromised(self) -> int:
        """Blocks that an allocation without a reservation can have now."""
        with self._lock:
            return len(self._free) - self._num_reserved

    # -- under the lock -----------------------------------------------------------------------------------------------

    def _need(self, num_blocks: int) -> None:
        assert num_blocks >= 0, "a negative number of blocks"
        available = len(self._free) - self._num_reserved
        if num_blocks > available:
            raise OutOfBlocks(
                f"{num_blocks} KV blocks are needed, {available} of {self.num_blocks} are neither held nor promised"
            )

    def _grow(self, reservation: Reservation, target: int) -> bool:
        with self._lock:
            available = len(self._free) - self._num_reserved
            more = max(0, min(target - reservation._remaining, available))
            reservation._remaining += more
            self._num_reserved += more
            return reservation._remaining >= target

    def _release(self, reservation: Reservation) -> None:
        with self._lock:
            self._num_reserved -= reservation._remaining
            reservation._remaining = 0

    def _add(self, blocks: Sequence[int], counter: list[int]) -> None:
        for block in blocks:
            assert self._is_held(block), f"block {block} is free: nobody can hold it for another"
        for block in blocks:
            self._count(block, -1)
            counter[block] += 1
            self._count(block, +1)

    def _drop(self, blocks: Sequence[int], counter: list[int], complaint: str) -> None:
        for block, times in _occurrences(blocks):
            assert counter[block] >= times, f"block {block} {complaint}"
        for block in blocks:
            self._count(block, -1)
            counter[block] -= 1
            if self._is_held(block):
                self._count(block, +1)
            else:
                self._free.append(block)

    def _is_held(self, block: int) -> bool:
        return bool(self._in_use[block] or self._leases[block] or self._custody[block])

    def _count(self, block: int, change: int) -> None:
        """Add ``change`` to the kind that the held block counts as."""
        if self._custody[block]:
            self._num_custody += change
        elif self._in_use[block]:
            self._num_in_use += change
        elif self._leases[block]:
            self._num_leased += change


def _occurrences(blocks: Sequence[int]) -> Iterable[tuple[int, int]]:
    counts: dict[int, int] = {}
    for block in blocks:
        counts[block] = counts.get(block, 0) + 1
    return counts.items()
