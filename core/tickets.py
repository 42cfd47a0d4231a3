"""Tickets: the router's word that one decode worker may take one hand-off from one prefill worker, until a moment.

The router has a secret of its own, made at its start, and from it a key for each incarnation of a prefill worker, which
it tells only that one (over mTLS, when it joins). So a worker can check tickets by itself, and with what it knows could
forge only those for its own memory; who reads has nothing to forge with. A ticket is good without the router that wrote
it: a holder remembers the keys of a router before this one.

Moments are the router's: a key comes with its age there, from which its holder tells the time of it. No clock of one
machine is compared with another's.

::

    ticket = id of the key (8 bytes), HMAC-SHA256 of the rest (32 bytes), what it says (JSON)
"""

import hashlib
import hmac
import json
import secrets
from collections import OrderedDict
from dataclasses import astuple, dataclass

from core.clock import Clock
from core.errors import TicketRefused
from core.ids import HandoffId, Incarnation, RequestId, WorkerId
from core.types import TicketKey, WorkerAddress

INTRODUCTION_S = 3600.0
SLACK_S = 30.0
"""Beyond a request's deadline: the end of what has begun within it."""
_MAX_KEYS = 4
"""Of routers that followed each other."""
_ID_BYTES, _MAC_BYTES = 8, 32
_MAX_BYTES = 4096
_NONE = HandoffId(""), RequestId("")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """``reader`` may ask ``holder`` for the addresses of its memory; and, unless it is only an introduction, claim that
    hand-off of that request for that attempt."""

    holder: WorkerId
    holder_incarnation: Incarnation
    reader: WorkerId
    reader_incarnation: Incarnation
    expires_at: float
    """Seconds since the key began."""
    handoff_id: HandoffId = _NONE[0]
    """Empty: an introduction."""
    request_id: RequestId = _NONE[1]
    attempt: int = 0
    tenant: str = ""


class TicketOffice:
    """The router's side."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began_at = clock.now()
        self._secret = secrets.token_bytes(32)

    def key_for(self, worker_id: WorkerId, incarnation: Incarnation) -> TicketKey:
        """Told to that worker, and to nobody else."""
        return TicketKey(secret=self._derive(worker_id, incarnation), age_s=self._now())

    def introduce(self, reader: WorkerAddress, holder: WorkerAddress) -> bytes:
        return self._sign(self._between(holder, reader, INTRODUCTION_S))

    def sign_claim(
        self,
        reader: WorkerAddress,
        holder: WorkerAddress,
        *,
        handoff_id: HandoffId,
        request_id: RequestId,
        attempt: int,
        tenant: str,
        deadline_s: float,
    ) -> bytes:
        ticket = self._between(
            holder,
            reader,
            deadline_s + SLACK_S,
            handoff_id=handoff_id,
            request_id=request_id,
            attempt=attempt,
            tenant=tenant,
        )
        return self._sign(ticket)

    def _between(self, holder: WorkerAddress, reader: WorkerAddress, for_s: float, **claim: object) -> Ticket:
        return Ticket(
            holder=holder.worker_id,
            holder_incarnation=holder.incarnation,
            reader=reader.worker_id,
            reader_incarnation=reader.incarnation,
            expires_at=self._now() + for_s,
            **claim,  # type: ignore[arg-type]
        )

    def _sign(self, ticket: Ticket) -> bytes:
        return sign(self._derive(ticket.holder, ticket.holder_incarnation), ticket)

    def _derive(self, worker_id: WorkerId, incarnation: Incarnation) -> bytes:
        return hmac.digest(self._secret, f"{incarnation}/{worker_id}".encode(), "sha256")

    def _now(self) -> float:
        return self._clock.now() - self._began_at


class TicketDesk:
    """The holder's side: what it was told by the router, and what it checks by that."""

    def __init__(self, worker_id: WorkerId, incarnation: Incarnation, clock: Clock) -> None:
        self._me = (worker_id, incarnation)
        self._clock = clock
        self._keys: OrderedDict[bytes, tuple[bytes, float]] = OrderedDict()
        """By its id: the key, and when it began by our clock."""

    def learn(self, key: TicketKey) -> None:
        name = _id_of(key.secret)
        self._keys[name] = (key.secret, self._clock.now() - key.age_s)
        self._keys.move_to_end(name)
        while len(self._keys) > _MAX_KEYS:
            self._keys.popitem(last=False)

    def check_introduction(self, ticket: bytes, *, reader: WorkerId, incarnation: Incarnation) -> None:
        """Any ticket of this reader for this worker will do. Raises TicketRefused."""
        self._read(ticket, reader, incarnation)

    def check_claim(
        self,
        ticket: bytes,
        *,
        reader: WorkerId,
        incarnation: Incarnation,
        handoff_id: HandoffId,
        request_id: RequestId,
        attempt: int,
    ) -> Ticket:
        """What it says, if it is for this claim. Raises TicketRefused."""
        read = self._read(ticket, reader, incarnation)
        if (read.handoff_id, read.request_id, read.attempt) != (handoff_id, request_id, attempt):
            raise TicketRefused("the ticket is for another claim")
        return read

    def _read(self, ticket: bytes, reader: WorkerId, incarnation: Incarnation) -> Ticket:
        if not ticket:
            raise TicketRefused("no ticket: the router gives one with each placement")
        name, mac, said = (
            ticket[:_ID_BYTES],
            ticket[_ID_BYTES : _ID_BYTES + _MAC_BYTES],
            ticket[_ID_BYTES + _MAC_BYTES :],
        )
        secret, began_at = self._keys.get(name, (b"", 0.0))
        if not secret or len(ticket) > _MAX_BYTES:
            raise TicketRefused("the ticket is of a router that this worker does not know")
        if not hmac.compare_digest(mac, hmac.digest(secret, said, "sha256")):
            raise TicketRefused("the ticket is not as the router wrote it")
        read = Ticket(**dict(zip(Ticket.__dataclass_fields__, json.loads(said), strict=True)))
        if (read.holder, read.holder_incarnation) != self._me:
            raise TicketRefused("the ticket is for another holder")
        if (read.reader, read.reader_incarnation) != (reader, incarnation):
            raise TicketRefused("the ticket is another reader's")
        late_s = self._clock.now() - began_at - read.expires_at
        if late_s >= 0:
            raise TicketRefused(f"the ticket expired {late_s:.0f} s ago")
        return read


def sign(secret: bytes, ticket: Ticket) -> bytes:
    said = json.dumps(astuple(ticket), separators=(",", ":")).encode()
    return _id_of(secret) + hmac.digest(secret, said, "sha256") + said


def _id_of(secret: bytes) -> bytes:
    return hashlib.blake2b(secret, digest_size=_ID_BYTES).digest()
