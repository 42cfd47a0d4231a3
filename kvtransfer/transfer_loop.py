"""What the transfer thread does, without the thread: sessions and links over some backends, one ``turn`` at a time.

Used by one thread; a test drives ``turn`` itself. Result and quiet of a fetch, and the link of a connect, are futures
that end however the loop ends: ``shut_down`` destroys the backend and resolves what is left.
"""

import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from core.clock import Clock
from core.errors import BackendFailed, LayoutMismatch, PeerLost
from core.handoff import HandoffOutcome, LeaseRef, PeerInfo
from core.ids import Incarnation, WorkerId
from core.kv import KVGeometry
from kvtransfer.backends.base import Backend, Batch, Link, Op, OpState
from kvtransfer.choice import PairReport
from kvtransfer.copies import Copy
from kvtransfer.custody import Custody
from kvtransfer.fetch import Addition, FetchRequest, Transfer
from kvtransfer.handshake import Handshakes
from kvtransfer.memory import CELL_BYTES, REGION_KV, REGION_SCRATCH, REGION_SLOTS, Scratch
from kvtransfer.pairs import Pairs
from kvtransfer.peers import Peers
from kvtransfer.plan import Blocks, Plan, plan_blocks
from kvtransfer.probe import NUM_GLANCES
from kvtransfer.session import (
    SLOT_READ,
    Abort,
    BackendClosed,
    Done,
    Effect,
    Event,
    Failed,
    Finish,
    More,
    Phase,
    Post,
    Quiet,
    Session,
    SlotRead,
    Start,
    Tick,
)
from kvtransfer.work import Work

_RESTING = (Phase.DRAINING, Phase.EXPECTING)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferStats:
    """Counters are totals since start; probes of links are not transfers."""

    num_active: int
    """Transfers and handshakes."""
    num_links: int
    num_retired_links: int
    bytes_received: tuple[tuple[str, int], ...]
    """By backend."""
    transfers: tuple[tuple[HandoffOutcome, int], ...]
    connects: int
    connects_failed: int


class TransferLoop:
    def __init__(
        self,
        backend: Backend,
        *,
        fallback: Backend | None = None,
        geometry: KVGeometry,
        scratch: Scratch,
        landing: Scratch,
        custody: Custody,
        clock: Clock,
        stall_s: float,
        handshake_s: float,
        num_glances: int = NUM_GLANCES,
        pairs: Pairs | None = None,
    ) -> None:
        """``pairs`` is told what was moved."""
        self._backends = (backend,) if fallback is None else (backend, fallback)
        self._geometry = geometry
        self._scratch = scratch
        self._custody = custody
        self._clock = clock
        self._stall_s = stall_s
        self._pairs = pairs if pairs is not None else Pairs()
        self._peers = Peers()
        self._handshakes = Handshakes(
            self._backends,
            landing=landing,
            peers=self._peers,
            clock=clock,
            handshake_s=handshake_s,
            num_glances=num_glances,
            on_replaced=self.forget,
        )
        self._waiting: deque[Work] = deque()
        self._active: list[Work] = []
        self._bytes_received: Counter[str] = Counter()
        self._outcomes: Counter[HandoffOutcome] = Counter()

    # -- commands -----------------------------------------------------------------------------------------------------

    def connect(self, peer: PeerInfo, future: Future[Link]) -> None:
        """Resolve ``future`` with the usable link to this incarnation, after its canary was read over it."""
        self._handshakes.connect(peer, future)

    def check(self, peer: PeerInfo, future: Future[PairReport]) -> None:
        """Resolve ``future`` with the measurement of every link to this incarnation; the best is used from now on."""
        self._handshakes.check(peer, future)

    def link(self, peer: PeerInfo) -> Link | None:
        """The usable link to this incarnation, if there is one. From any thread."""
        return self._peers.usable_to(peer)

    def forget(self, worker_id: WorkerId, incarnation: Incarnation) -> None:
        """That process is gone: its link ends, fetches and probes over it end with PEER_LOST."""
        self._peers.forget(worker_id, incarnation)
        for work in [*self._active, *self._waiting]:
            if (work.link.peer.worker_id, work.link.peer.incarnation) == (worker_id, incarnation):
                self._handle(work, Abort(HandoffOutcome.PEER_LOST, "the peer was replaced or lost"))
                self._handshakes.backend_of(work.link).abort(work.link)
        self._handshakes.forget(worker_id, incarnation, PeerLost("the peer was replaced or lost"))

    def begin(self, link: Link, request: FetchRequest) -> Work:
        """Plan a fetch and take custody of its blocks. From any thread: touches nothing of the loop.

        Raises LayoutMismatch for block ids outside the geometries; then nothing has changed.
        """
        remote = (request.first_remote_block, request.remote_blocks)
        local = (request.first_local_block, request.local_blocks)
        plan = self._plan(link, remote, local)
        session = self._session(len(plan.chunks), request.lease, request.deadline_s, is_open=request.is_open)
        self._custody.begin(request.transfer_id, request.local_blocks)
        work = Work(session, link, request.slot, Transfer(request.transfer_id))
        work.extend(plan)
        return work

    def fetch(self, work: Work) -> None:
        self._waiting.append(work)

    def plan_more(self, work: Work, parts: Sequence[Addition]) -> list[Plan] | None:
        """Plan additions and take their blocks into custody; None when the fetch is quiet already. From any thread.

        Raises LayoutMismatch like :meth:`begin`.
        """
        plans = [self._plan(work.link, (0, part.remote_blocks), (0, part.local_blocks)) for part in parts]
        local_blocks = [block for part in parts for block in part.local_blocks]
        return plans if self._custody.extend(work.transfer.transfer_id, local_blocks) else None

    def _plan(self, link: Link, remote: tuple[int, Sequence[int]], local: tuple[int, Sequence[int]]) -> Plan:
        """Of blocks on both sides, each from a place within the sequence on."""
        peer = link.peer
        return plan_blocks(
            Blocks(geometry=peer.geometry, first_block=remote[0], block_ids=remote[1]),
            Blocks(geometry=self._geometry, first_block=local[0], block_ids=local[1]),
            num_kv_heads=peer.format.num_kv_heads,
        )

    def more(self, work: Work, parts: "Sequence[tuple[Plan, Future[bool]]]", *, is_last: bool) -> None:
        """Add to an open fetch. The futures are resolved as :attr:`Part.arrived`."""
        if work.session.outcome is not None:
            for _, arrived in parts:
                arrived.set_result(False)
            return
        for plan, arrived in parts:
            part = work.extend(plan)
            work.added.append(part)
            part.arrived = arrived
            if not part.num_left:
                arrived.set_result(True)
        if is_last:
            self.granted(work)
        self._handle(work, More(sum(len(plan.chunks) for plan, _ in parts), is_last))

    def granted(self, work: Work) -> None:
        """All that there is to read is known now: what happens from here on is waited for. The first time counts."""
        if work.granted_at is None:
            work.granted_at = self._clock.now()
            work.early_bytes = work.num_bytes
            work.early_post_s = work.post_s

    def abort(self, work: Work) -> None:
        self._handle(work, Abort())

    def abort_all(self, detail: str) -> None:
        self._handshakes.refuse_all(BackendFailed(detail))
        for work in [*self._active, *self._waiting]:
            self._handle(work, Abort(HandoffOutcome.ABORTED, detail))

    def shut_down(self) -> bool:
        """Destroy the backend; afterwards everything is quiet. True if it was before. Idempotent."""
        clean = all([backend.close() for backend in self._backends]) and not self._active
        for work in [*self._active, *self._waiting]:
            self._handle(work, BackendClosed())
        self._active.clear()
        self._waiting.clear()
        self._handshakes.close()
        return clean

    # -- the turn -----------------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        return not self._active and not self._waiting and self._handshakes.is_idle

    @property
    def is_resting(self) -> bool:
        """Nobody waits for an operation: those that there are were given up, or the source has more to compute."""
        is_awaited = self._waiting or self._handshakes.is_waiting
        return not is_awaited and all(work.session.phase in _RESTING for work in self._active)

    def turn(self) -> bool:
        """Start what can start, observe every operation once, then judge time. True if anything moved."""
        moved = self._handshakes.turn() | self._start_waiting()
        for work in self._active:
            moved |= self._observe(work) or self._post_next(work)
        for work in [*self._active, *self._waiting]:
            self._handle(work, Tick(work.link.progress_at))
        self._abort_stuck_links()
        if any(work.session.phase.is_final for work in self._active):
            self._active = [work for work in self._active if not work.session.phase.is_final]
        self._peers.sweep(lambda link: self._handshakes.backend_of(link).disconnect(link))
        return moved

    def _abort_stuck_links(self) -> None:
        """Nobody waits for what was given up, and nothing has come over its link for the stall time: end it, where the
        backend can."""
        now = self._clock.now()
        for work in self._active:
            if work.session.phase is Phase.DRAINING and not work.link.is_dead and work.session.is_stalled(now):
                self._handshakes.backend_of(work.link).abort(work.link)

    def _start_waiting(self) -> bool:
        moved = False
        while self._waiting:
            work = self._waiting[0]
            if not self._peers.is_usable(work.link):
                self._handle(work, Abort(HandoffOutcome.PEER_LOST, "the link has ended"))
            if not work.session.phase.is_final:
                work.cell = self._scratch.allocate()
                if work.cell is None:
                    break
                self._active.append(work)
                self._handle(work, Start())
            self._waiting.popleft()
            moved = True
        return moved

    def _observe(self, work: Work) -> bool:
        """Poll every operation of a session once."""
        moved, backend = False, self._handshakes.backend_of(work.link)
        for key, op in list(work.ops.items()):
            status = backend.poll(op)
            if status.state is OpState.PENDING:
                continue
            moved = True
            del work.ops[key]
            if status.state is OpState.DONE:
                work.link.progress_at = self._clock.now()
            self._count(op)
            self._handle(work, self._event(work, key, op))
        return moved

    def _count(self, op: Op) -> None:
        """By what the backend measured, where it does; else as seen from here."""
        post_s, move_s, num_descriptors = op.post_s, max(0.0, time.perf_counter() - op.posted_at - op.post_s), 0
        if op.stats is not None:
            post_s, move_s, num_descriptors = op.stats.post_s, op.stats.move_s, op.stats.num_descriptors
        self._pairs.count(
            op.link.peer.worker_id, num_ops=1, post_s=post_s, move_s=move_s, num_descriptors=num_descriptors
        )

    def _event(self, work: Work, key: int, op: Op) -> Event:
        status = op.status
        if status.state is OpState.FAILED:
            return Failed(key, status.cause or HandoffOutcome.BACKEND_FAILED, status.detail)
        if key == SLOT_READ:
            assert work.cell is not None
            return SlotRead(self._scratch.read(work.cell))
        num_bytes = work.chunks[key].num_bytes
        work.num_bytes += num_bytes
        self._bytes_received[work.link.peer.link.backend] += num_bytes
        self._pairs.count(work.link.peer.worker_id, num_bytes=num_bytes)
        part = work.parts[key]
        part.num_left -= 1
        part.arrived_at = None if part.num_left else self._clock.now()
        if not part.num_left and not part.arrived.done():
            part.arrived.set_result(True)
        return Done(key)

    def _handle(self, work: Work, event: Event) -> None:
        now = self._clock.now()
        effects = work.session.handle(event, now)
        if not effects:
            return
        finish: Effect | None = None
        quiet: Quiet | None = None
        for effect in effects:
            match effect:
                case Post(key):
                    work.to_post.append(key)
                case Finish():
                    finish = effect
                case Quiet():
                    quiet = effect
        if quiet is not None and work.cell is not None:
            self._scratch.free(work.cell)
            work.cell = None
        self._conclude(work.transfer, work, finished=finish is not None, quiet=quiet, now=now)
        self._post_next(work)

    def _post_next(self, work: Work) -> bool:
        """Post what is to be posted. Where posting is the copy, one at a time: that it has arrived is told before the
        next is begun, and commands and others have their turn. True if anything was posted."""
        posted = False
        while work.to_post and not work.session.phase.is_final:
            op = self._post(work, work.to_post.popleft())
            posted = True
            if op is not None and op.status.state is not OpState.PENDING:
                break
        return posted

    def _post(self, work: Work, key: int) -> Op | None:
        """None: it failed before it was posted."""
        if work.session.phase is Phase.DRAINING:
            self._handle(work, Failed(key, HandoffOutcome.ABORTED, "never posted"))
            return None
        if key == SLOT_READ:
            assert work.cell is not None
            copy = Copy(work.slot * CELL_BYTES, work.cell * CELL_BYTES, CELL_BYTES)
            batch = Batch(remote_region=REGION_SLOTS, local_region=REGION_SCRATCH, copies=(copy,))
        else:
            batch = Batch(
                remote_region=REGION_KV,
                local_region=REGION_KV,
                copies=work.chunks[key],
                lease=work.session.lease,
                slot=work.slot,
            )
            part = work.parts[key]
            if part.begun_at is None:
                part.begun_at, part.is_early = self._clock.now(), work.granted_at is None
        began = time.perf_counter()
        try:
            op = self._handshakes.backend_of(work.link).post(work.link, batch)
        except LayoutMismatch as error:
            self._handle(work, Failed(key, HandoffOutcome.INCOMPATIBLE, error.message))
            return None
        op.posted_at, op.post_s = began, time.perf_counter() - began
        work.ops[key] = op
        work.post_s += op.post_s
        return op

    # -- endings ------------------------------------------------------------------------------------------------------

    def _conclude(self, transfer: Transfer, work: Work, *, finished: bool, quiet: Quiet | None, now: float) -> None:
        """Custody first: whoever sees a result that is also quiet finds the blocks' custody ended."""
        if quiet is not None:
            self._custody.end(transfer.transfer_id, quiet.why)
        elif finished:
            self._custody.quarantine(transfer.transfer_id, now)
        if finished:
            for part in work.parts:
                if not part.arrived.done():
                    part.arrived.set_result(False)
            result = work.result(now)
            self._outcomes[result.outcome] += 1
            transfer.result.set_result(result)
        if quiet is not None:
            transfer.quiet.set_result(None)

    def _session(self, num_chunks: int, lease: LeaseRef | None, deadline_s: float, *, is_open: bool = False) -> Session:
        now = self._clock.now()
        return Session(
            num_chunks,
            lease=lease,
            now=now,
            deadline_at=now + deadline_s,
            stall_s=self._stall_s,
            is_open=is_open,
        )

    def report(self, peer: PeerInfo) -> PairReport | None:
        """How the link to this incarnation was chosen. From any thread."""
        return self._handshakes.report(peer)

    def reports(self) -> dict[WorkerId, PairReport]:
        """How the link to each peer was chosen. From any thread."""
        return self._handshakes.reports()

    def stats(self) -> TransferStats:
        """From any thread."""
        return TransferStats(
            num_active=len(self._active) + len(self._waiting) + self._handshakes.num_active,
            num_links=len(self._peers.usable),
            num_retired_links=self._peers.num_retired,
            bytes_received=tuple((each.name, self._bytes_received[each.name]) for each in self._backends),
            transfers=tuple((outcome, self._outcomes[outcome]) for outcome in HandoffOutcome),
            connects=self._handshakes.num_connects,
            connects_failed=self._handshakes.num_failed,
        )
