"""What goes wrong: one class for each family of faults, one entry of :data:`KINDS` for each kind.

A fault waits for the event that it was drawn for (the n-th message, operation or failpoint that it may hit), strikes
once, and remembers whom it hit. It acts through the hooks of the virtual cluster only.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from core import types as t
from core.errors import Cancelled, OutOfBlocks
from core.handoff import (
    AbortHandoff,
    Ended,
    LeaseRef,
    Open,
    Refused,
    Release,
    Renew,
    Sealed,
    Welcome,
)
from core.ids import HandoffId, LeaseId
from engine.sequence import Sequence, SequenceKey
from kvtransfer.backends.base import Batch
from kvtransfer.backends.inproc import Fault
from kvtransfer.memory import REGION_KV, REGION_SLOTS
from tests.support.virtual.content_engine import BLOCK_SIZE, HEADS
from tests.support.virtual.network import Pipe
from tests.support.virtual.worker import VirtualWorker

if TYPE_CHECKING:
    from tests.faults.inject import Case

Bytes = NDArray[np.uint8]


class Injected:
    """One fault. ``handoff`` is the hand-off it hit, if it hit one."""

    first_hits = 2
    """It strikes at one of the first so many chances."""

    def __init__(self, kind: str, case: Case, rng: random.Random) -> None:
        self.kind, self.case, self.rng = kind, case, rng
        self.number = len(case.faults)
        self.countdown = rng.randrange(self.first_hits)
        self.has_struck = False
        self.took_effect = False
        self.handoff: str | None = None

    def _is_due(self) -> bool:
        """Call at each chance."""
        if self.has_struck:
            return False
        self.countdown -= 1
        if self.countdown >= 0:
            return False
        self.has_struck = self.took_effect = True
        return True

    def begin(self) -> None:
        pass

    def on_message(self, pipe: Pipe, message: Any) -> list[tuple[Any, float]] | None:
        return None

    def on_post(self, reader: VirtualWorker, batch: Batch, handoff: str) -> Fault | None:
        return None

    def on_reach(self, worker: VirtualWorker, name: str) -> None:
        pass

    def _soon(self, act: Callable[[], Any]) -> None:
        """From outside of every process."""
        self.case.cluster.loop.call_later(self.rng.choice((0.0, 0.0005, 0.002)), act, context=self.case.context.copy())


# -- bytes ------------------------------------------------------------------------------------------------------------


class Mangled(Injected):
    """The bytes that an operation brings are not those it read."""

    def __init__(
        self, kind: str, case: Case, rng: random.Random, change: Callable[..., None], region: str = REGION_KV
    ) -> None:
        super().__init__(kind, case, rng)
        self._change, self._region = change, region

    def on_post(self, reader: VirtualWorker, batch: Batch, handoff: str) -> Fault | None:
        if batch.remote_region != self._region or not self._is_due():
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


# -- operations -------------------------------------------------------------------------------------------------------


class Operation(Injected):
    def __init__(self, kind: str, case: Case, rng: random.Random, what: str) -> None:
        super().__init__(kind, case, rng)
        self._what = what

    def on_post(self, reader: VirtualWorker, batch: Batch, handoff: str) -> Fault | None:
        if self.rng.random() < 0.2 or not self._is_due():
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


# -- messages ---------------------------------------------------------------------------------------------------------


class Message(Injected):
    """A control message is lost, comes twice, late, or before its predecessors; or the stream ends."""

    def __init__(self, kind: str, case: Case, rng: random.Random, what: str) -> None:
        super().__init__(kind, case, rng)
        self._what = what
        self._types = rng.choice(
            (
                (Open,),
                (Sealed,),
                (Release,),
                (Renew, AbortHandoff, Release),
                (Ended, Refused, Sealed),
                (Welcome,),
                (object,),
            )
        )

    def on_message(self, pipe: Pipe, message: Any) -> list[tuple[Any, float]] | None:
        if not isinstance(message, self._types) or not self._is_due():
            return None
        self.handoff = getattr(message, "handoff_id", None)
        late = self.rng.choice((0.001, 0.01, 0.3, 2.0, 5.0))
        match self._what:
            case "lost":
                return []
            case "twice":
                return [(message, 0.0), (message, self.rng.choice((0.0, late)))]
            case "late":
                return [(message, late)]
            case _:
                ends = (pipe.sender, pipe.receiver)
                self._soon(lambda: self.case.cluster.network.break_streams(ends))
                return None


class Forged(Injected):
    """A control message arrives that says something else."""

    first_hits = 2

    def __init__(self, kind: str, case: Case, rng: random.Random, change: Callable[..., Any], of: type) -> None:
        super().__init__(kind, case, rng)
        self._change, self._of = change, of

    def on_message(self, pipe: Pipe, message: Any) -> list[tuple[Any, float]] | None:
        if not isinstance(message, self._of) or not self._is_due():
            return None
        forged = self._change(self, message)
        self.handoff = getattr(message, "handoff_id", None)
        self.took_effect = forged != message
        self.case.audit.data_was_changed = True
        return [(forged, 0.0)]

    def digests(self, sealed: Sealed) -> Sealed:
        digests = bytearray(sealed.grant.digests)
        if digests:
            digests[self.rng.randrange(len(digests))] ^= 1 << self.rng.randrange(8)
        return replace(sealed, grant=replace(sealed.grant, digests=bytes(digests)))

    def blocks(self, sealed: Sealed) -> Sealed:
        blocks = list(sealed.grant.block_ids)
        self.rng.shuffle(blocks)
        if blocks and self.rng.random() < 0.5:
            blocks[0] = self.rng.choice((0, 1, blocks[0] + 1, 10**6, -1))
        return replace(sealed, grant=replace(sealed.grant, block_ids=tuple(blocks)))

    def grant(self, sealed: Sealed) -> Sealed:
        grant = sealed.grant
        change = self.rng.choice(
            (
                {"slot": self.rng.choice((grant.slot + 1, 0, 10**6))},
                {"lease": LeaseRef(lease_id=grant.lease.lease_id, epoch=grant.lease.epoch + self.rng.choice((-1, 1)))},
                {"lease": LeaseRef(lease_id=LeaseId(grant.lease.lease_id + 1), epoch=grant.lease.epoch)},
                {"num_tokens": grant.num_tokens + 1},
                {"first_block": grant.first_block + 1},
                {"block_ids": grant.block_ids[:-1]},
            )
        )
        return replace(sealed, grant=replace(grant, **change))

    def release(self, release: Release) -> Release:
        lease = release.lease
        change = self.rng.choice(
            (
                {"lease": LeaseRef(lease_id=lease.lease_id, epoch=lease.epoch - 1)},
                {"lease": LeaseRef(lease_id=LeaseId(lease.lease_id + 1), epoch=lease.epoch)},
                {"attempt": release.attempt + 1},
            )
        )
        return replace(release, **change)

    def open(self, opened: Open) -> Open:
        return replace(opened, num_held_blocks=self.rng.choice((1, 3, 10**6)))


# -- processes --------------------------------------------------------------------------------------------------------


class AtAnyEvent(Injected):
    """Strikes at an event of the hand-off, whatever it is: a message, an operation or a failpoint."""

    first_hits = 24

    def on_message(self, pipe: Pipe, message: Any) -> list[tuple[Any, float]] | None:
        if pipe.name.startswith("handoff"):
            self._chance()
        return None

    def on_post(self, reader: VirtualWorker, batch: Batch, handoff: str) -> Fault | None:
        self._chance()
        return None

    def on_reach(self, worker: VirtualWorker, name: str) -> None:
        self._chance()

    def _chance(self) -> None:
        if self._is_due():
            self._soon(self.strike)

    def strike(self) -> None:
        raise NotImplementedError


class ProcessFault(AtAnyEvent):
    def __init__(self, kind: str, case: Case, rng: random.Random, role: t.Role, what: str) -> None:
        super().__init__(kind, case, rng)
        self._role, self._what = role, what

    def strike(self) -> None:
        cluster, rng = self.case.cluster, self.rng
        candidates = [each for each in cluster.alive if each.role_name is self._role and not each.process.is_stopped]
        if not candidates:
            self.took_effect = False
            return
        worker = rng.choice(candidates)
        match self._what:
            case "dies":
                cluster.kill(worker)
                self.case.later(rng.choice((0.6, 2.0)), lambda: self.case.replace_lost(worker))
            case "returns":
                cluster.restart(worker)
            case "hangs":
                self.case.hang(worker, rng.choice((0.01, 0.2, 1.0, 3.0, 8.0)), rng)
            case "twice":  # taken for dead while it hung; wakes up beside its successor
                self.case.hang(worker, rng.choice((0.5, 4.0)), rng)
                cluster.start(worker.worker_id, num_blocks=worker.num_blocks)
                self.case.later(10.0, lambda: cluster.kill(worker))


# -- requests ---------------------------------------------------------------------------------------------------------


class ClientGone(AtAnyEvent):
    def strike(self) -> None:
        running = [answer for answer in self.case.cluster.answers if not answer.is_over]
        self.took_effect = bool(running)
        if running:
            answer = self.rng.choice(running)
            self.handoff = f"{answer.request.request_id}-{answer.run.attempt}"
            assert answer.task is not None
            answer.task.cancel()


class SecondClaim(Injected):
    """Another D claims the hand-off with a higher attempt; what the first one says of it counts no more."""

    def __init__(self, kind: str, case: Case, rng: random.Random) -> None:
        super().__init__(kind, case, rng)
        self._at = rng.choice(("decode.opened", "decode.granted", "decode.fetched", "prefill.seal", "prefill.sealed"))

    def on_reach(self, worker: VirtualWorker, name: str) -> None:
        if name == self._at and self._is_due():
            self._soon(self._strike)

    def _strike(self) -> None:
        cluster = self.case.cluster
        held = [
            (worker, export)
            for worker in cluster.alive
            if worker.role_name is t.Role.PREFILL
            for export in worker.role.exports._exports.values()
        ]
        readers = [each for each in cluster.alive if each.role_name is t.Role.DECODE]
        self.took_effect = bool(held and readers)
        if self.took_effect:
            holder, export = self.rng.choice(held)
            self.handoff = export.handoff_id
            self.case.claim_again(export.handoff_id, holder, self.rng.choice(readers))


class WriterGoesOn(Injected):
    """P continues a sequence whose blocks are held for a reader, tail included."""

    def on_reach(self, worker: VirtualWorker, name: str) -> None:
        if name == "prefill.sealed" and self._is_due():
            worker.process.spawn(self._go_on(worker), name="goes-on")

    async def _go_on(self, worker: VirtualWorker) -> None:
        request = self.case.request_of
        exports = [
            export
            for export in worker.role.exports._exports.values()
            if export.grant is not None and export.num_tokens % BLOCK_SIZE and export.request_id in request
        ]
        self.took_effect = bool(exports)
        if not exports:
            return
        export = self.rng.choice(exports)
        self.handoff = export.handoff_id
        asked = request[export.request_id].request
        blocks = list(export.grant.block_ids)
        tokens = [*asked.prompt_token_ids, *self.case.answer_of(export.request_id)][: export.num_tokens + 1]
        sequence = Sequence(
            key=SequenceKey(request_id=t.RequestId(f"{export.handoff_id}-goes-on"), attempt=self.number, choice=0),
            sampling=replace(asked.sampling, max_tokens=len(tokens) - asked.num_prompt_tokens + 3),
            tokens=tokens,
            num_prompt_tokens=asked.num_prompt_tokens,
            num_computed=export.num_tokens,
            block_table=blocks,
        )
        worker.engine.pool.share(blocks)
        await worker.steps.call(lambda engine: engine.add(sequence))


Maker = Callable[[str, "Case", random.Random], Injected]

KINDS: dict[str, Maker] = {
    "bit flipped": lambda *a: Mangled(*a, Mangled.flip),
    "bits flipped": lambda *a: Mangled(*a, Mangled.flip_many),
    "blocks reordered": lambda *a: Mangled(*a, Mangled.swap_blocks),
    "heads reordered": lambda *a: Mangled(*a, Mangled.swap_heads),
    "words reordered": lambda *a: Mangled(*a, Mangled.swap_words),
    "stale block": lambda *a: Mangled(*a, Mangled.other_block),
    "bytes lost": lambda *a: Mangled(*a, Mangled.zeros),
    "read cut short": lambda *a: Mangled(*a, Mangled.cut_short),
    "slot bits flipped": lambda *a: Mangled(*a, Mangled.flip_many, REGION_SLOTS),
    "source reused before": lambda *a: SourceReused(*a, "before"),
    "torn read": lambda *a: SourceReused(*a, "between"),
    "source reused after": lambda *a: SourceReused(*a, "after"),
    "operation fails": lambda *a: Operation(*a, "fails"),
    "operation slow": lambda *a: Operation(*a, "slow"),
    "operation hangs": lambda *a: Operation(*a, "hangs"),
    "late write": lambda *a: Operation(*a, "given up"),
    "message lost": lambda *a: Message(*a, "lost"),
    "message twice": lambda *a: Message(*a, "twice"),
    "message late": lambda *a: Message(*a, "late"),
    "stream breaks": lambda *a: Message(*a, "breaks"),
    "digests forged": lambda *a: Forged(*a, Forged.digests, Sealed),
    "blocks forged": lambda *a: Forged(*a, Forged.blocks, Sealed),
    "grant forged": lambda *a: Forged(*a, Forged.grant, Sealed),
    "release forged": lambda *a: Forged(*a, Forged.release, Release),
    "open forged": lambda *a: Forged(*a, Forged.open, Open),
    "prefill dies": lambda *a: ProcessFault(*a, t.Role.PREFILL, "dies"),
    "prefill returns": lambda *a: ProcessFault(*a, t.Role.PREFILL, "returns"),
    "prefill hangs": lambda *a: ProcessFault(*a, t.Role.PREFILL, "hangs"),
    "prefill twice": lambda *a: ProcessFault(*a, t.Role.PREFILL, "twice"),
    "decode dies": lambda *a: ProcessFault(*a, t.Role.DECODE, "dies"),
    "decode returns": lambda *a: ProcessFault(*a, t.Role.DECODE, "returns"),
    "decode hangs": lambda *a: ProcessFault(*a, t.Role.DECODE, "hangs"),
    "decode twice": lambda *a: ProcessFault(*a, t.Role.DECODE, "twice"),
    "client gone": ClientGone,
    "second claim": SecondClaim,
    "writer goes on": WriterGoesOn,
}

NEEDS_DIGESTS = frozenset(
    kind
    for kind in KINDS
    if kind.endswith(("flipped", "reordered", "forged")) or kind in ("stale block", "bytes lost", "read cut short")
) - {"slot bits flipped", "grant forged", "release forged", "open forged"}
"""What only digests can see: without them these are not injected."""
