"""D's side of the control streams: one for each incarnation of a prefill worker that holds something for us.

A holder::

    CONNECTING --Welcome, formats equal, link proven--> CONNECTED --stream ends--> LOST (forgotten; the next
                                                                                  need dials anew)
        `--refused | handshake_s--> LOST

When a holder is lost, every hand-off that waits on it fails with PeerLost at once. Fetches that already run end by
their own poll; a grant that is known stays usable (equal digests suffice without P).

Each pair has a circuit (kvtransfer/circuit.py): after failures in a row nothing is begun with that holder until its
canary was read again. The router hears of it and places elsewhere.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator
from contextlib import aclosing, contextmanager
from functools import partial
from typing import Any, Protocol

from core.errors import BackendFailed, Blame, PeerLost, ServingError, error_from_slug
from core.handoff import (
    AbortHandoff,
    CanaryRead,
    Claim,
    Ended,
    HandoffOutcome,
    Hello,
    LeaseRef,
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
from core.ids import HandoffId, Incarnation, WorkerId
from core.tasks import TaskScope
from core.types import WorkerAddress
from kvtransfer.backends.base import Link
from kvtransfer.choice import PairReport
from kvtransfer.circuit import Circuit, CircuitState
from kvtransfer.layout import check_peer
from kvtransfer.transfer_thread import TransferThread
from worker.context import WorkerContext

log = logging.getLogger(__name__)

_MAX_PROBES = 10
"""That fail, of one incarnation; they take some minutes. Then it is forgotten, as one that is gone."""
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.1, 2.0
"""Between tries to read the canary of a peer that is new."""


class HandoffStream(Protocol):
    """The control stream to one incarnation of a prefill worker (``rpc.clients.HandoffClient``)."""

    def connect(self, messages: AsyncIterator[ToHolder]) -> AsyncGenerator[ToReader, None]: ...
    async def close(self) -> None: ...


Dial = Callable[[WorkerAddress], HandoffStream]
"""Makes a stream; the I/O begins with ``connect``."""


class Offer:
    """A hand-off we opened, as its holder tells of it: any number of Ready, then Sealed, or the error that ended it."""

    def __init__(self, message: Open | Claim) -> None:
        self.message = message
        self._messages: asyncio.Queue[Ready | Sealed | ServingError] = asyncio.Queue()
        self._is_over = False
        self.lease: LeaseRef | None = None
        """Known from Sealed on; it is renewed until released."""
        self.on_ended: Callable[[ServingError], None] = lambda error: None
        """Called when the holder says that it is over for us, at any time."""

    @property
    def key(self) -> tuple[HandoffId, int]:
        return self.message.handoff_id, self.message.attempt

    @property
    def is_waiting(self) -> bool:
        """For the grant."""
        return not self._is_over

    async def next(self) -> Ready | Sealed:
        """What the holder said next. Raises its refusal, or the loss of the holder. Nothing follows Sealed."""
        message = await self._messages.get()
        if isinstance(message, ServingError):
            raise message
        return message

    def put(self, message: Ready | Sealed | ServingError) -> None:
        """Whatever follows the end changes nothing."""
        if not self._is_over:
            self._is_over = not isinstance(message, Ready)
            if isinstance(message, Sealed):
                self.lease = message.grant.lease
            self._messages.put_nowait(message)

    def end(self, error: ServingError) -> None:
        """The holder's word, also after Sealed."""
        self.put(error)
        self.on_ended(error)


class Holder:
    """The control stream to one incarnation of a prefill worker. Event loop only."""

    def __init__(
        self,
        context: WorkerContext,
        transfers: TransferThread,
        me: PeerInfo,
        address: WorkerAddress,
        dial: Dial,
        is_superseded: Callable[[WorkerAddress], bool],
        ticket: bytes,
    ) -> None:
        """``ticket``: by which the router introduces us."""
        self._context = context
        self._transfers = transfers
        self._me = me
        self._dial = dial
        self._is_superseded = is_superseded
        self._ticket = ticket
        self.address = address
        self._outgoing: asyncio.Queue[ToHolder] = asyncio.Queue()
        self._offers: dict[tuple[HandoffId, int], Offer] = {}
        self._peer: asyncio.Future[PeerInfo] = asyncio.get_running_loop().create_future()
        self._peer.add_done_callback(_take_error)
        self._lost: ServingError | None = None

    async def run(self) -> None:
        """Dial and serve until the stream ends."""
        client = self._dial(self.address)
        renewals = asyncio.create_task(self._renew(), name="handoff-renew")
        error: ServingError = PeerLost(f"{self.address.worker_id} closed the hand-off stream")
        try:
            async with aclosing(client.connect(self._messages())) as replies:
                async with asyncio.timeout(self._context.config.transfer.handshake_s):
                    welcome = await anext(replies, None)
                    if not isinstance(welcome, Welcome):
                        raise PeerLost(f"{self.address.worker_id} did not answer the handshake")
                    await self._shake(welcome)
                async for reply in replies:
                    self._handle(reply)
        except ServingError as failure:
            error = _as_transfer_error(failure, self.address)
        except TimeoutError:
            error = PeerLost(f"{self.address.worker_id} did not finish the handshake in time")
        except asyncio.CancelledError:
            error = PeerLost("this worker is stopping")
            raise
        finally:
            renewals.cancel()
            self._lose(error)
            await client.close()

    @property
    def is_met(self) -> bool:
        """The handshake is over."""
        return self._peer.done()

    async def link(self) -> Link:
        """The proven link. Raises a typed error when the handshake fails."""
        peer = await asyncio.shield(self._peer)
        link = self._transfers.link(peer)
        return link if link is not None else await asyncio.wrap_future(self._transfers.connect(peer))

    async def check(self) -> PairReport:
        """Prove the link again, and measure all that there are. Raises a typed error when the handshake fails or there
        was nothing to measure."""
        peer = await asyncio.shield(self._peer)
        return await asyncio.wrap_future(self._transfers.check(peer))

    def open(self, message: Open | Claim) -> Offer:
        """Ask for a hand-off. To be closed."""
        offer = Offer(message)
        if self._lost is not None:
            offer.put(self._lost)
            return offer
        self._offers[offer.key] = offer
        self._outgoing.put_nowait(message)
        return offer

    def close(self, offer: Offer, outcome: HandoffOutcome, *, num_bytes: int = 0, reason: str = "") -> None:
        """The claim is over. Legal in every state, idempotent at the holder."""
        self._offers.pop(offer.key, None)
        handoff_id, attempt = offer.key
        if offer.lease is None:
            self._send(AbortHandoff(handoff_id=handoff_id, attempt=attempt, outcome=outcome, reason=reason))
        else:
            self._release(handoff_id, attempt, offer.lease, outcome, num_bytes)

    def _release(
        self, handoff_id: HandoffId, attempt: int, lease: LeaseRef, outcome: HandoffOutcome, num_bytes: int
    ) -> None:
        self._send(Release(handoff_id=handoff_id, lease=lease, attempt=attempt, outcome=outcome, num_bytes=num_bytes))

    def tell_canary(self, error: str) -> None:
        """What became of reading it, or of the last try to; empty if it was good."""
        self._send(CanaryRead(error=error))

    @property
    def is_lost(self) -> bool:
        return self._lost is not None

    async def _messages(self) -> AsyncIterator[ToHolder]:
        yield Hello(peer=self._me, ticket=self._ticket)
        while True:
            yield await self._outgoing.get()

    def _send(self, message: ToHolder) -> None:
        if self._lost is None:
            self._outgoing.put_nowait(message)

    async def _shake(self, welcome: Welcome) -> None:
        context, peer = self._context, welcome.peer
        if (peer.worker_id, peer.incarnation) != (self.address.worker_id, self.address.incarnation):
            raise PeerLost(f"{self.address.address} is served by another worker or incarnation now")
        if self._is_superseded(self.address):
            raise PeerLost(f"a later start of {self.address.worker_id} is connected")
        check_peer(peer, mine=context.format, geometry=context.geometry)
        await asyncio.wrap_future(self._transfers.connect(peer))
        if not self._peer.done():
            self._peer.set_result(peer)
        log.info("holder connected", extra={"holder": peer.worker_id})

    def _handle(self, reply: ToReader) -> None:
        match reply:
            case Ready():
                offer = self._offers.get((reply.handoff_id, reply.attempt))
                if offer is not None:
                    offer.put(reply)
            case Sealed():
                offer = self._offers.get((reply.handoff_id, reply.attempt))
                if offer is None:
                    # Nobody waits any more: the attempt was aborted while this was under way.
                    self._release(reply.handoff_id, reply.attempt, reply.grant.lease, HandoffOutcome.ABORTED, 0)
                else:
                    offer.put(reply)
            case Refused() | Ended():
                offer = self._offers.get((reply.handoff_id, reply.attempt))
                if offer is not None:
                    offer.end(error_from_slug(reply.slug, reply.message, worker_id=self.address.worker_id))
            case _:
                log.warning("unexpected hand-off message", extra={"kind": type(reply).__name__})

    async def _renew(self) -> None:
        """Hold what is granted, and ask again for what is not: a message may have been lost on a stream that lives."""
        while True:
            await asyncio.sleep(self._context.config.transfer.renew_s)
            leases = tuple(offer.lease for offer in self._offers.values() if offer.lease is not None)
            if leases:
                self._send(Renew(leases=leases))
            for offer in self._offers.values():
                if offer.is_waiting:
                    self._send(offer.message)

    def _lose(self, error: ServingError) -> None:
        self._lost = error
        if not self._peer.done():
            self._peer.set_exception(error)
        for offer in self._offers.values():
            offer.put(error)
        self._offers.clear()
        log.info("holder lost", extra={"holder": self.address.worker_id, "reason": error.message})


class Holders:
    """All holders of this decode worker, dialled on demand."""

    def __init__(self, context: WorkerContext, transfers: TransferThread, me: PeerInfo, *, dial: Dial) -> None:
        self._context = context
        self._transfers = transfers
        self._me = me
        self._dial = dial
        self._scope = TaskScope("holders")
        self._holders: dict[Incarnation, Holder] = {}
        self._proving: dict[Incarnation, asyncio.Task[None]] = {}
        """Of the peers that are named now, those that are proven too."""
        self._num_dials = 0
        self._latest: dict[WorkerId, tuple[int, Incarnation]] = {}
        """Of each worker that answered: its dial that came last."""

    @contextmanager
    def hand_off(self, address: WorkerAddress, *, is_retry: bool = False, ticket: bytes = b"") -> Iterator[Holder]:
        """The holder of that incarnation for one hand-off, whose end tells of the pair. Never waits. ``ticket``: its
        own, which also introduces us.

        Raises BackendFailed while the pair's circuit is open."""
        worker_id, pairs = address.worker_id, self._context.pairs
        circuit = pairs.circuit(worker_id, address.incarnation)
        if not circuit.is_closed:
            raise BackendFailed(
                f"{worker_id} is left alone until its canary is read again; what failed last: {circuit.why}",
                worker_id=worker_id,
            )
        begun = circuit.begin()
        pairs.count(worker_id, num_handoffs=1, num_retries=int(is_retry))
        try:
            yield self.get(address, ticket)
        except ServingError as error:
            if error.blame is Blame.PAIR:
                pairs.count_failure(worker_id, error.slug)
                if circuit.fail(begun, error.message, self._context.clock.now()):
                    self._scope.spawn(self._revive(address, circuit), name=f"circuit-{worker_id}")
            raise
        circuit.succeed()

    async def check(self, address: WorkerAddress) -> PairReport:
        """See :meth:`Holder.check`; whatever the state of the circuit."""
        return await self.get(address).check()

    async def _revive(self, address: WorkerAddress, circuit: Circuit) -> None:
        """From OPEN on, until the circuit is closed, or nobody needs it any more."""
        clock, worker_id, num_probes = self._context.clock, address.worker_id, 0
        while True:
            log.warning("circuit open", extra={"holder": worker_id, "reason": circuit.why})
            while (wait_s := circuit.retry_at - clock.now()) > 0 and circuit.state is CircuitState.OPEN:
                await asyncio.sleep(wait_s)
            if circuit.state is not CircuitState.OPEN or not self._context.pairs.is_current(worker_id, circuit):
                return
            circuit.begin_probe()
            circuit.end_probe(await self._probe(address), clock.now())
            num_probes += 1
            if circuit.is_closed:
                log.info("circuit closed", extra={"holder": worker_id})
                return
            if num_probes >= _MAX_PROBES:
                self._context.pairs.forget_circuit(worker_id, circuit)
                return

    def meet(self, peers: Iterable[WorkerAddress]) -> None:
        """Read the canary of each new one, for as long as it is named and it did not succeed. Never waits."""
        named = {address.incarnation: address for address in peers}
        for incarnation in self._proving.keys() - named.keys():
            self._proving.pop(incarnation).cancel()
        for incarnation in named.keys() - self._proving.keys():
            address = named[incarnation]
            proving = self._scope.spawn(self._prove(address), name=f"prove-{address.worker_id}")
            self._proving[incarnation] = proving

    async def _prove(self, address: WorkerAddress) -> None:
        """Both sides hear of each try. What fails here needs no circuit: until it succeeds one of the two is not ready,
        or has another peer."""
        pause_s, error = _FIRST_PAUSE_S, ""
        while True:
            holder = self.get(address)
            if error:
                holder.tell_canary(error)  # the stream of that try has ended with it
            try:
                await holder.link()
            except ServingError as failure:
                error = failure.message
            else:
                holder.tell_canary("")
                self._context.proof.note(address.worker_id, address.incarnation, "")
                return
            log.info("canary not read", extra={"holder": address.worker_id, "reason": error})
            self._context.proof.note(address.worker_id, address.incarnation, error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)

    async def _probe(self, address: WorkerAddress) -> str:
        """Empty when the canary was read, else why not."""
        try:
            report = await self.check(address)
        except ServingError as error:
            return error.message
        return "" if report.chosen is not None else report.reason

    def get(self, address: WorkerAddress, ticket: bytes = b"") -> Holder:
        """The holder of that incarnation, dialling it if needed, whatever the state of the circuit. Never waits."""
        holder = self._holders.get(address.incarnation)
        if holder is None or holder.is_lost:
            for other in list(self._holders.values()):
                if other.is_lost:
                    del self._holders[other.address.incarnation]
            self._num_dials += 1
            holder = Holder(
                self._context,
                self._transfers,
                self._me,
                address,
                self._dial,
                partial(self._is_superseded, self._num_dials),
                ticket or self._context.tickets.to_show(address.incarnation),
            )
            self._holders[address.incarnation] = holder
            self._scope.spawn(holder.run(), name=address.worker_id)
        return holder

    def _is_superseded(self, number: int, address: WorkerAddress) -> bool:
        """Whether dial ``number``, which is answered only now, was overtaken by a dial to another start of the worker.

        Incarnations have no order, dials have one: a process that hung and wakes up must not depose its successor."""
        latest, incarnation = self._latest.get(address.worker_id, (0, address.incarnation))
        if latest > number and incarnation != address.incarnation:
            return True
        self._latest[address.worker_id] = (number, address.incarnation)
        return False

    async def close(self) -> None:
        await self._scope.close()
        self._holders.clear()


def _take_error(future: "asyncio.Future[Any]") -> None:
    """It may go unawaited: a holder can be lost before anybody waits for its link."""
    if not future.cancelled():
        future.exception()


def _as_transfer_error(error: ServingError, address: WorkerAddress) -> ServingError:
    """A holder that cannot be reached is PeerLost: the pair is to blame, or the holder, never this worker."""
    if error.slug in ("worker_lost", "cancelled", "deadline_exceeded"):
        return PeerLost(f"{address.worker_id} is gone: {error.message}", worker_id=address.worker_id)
    error.worker_id = error.worker_id or address.worker_id
    return error
