"""Who holds each KV block: the one place where blocks change hands.

A block has three counters; nobody holds it when all are zero. It counts once, as the first that applies::

    custody > 0     a transfer may still write (or serve) it, whatever became of its request
    in use  > 0     sequences read or write it (several may share it)
    leased  > 0     held for other workers to read (under several leases perhaps)
    cached          nobody holds it, it is kept for its content (engine/prefix_cache.py)
    free            on the free list

Reservations are promises on top: ``reserved <= free + cached`` always holds, so a promised block can always be had
(by evicting a cached one if need be). Taking a cached block for its content spends a promise like any other.

Content is for reading: a block is *writable* only for the one sequence that holds it, while nobody else does and its
content is not shared.
"""

import threading
from collections.abc import Iterable, Sequence

from core.errors import OutOfBlocks
from core.ids import BlockHash
from core.kv import BlockCounts
from engine.prefix_cache import CacheChanges, PrefixCache


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

    def split(self, num_blocks: int) -> "Reservation":
        """A promise of its own for ``num_blocks`` of these blocks, or for as many as there are."""
        return self._pool._split(self, num_blocks)

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
        self._generations = [0] * num_blocks
        self._cache = PrefixCache()
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

    def allocate(self, num_blocks: int, *reservations: Reservation | None) -> list[int]:
        """``num_blocks`` blocks, now in use.

        Each spends a promise, from the first reservation that has any left; what goes beyond is taken from what is
        promised to nobody. Raises :class:`OutOfBlocks` and changes nothing when there are not enough.
        """
        return self.allocate_shared(num_blocks, (), *reservations)[0]

    def allocate_shared(
        self, num_blocks: int, hashes: Sequence[BlockHash], *reservations: Reservation | None
    ) -> tuple[list[int], int]:
        """Like :meth:`allocate`; as many of the first blocks as possible hold what ``hashes`` name. Also returns how
        many."""
        with self._lock:
            return self._take(num_blocks, self._cache.find(hashes, num_blocks), reservations)

    def hold(self, hashes: Sequence[BlockHash], *reservations: Reservation | None) -> list[int]:
        """The blocks that hold what ``hashes`` name, from the first on as far as they are here; now in use."""
        with self._lock:
            hits = self._cache.find(hashes, len(hashes))
            return self._take(len(hits), hits, reservations)[0]

    def count_missing(self, num_blocks: int, hashes: Sequence[BlockHash] = ()) -> int:
        """Blocks that :meth:`allocate` would have to take from free and cached ones now: those it finds in the hands
        of others cost nothing."""
        with self._lock:
            return num_blocks - sum(map(self._is_held, self._cache.find(hashes, num_blocks)))

    def share(self, blocks: Sequence[int]) -> None:
        """One more use of blocks that are held already: another sequence reads them too."""
        with self._lock:
            self._add(blocks, self._in_use)

    def is_writable(self, block: int) -> bool:
        """Whether the one who uses the block may write to it. Otherwise it has to be copied first."""
        with self._lock:
            is_alone = self._in_use[block] == 1 and not self._leases[block] and not self._custody[block]
            return is_alone and not self._cache.has_content(block)

    def generations(self, blocks: Sequence[int]) -> list[int]:
        """How often each block was given out for new content: a complete block does not change within one."""
        with self._lock:
            return [self._generations[block] for block in blocks]

    def publish(self, blocks: Sequence[int], hashes: Sequence[BlockHash]) -> None:
        """The held ``blocks`` are complete and hold what ``hashes`` name: others may share them from now on."""
        with self._lock:
            for block, block_hash in zip(blocks, hashes, strict=True):
                assert self._is_held(block), f"block {block} is free: it has no content"
                self._cache.store(block, block_hash)

    def forget(self, blocks: Sequence[int]) -> None:
        """What the held ``blocks`` contain is broken: nobody shares it from now on."""
        with self._lock:
            for block in blocks:
                assert self._is_held(block), f"block {block} is free"
                self._cache.forget(block)

    def take_changes(self, *, whole: bool = False) -> CacheChanges:
        """What others may now find here and what not any more, since the last call; ``whole``: everything."""
        with self._lock:
            return self._cache.take_changes(whole=whole)

    def free(self, blocks: Sequence[int]) -> None:
        """Drop one use of each block. A block that others use, that is leased or in custody stays what it is until
        that ends.
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
                cached=self._cache.num_kept,
                free=len(self._free),
                reserved=self._num_reserved,
            )

    @property
    def num_unpromised(self) -> int:
        """Blocks that an allocation without a reservation can have now."""
        with self._lock:
            return self._num_unpromised()

    # -- under the lock -----------------------------------------------------------------------------------------------

    def _num_unpromised(self) -> int:
        return len(self._free) + self._cache.num_kept - self._num_reserved

    def _need(self, num_blocks: int) -> None:
        assert num_blocks >= 0, "a negative number of blocks"
        available = self._num_unpromised()
        if num_blocks > available:
            raise OutOfBlocks(
                f"{num_blocks} KV blocks are needed, {available} of {self.num_blocks} are neither held nor promised"
            )

    def _take(
        self, num_blocks: int, hits: list[int], reservations: tuple[Reservation | None, ...]
    ) -> tuple[list[int], int]:
        num_held = sum(map(self._is_held, hits))
        promised = min(num_blocks, sum(each.remaining for each in reservations if each is not None))
        self._need(max(0, num_blocks - num_held - promised))
        self._num_reserved -= promised
        for reservation in reservations:
            if reservation is not None:
                spent = min(promised, reservation._remaining)
                reservation._remaining -= spent
                promised -= spent
        self._use(hits)
        fresh = [self._free.pop() if self._free else self._cache.evict() for _ in range(num_blocks - len(hits))]
        for block in fresh:
            self._in_use[block] = 1
            self._generations[block] += 1
        self._num_in_use += len(fresh)
        return hits + fresh, len(hits)

    def _grow(self, reservation: Reservation, target: int) -> bool:
        with self._lock:
            available = self._num_unpromised()
            more = max(0, min(target - reservation._remaining, available))
            reservation._remaining += more
            self._num_reserved += more
            return reservation._remaining >= target

    def _split(self, reservation: Reservation, num_blocks: int) -> Reservation:
        part = Reservation(self)
        with self._lock:
            part._remaining = min(num_blocks, reservation._remaining)
            reservation._remaining -= part._remaining
        return part

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
        for block in reversed(blocks):  # so that the last block of a sequence is given up before the first
            self._count(block, -1)
            counter[block] -= 1
            if self._is_held(block):
                self._count(block, +1)
            elif not self._cache.keep(block):
                self._free.append(block)

    def _use(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if self._cache.is_kept(block):
                self._cache.take(block)
            self._count(block, -1)
            self._in_use[block] += 1
            self._count(block, +1)

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
