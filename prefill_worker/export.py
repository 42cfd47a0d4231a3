"""The holding side of the hand-off: finished KV under leases, readers that claim it.

State of a hand-off at P (the lease inside is drawn in kvtransfer/lease.py)::

    begin -> FILLING --seal--> SEALED --Release by the claimant | AbortHandoff | lease time | revoke--> over
              |  ^
              |  '--offer: complete blocks are announced by Ready at once, and digested beside the steps
              +--cancel | deadline | preempted | ended at token 1--> over

Blocks that are offered while the prompt is computed are leased in the pool on their own (immutable, and safe from
eviction and preemption) until the hand-off is sealed, which leases all blocks at once, or over.

An Open that comes before ``begin`` waits here for up to ``lease_s`` (order is not assumed), and for as long as the
prompt itself waits for room (``expect``). A claimant that fails or is lost leaves the hand-off to the next one, which
claims it with a higher attempt; the one before is told. Whatever ends a hand-off bumps the epoch first and gives the
blocks back afterwards. Everything runs on the event loop.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace

from core.errors import Blame, LayoutMismatch, LeaseExpired, OutOfBlocks, ServingError, StaleLease, TicketRefused
from core.handoff import (
    AbortHandoff,
    CanaryRead,
    Claim,
    Ended,
    Grant,
    HandoffOutcome,
    Hello,
    Open,
    PeerInfo,
    Ready,
    Refused,
    Release,
    Renew,
    Sealed,
    ToHolder,
    ToReader,
    Welcome,
)
from core.ids import HandoffId, Incarnation, RequestId, WorkerId
from core.spans import Span
from core.tasks import TaskScope
from core.tickets import Ticket
from core.types import FirstToken
from kvtransfer import digest as digests
from kvtransfer.digest import DigestMemory
from kvtransfer.fetch import error_of
from kvtransfer.layout import check_peer
from kvtransfer.lease import EndedLease, LeaseTable, LeaseView, Reader, Verdict
from worker.context import WorkerContext
from worker.tickets import check_tenant

log = logging.getLogger(__name__)

_REAPER_S = 0.25


@dataclass(slots=True, eq=False)
class _Connection:
    """The control stream of one incarnation of a decode worker."""

    peer: PeerInfo
    outgoing: asyncio.Queue[ToReader | None] = field(default_factory=asyncio.Queue)

    @property
    def incarnation(self) -> Incarnation:
        return self.peer.incarnation


@dataclass(slots=True, kw_only=True)
class _Export:
    """One hand-off."""

    handoff_id: HandoffId
    request_id: RequestId
    attempt: int
    lease: LeaseView
    num_tokens: int
    tenant: str
    span: Span
    """For as long as the blocks are held."""
    begun_at: float
    early: list[int] = field(default_factory=list)
    """Its first blocks, complete, leased and announced before it is sealed."""
    num_digested: int = 0
    """Of those."""
    chunks: "list[tuple[Span, int]]" = field(default_factory=list)
    """Of what is announced and not digested yet: a span, and the number of early blocks up to its end."""
    last_chunk: str = ""
    """Traceparent of the latest."""
    digesting: "asyncio.Task[None] | None" = None
    grant: Grant | None = None
    """Of all blocks."""
    num_held: int = 0
    """Blocks that the claimant says it has: they are not moved."""
    first_tokens: tuple[FirstToken, ...] = ()


@dataclass(slots=True, kw_only=True)
class _Early:
    """An Open for a hand-off that is not known yet."""

    connection: _Connection
    message: Open | Claim
    ticket: Ticket | None
    until: float

    @property
    def reader(self) -> Reader:
        return Reader(incarnation=self.connection.incarnation, attempt=self.message.attempt)


class Exports:
    """All hand-offs that this worker holds."""

    def __init__(self, context: WorkerContext, leases: LeaseTable, me: PeerInfo) -> None:
        self._context = context
        self._leases = leases
        self._me = me
        self._exports: dict[HandoffId, _Export] = {}
        self._connections: dict[Incarnation, _Connection] = {}
        self._early: dict[HandoffId, _Early] = {}
        self._expected: set[HandoffId] = set()
        self._scope = TaskScope("exports")
        self.digests = DigestMemory(context.digester, context.engine.pool.generations)
        self.room_freed = asyncio.Event()
        """Set whenever blocks or quota came back."""
        self.on_readers_changed: Callable[[], None] = lambda: None
        """Called when a reader has come that waits for a hand-off which has not begun, or has gone."""
        self.sent_bytes = 0
        self.refetched_tokens = 0
        """Of hand-offs that another claim than the first has taken: they were not computed again."""
        self.outcomes: dict[str, int] = {}

    # -- P's own side -------------------------------------------------------------------------------------------------

    def expect(self, handoff_id: HandoffId) -> None:
        """The prompt is here and waits for room: so may an early Open, for as long as it takes."""
        self._expected.add(handoff_id)

    def is_awaited(self, handoff_id: HandoffId) -> bool:
        """A reader has asked for what has not begun yet: it has room for all of it."""
        return handoff_id in self._early

    def expect_no_more(self, handoff_id: HandoffId) -> None:
        """The call has ended. An Open that still waits is answered when its time is over."""
        self._expected.discard(handoff_id)

    def begin(
        self,
        handoff_id: HandoffId,
        *,
        request_id: RequestId,
        attempt: int,
        num_tokens: int,
        deadline_s: float,
        tenant: str = "",
        traceparent: str = "",
    ) -> None:
        """Before the first chunk. Raises OutOfBlocks (quota) or LeaseExpired (the hand-off was aborted before)."""
        now = self._context.clock.now()
        lease = self._leases.open(
            handoff_id, num_blocks=self._context.geometry.blocks_for(num_tokens), deadline_s=deadline_s, now=now
        )
        self._exports[handoff_id] = _Export(
            handoff_id=handoff_id,
            request_id=request_id,
            attempt=attempt,
            lease=lease,
            num_tokens=num_tokens,
            begun_at=now,
            tenant=tenant,
            span=self._context.telemetry.begin("kv.hold", parent=traceparent, handoff_id=handoff_id, attempt=attempt),
        )
        early = self._early.get(handoff_id)
        if early is not None:
            try:
                check_tenant(early.ticket, tenant)
            except TicketRefused as error:
                self._refuse(early.connection, early.message, error)
            else:
                self._claim(early.connection, early.message)  # counted already, since it waits
            del self._early[handoff_id]

    def offer(self, handoff_id: HandoffId, first_block: int, blocks: Sequence[int]) -> None:
        """More complete blocks of a prompt, leased already: they may move at once. Nothing is kept of what does not
        continue the hand-off."""
        export = self._exports.get(handoff_id)
        if export is None or export.grant is not None or first_block != len(export.early):
            self._give_back(list(blocks))
            return
        export.early += blocks
        if blocks:
            self._begin_chunk(export, first_block, len(blocks))
        self._leases.set_ready(export.lease.ref.lease_id, len(export.early))
        view = self._leases.find(handoff_id)
        if view is not None and view.reader is not None:
            self._send_ready(export, view.reader, first_block)
        if export.digesting is None or export.digesting.done():
            export.digesting = self._scope.spawn(self._digest_early(export), name=f"digest-{handoff_id[:8]}")

    async def _digest_early(self, export: _Export) -> None:
        """Off the loop and off the steps, so that the seal finds the digests made."""
        await self._context.failpoints.reach("prefill.announced")
        while fresh := export.early[export.num_digested :]:
            await asyncio.to_thread(self.digests.digest, fresh, num_complete=len(fresh))
            export.num_digested += len(fresh)
            while export.chunks and export.chunks[0][1] <= export.num_digested:
                export.chunks.pop(0)[0].end()
            await self._context.failpoints.reach("prefill.digested")

    def _begin_chunk(self, export: _Export, first_block: int, num_blocks: int) -> None:
        """Of blocks that a reader may fetch from now on; it ends when they are digested."""
        span = self._context.telemetry.begin(
            "kv.publish",
            parent=export.span.traceparent,
            kind="producer",
            lease_id=export.lease.ref.lease_id,
            epoch=export.lease.ref.epoch,
            first_block=first_block,
            blocks=num_blocks,
            bytes=num_blocks * self._context.geometry.block_bytes,
        )
        export.chunks.append((span, first_block + num_blocks))
        export.last_chunk = span.traceparent

    async def seal(self, handoff_id: HandoffId, blocks: list[int], first_tokens: tuple[FirstToken, ...]) -> bool:
        """Hold ``blocks`` (already leased in the pool) and tell the claimant. False: it is over, the blocks are given
        back."""
        context = self._context
        kind = context.digester.kind
        export = self._exports.get(handoff_id)
        num_complete = 0 if export is None else export.num_tokens // context.geometry.block_size
        if export is not None and len(export.early) < len(blocks):
            self._begin_chunk(export, len(export.early), len(blocks) - len(export.early))
        try:
            if export is not None and export.digesting is not None:
                await asyncio.wait({export.digesting})  # what it digests is not digested again
            made = await asyncio.to_thread(self.digests.digest, blocks, num_complete=num_complete)
            await context.failpoints.reach("prefill.seal", "" if export is None else export.request_id)
        except BaseException:
            self._give_back(blocks)
            raise
        export = self._exports.get(handoff_id)
        view = None
        if export is not None:
            view = self._leases.seal(
                export.lease.ref.lease_id, blocks, digest=digests.combine(kind, made), now=context.clock.now()
            )
        if export is None or view is None:
            self._give_back(blocks)
            return False
        export.lease = view
        export.first_tokens = first_tokens
        export.grant = Grant(
            lease=view.ref,
            slot=view.slot,
            block_ids=tuple(blocks),
            first_block=0,
            num_tokens=export.num_tokens,
            digest=kind,
            digests=made,
        )
        if view.reader is not None:
            self._send_sealed(export, view.reader)
        for span, _ in export.chunks:
            span.end()
        export.chunks.clear()
        self._give_back_early(export)
        await context.failpoints.reach("prefill.sealed", export.request_id)
        return True

    def end(self, handoff_id: HandoffId, error: ServingError) -> bool:
        """Cancelled, failed, or not needed. A tombstone stays. False when nothing was held any more."""
        kind = OutOfBlocks if isinstance(error, OutOfBlocks) else LeaseExpired
        ended = self._leases.revoke(handoff_id, error.message, now=self._context.clock.now(), error=kind)
        early = self._early.pop(handoff_id, None)
        if early is not None:
            self._refuse(early.connection, early.message, error)
        if ended is None:
            return False
        self._over(ended, error)
        return True

    def end_unawaited(self, error: OutOfBlocks) -> HandoffId | None:
        """End the youngest hand-off that no reader has asked for; None when there is none. Who asks for it later is
        refused with OutOfBlocks: the request is placed anew, and has lost no attempt."""
        for handoff_id in reversed(self._exports):
            view = self._leases.find(handoff_id)
            if view is not None and view.reader is None:
                self.end(handoff_id, error)
                return handoff_id
        return None

    def end_announced(self, handoff_id: HandoffId, error: ServingError) -> bool:
        """End a hand-off of which blocks were offered; one that nobody can read from yet goes on."""
        export = self._exports.get(handoff_id)
        return export is not None and bool(export.early) and self.end(handoff_id, error)

    def end_request(self, request_id: RequestId, attempt: int, error: ServingError) -> bool:
        """End what is held for an attempt (0: every attempt) of a request."""
        wanted = [
            export.handoff_id
            for export in self._exports.values()
            if export.request_id == request_id and attempt in (0, export.attempt)
        ]
        for handoff_id in wanted:
            self.end(handoff_id, error)
        return bool(wanted)

    # -- the control stream -------------------------------------------------------------------------------------------

    async def connect(self, messages: AsyncIterator[ToHolder]) -> AsyncGenerator[ToReader, None]:
        """Serve one reader until its stream ends."""
        hello = await anext(messages, None)
        if not isinstance(hello, Hello):
            raise LayoutMismatch("the first message of a hand-off stream must be Hello")
        context = self._context
        context.tickets.check_introduction(hello.ticket, hello.peer)
        check_peer(hello.peer, mine=context.format, geometry=context.geometry)
        connection = _Connection(hello.peer)
        for other in list(self._connections.values()):
            if other.peer.worker_id == hello.peer.worker_id:
                self._lose(other)  # a new stream of the same worker replaces the old one, whatever its incarnation
        self._connections[connection.incarnation] = connection
        log.info("reader connected", extra={"reader": hello.peer.worker_id})
        pump = asyncio.create_task(self._receive(connection, messages), name="handoff-receive")
        try:
            yield Welcome(peer=self._me, lease_s=context.config.transfer.lease_s)
            while (message := await connection.outgoing.get()) is not None:
                yield message
        finally:
            pump.cancel()
            self._lose(connection)

    async def _receive(self, connection: _Connection, messages: AsyncIterator[ToHolder]) -> None:
        try:
            async for message in messages:
                try:
                    self._handle(connection, message)
                except ServingError as error:
                    kind = type(message).__name__
                    log.info("hand-off message dropped", extra={"kind": kind, "reason": error.message})
        finally:
            connection.outgoing.put_nowait(None)

    def _handle(self, connection: _Connection, message: ToHolder) -> None:
        now = self._context.clock.now()
        match message:
            case Open() | Claim():
                self._claim(connection, message)
            case Renew():
                for ref in message.leases:
                    self._leases.renew(ref, connection.incarnation, now=now)
            case Release():
                self._release(connection, message)
            case AbortHandoff():
                self._abort(connection, message)
            case CanaryRead():
                self._context.proof.note(connection.peer.worker_id, connection.incarnation, message.error)
            case _:
                log.warning("unexpected hand-off message", extra={"kind": type(message).__name__})

    def _claim(self, connection: _Connection, message: Open | Claim) -> None:
        """The answer to a claim that comes again, because its answer did not, is what there is to say by now."""
        reader = Reader(incarnation=connection.incarnation, attempt=message.attempt)
        now = self._context.clock.now()
        before, early = self._leases.find(message.handoff_id), self._early.get(message.handoff_id)
        is_waiting = early is not None and early.reader == reader
        ticket = early.ticket if early is not None and is_waiting else None
        if not is_waiting and (before is None or before.reader != reader):
            try:
                ticket = self._check_ticket(connection, message)
            except TicketRefused as error:
                log.warning("ticket refused", extra={"reader": connection.peer.worker_id, "reason": error.message})
                self._refuse(connection, message, error)
                return
            num_retries = int(message.attempt > 1)
            self._context.pairs.count(connection.peer.worker_id, num_handoffs=1, num_retries=num_retries)
        try:
            view = self._leases.claim(message.handoff_id, reader, now=now)
        except (LeaseExpired, StaleLease, OutOfBlocks) as error:
            self._refuse(connection, message, error)
            return
        if view is None:
            if early is None or early.message.attempt < message.attempt:
                until = now + self._context.config.transfer.lease_s
                self._early[message.handoff_id] = _Early(
                    connection=connection, message=message, ticket=ticket, until=until
                )
                self.on_readers_changed()
            return
        export = self._exports[message.handoff_id]
        export.lease = view
        export.num_held = message.num_held_blocks
        if before is not None and before.reader not in (None, reader):
            self._tell_end(before, StaleLease(f"the hand-off was claimed for attempt {message.attempt}"))
        export.span.link(message.traceparent)
        export.span.set(reader=connection.peer.worker_id)
        if export.grant is not None:
            self._send_sealed(export, reader)
        else:
            self._send_ready(export, reader, 0)

    def _check_ticket(self, connection: _Connection, message: Open | Claim) -> Ticket | None:
        """Once for each claim, before anything of the hand-off is told or changed. Raises TicketRefused."""
        ticket = self._context.tickets.check_claim(message, connection.peer)
        export = self._exports.get(message.handoff_id)
        if export is not None:
            check_tenant(ticket, export.tenant)
        return ticket

    def _release(self, connection: _Connection, message: Release) -> None:
        """The claimant has taken the blocks, or cannot: then they are kept for another claim."""
        reader = Reader(incarnation=connection.incarnation, attempt=message.attempt)
        export = self._exports.get(message.handoff_id)
        ended = None
        if message.outcome.ends_lease:
            now = self._context.clock.now()
            _, ended = self._leases.release(message.lease, reader, reason=message.outcome, now=now)
            if ended is None:
                return
        elif self._leases.unclaim(message.lease, reader) is not Verdict.APPLIED:
            return
        self._count_release(connection.peer.worker_id, message, export, ended)
        if ended is not None:
            self._over(ended, None, outcome=message.outcome)

    def _count_release(
        self, peer: WorkerId, message: Release, export: _Export | None, ended: EndedLease | None
    ) -> None:
        if message.outcome is not HandoffOutcome.OK:
            if (error := error_of(message.outcome, "")).blame is Blame.PAIR:
                self._context.pairs.count_failure(peer, error.slug)
        elif export is not None and ended is not None:
            num_bytes = ended.num_bytes - self._held_bytes(export)
            self.sent_bytes += num_bytes
            self._context.pairs.count(peer, num_bytes=num_bytes)
            if message.attempt != export.attempt:
                self.refetched_tokens += export.num_tokens

    def _abort(self, connection: _Connection, message: AbortHandoff) -> None:
        """The claimant gives the attempt up. Of anybody else only a waiting Open of the same attempt is forgotten."""
        early = self._early.get(message.handoff_id)
        if early is not None and early.connection is connection and early.message.attempt == message.attempt:
            del self._early[message.handoff_id]
            self.on_readers_changed()
        view = self._leases.find(message.handoff_id)
        reader = Reader(incarnation=connection.incarnation, attempt=message.attempt)
        if view is None or view.reader != reader:
            return
        if not message.outcome.ends_lease:
            self._leases.unclaim(view.ref, reader)
        elif view.blocks:
            ended = self._leases.revoke(message.handoff_id, message.reason, now=self._context.clock.now())
            if ended is not None:
                self._over(ended, None, outcome=message.outcome)

    def _send_ready(self, export: _Export, reader: Reader, first: int) -> None:
        """Announce what is ready from block ``first`` on, as far as the claimant lacks it."""
        first = max(first, export.num_held)
        connection = self._connections.get(reader.incarnation)
        if connection is not None and first < len(export.early):
            connection.outgoing.put_nowait(
                Ready(
                    handoff_id=export.handoff_id,
                    attempt=reader.attempt,
                    lease=export.lease.ref,
                    slot=export.lease.slot,
                    first_block=first,
                    block_ids=tuple(export.early[first:]),
                    traceparent=export.last_chunk,
                )
            )

    def _send_sealed(self, export: _Export, reader: Reader) -> None:
        connection = self._connections.get(reader.incarnation)
        assert export.grant is not None
        if connection is not None:
            grant = _grant_from(export.grant, export.num_held, self._context.geometry.num_kv_heads)
            self._leases.set_digest(grant.lease.lease_id, digests.combine(grant.digest, grant.digests))
            connection.outgoing.put_nowait(
                Sealed(
                    handoff_id=export.handoff_id,
                    attempt=reader.attempt,
                    grant=grant,
                    first_tokens=export.first_tokens,
                    traceparent=export.last_chunk or export.span.traceparent,
                )
            )

    def _held_bytes(self, export: _Export) -> int:
        """Bytes of a hand-off that were not moved, because the claimant had them."""
        if export.grant is None:
            return 0
        return min(export.num_held, len(export.grant.block_ids)) * self._context.geometry.block_bytes

    def _refuse(self, connection: _Connection, message: Open | Claim, error: ServingError) -> None:
        connection.outgoing.put_nowait(
            Refused(handoff_id=message.handoff_id, attempt=message.attempt, slug=error.slug, message=error.message)
        )

    def _lose(self, connection: _Connection) -> None:
        """The stream is gone. Its claims lapse; the leases stay for another claimant until their time is over."""
        if self._connections.get(connection.incarnation) is connection:
            del self._connections[connection.incarnation]
            dropped = self._leases.drop_reader(connection.incarnation)
            log.info("reader lost", extra={"reader": connection.peer.worker_id, "claims": dropped})
        for handoff_id in [key for key, early in self._early.items() if early.connection is connection]:
            del self._early[handoff_id]
        self.on_readers_changed()
        connection.outgoing.put_nowait(None)

    # -- ends ---------------------------------------------------------------------------------------------------------

    async def reap(self) -> None:
        """Own timer of the leases: ends what is over, whether or not anything else happens."""
        while True:
            await asyncio.sleep(_REAPER_S)
            self.sweep()

    def sweep(self) -> None:
        now = self._context.clock.now()
        for ended in self._leases.expire(now):
            log.warning("lease expired", extra={"handoff_id": ended.handoff_id, "reason": ended.reason})
            self._over(ended, LeaseExpired(f"the lease ended: {ended.reason}"), outcome="expired")
        for handoff_id, early in list(self._early.items()):
            if early.until <= now and handoff_id not in self._expected:
                del self._early[handoff_id]
                self._refuse(early.connection, early.message, LeaseExpired("the hand-off was never begun here"))

    def _over(self, ended: EndedLease, error: ServingError | None, *, outcome: str = "revoked") -> None:
        export = self._exports.pop(ended.handoff_id, None)
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        if ended.blocks:
            self._give_back(list(ended.blocks))
        if export is not None:
            self._context.observed.hold(self._context.clock.now() - export.begun_at)
            self._give_back_early(export)
            for span, _ in export.chunks:
                span.end(str(outcome))
            export.span.end(str(outcome), blocks=len(ended.blocks), bytes=ended.num_bytes)
        self.room_freed.set()
        if error is not None and export is not None:
            self._tell_end(ended, error)

    def _tell_end(self, lease: LeaseView | EndedLease, error: ServingError) -> None:
        """To whoever holds it, or held it until now."""
        connection = None if lease.reader is None else self._connections.get(lease.reader.incarnation)
        if connection is not None and lease.reader is not None:
            connection.outgoing.put_nowait(
                Ended(
                    handoff_id=lease.handoff_id,
                    attempt=lease.reader.attempt,
                    lease=lease.ref,
                    slug=error.slug,
                    message=error.message,
                )
            )

    def _give_back(self, blocks: list[int]) -> None:
        self._context.engine.pool.end_lease(blocks)
        self.room_freed.set()

    def _give_back_early(self, export: _Export) -> None:
        blocks, export.early = export.early, []
        self._give_back(blocks)

    def is_idle(self) -> bool:
        return not self._exports and self._leases.num_live == 0

    async def close(self) -> None:
        """End every stream and every lease (shutdown)."""
        for handoff_id in list(self._exports):
            self.end(handoff_id, LeaseExpired("the prefill worker is stopping"))
        for connection in list(self._connections.values()):
            self._lose(connection)
        await self._scope.close()


def _grant_from(whole: Grant, num_held: int, num_kv_heads: int) -> Grant:
    """The right to read what a claimant with ``num_held`` blocks lacks."""
    first = min(num_held, len(whole.block_ids))
    return replace(
        whole,
        first_block=first,
        block_ids=whole.block_ids[first:],
        digests=whole.digests[first * num_kv_heads * digests.DIGEST_BYTES :],
    )
