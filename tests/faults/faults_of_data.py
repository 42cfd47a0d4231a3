"""What goes wrong with bytes: changed in flight, read from a source that changes, late, or never there."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from core.errors import Cancelled, OutOfBlocks
from core.ids import HandoffId
from kvtransfer.backends.base import Batch
from kvtransfer.backends.inproc import Fault
from kvtransfer.memory import REGION_CANARY, REGION_KV, REGION_SLOTS
from tests.faults.injected import Injected
from tests.support.virtual.content_engine import HEADS
from tests.support.virtual.worker import VirtualWorker

if TYPE_CHECKING:
    from tests.faults.case import Case


Bytes = NDArray[np.uint8]


class Mangled(Injected):
    """The bytes that an operation brings are not those it read."""

    def __init__(
        self, kind: str, case: Case, rng: random.Random, change: Callable[..., None], region: str = REGION_KV
    ) -> None:
        super().__init__(kind, case, rng)
        self._change, self._region = change, region

    def on_post(self, reader: VirtualWorker, batch: Batch, handoff: str) -> Fault | None:
        if batch.remote_region != self._region:
            return None
        is_chance = self._region == REGION_CANARY or self._counts(handoff)
        if not is_chance or not self._is_due():
            return None
        self.handoff = handoff or None

        def mangle(joined: Bytes) -> None:
            before = joined.copy()
            self._change(self, joined)
            self.took_effect = not np.array_equal(joined, before)
            if self.took_effect:
                self.case.audit.data_was_changed = True

        return Fault(delay_polls=self.rng.randrange(3), mangle=mangle)

    def flip(self, joined: Bytes) -> None:
        joined[self.rng.randrange(joined.size)] ^= 1 << self.rng.randrange(8)

    def flip_many(self, joined: Bytes) -> None:
        for _ in range(self.rng.randrange(2, 40)):
            self.flip(joined)

    def _swap(self, joined: Bytes, unit: int) -> None:
        parts = joined.reshape(-1, unit)
        if len(parts) > 1:
            one, other = self.rng.sample(range(len(parts)), 2)
            parts[[one, other]] = parts[[other, one]]

    def swap_blocks(self, joined: Bytes) -> None:
        self._swap(joined, self.case.block_bytes)

    def swap_heads(self, joined: Bytes) -> None:
        self._swap(joined, self.case.block_bytes // HEADS)

    def swap_words(self, joined: Bytes) -> None:
        self._swap(joined, 8)

    def other_block(self, joined: Bytes) -> None:
        """A block of some other sequence in the place of one: what a stale address brings."""
        blocks = joined.reshape(-1, self.case.block_bytes)
        donor = self.rng.choice(self.case.cluster.workers).engine
        source = self.rng.randrange(donor.geometry.num_blocks)
        blocks[self.rng.randrange(len(blocks))] = donor.kv[source].view(np.uint8).ravel()

    def zeros(self, joined: Bytes) -> None:
        start = self.rng.randrange(joined.size)
        joined[start : start + self.rng.randrange(1, 512)] = 0

    def cut_short(self, joined: Bytes) -> None:
        """The end never arrived: what was there before is there still."""
        left = self.rng.randrange(1, joined.size)
        joined[-left:] = np.frombuffer(self.rng.randbytes(left), dtype=np.uint8)


class SourceReused(Injected):
    """P ends the hand-off (preempted, cancelled) and gives its blocks to others while D reads."""

    def __init__(self, kind: str, case: Case, rng: random.Random, when: str) -> None:
        super().__init__(kind, case, rng)
        self._when = when
        self._armed_for: str | None = None

    def on_post(self, reader: VirtualWorker, batch: Batch, handoff: str) -> Fault | None:
        if not handoff:
            return None
        if self._when == "after":
            if batch.remote_region == REGION_SLOTS and self._is_due():
                self._reuse(handoff)
            return None
        if batch.remote_region != REGION_KV or not self._is_due():
            return None
        if self._when == "before":
            self._reuse(handoff)
            return None
        return Fault(between=(self.rng.randrange(batch.num_bytes), lambda: self._reuse(handoff)))

    def _reuse(self, handoff: str) -> None:
        self.handoff = handoff
        worker = self.case.holder_of(handoff)
        self.took_effect = worker is not None and worker.process.run(self._end_and_write, worker, handoff)
        if self.took_effect:
            self.case.audit.data_was_changed = True  # if P dies before its slot is read, the digests find out

    def _end_and_write(self, worker: VirtualWorker, handoff: str) -> bool:
        if not worker.role.exports.end(HandoffId(handoff), Cancelled("preempted")):
            return False
        pool = worker.engine.pool
        try:
            taken = pool.allocate(pool.num_unpromised)
        except OutOfBlocks:
            return False
        for block in taken:
            worker.engine.kv[block] = self.rng.getrandbits(32)
        pool.free(taken)
        return True


class Operation(Injected):
    def __init__(self, kind: str, case: Case, rng: random.Random, what: str) -> None:
        super().__init__(kind, case, rng)
        self._what = what

    def on_post(self, reader: VirtualWorker, batch: Batch, handoff: str) -> Fault | None:
        if not self._counts(handoff) or self.rng.random() < 0.2 or not self._is_due():
            return None
        self.handoff = handoff or None
        if self._what == "fails":
            return Fault(
                delay_polls=self.rng.randrange(4), fail="injected", fail_after_bytes=self.rng.randrange(batch.num_bytes)
            )
        if self._what == "slow":
            return Fault(delay_polls=self.rng.randrange(4, 60))
        fault = Fault(delay_polls=-1)
        if self._what == "given up":  # its request ends at once, its bytes come later
            self._soon(lambda: self.case.cancel_client(handoff))
        self.case.cluster.loop.call_later(
            self.rng.choice((0.01, 0.1, 1.0, 4.0, 9.0)), let_go, fault, context=self.case.context.copy()
        )
        return fault


def let_go(fault: Fault) -> None:
    """The operation that hangs proceeds."""
    fault.delay_polls = 0
