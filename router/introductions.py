"""Workers are told of their peers: those of the other role that they can hand off with. Each tries a canary out with
them before it says that it is ready, and so the first request over a new pair waits for no handshake."""

from collections.abc import Iterable

from core.types import CommandKind, Role, WorkerAddress, WorkerCommand, WorkerState, WorkerStatus
from router.registry import Commands, Membership, Registry

_OTHER = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}
_LIVE = (WorkerState.STARTING, WorkerState.READY)


class Introductions:
    """Who was told of whom, by the worker's stream."""

    def __init__(self, registry: Registry, *, is_local: bool) -> None:
        """``is_local``: nothing is ever handed off."""
        self._registry = registry
        self._is_local = is_local
        self._told: dict[Commands, tuple[WorkerAddress, ...]] = {}

    def begin(self, membership: Membership) -> tuple[WorkerAddress, ...]:
        """The peers of a worker that has just joined. From now on it is told when they change."""
        workers = self._registry.workers()
        me = next((w for w in workers if w.registration.worker_id == membership.worker_id), None)
        self._told[membership.commands] = peers = () if me is None else self._peers(me, workers)
        return peers

    def tell(self) -> None:
        """After a change of members or of their states: to those whose peers are others now."""
        workers, memberships = self._registry.workers(), self._registry.memberships()
        told: dict[Commands, tuple[WorkerAddress, ...]] = {}
        for worker in workers:
            commands = memberships[worker.registration.worker_id].commands
            if commands in self._told:
                told[commands] = peers = self._peers(worker, workers)
                if peers != self._told[commands]:
                    commands.put_nowait(WorkerCommand(kind=CommandKind.PEERS, peers=peers))
        self._told = told

    def _peers(self, me: WorkerStatus, workers: Iterable[WorkerStatus]) -> tuple[WorkerAddress, ...]:
        return () if self._is_local else peers_of(me, workers)


def peers_of(me: WorkerStatus, workers: Iterable[WorkerStatus]) -> tuple[WorkerAddress, ...]:
    """Live workers of the other role of the same model with equal KV formats. A worker that drains begins nothing."""
    mine, role = me.registration.model, _OTHER.get(me.registration.role)
    return tuple(
        WorkerAddress(worker_id=it.worker_id, incarnation=it.incarnation, address=it.address)
        for it, state in ((worker.registration, worker.state) for worker in workers)
        if it.role is role and state in _LIVE and (it.model.name, it.model.format_hash) == (mine.name, mine.format_hash)
    )
