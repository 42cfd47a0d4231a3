"""The blocks of one hand-off on their way to D: asked for as P announces them, digested as they arrive.

::

    EMPTY --take(Ready)--> EARLY --finish(grant)--> REST --quiet, verified--> over: the blocks are the caller's
      |                    |  ^                      ^ `--failure--> over
      |                    '--' take(Ready)          |
      '------------------finish(grant)---------------'
    any state --the block is left by an exception--> over: the transfer is abandoned, the blocks are given back

What is announced is only a hint of what may be read now: the grant says what the hand-off consists of, the lease slot
is read after the last block, and every digest is compared with the grant's. So an announcement that is lost, doubled
or out of order costs nothing but time. EARLY ends with the hand-off (its holder's stream, or the deadline).
"""

import asyncio
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from core.errors import LayoutMismatch, PeerLost, ServingError, StaleLease, TransferError
from core.handoff import Grant, HandoffOutcome, LeaseRef, Ready
from core.spans import NO_SPAN, Span
from core.tasks import TaskScope
from decode_worker.story import Asked, Moved, moved, tell_chunks
from engine.block_pool import Reservation
from kvtransfer.backends.base import Link
from kvtransfer.fetch import Addition, FetchRequest, FetchResult, Transfer, outcome_of
from kvtransfer.transfer_thread import TransferThread
from kvtransfer.validate import check_read
from worker.context import WorkerContext

PART_BYTES = 8 << 20
"""What is digested together: while it is in the processor's cache, and the next part is on its way."""


class Reading:
    """Use as an async context manager. Event loop only. Blocks are named by their index within the sequence."""

    def __init__(
        self,
        context: WorkerContext,
        transfers: TransferThread,
        link: Link,
        *,
        transfer_id: int,
        indices: range,
        reservation: Reservation | None,
        deadline_at: float,
        span: Span = NO_SPAN,
    ) -> None:
        """``indices`` are the blocks that are not here. They are taken from ``reservation``. ``span`` ends
        with this."""
        self.span = span
        self._context = context
        self._transfers = transfers
        self._link = link
        self.transfer_id = transfer_id
        self._indices = indices
        self._reservation = reservation
        self._deadline_at = deadline_at
        self._remote: dict[int, int] = {}
        self._local: dict[int, int] = {}
        self._digests: dict[int, bytes] = {}
        self._lease: LeaseRef | None = None
        self._transfer: Transfer | None = None
        self._scope = TaskScope("reading")
        self._asked: list[Asked] = []
        self.moved: tuple[Moved, ...] = ()
        """Known with ``result``."""
        self._digesting: list[asyncio.Task[None]] = []
        self.result: FetchResult | None = None
        """Of the transfer, from the moment it is known."""
        self.marks: dict[str, float] = {}
        """``time.monotonic`` of when that was ("arrived"), and when every digest was found equal ("verified")."""
        self._ended: ServingError | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_span(error)
        if error is not None:
            if self._transfer is not None:
                self._transfer.abandon()
            self._context.engine.pool.free(list(self._local.values()))  # those in custody stay until they are quiet
            self._local.clear()
        await self._scope.close()

    def give_up(self, error: ServingError) -> None:
        """The holder has ended the hand-off: what has not arrived by now is not read any more. Data that is complete is
        judged as always."""
        self._ended = error
        if self._transfer is not None:
            self._transfer.abandon()

    def _end_span(self, error: BaseException | None) -> None:
        outcome = HandoffOutcome.OK if error is None else outcome_of(error)
        result = self.result
        if result is not None:
            self.moved = moved(self._asked, result)
            if self.span.is_told:
                tell_chunks(self._context.telemetry, self.span, self.moved, result)
        wire_s = 0.0 if result is None else result.times.wire_s
        num_bytes = 0 if result is None else result.num_bytes
        if "verified" in self.marks:
            self.span.set(verify_s=self.marks["verified"] - self.marks["arrived"])
        self.span.end(
            str(outcome),
            blocks=len(self._local),
            bytes=num_bytes,
            early_bytes=0 if result is None else result.early_bytes,
            descriptors=0 if result is None else result.num_copies,
            gb_per_s=round(num_bytes / wire_s / 1e9, 6) if wire_s > 0 else 0.0,
        )

    def take(self, ready: Ready) -> None:
        """Begin to read what P has announced and was not asked for yet.

        Raises LayoutMismatch for blocks that the hand-off does not have. What belongs to another lease than the blocks
        before it is left alone: the grant will tell.
        """
        if self._ended is not None or self._lease not in (None, ready.lease):
            return
        announced = dict(enumerate(ready.block_ids, ready.first_block))
        if announced:
            self._ask(announced, ready.lease, ready.slot, is_last=False, source=ready.traceparent)

    async def finish(self, grant: Grant, *, source: str = "") -> list[int]:
        """Read what is missing, then verify everything. Returns the local blocks of the grant, in order. Raises the
        typed error of what went wrong. ``source`` is the traceparent of the holder's span of the last blocks."""
        if self._ended is not None:
            raise self._ended
        granted = dict(enumerate(grant.block_ids, grant.first_block))
        if self._lease not in (None, grant.lease) or any(granted.get(i) != self._remote[i] for i in self._remote):
            raise StaleLease("the blocks that were announced are not those that are granted")
        self._ask(granted, grant.lease, grant.slot, is_last=True, source=source)
        assert self._transfer is not None
        self.result = result = await asyncio.wrap_future(self._transfer.result)
        self.marks["arrived"] = time.monotonic()
        is_ok = result.outcome is HandoffOutcome.OK
        if not is_ok and not (result.outcome is HandoffOutcome.PEER_LOST and result.is_data_complete):
            raise self._ended or result.error() or PeerLost("the transfer failed")
        await asyncio.gather(*self._digesting)
        made = b"".join(self._digests.get(index, b"") for index in granted)
        num_kv_heads = self._context.geometry.num_kv_heads
        try:
            check_read(grant, result.snapshot if is_ok else None, made, num_kv_heads=num_kv_heads)
        except TransferError as error:
            raise self._ended or error from None  # the slot speaks of another's grant then
        self.marks["verified"] = time.monotonic()
        await self._context.failpoints.reach("decode.fetched")
        if not self._transfer.quiet.done():
            await asyncio.wrap_future(self._transfer.quiet)
        return [self._local[index] for index in granted]

    def _ask(self, blocks: dict[int, int], lease: LeaseRef, slot: int, *, is_last: bool, source: str) -> None:
        """Read those of ``blocks`` (index to P's block) that nobody asked for before."""
        fresh = [index for index in blocks if index not in self._local]
        if any(index not in self._indices for index in fresh):
            raise LayoutMismatch(f"blocks {fresh[0]} to {fresh[-1]} were offered, {self._indices} are missing here")
        remote = [blocks[index] for index in fresh]
        local = self._context.engine.pool.allocate(len(fresh), self._reservation)
        self._local.update(zip(fresh, local, strict=True))
        self._remote.update(zip(fresh, remote, strict=True))
        self._lease = lease
        transfer = self._transfer
        if transfer is None:
            transfer = self._transfer = self._begin(lease, slot)
        if is_last:
            transfer.granted()
        size = max(1, PART_BYTES // self._context.geometry.block_bytes)
        parts = [slice(start, start + size) for start in range(0, len(fresh), size)]
        made = transfer.more(
            [Addition(remote[part], local[part]) for part in parts], then=self._context.digester.digest, is_last=is_last
        )
        for part, one in zip(parts, made, strict=True):
            asked = Asked(fresh[part.start], len(fresh[part]), source)
            self._asked.append(asked)
            keeping = self._keep_digests(fresh[part], asyncio.wrap_future(one), asked)
            self._digesting.append(self._scope.spawn(keeping, name=f"digests-{fresh[part.start]}"))

    def _begin(self, lease: LeaseRef, slot: int) -> Transfer:
        return self._transfers.fetch(
            self._link,
            FetchRequest(
                transfer_id=self.transfer_id,
                remote_blocks=(),
                local_blocks=(),
                lease=lease,
                slot=slot,
                deadline_s=max(0.001, self._deadline_at - self._context.clock.now()),
                is_open=True,
            ),
        )

    async def _keep_digests(
        self, indices: Sequence[int], digesting: "asyncio.Future[bytes | None]", asked: Asked
    ) -> None:
        """They are made once blocks have arrived: no operation writes to them any more then."""
        made = await digesting
        if made is None:
            return
        asked.digested_at = time.monotonic()
        size = len(made) // len(indices)
        self._digests.update((index, made[i * size : (i + 1) * size]) for i, index in enumerate(indices))
        await self._context.failpoints.reach("decode.digested")
