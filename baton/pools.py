"""``baton drain``, ``baton flip`` and ``baton scale``: change a running cluster, and watch how far it is."""

import asyncio
import time
from collections.abc import Callable, Sequence

from baton.status import ask_router
from core.credentials import Credentials
from core.errors import ConfigError, InvalidRequest, ServingError, WorkerLost
from core.types import ClusterStatus, PoolSize, Role, WorkerState, WorkerStatus
from rpc.clients import RouterClient

POLL_S = 0.25
SAY_AGAIN_S = 5.0

Progress = Callable[[ClusterStatus], tuple[bool, str]]
"""Whether it is done, and how far it is in one line."""


async def drain(
    address: str, worker_id: str, *, reason: str, wait_s: float, credentials: Credentials | None = None
) -> int:
    """Returns once the worker is told, or with ``wait_s`` once it has left. Raises ConfigError and InvalidRequest."""
    before = _worker(await ask_router(address, credentials), worker_id)
    async with RouterClient(address, credentials) as router:
        await router.drain(worker_id, reason)
    print(f"{worker_id} takes no new work{_alone(await ask_router(address, credentials), before)}", flush=True)

    def progress(status: ClusterStatus) -> tuple[bool, str]:
        worker = _find(status, worker_id)
        if worker is None or not _is_same(worker, before):
            return True, f"{worker_id} has left"
        return False, describe_drain(worker)

    return await follow(address, progress, wait_s, credentials)


async def flip(
    address: str, worker_id: str, *, reason: str, wait_s: float, credentials: Credentials | None = None
) -> int:
    """The same for a worker that takes the other role; then it serves again."""
    before = _worker(await ask_router(address, credentials), worker_id)
    async with RouterClient(address, credentials) as router:
        sizes = await router.flip(worker_id, reason)
    model = before.registration.model.name
    print(f"{worker_id} will change its role; {model}: {_sizes(sizes, model)}", flush=True)

    def progress(status: ClusterStatus) -> tuple[bool, str]:
        worker = _find(status, worker_id)
        if worker is None:
            return False, f"{worker_id} is between its roles"
        if _is_same(worker, before):
            return False, describe_drain(worker)
        role = worker.registration.role
        return worker.state is WorkerState.READY, f"{worker_id} is a {role} worker now, {worker.state}"

    return await follow(address, progress, wait_s, credentials)


async def scale(
    address: str, model: str, wanted: Sequence[str], *, wait_s: float, credentials: Credentials | None = None
) -> int:
    """``wanted``: such as ``prefill=2``. With ``wait_s``: until every pool of the model has its size."""
    pools = tuple(_parse(model, text) for text in wanted)
    await ask_router(address, credentials)
    async with RouterClient(address, credentials) as router:
        sizes = await router.scale(pools)
    print(f"{model}: {_sizes(sizes, model)}", flush=True)

    def progress(status: ClusterStatus) -> tuple[bool, str]:
        here = [pool for pool in status.pools if pool.model == model]
        leaving = [
            w.registration.worker_id
            for w in status.workers
            if w.registration.model.name == model and w.state is WorkerState.DRAINING
        ]
        line = ", ".join(f"{pool.role} {pool.ready} of {pool.desired} ready" for pool in here)
        line += f"; {' and '.join(leaving)} draining" if leaving else ""
        line += "".join(f"; {pool.problem}" for pool in here if pool.problem)
        return not leaving and all(pool.ready == pool.desired and not pool.problem for pool in here), line

    return await follow(address, progress, wait_s, credentials)


def describe_drain(worker: WorkerStatus) -> str:
    """What a worker that drains still waits for, and for how long."""
    load, worker_id = worker.load, worker.registration.worker_id
    kinds = (
        (load.num_running, "running"),
        (load.num_waiting, "waiting"),
        (load.num_leases, "held for decode workers"),
        (load.num_transfers, "in transfer"),
    )
    left = ", ".join(f"{number} {kind}" for number, kind in kinds if number)
    if worker.state is not WorkerState.DRAINING or load.drain_left_s is None:
        return f"{worker_id} is {worker.state}{': ' + left if left else ''}"
    if not left:
        return f"{worker_id} has finished"
    return f"{worker_id} finishes: {left}; hands back what is left in {load.drain_left_s:.0f} s"


async def follow(address: str, progress: Progress, wait_s: float, credentials: Credentials | None) -> int:
    """Print what changes until it is done. Raises ServingError when it is not in time."""
    if not wait_s:
        return 0
    until, said, said_at = time.monotonic() + wait_s, "", 0.0
    while True:
        try:
            is_done, line = progress(await ask_router(address, credentials))
        except (ConfigError, WorkerLost):
            is_done, line = False, f"the router at {address} does not answer"
        now = time.monotonic()
        if is_done or line.partition(";")[0] != said.partition(";")[0] or now >= said_at + SAY_AGAIN_S:
            print(line, flush=True)
            said, said_at = line, now
        if is_done:
            return 0
        if now >= until:
            raise ServingError(f"not done after {wait_s:g} s: {line}; it goes on, `baton status` shows it")
        await asyncio.sleep(POLL_S)


def _parse(model: str, text: str) -> PoolSize:
    name, _, number = text.partition("=")
    try:
        return PoolSize(model=model, role=Role(name), replicas=int(number))
    except ValueError:
        roles = ", ".join(f"{role}=N" for role in Role)
        raise ConfigError(f"{text!r} is not a size: say one or more of {roles}") from None


def _sizes(sizes: Sequence[PoolSize], model: str) -> str:
    return ", ".join(f"{size.role}={size.replicas}" for size in sizes if size.model == model)


def _find(status: ClusterStatus, worker_id: str) -> WorkerStatus | None:
    return next((w for w in status.workers if w.registration.worker_id == worker_id), None)


def _worker(status: ClusterStatus, worker_id: str) -> WorkerStatus:
    worker = _find(status, worker_id)
    if worker is None:
        known = ", ".join(w.registration.worker_id for w in status.workers) or "none"
        raise InvalidRequest(f"no worker {worker_id!r}; registered: {known}")
    return worker


def _is_same(worker: WorkerStatus, other: WorkerStatus) -> bool:
    return worker.registration.incarnation == other.registration.incarnation


def _alone(status: ClusterStatus, worker: WorkerStatus) -> str:
    """A word about what its going means, if nobody else does its work."""
    mine = worker.registration
    others = [
        w
        for w in status.workers
        if w.state is WorkerState.READY
        and (w.registration.model.name, w.registration.role) == (mine.model.name, mine.role)
    ]
    if others:
        return ""
    return f"; no other {mine.role} worker of {mine.model.name} is ready: new requests wait for one"
