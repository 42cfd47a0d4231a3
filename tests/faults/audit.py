"""The judge of an injected case: watches every place where damage would show, and says of what kind it is.

Kinds of damage (each belongs to a defence; with all defences in place none is ever seen)::

    wrong content       attention, or the prefix cache, met bytes that are not what the tokens say   slot, digests
    late write          an operation wrote into a block that was given up, or to somebody else       custody
    old incarnation     KV was read from another start of a worker than the one that was meant       incarnations
    wrongly ended       a reader that is not the holder ended a lease                                claims
    served lease ended   a lease ended by its time while its holder lived and renewed it
    leased block written a block changed while it was held for a reader                              tail copy
    false alarm         a digest mismatch although nothing was ever changed
    wrong answer        accepted tokens are not the answer
    leak, stuck, lost   what is left when all is over; a healthy cluster that does not answer
    bug                 an exception where none may be
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, cast

from core.handoff import AbortHandoff, PeerInfo, Release
from core.ids import BlockHash, HandoffId, Incarnation, WorkerId
from core.kv import hash_blocks
from core.types import Role
from decode_worker.reading import Reading
from engine.sequence import Sequence
from kvtransfer.backends.base import Batch, Identity
from kvtransfer.fetch import FetchRequest
from kvtransfer.memory import REGION_KV
from tests.support.virtual.cluster import VirtualCluster
from tests.support.virtual.content_engine import BLOCK_SIZE, SHAPE, answer_to, content_of
from tests.support.virtual.worker import VirtualWorker


@dataclass(slots=True)
class Holder:
    """Who may end a lease, by our own book."""

    incarnation: Incarnation
    attempt: int
    is_lost: bool = False
    """Its stream ended, or it left the lease to others."""


@dataclass
class Audit:
    cluster: VirtualCluster = field(init=False)
    damage: list[tuple[str, str]] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    """Hand-off -> slug of the error that ended its attempt."""
    quarantined: set[str] = field(default_factory=set)
    """Hand-offs that were over while bytes could still come."""
    renewals_were_disturbed: bool = False
    """Somebody was kept from renewing its leases: they may end by their time."""
    data_was_changed: bool = False
    """Somebody injected wrong bytes: a digest mismatch is no false alarm."""
    outcomes: Counter[str] = field(default_factory=Counter)
    handoff_of: dict[tuple[Incarnation, int], str] = field(default_factory=dict)
    """(D, its block) -> the hand-off it is fetched for."""
    meant: dict[tuple[Incarnation, int], Incarnation] = field(default_factory=dict)
    """(D, transfer) -> P as the placement named it."""
    newest: dict[tuple[Incarnation, WorkerId], Incarnation] = field(default_factory=dict)
    """(D, worker) -> the newest start that D has probed."""
    holders: dict[tuple[Incarnation, str], Holder] = field(default_factory=dict)
    times_taken: Counter[tuple[Incarnation, int]] = field(default_factory=Counter)
    """(D, its block) -> how often it was allocated."""
    posted: dict[int, tuple[Batch, list[int]]] = field(default_factory=dict)
    """Operation -> how often each of its blocks had been allocated by then."""
    sealed: dict[tuple[Incarnation, int], tuple[tuple[int, ...], bytes]] = field(default_factory=dict)
    """(P, lease) -> blocks and their bytes when they were sealed."""

    def report(self, kind: str, text: str) -> None:
        self.damage.append((kind, f"{self.cluster.loop.time():.4f} s: {text}"))

    # -- watching a worker --------------------------------------------------------------------------------------------

    def watch(self, worker: VirtualWorker) -> None:
        if worker.role_name is Role.PREFILL:
            self._watch_leases(worker)
        else:
            self._watch_fetches(worker)

    def _watch_leases(self, worker: VirtualWorker) -> None:
        leases, exports, me = worker.leases, worker.role.exports, worker.incarnation
        claim, handle, lose, seal, end = (
            exports._claim,
            exports._handle,
            exports._lose,
            leases.seal,
            leases._end,
        )
        said_by: list[tuple[Any, Any]] = []

        def on_claim(connection: Any, message: Any) -> None:
            holder = self.holders.get((me, message.handoff_id))
            if leases.find(message.handoff_id) is not None and (
                holder is None or holder.is_lost or holder.attempt < message.attempt
            ):
                self.holders[me, message.handoff_id] = Holder(connection.incarnation, message.attempt)
            claim(connection, message)

        def on_handle(connection: Any, message: Any) -> None:
            if isinstance(message, Release | AbortHandoff):
                said_by.append((connection, message))
                holder = self.holders.get((me, message.handoff_id))
                said = (connection.incarnation, message.attempt)
                if holder is not None and said == (holder.incarnation, holder.attempt):
                    holder.is_lost = holder.is_lost or not message.outcome.ends_lease
            try:
                handle(connection, message)
            finally:
                said_by.clear()

        def on_lose(connection: Any) -> None:
            for (p, _), holder in self.holders.items():
                if p == me and holder.incarnation == connection.incarnation:
                    holder.is_lost = True
            lose(connection)

        def on_seal(lease_id: int, blocks: Any, **rest: Any) -> Any:
            view = seal(lease_id, blocks, **rest)
            if view is not None:
                self.sealed[me, lease_id] = (tuple(blocks), self._bytes(worker, blocks))
            return view

        def on_end(lease: Any, *rest: Any) -> Any:
            if "lease time" in rest and not self.renewals_were_disturbed and self._is_served(worker, lease):
                self.report("served lease ended", f"{worker.process.name} {lease.handoff_id} of {lease.reader}")
            sealed = self.sealed.pop((me, lease.ref.lease_id), None)
            if sealed is not None and self._bytes(worker, sealed[0]) != sealed[1]:
                self.report("leased block written", f"{worker.process.name} {lease.handoff_id}")
            if said_by:
                connection, message = said_by[-1]
                holder = self.holders.get((me, lease.handoff_id), Holder(connection.incarnation, message.attempt))
                is_holder = (holder.incarnation, holder.attempt) == (connection.incarnation, message.attempt)
                if not (is_holder or holder.is_lost):
                    self.report("wrongly ended", f"{lease.handoff_id} by attempt {message.attempt}")
            return end(lease, *rest)

        exports._claim, exports._handle, exports._lose = on_claim, on_handle, on_lose
        leases.seal, leases._end = on_seal, on_end

    def _is_served(self, worker: VirtualWorker, lease: Any) -> bool:
        """Its holder lives, knows the grant and has not released it."""
        reader = None if lease.reader is None else self.worker(lease.reader.incarnation)
        if reader is None or reader.process.is_killed:
            return False
        holder = reader.role._holders._holders.get(worker.incarnation)
        offer = None if holder is None else holder._offers.get((lease.handoff_id, lease.reader.attempt))
        return offer is not None and offer.lease is not None

    def _watch_fetches(self, worker: VirtualWorker) -> None:
        intake, transfers, custody, me = worker.role._intake, worker.transfers, worker.custody, worker.incarnation
        make_reading, fetch, quarantine = intake._reading, transfers.fetch, custody.quarantine
        of_transfer: dict[int, str] = {}
        pool = worker.engine.pool
        take = pool._take

        def on_take(*asked: Any) -> Any:
            taken = take(*asked)
            self.times_taken.update((me, block) for block in taken[0][taken[1] :])
            return taken

        pool._take = on_take  # type: ignore[method-assign]

        def on_reading(admission: Any, *rest: Any) -> Reading:
            reading: Any = make_reading(admission, *rest)
            handoff, ask = str(admission.asked.handoff_id), reading._ask
            of_transfer[reading.transfer_id] = handoff
            self.meant[me, reading.transfer_id] = admission.asked.prefill.incarnation

            def on_ask(*blocks: Any, **options: Any) -> None:
                ask(*blocks, **options)
                self.handoff_of.update({(me, block): handoff for block in reading._local.values()})

            reading._ask = on_ask
            return cast(Reading, reading)

        def on_fetch(link: Any, request: FetchRequest) -> Any:
            if link.peer.incarnation != self.meant[me, request.transfer_id]:
                self.report("old incarnation", f"{worker.process.name} reads {link.peer.link.agent_name}")
            return fetch(link, request)

        def on_quarantine(transfer_id: int, now: float) -> None:
            self.quarantined.add(of_transfer[transfer_id])
            quarantine(transfer_id, now)

        intake._reading, transfers.fetch, custody.quarantine = on_reading, on_fetch, on_quarantine

    def _bytes(self, worker: VirtualWorker, blocks: Any) -> bytes:
        return worker.engine.kv[list(blocks)].tobytes()

    # -- watching what moves ------------------------------------------------------------------------------------------

    def on_post(self, reader: Identity, peer: PeerInfo, batch: Batch) -> None:
        key = (reader.incarnation, peer.worker_id)
        newest = self.newest.setdefault(key, peer.incarnation)
        if batch.remote_region != REGION_KV:
            self.newest[key] = max(newest, peer.incarnation)
            return
        if peer.incarnation < newest:
            self.report("old incarnation", f"{reader.agent_name} still reads {peer.link.agent_name}")
        self.posted[id(batch)] = (batch, self._times_taken(reader.incarnation, batch))

    def on_move(self, reader: Identity, batch: Batch) -> None:
        if batch.local_region != REGION_KV:
            return
        pool = self.worker(reader.incarnation).engine.pool
        before = self.posted[id(batch)][1]
        now = self._times_taken(reader.incarnation, batch)
        for block, at_post, at_move in zip(blocks_of(batch, SHAPE.block_bytes), before, now, strict=True):
            if at_post != at_move or not pool._is_held(block):
                self.report("late write", f"{reader.agent_name} block {block}")
        if not pool.counts().is_conserved():
            self.report("leak", f"{reader.agent_name}: {pool.counts()}")

    def _times_taken(self, incarnation: Incarnation, batch: Batch) -> list[int]:
        return [self.times_taken[incarnation, block] for block in blocks_of(batch, SHAPE.block_bytes)]

    def on_wrong(self, worker: VirtualWorker, sequence: Sequence, index: int, block: int) -> None:
        self.report("wrong content", f"{worker.process.name} {sequence.key} place {index}, block {block}")

    def worker(self, incarnation: Incarnation) -> VirtualWorker:
        return next(each for each in self.cluster.workers if each.incarnation == incarnation)

    # -- watching requests --------------------------------------------------------------------------------------------

    def watch_pipeline(self, pipeline: Any) -> None:
        recover = pipeline._recover

        def on_failure(run: Any, branch: Any, error: Any) -> float:
            self.note_failure(HandoffId(f"{run.request.request_id}-{run.attempt}"), error)
            return float(recover(run, branch, error))

        pipeline._recover = on_failure

    def note_failure(self, handoff_id: HandoffId, error: Any) -> None:
        self.failures.setdefault(handoff_id, error.slug)
        if error.slug == "digest_mismatch" and not self.data_was_changed:
            self.report("false alarm", f"{handoff_id}: {error.message}")

    # -- the end ------------------------------------------------------------------------------------------------------

    def check_answers(self) -> None:
        for answer in self.cluster.answers:
            request = answer.request
            expected = answer_to(request.prompt_token_ids, request.sampling.max_tokens)
            is_cancelled = answer.task is not None and answer.task.cancelled()
            for choice in answer.run.choices:
                tokens = choice.accepted
                is_whole = tokens == expected or answer.error is not None or is_cancelled or not answer.is_over
                if not is_whole or tokens != expected[: len(tokens)]:
                    self.report("wrong answer", f"{request.request_id}-{choice.number}: {tokens} for {expected}")
            if not answer.is_over:
                self.report("stuck", f"{request.request_id} has no end")

    def check_idle(self) -> None:
        """Law 1 and 2 of every worker that lives."""
        for worker in self.cluster.alive:
            counts, stats = worker.engine.pool.counts(), worker.custody.stats()
            name = worker.process.name
            if not worker.role.is_idle() or worker.engine.has_work:
                self.report("stuck", f"{name} is not idle")
            if not (counts.is_conserved() and counts.is_idle()) or stats.num_blocks or stats.num_transfers:
                self.report("leak", f"{name}: {counts}, {stats.num_transfers} transfers")
            if worker.scratch.num_free != worker.scratch.num_cells or worker.transfers.stats().num_retired_links:
                self.report("leak", f"{name}: scratch cells or links")
            if worker.leases.held_bytes or len(worker.leases._free_slots) != worker.slots.num_slots:
                self.report("leak", f"{name}: leases")
            self._check_cache(worker)

    def _check_cache(self, worker: VirtualWorker) -> None:
        """Whatever the prefix cache offers is what its hash names."""
        cache = worker.engine.pool._cache._blocks
        for answer in self.cluster.answers:
            for block_hash, content in _published(answer.request.prompt_token_ids, answer.request.sampling.max_tokens):
                block = cache.get(block_hash)
                if block is not None and self._bytes(worker, [block]) != content:
                    self.report("wrong content", f"{worker.process.name} offers block {block}")

    def check_transfers(self) -> None:
        """One end for each fetch, with an outcome of the closed set."""
        for worker in self.cluster.alive:
            stats = worker.transfers.stats()
            self.outcomes.update({str(outcome): number for outcome, number in stats.transfers if number})
            ended = sum(number for _, number in worker.custody.stats().ended)
            if sum(number for _, number in stats.transfers) != ended:
                self.report("leak", f"{worker.process.name}: {stats.transfers} but {ended} custodies ended")


class Bugs(logging.Handler):
    """Exceptions that a task scope or the loop had to swallow."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self.texts.append(f"{record.getMessage()}: {error!r}")


@lru_cache(maxsize=256)
def _published(prompt: tuple[int, ...], num_tokens: int) -> list[tuple[BlockHash, bytes]]:
    """Hash and content of every complete block that a request may have published."""
    tokens = (*prompt, *answer_to(prompt, num_tokens))
    return [
        (block_hash, content_of(tokens[: start + BLOCK_SIZE], start).tobytes())
        for start, block_hash in zip(range(0, len(tokens), BLOCK_SIZE), hash_blocks(tokens, BLOCK_SIZE), strict=False)
    ]


def blocks_of(batch: Batch, block_bytes: int) -> list[int]:
    """Local blocks that a batch writes to."""
    blocks: list[int] = []
    for copy in batch.copies:
        first = copy.local_offset // block_bytes
        blocks += range(first, (copy.local_offset + copy.num_bytes - 1) // block_bytes + 1)
    return blocks
