"""What operators see and say: status, drain, desired sizes, records of finished requests."""

from collections import deque
from collections.abc import Iterable

from core.ids import Incarnation, WorkerId
from core.types import (
    ClusterStatus,
    CommandKind,
    PoolStatus,
    RequestRecord,
    Role,
    WorkerCommand,
    WorkerState,
    WorkerStatus,
)
from router.gateways import GatewayBook
from router.pools import PoolBook
from router.registry import Registry

DEFAULT_LIMIT = 100


class RecordRing:
    """The latest finished requests, pushed by gateways. Bounded; the oldest fall out."""

    def __init__(self, max_records: int) -> None:
        self._records: deque[RequestRecord] = deque(maxlen=max_records)

    def __len__(self) -> int:
        return len(self._records)

    def push(self, records: Iterable[RequestRecord]) -> None:
        self._records.extend(records)

    def find(self, request_id: str = "", limit: int = 0) -> tuple[RequestRecord, ...]:
        """Newest first. An empty ``request_id`` finds all; ``limit`` 0 is the default limit."""
        found = [r for r in reversed(self._records) if not request_id or r.request_id == request_id]
        return tuple(found[: limit or DEFAULT_LIMIT])


class Admin:
    """Reads and commands over the cell's books."""

    def __init__(
        self,
        *,
        registry: Registry,
        gateways: GatewayBook,
        pools: PoolBook,
        incarnation: Incarnation,
        pid: int,
    ) -> None:
        self._registry = registry
        self._gateways = gateways
        self._pools = pools
        self._incarnation = incarnation
        self._pid = pid

    def status(self, *, http_address: str, num_placements: int, num_waiting: int) -> ClusterStatus:
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
        )

    def drain(self, worker_id: str, reason: str) -> None:
        """Place nothing on this worker any more and tell it to finish. Raises InvalidRequest for an unknown one."""
        membership = self._registry.ask_drain(WorkerId(worker_id))
        membership.commands.put_nowait(WorkerCommand(kind=CommandKind.DRAIN, reason=reason or "asked by an operator"))

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
            )
            for model, role in keys
        )
