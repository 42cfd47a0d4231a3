"""Who is alive: the members of the cell, each one incarnation of a worker, judged by silence.

::

    join --> starting --> ready --> draining          (as the worker's heartbeats say)
                |           |          |
                +-----------+----------+--- stream broken, or silent for suspect_after_s --> suspect
    draining --- stream ended -------------------------------> forgotten (it has left, or begins anew)
    suspect  --- heartbeat on a live stream, or re-join ---> what the worker says
    suspect  --- silent or apart for lost_after_s ---------> lost
    lost     --- heartbeat or re-join ---------------------> what the worker says (it was only slow)
    lost     --- retention_s (none if a drain was asked) --> forgotten
    any      --- join of a new incarnation of the id, or of another worker at its address --> superseded: stale for ever

The judgement is a function of the clock, so a snapshot is never older than the moment it is taken; ``sweep`` only
reports changes and forgets. Nothing is stored on disk: a restarted router is empty and fills up from re-joins.
"""

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from core.clock import Clock
from core.config import RouterConfig
from core.errors import InvalidRequest, ServingError, StaleIncarnation
from core.ids import Incarnation, WorkerId, format_incarnation
from core.kv import BlockCounts
from core.types import ModelRecord, Role, WorkerCommand, WorkerLoad, WorkerRegistration, WorkerState, WorkerStatus

SUPERSEDED_MEMORY = 16
"""Replaced incarnations remembered for each worker id, so that a woken one cannot take its place back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LivenessTimes:
    """How long silence may last."""

    suspect_after_s: float
    lost_after_s: float
    """From the last heartbeat, or from the moment the stream broke."""
    retention_s: float = 30.0
    """How long a lost worker stays visible to operators."""

    @classmethod
    def of(cls, config: RouterConfig) -> "LivenessTimes":
        """A worker is dead after ``heartbeat_timeout_s`` and suspect at half of it, but not for two missed beats."""
        lost = config.heartbeat_timeout_s
        return cls(suspect_after_s=min(lost, max(lost / 2, 2.5 * config.heartbeat_s)), lost_after_s=lost)


Commands = asyncio.Queue[WorkerCommand | ServingError | None]
"""What a worker's stream has to carry. An error ends the stream with it, None ends it in peace."""


class Membership:
    """One stream of one incarnation. A re-join makes a new one; the old one can then say nothing any more."""

    __slots__ = ("commands", "incarnation", "worker_id")

    def __init__(self, worker_id: WorkerId, incarnation: Incarnation, commands: Commands) -> None:
        self.worker_id = worker_id
        self.incarnation = incarnation
        self.commands = commands

    def replaced(self) -> StaleIncarnation:
        name = f"{self.worker_id}, incarnation {format_incarnation(self.incarnation)}"
        return StaleIncarnation(f"worker {name}, was replaced by a newer one", worker_id=self.worker_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateChange:
    """What ``sweep`` saw since the last time; ``after`` is None when the worker is gone from the registry."""

    worker_id: WorkerId
    incarnation: Incarnation
    before: WorkerState | None
    after: WorkerState | None


class _Member:
    """The progress of one incarnation."""

    __slots__ = ("heard_at", "load", "membership", "order", "parted_at", "registration")

    def __init__(self, registration: WorkerRegistration, membership: Membership, now: float) -> None:
        self.registration = registration
        self.membership = membership
        self.load = WorkerLoad(state=WorkerState.STARTING, blocks=_all_free(registration.num_blocks))
        self.heard_at = now
        self.parted_at: float | None = None
        self.order: WorkerCommand | None = None
        """The last drain or flip that was asked for; nothing is placed here from then on."""

    def silent_since(self) -> float:
        return self.heard_at if self.parted_at is None else self.parted_at

    def is_draining(self) -> bool:
        return self.order is not None or self.load.state is WorkerState.DRAINING

    def has_left(self) -> bool:
        """It had said that it drains, and then its stream ended."""
        return self.parted_at is not None and self.load.state is WorkerState.DRAINING

    def next_role(self) -> Role | None:
        return self.load.next_role if self.order is None else self.order.role


class Registry:
    """The members by worker id. Used by one event loop; every call is immediate."""

    def __init__(self, clock: Clock, times: LivenessTimes) -> None:
        self._clock = clock
        self._times = times
        self._members: dict[WorkerId, _Member] = {}
        self._superseded: dict[WorkerId, deque[Incarnation]] = {}
        self._seen: dict[WorkerId, tuple[Incarnation, WorkerState]] = {}
        """As of the last sweep."""

    # -- what workers say ---------------------------------------------------------------------------------------------

    def join(self, registration: WorkerRegistration, commands: Commands | None = None) -> Membership:
        """Take a worker in. A new incarnation replaces the old one at once; the same one continues on a new stream.

        ``commands`` is the queue of the stream that carries the registration.
        Raises StaleIncarnation if this incarnation was replaced before, InvalidRequest for an impossible registration.
        """
        _check(registration)
        worker_id, incarnation = registration.worker_id, registration.incarnation
        membership = Membership(worker_id, incarnation, commands if commands is not None else asyncio.Queue())
        if incarnation in self._superseded.get(worker_id, ()):
            raise membership.replaced()
        now = self._clock.now()
        member = self._members.get(worker_id)
        if member is not None and member.registration.incarnation == incarnation:
            if member.membership.commands is not membership.commands:
                member.membership.commands.put_nowait(None)
            member.registration = registration
            member.membership = membership
            member.heard_at, member.parted_at = now, None
            if member.order is not None:
                membership.commands.put_nowait(member.order)  # the stream that was to carry it broke
            return membership
        if member is not None:
            self._supersede(member)
        for other in [m for m in self._members.values() if m.registration.address == registration.address]:
            self._supersede(other)  # one address is one process: the other one cannot be there any more
        self._members[worker_id] = _Member(registration, membership, now)
        return membership

    def heartbeat(self, membership: Membership, load: WorkerLoad) -> bool:
        """Note a worker's load. False: the worker was forgotten and must register again.

        Raises StaleIncarnation when a newer incarnation has replaced it. What an older stream of the same incarnation
        says is ignored.
        """
        if membership.incarnation in self._superseded.get(membership.worker_id, ()):
            raise membership.replaced()
        member = self._members.get(membership.worker_id)
        if member is None:
            return False
        if member.membership is membership:
            member.load = load
            member.heard_at, member.parted_at = self._clock.now(), None
        return True

    def is_current(self, membership: Membership) -> bool:
        """It is the newest stream of a worker that is known: what it says counts."""
        member = self._members.get(membership.worker_id)
        return member is not None and member.membership is membership

    def part(self, membership: Membership) -> None:
        """The membership's stream ended, however it did. Suspect at once, unless it has been replaced already."""
        member = self._members.get(membership.worker_id)
        if member is not None and member.membership is membership and member.parted_at is None:
            member.parted_at = self._clock.now()

    def order(self, worker_id: WorkerId, command: WorkerCommand) -> None:
        """Tell a worker to drain or to flip. From now on nothing is placed on this incarnation.

        Raises InvalidRequest for an unknown or lost worker.
        """
        member = self._members.get(worker_id)
        if member is None or self._judge(member) is WorkerState.LOST:
            known = ", ".join(sorted(self._members)) or "none"
            raise InvalidRequest(f"no worker {worker_id!r} to {command.kind}; registered: {known}", param="worker_id")
        member.order = command
        member.membership.commands.put_nowait(command)

    # -- what others read ---------------------------------------------------------------------------------------------

    def workers(self) -> tuple[WorkerStatus, ...]:
        """All members with the router's judgement, by worker id."""
        now = self._clock.now()
        return tuple(
            WorkerStatus(
                registration=member.registration,
                load=member.load,
                state=self._judge(member),
                heartbeat_age_s=now - member.heard_at,
                next_role=member.next_role(),
            )
            for _, member in sorted(self._members.items())
        )

    def memberships(self) -> dict[WorkerId, Membership]:
        """The stream of each member."""
        return {worker_id: member.membership for worker_id, member in self._members.items()}

    def heard_at(self, worker_id: WorkerId) -> float:
        """When the worker reported its load last, on the router's clock."""
        return self._members[worker_id].heard_at

    def models(self) -> tuple[ModelRecord, ...]:
        """One record for each model name, from live registrations.

        While two formats of one model serve side by side (a rollout), the one with more ready workers speaks for it.
        Its context is the smallest that any of its workers can serve.
        """
        groups: dict[str, dict[str, list[WorkerStatus]]] = {}
        for worker in self.workers():
            if worker.state is not WorkerState.LOST:
                model = worker.registration.model
                groups.setdefault(model.name, {}).setdefault(model.format_hash, []).append(worker)
        return tuple(_speak_for(formats) for _, formats in sorted(groups.items()))

    def sweep(self) -> list[StateChange]:
        """Forget workers lost for long, and report every change of state since the last sweep."""
        now = self._clock.now()
        for worker_id, member in list(self._members.items()):
            # Whoever drained first has left as it should: nobody needs to see it.
            retention_s = 0.0 if member.is_draining() else self._times.retention_s
            if member.has_left() or now - member.silent_since() >= self._times.lost_after_s + retention_s:
                del self._members[worker_id]
        seen = {
            worker_id: (member.registration.incarnation, self._judge(member))
            for worker_id, member in self._members.items()
        }
        changes = list(_compare(self._seen, seen))
        self._seen = seen
        return changes

    # -- the judgement ------------------------------------------------------------------------------------------------

    def _judge(self, member: _Member) -> WorkerState:
        silence_s = self._clock.now() - member.silent_since()
        if silence_s >= self._times.lost_after_s or member.has_left():
            return WorkerState.LOST
        if member.parted_at is not None or silence_s >= self._times.suspect_after_s:
            return WorkerState.SUSPECT
        if member.order is not None and member.load.state is WorkerState.READY:
            return WorkerState.DRAINING
        return member.load.state

    def _supersede(self, member: _Member) -> None:
        worker_id, incarnation = member.registration.worker_id, member.registration.incarnation
        self._members.pop(worker_id, None)
        self._superseded.setdefault(worker_id, deque(maxlen=SUPERSEDED_MEMORY)).append(incarnation)
        member.membership.commands.put_nowait(member.membership.replaced())


def _check(registration: WorkerRegistration) -> None:
    """Registrations come from outside: refuse what would poison a placement."""
    problems = [
        what
        for is_bad, what in (
            (not registration.worker_id, "worker_id is empty"),
            (registration.incarnation == 0, "incarnation is zero"),
            (not registration.address, "address is empty"),
            (not registration.model.name, "model.name is empty"),
            (not registration.model.format_hash, "model.format_hash is empty"),
            (registration.model.block_size < 1, "model.block_size is below 1"),
            (registration.num_blocks < 1, "num_blocks is below 1"),
            (registration.max_sequences < 1, "max_sequences is below 1"),
            (registration.max_step_tokens < 1, "max_step_tokens is below 1"),
        )
        if is_bad
    ]
    if problems:
        raise InvalidRequest(f"registration of worker {registration.worker_id!r} refused: {'; '.join(problems)}")


def _all_free(num_blocks: int) -> BlockCounts:
    return BlockCounts(total=num_blocks, custody=0, in_use=0, leased=0, cached=0, free=num_blocks)


def _speak_for(formats: dict[str, list[WorkerStatus]]) -> ModelRecord:
    def strength(workers: list[WorkerStatus]) -> tuple[int, str]:
        return sum(w.state is WorkerState.READY for w in workers), workers[0].registration.model.format_hash

    workers = max(formats.values(), key=strength)
    return min((w.registration.model for w in workers), key=lambda model: (model.max_context, model.block_size))


def _compare(
    before: dict[WorkerId, tuple[Incarnation, WorkerState]], after: dict[WorkerId, tuple[Incarnation, WorkerState]]
) -> Iterator[StateChange]:
    for worker_id in sorted(before.keys() | after.keys()):
        old, new = before.get(worker_id), after.get(worker_id)
        if old == new:
            continue
        if old is not None and (new is None or new[0] != old[0]):
            yield StateChange(worker_id=worker_id, incarnation=old[0], before=old[1], after=None)
            old = None
        if new is not None:
            yield StateChange(
                worker_id=worker_id, incarnation=new[0], before=old[1] if old is not None else None, after=new[1]
            )
