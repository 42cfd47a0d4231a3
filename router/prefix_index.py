"""Which worker holds which KV block, by block hash: what placing by shared prefixes looks things up in.

Workers tell what they stored and evicted (``stored_hashes`` and ``evicted_hashes`` of their heartbeats), and everything
in the first heartbeats of a stream. What a placement has just sent to a worker is *expected* there: several requests
with the same new prefix go to one worker although none of its blocks has been reported yet.

::

    absent   --- a placement sends it to the worker ---------> expected
    absent   --- the worker stored it -----------------------> held
    expected --- the worker stored it -----------------------> held
    expected --- its time is over, or the worker evicted it -> absent
    held     --- the worker evicted it ----------------------> absent
    any      --- a new stream, or the worker is gone --------> absent

A hash covers its block and all blocks before it, so what a worker can use of a request is the run of its first hashes.
One walk over the request's hashes finds the runs of all workers: each hash has a mask with one bit for each holder.

Memory is bounded by what the workers have: none is credited with more blocks than its pool has, nor expected to get
more. What a lost worker held counts no more at once, and is freed piece by piece: millions of entries take a while.
"""

import heapq
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from core.clock import Clock
from core.ids import BlockHash, Incarnation, WorkerId

WorkerKey = tuple[WorkerId, Incarnation]

FREED_IN_ONE_SWEEP = 20_000
"""Hashes of lost workers; some milliseconds."""
REFRESH_S = 1.0
"""What is expected already is expected for longer only from this on: a burst need not be noted request by request."""
HELD = 0.0
"""In place of the moment until which a block is expected."""


@dataclass(slots=True, eq=False)
class _Holder:
    """One stream of one worker."""

    bit: int
    """Of the masks, and nobody else's until everything that this one had is freed."""
    max_blocks: int
    hashes: dict[BlockHash, float] = field(default_factory=dict)
    """``HELD``, or until when the block is expected. (Not a set: the garbage collector walks through those.)"""
    num_expected: int = 0


class PrefixIndex:
    """Holders by worker incarnation. Used by one event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._holders: dict[WorkerKey, _Holder] = {}
        self._masks: dict[BlockHash, int] = {}
        self._expectations: list[tuple[float, int, _Holder, Collection[BlockHash]]] = []
        """A heap by the moment of their end."""
        self._num_expected = 0
        """Expectations ever made: the order among equal moments."""
        self._gone: deque[_Holder] = deque()
        self._free_bits: list[int] = []
        self._num_bits = 0

    @property
    def num_hashes(self) -> int:
        """Different ones, those that are not freed yet included."""
        return len(self._masks)

    @property
    def num_expectations(self) -> int:
        """Prompts on their way, but for those that ask for what others have asked for just before."""
        return len(self._expectations)

    def num_blocks(self, worker: WorkerKey) -> int:
        """Blocks that the worker holds or is expected to hold."""
        holder = self._holders.get(worker)
        return 0 if holder is None else len(holder.hashes)

    # -- what workers say ---------------------------------------------------------------------------------------------

    def begin(self, worker: WorkerKey, *, max_blocks: int) -> None:
        """A new stream of the worker: it will tell everything, so nothing is known of it until then."""
        self.drop(worker)
        if not self._free_bits:
            self._free_bits.append(1 << self._num_bits)
            self._num_bits += 1
        self._holders[worker] = _Holder(bit=self._free_bits.pop(), max_blocks=max_blocks)

    def apply(self, worker: WorkerKey, *, stored: Iterable[BlockHash], evicted: Iterable[BlockHash]) -> None:
        """What became of the worker's blocks. Idempotent. Ignored while the worker has no stream."""
        holder = self._holders.get(worker)
        if holder is None:
            return
        for block_hash in evicted:
            self._remove(holder, block_hash)
        hashes, masks, bit = holder.hashes, self._masks, holder.bit
        for block_hash in stored:
            until = hashes.get(block_hash)
            if until is None:
                if len(hashes) - holder.num_expected >= holder.max_blocks:
                    return  # more than it has room for: an incarnation that lies gets no more memory for it
                masks[block_hash] = masks.get(block_hash, 0) | bit
            elif until != HELD:
                holder.num_expected -= 1
            hashes[block_hash] = HELD

    def drop(self, worker: WorkerKey) -> None:
        """Nothing is known of the worker any more."""
        holder = self._holders.pop(worker, None)
        if holder is not None:
            self._gone.append(holder)

    def keep_only(self, alive: Iterable[WorkerKey]) -> None:
        """Drop the workers that are not ``alive``."""
        for worker in self._holders.keys() - set(alive):
            self.drop(worker)

    # -- what placements make of it -----------------------------------------------------------------------------------

    def overlaps(self, hashes: Sequence[BlockHash]) -> dict[WorkerKey, int]:
        """How many of the first ``hashes`` each worker has without a gap; those that have none are left out."""
        workers = {holder.bit: worker for worker, holder in self._holders.items()}
        found: dict[WorkerKey, int] = {}
        mask_of = self._masks.get
        left = sum(workers)
        for number, block_hash in enumerate(hashes):
            still = left & mask_of(block_hash, 0)
            if still != left:
                if number:
                    found |= {workers[bit]: number for bit in _bits(left ^ still)}
                left = still
                if not left:
                    return found
        return found | ({workers[bit]: len(hashes) for bit in _bits(left)} if hashes else {})

    def expect(self, worker: WorkerKey, hashes: Iterable[BlockHash], *, for_s: float) -> None:
        """A prompt of these blocks is on its way to the worker, which should have reported them within ``for_s``."""
        holder = self._holders.get(worker)
        if holder is None:
            return
        until = self._clock.now() + for_s
        new: list[BlockHash] = []
        for block_hash in hashes:
            before = holder.hashes.get(block_hash)
            if before is None:
                if holder.num_expected >= holder.max_blocks:
                    break
                holder.num_expected += 1
                self._masks[block_hash] = self._masks.get(block_hash, 0) | holder.bit
            elif before == HELD or until < before + REFRESH_S:
                continue
            holder.hashes[block_hash] = until
            new.append(block_hash)
        if new:
            heapq.heappush(self._expectations, (until, self._num_expected, holder, new))
            self._num_expected += 1

    # -- time ---------------------------------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Forget what was expected for too long, and free some of what lost workers had."""
        now = self._clock.now()
        while self._expectations and self._expectations[0][0] <= now:
            until, _, holder, hashes = heapq.heappop(self._expectations)
            for block_hash in hashes:
                if holder.hashes.get(block_hash) == until:  # not confirmed since, nor expected for longer
                    self._remove(holder, block_hash)
        budget = FREED_IN_ONE_SWEEP
        while self._gone and budget > 0:
            holder = self._gone[0]
            while holder.hashes and budget > 0:
                block_hash, _ = holder.hashes.popitem()
                self._clear(holder, block_hash)
                budget -= 1
            if not holder.hashes:
                self._free_bits.append(holder.bit)
                self._gone.popleft()

    def _remove(self, holder: _Holder, block_hash: BlockHash) -> None:
        until = holder.hashes.pop(block_hash, None)
        if until is None:
            return
        if until != HELD:
            holder.num_expected -= 1
        self._clear(holder, block_hash)

    def _clear(self, holder: _Holder, block_hash: BlockHash) -> None:
        mask = self._masks[block_hash] & ~holder.bit
        if mask:
            self._masks[block_hash] = mask
        else:
            del self._masks[block_hash]


def _bits(mask: int) -> Iterator[int]:
    """Its single bits."""
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit
