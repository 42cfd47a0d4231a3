"""What operators see and say: status, drain, flip, desired sizes, records of finished requests."""

from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice

from core.clock import Clock
from core.config import ModelConfigSection
from core.errors import InvalidRequest
from core.ids import Incarnation, WorkerId
from core.types import (
    ClusterStatus,
    CommandKind,
    PoolSize,
    PoolStatus,
    RequestRecord,
    RequestRecords,
    Role,
    ScalingStatus,
    WorkerCommand,
    WorkerState,
    WorkerStatus,
)
from router.gateways import GatewayBook
from router.pools import PoolBook
from router.registry import Registry
from router.rollouts import RolloutBook

DEFAULT_LIMIT = 100
OTHER_ROLE = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}


class RecordRing:
    """The latest finished requests, pushed by gateways. Bounded; the oldest fall out."""

    def __init__(self, clock: Clock, max_records: int) -> None:
        self._clock = clock
        self._max_records = max_records
        self._records: deque[tuple[float, RequestRecord]] = deque(maxlen=max_records)
        """With the moment of their end."""
        self.num_pushed = 0
        """All that ever came."""

    def __len__(self) -> int:
        return len(self._records)

    def push(self, records: Iterable[RequestRecord]) -> None:
        now = self._clock.now()
        new = [(now - record.age_s, record) for record in records]
        self._records.extend(new)
        self.num_pushed += len(new)

    def since(self, number: int, limit: int) -> tuple[RequestRecord, ...]:
        """What came behind the first ``number``, oldest first: the newest ``limit`` of it."""
        now = self._clock.now()
        num_new = min(self.num_pushed - number, len(self._records), limit)
        new = [replace(record, age_s=now - at) for at, record in islice(reversed(self._records), num_new)]
        return tuple(reversed(new))

    def find(self, request_id: str = "", limit: int = 0) -> RequestRecords:
        """Newest first. An empty ``request_id`` finds all, any other the request and those of a call's further prompts,
        which bear numbers behind it. ``limit`` 0 is the default limit."""
        further, now = f"{request_id}-", self._clock.now()
        found = (
            replace(record, age_s=now - ended_at)
            for ended_at, record in reversed(self._records)
            if not request_id or record.request_id == request_id or record.request_id.startswith(further)
        )
        return RequestRecords(
            records=tuple(islice(found, limit or DEFAULT_LIMIT)),
            num_kept=len(self._records),
            max_kept=self._max_records,
            oldest_age_s=now - self._records[0][0] if self._records else 0.0,
        )


class Admin:
    """Reads and commands over the cell's books."""

    def __init__(
        self,
        *,
        registry: Registry,
        gateways: GatewayBook,
        pools: PoolBook,
        rollouts: RolloutBook,
        models: Iterable[ModelConfigSection],
        incarnation: Incarnation,
        pid: int,
    ) -> None:
        self._registry = registry
        self._gateways = gateways
        self._pools = pools
        self._rollouts = rollouts
        self._models = {model.name: model for model in models}
        self._incarnation = incarnation
        self._pid = pid

    def status(
        self, *, http_address: str, num_placements: int, num_waiting: int, scaling: tuple[ScalingStatus, ...]
    ) -> ClusterStatus:
        """The cell as an operator sees it."""
        workers = self._registry.workers()
        return ClusterStatus(
            router_incarnation=self._incarnation,
            router_pid=self._pid,
            router_http_address=http_address,
            pools=self._pool_statuses(workers),
            workers=workers,
            gateways=self._gateways.statuses(),
            models=self._registry.models(),
            num_placements=num_placements,
            num_waiting=num_waiting,
            scaling=scaling,
            rollouts=self._rollouts.rollouts(),
        )

    def drain(self, worker_id: str, reason: str) -> None:
        """Place nothing on this worker any more and tell it to finish. Raises InvalidRequest for an unknown one."""
        command = WorkerCommand(kind=CommandKind.DRAIN, reason=reason or "asked by an operator")
        self._registry.order(WorkerId(worker_id), command)

    def flip(self, worker_id: str, reason: str) -> tuple[PoolSize, ...]:
        """Drain a worker that then serves in the other role, and let the sizes of both pools follow. Returns all sizes.

        Again for a worker that is on its way changes nothing. Raises InvalidRequest where it cannot be: an unknown
        worker, a unified one, pools of another shape, or the last worker of a role.
        """
        worker = next((w for w in self._registry.workers() if w.registration.worker_id == worker_id), None)
        if worker is None or worker.state in (WorkerState.SUSPECT, WorkerState.LOST):
            known = ", ".join(w.registration.worker_id for w in self._registry.workers()) or "none"
            raise InvalidRequest(f"no worker {worker_id!r} to flip; registered: {known}", param="worker_id")
        model, role = worker.registration.model.name, worker.registration.role
        other = OTHER_ROLE.get(role)
        if other is None or not (self._pools.has(model, role) and self._pools.has(model, other)):
            raise InvalidRequest(
                f"{worker_id} is a {role} worker of {model!r}, which has no pool to flip it to: only workers of models "
                "with a prefill and a decode pool can be flipped",
                param="worker_id",
            )
        if worker.state is WorkerState.DRAINING and worker.next_role is other:
            return self._pools.sizes()
        self._check_shape(worker_id, model, role, other)
        left = self._pools.desired(model, role) - 1
        if left < 1:
            raise InvalidRequest(
                f"{worker_id} is the last {role} worker of {model!r}; first `baton scale {model} {role}=2`",
                param="worker_id",
            )
        if not self._has_other(worker):
            raise InvalidRequest(
                f"{worker_id} is the only {role} worker of {model!r} that is ready now: wait until another one is",
                param="worker_id",
            )
        command = WorkerCommand(kind=CommandKind.FLIP, reason=reason or "asked by an operator", role=other)
        self._registry.order(WorkerId(worker_id), command)
        return self._pools.scale(
            (
                PoolSize(model=model, role=role, replicas=left),
                PoolSize(model=model, role=other, replicas=self._pools.desired(model, other) + 1),
            )
        )

    def _has_other(self, worker: WorkerStatus) -> bool:
        """Somebody else does the work of its role."""
        mine = worker.registration
        return any(
            w.state is WorkerState.READY
            and w.registration.worker_id != mine.worker_id
            and (w.registration.model.name, w.registration.role) == (mine.model.name, mine.role)
            for w in self._registry.workers()
        )

    def _check_shape(self, worker_id: str, model: str, role: Role, other: Role) -> None:
        """A process keeps what it was started with."""
        pools = self._models[model].pools
        for name in ("resources", "num_threads"):
            if getattr(pools[role], name) != getattr(pools[other], name):
                raise InvalidRequest(
                    f"{worker_id} cannot be flipped: {name} of the {role} and the {other} pool of {model!r} differ, "
                    "and a running process keeps its own; change the sizes with `baton scale`",
                    param="worker_id",
                )

    def _pool_statuses(self, workers: tuple[WorkerStatus, ...]) -> tuple[PoolStatus, ...]:
        """The configured pools in their order, then pools that only workers know."""
        keys: dict[tuple[str, Role], None] = dict.fromkeys((pool.model, pool.role) for pool in self._pools.sizes())
        keys |= dict.fromkeys((w.registration.model.name, w.registration.role) for w in workers)
        return tuple(
            PoolStatus(
                model=model,
                role=role,
                desired=self._pools.desired(model, role),
                ready=sum(
                    w.state is WorkerState.READY and w.registration.model.name == model and w.registration.role is role
                    for w in workers
                ),
                problem=self._pools.problem(model, role),
            )
            for model, role in keys
        )
