"""Which worker holds which KV block, by block hash: what placing by shared prefixes looks things up in.

Workers tell what they stored and evicted (``stored_hashes`` and ``evicted_hashes`` of their heartbeats), and everything
in the first heartbeats of a stream. What a placement has just sent to a worker is *expected* there: several requests
with the same new prefix go to one worker although none of its blocks has been reported yet.

::

    absent   --- a placement sends it to the worker --------> expected
    absent   --- the worker stored it ----------------------> held
    expected --- the worker stored it ----------------------> held
    expected --- its time is over, the worker evicted it ---> absent
    held     --- the worker evicted it ---------------------> absent
    any      --- a new stream, or the worker is gone -------> absent

A hash covers its block and all blocks before it, so what a worker can use of a request is the run of its first hashes.
One walk over the request's hashes finds the runs of all workers: each hash has a mask with one bit for each holder.

Memory is bounded by what the workers have: none is credited with more blocks than its pool has, nor are more expected
than all of them have together. What a lost worker held counts no more at once, and is freed piece by piece: millions of
entries take a while.
"""

import heapq
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from core.clock import Clock
from core.ids import BlockHash, Incarnation, WorkerId

WorkerKey = tuple[WorkerId, Incarnation]

FREED_IN_ONE_SWEEP = 20_000
"""Hashes of lost workers; some milliseconds."""


@dataclass(slots=True, eq=False)
class _Holder:
    """One stream of one worker."""

    bit: int
    """Of the masks, and nobody else's until everything that this one had is freed, and nothing is expected of it."""
    max_blocks: int
    hashes: dict[BlockHash, None] = field(default_factory=dict)
    """Held. (Not a set: the garbage collector walks through those.)"""
    expected_until: float = 0.0


class PrefixIndex:
    """Holders by worker incarnation. Used by one event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._holders: dict[WorkerKey, _Holder] = {}
        self._masks: dict[BlockHash, int] = {}
        self._expected: dict[BlockHash, int] = {}
        """Masks of what is on its way."""
        self._max_expected = 0
        self._expectations: list[tuple[float, int, int, list[BlockHash]]] = []
        """A heap: (until, number, mask, hashes)."""
        self._num_expectations = 0
        """Ever made: the order among equal moments."""
        self._gone: list[_Holder] = []
        self._free_bits: list[int] = []
        self._num_bits = 0

    @property
    def num_hashes(self) -> int:
        """Different ones that are held, those that are not freed yet included."""
        return len(self._masks)

    @property
    def num_expected(self) -> int:
        """Different ones that are on their way."""
        return len(self._expected)

    @property
    def num_expectations(self) -> int:
        """Prompts on their way, but for those of a burst that others have gone before."""
        return len(self._expectations)

    def num_blocks(self, worker: WorkerKey) -> int:
        """Blocks that the worker holds."""
        holder = self._holders.get(worker)
        return 0 if holder is None else len(holder.hashes)

    # -- what workers say ---------------------------------------------------------------------------------------------

    def begin(self, worker: WorkerKey, *, max_blocks: int) -> None:
        """A new stream of the worker: it will tell everything, so nothing is known of it until then. ``max_blocks`` is
        0 for one that keeps none: nothing is expected of it either."""
        self.drop(worker)
        if not self._free_bits:
            self._free_bits.append(1 << self._num_bits)
            self._num_bits += 1
        self._holders[worker] = _Holder(bit=self._free_bits.pop(), max_blocks=max_blocks)
        self._max_expected += max_blocks

    def apply(self, worker: WorkerKey, *, stored: Iterable[BlockHash], evicted: Iterable[BlockHash]) -> None:
        """What became of the worker's blocks. Idempotent. Ignored while the worker has no stream."""
        holder = self._holders.get(worker)
        if holder is None:
            return
        hashes, masks, bit = holder.hashes, self._masks, holder.bit
        for block_hash in evicted:
            if block_hash in hashes:
                del hashes[block_hash]
                self._clear(masks, block_hash, bit)
            if block_hash in self._expected:
                self._clear(self._expected, block_hash, bit)
        for block_hash in stored:
            if block_hash not in hashes:
                if len(hashes) >= holder.max_blocks:
                    return  # more than it has room for: an incarnation that lies gets no more memory for it
                hashes[block_hash] = None
                masks[block_hash] = masks.get(block_hash, 0) | bit

    def drop(self, worker: WorkerKey) -> None:
        """Nothing is known of the worker any more."""
        holder = self._holders.pop(worker, None)
        if holder is not None:
            self._max_expected -= holder.max_blocks
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
        held, expected = self._masks.get, self._expected.get
        left = sum(workers)
        for number, block_hash in enumerate(hashes):
            still = left & held(block_hash, 0)
            if still != left:
                still |= left & expected(block_hash, 0)
            if still != left:
                if number:
                    found |= {workers[bit]: number for bit in _bits(left ^ still)}
                left = still
                if not left:
                    return found
        return found | ({workers[bit]: len(hashes) for bit in _bits(left)} if hashes else {})

    def expect(self, workers: Iterable[WorkerKey], hashes: Collection[BlockHash], *, for_s: float) -> None:
        """A prompt of these blocks is on its way to the workers, which should have reported them within ``for_s``. What
        is expected of a worker already is not expected for longer by that: a burst is one expectation."""
        known = (self._holders.get(worker) for worker in workers)
        holders = [holder for holder in known if holder is not None and holder.max_blocks]
        mask, until = sum(holder.bit for holder in holders), self._clock.now() + for_s
        expected = self._expected
        if not mask or len(expected) + len(hashes) > self._max_expected:
            return
        if expected.keys().isdisjoint(hashes):
            groups = {mask: list(hashes)}
            expected.update(dict.fromkeys(hashes, mask))
        else:
            groups = {}
            for block_hash in hashes:
                before = expected.get(block_hash, 0)
                if added := mask & ~before:
                    groups.setdefault(added, []).append(block_hash)
                    expected[block_hash] = before | added
        for added, new in groups.items():
            heapq.heappush(self._expectations, (until, self._num_expectations, added, new))
            self._num_expectations += 1
        for holder in holders:
            holder.expected_until = max(holder.expected_until, until)

    # -- time ---------------------------------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Forget what was expected for too long, and free some of what lost workers had."""
        now = self._clock.now()
        while self._expectations and self._expectations[0][0] <= now:
            _, _, mask, hashes = heapq.heappop(self._expectations)
            for block_hash in hashes:
                if block_hash in self._expected:
                    self._clear(self._expected, block_hash, mask)
        budget = FREED_IN_ONE_SWEEP
        for holder in list(self._gone):
            while holder.hashes and budget > 0:
                block_hash, _ = holder.hashes.popitem()
                self._clear(self._masks, block_hash, holder.bit)
                budget -= 1
            if not holder.hashes and holder.expected_until <= now:
                self._free_bits.append(holder.bit)
                self._gone.remove(holder)

    @staticmethod
    def _clear(masks: dict[BlockHash, int], block_hash: BlockHash, bits: int) -> None:
        mask = masks[block_hash] & ~bits
        if mask:
            masks[block_hash] = mask
        else:
            del masks[block_hash]


def _bits(mask: int) -> Iterator[int]:
    """Its single bits."""
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit
