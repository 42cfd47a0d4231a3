"""Workers are told of their peers: those of the other role that they can hand off with. Each tries a canary out with
them before it says that it is ready, and so the first request over a new pair waits for no handshake."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from core.clock import Clock, MonotonicClock
from core.tickets import INTRODUCTION_S, TicketOffice
from core.types import CommandKind, Role, WorkerAddress, WorkerCommand, WorkerState, WorkerStatus
from router.registry import Commands, Membership, Registry

_OTHER = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}
_LIVE = (WorkerState.STARTING, WorkerState.READY)


@dataclass(frozen=True, slots=True)
class _Told:
    peers: tuple[WorkerAddress, ...]
    at: float


class Introductions:
    """Who was told of whom, by the worker's stream."""

    def __init__(
        self, registry: Registry, *, is_local: bool, clock: Clock | None = None, office: TicketOffice | None = None
    ) -> None:
        """``is_local``: nothing is ever handed off. ``office``: of a cluster with tickets."""
        self._registry = registry
        self._is_local = is_local
        self._clock = clock or MonotonicClock()
        self._office = office
        self._told: dict[Commands, _Told] = {}
        self._renewed_at = self._clock.now()

    def begin(self, membership: Membership) -> WorkerCommand:
        """The welcome of a worker that has just joined: its peers. From now on it is told when they change."""
        workers = self._registry.workers()
        me = next((w for w in workers if w.registration.worker_id == membership.worker_id), None)
        peers = () if me is None else self._peers(me, workers)
        self._told[membership.commands] = _Told(peers, self._clock.now())
        command = WorkerCommand(kind=CommandKind.JOINED, peers=peers)
        return command if me is None else self._with_tickets(command, me)

    def tell(self) -> None:
        """After a change of members or of their states: to those whose peers are others now."""
        workers, memberships = self._registry.workers(), self._registry.memberships()
        told: dict[Commands, _Told] = {}
        now = self._clock.now()
        for worker in workers:
            commands = memberships[worker.registration.worker_id].commands
            before = self._told.get(commands)
            if before is None:
                continue
            peers = self._peers(worker, workers)
            is_late = self._office is not None and now - before.at >= INTRODUCTION_S / 2  # tickets expire
            if peers != before.peers or is_late:
                command = WorkerCommand(kind=CommandKind.PEERS, peers=peers)
                commands.put_nowait(self._with_tickets(command, worker))
                before = _Told(peers, now)
            told[commands] = before
        self._told = told

    def keep_fresh(self) -> None:
        """Tickets expire: who has not heard for long is told again. To be called now and then."""
        now = self._clock.now()
        if self._office is not None and now - self._renewed_at >= INTRODUCTION_S / 8:
            self._renewed_at = now
            self.tell()

    def _with_tickets(self, command: WorkerCommand, worker: WorkerStatus) -> WorkerCommand:
        """Who reads is introduced to each, and who holds gets what it checks tickets by."""
        me = worker.registration
        if self._office is None or self._is_local:
            return command
        if me.role is Role.PREFILL:
            return replace(command, ticket_key=self._office.key_for(me.worker_id, me.incarnation))
        reader = WorkerAddress(worker_id=me.worker_id, incarnation=me.incarnation, address=me.address)
        return replace(command, tickets=tuple(self._office.introduce(reader, peer) for peer in command.peers))

    def _peers(self, me: WorkerStatus, workers: Iterable[WorkerStatus]) -> tuple[WorkerAddress, ...]:
        return () if self._is_local else peers_of(me, workers)


def peers_of(me: WorkerStatus, workers: Iterable[WorkerStatus]) -> tuple[WorkerAddress, ...]:
    """Live workers of the other role of the same model with equal KV formats and revisions. A worker that drains begins
    nothing."""
    mine, role = me.registration, _OTHER.get(me.registration.role)
    return tuple(
        WorkerAddress(worker_id=it.worker_id, incarnation=it.incarnation, address=it.address)
        for it, state in ((worker.registration, worker.state) for worker in workers)
        if it.role is role and state in _LIVE and (it.model.name, it.pairing) == (mine.model.name, mine.pairing)
    )
