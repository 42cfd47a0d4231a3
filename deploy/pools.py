"""Keeps pools at their desired sizes, live: what the router says is wanted, this launcher makes true.

The launcher starts workers and ends those that serve nobody; a worker that serves is drained through the router, and
leaves by itself. A worker that left unasked (an operator drained it, or sent SIGTERM) is replaced under another name,
as soon as it begins to drain. The sizes are remembered here with their age, for a router that forgot them.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, replace

from pydantic import ValidationError

from core.clock import Clock, MonotonicClock
from core.config import ClusterConfig, ModelConfigSection
from core.errors import ServingError
from core.tasks import TaskScope
from core.types import LauncherReport, PoolProblem, PoolSize, Role, Rollout, WorkerState, WorkerStatus
from deploy.launcher import ComponentEvent, ComponentSpec, ComponentState, Launcher
from deploy.plan import Member, Plan, Pool, Standing, free_number, plan
from rpc.clients import RouterClient

log = logging.getLogger(__name__)

RECHECK_S = 5.0
"""Every change wakes us; this is for what was missed."""
ROUTER_RETRY_S = 0.5
FIRST_RETRY_S, MAX_RETRY_S = 10.0, 300.0
"""Until a worker that could not be started is tried again."""
LEAVE_MARGIN_S = 15.0
"""Beyond ``worker.drain_s``: who has not left by then hangs, and is stopped."""

MakeSpec = Callable[[ModelConfigSection, Role, int], ComponentSpec]
"""(the model's section, role, number of the worker)."""


@dataclass(slots=True, kw_only=True)
class _Worker:
    """A worker that this launcher runs."""

    name: str
    started_as: Pool
    pool: Pool | None
    age: int
    revision: str
    state: ComponentState = ComponentState.STARTED
    pid: int = 0
    message: str = ""
    retry_at: float = 0.0
    """FAILED: when its place is tried again."""
    leaving_since: float | None = None


class PoolKeeper:
    """All workers of one launcher. ``note`` every event of the launcher, and ``run``."""

    def __init__(
        self,
        config: ClusterConfig,
        launcher: Launcher,
        make_spec: MakeSpec,
        *,
        say: Callable[[str], None] = lambda text: None,
        clock: Clock | None = None,
    ) -> None:
        self._config = config
        self._launcher = launcher
        self._make_spec = make_spec
        self._say = say
        self._clock = clock or MonotonicClock()
        self._workers: dict[str, _Worker] = {}
        self._num_started = 0
        self._desired: dict[Pool, tuple[int, float | None]] = {
            (model.name, role): (pool.replicas, None) for model in config.models for role, pool in model.pools.items()
        }
        """(replicas, when somebody said so)."""
        self._sections = {model.name: model for model in config.models}
        """Of new workers."""
        self._rollouts: dict[str, tuple[Rollout, float]] = {}
        """(the last one, when somebody asked for it)."""
        self._num_failures: dict[Pool, int] = {}
        self._wake = asyncio.Event()
        self._is_running = False

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._workers)

    async def start(self) -> None:
        """The workers of the configuration."""
        for pool, (replicas, _) in self._desired.items():
            for _ in range(replicas):
                await self._start(pool, ())

    async def run(self, router: RouterClient) -> None:
        """Follow the router until cancelled."""
        scope = TaskScope("pools")
        self._is_running = True
        scope.spawn(self._watch(router), name="watch")
        try:
            while True:
                try:
                    async with asyncio.timeout(RECHECK_S):
                        await self._wake.wait()
                except TimeoutError:
                    pass
                self._wake.clear()
                try:
                    await self.reconcile(router)
                except ServingError as error:
                    log.info("pools are not kept: %s", error.message)
                    await asyncio.sleep(ROUTER_RETRY_S)
                    self._wake.set()
        finally:
            self._is_running = False
            await scope.close()

    async def _watch(self, router: RouterClient) -> None:
        while True:
            try:
                async with aclosing(router.watch_pools()) as changes:
                    async for _ in changes:
                        self._wake.set()
            except ServingError:
                pass  # it is restarting
            await asyncio.sleep(ROUTER_RETRY_S)

    def note(self, event: ComponentEvent) -> None:
        """One event of the launcher, whoever reads them."""
        worker = self._workers.get(event.component)
        if worker is None:
            return
        worker.state, worker.message = event.state, event.message
        match event.state:
            case ComponentState.STARTED:
                worker.pid, worker.pool, worker.leaving_since = event.pid, worker.started_as, None
            case ComponentState.READY:
                self._num_failures.pop(worker.started_as, None)
            case ComponentState.FAILED:
                failures = self._num_failures[worker.started_as] = self._num_failures.get(worker.started_as, 0) + 1
                delay_s = min(MAX_RETRY_S, FIRST_RETRY_S * 2 ** min(failures - 1, 10))
                worker.retry_at = self._clock.now() + delay_s
                if self._is_running:
                    self._say(f"{worker.name} cannot run: {event.message}; tried again in {delay_s:g} s")
            case _:
                pass
        self._wake.set()

    # -- one round ----------------------------------------------------------------------------------------------------

    async def reconcile(self, router: RouterClient) -> None:
        """Ask what is wanted and who is there, and take the steps that bring them together. Raises a ServingError of
        the router's, with the rest to be done next time."""
        await self._forget_ended()
        report = LauncherReport(pools=self._sizes(), problems=self._problems(), rollouts=self._known_rollouts())
        self._take_sizes(await router.report_pools(report))
        status = await router.status()
        self._take_rollouts(status.rollouts)
        desired = {pool: replicas for pool, (replicas, _) in self._desired.items()}
        if any(desired.get((pool.model, pool.role), pool.desired) != pool.desired for pool in status.pools):
            self._wake.set()  # changed in between, with what it means for workers: only one moment's view is acted on
            return
        statuses: dict[str, WorkerStatus] = {w.registration.worker_id: w for w in status.workers}
        for worker in self._workers.values():
            self._look_at(worker, statuses.get(worker.name))
        await self._stop_hanging()
        members = [self._member(worker, statuses.get(worker.name)) for worker in self._workers.values()]
        leaving = {worker.started_as[0] for worker in self._workers.values() if worker.pool is None}
        targets = {model: section.revision for model, section in self._sections.items()}
        steps = plan(desired, members, targets=targets, leaving=leaving)
        for name in steps.cancel:
            self._say(f"{name} is not needed any more")
            await self._stop(name)
        for name in steps.drain:
            why = self._why_it_goes(name)
            self._say(f"{name} drains: {why}")
            await router.drain(name, why)
        for pool in steps.start:
            name = await self._start(pool, statuses)
            self._say(f"starting {name}")
        if steps != Plan():
            self._wake.set()  # what has changed by them is told

    def _sizes(self) -> tuple[PoolSize, ...]:
        now = self._clock.now()
        return tuple(
            PoolSize(model=model, role=role, replicas=replicas, age_s=None if said_at is None else now - said_at)
            for (model, role), (replicas, said_at) in self._desired.items()
        )

    def _take_sizes(self, sizes: Iterable[PoolSize]) -> None:
        now = self._clock.now()
        for size in sizes:
            pool = (size.model, size.role)
            if pool not in self._desired:
                continue
            if self._desired[pool][0] != size.replicas:  # somebody looked at it: no reason to wait
                self._num_failures.pop(pool, None)
                for worker in self._workers.values():
                    worker.retry_at = now if worker.started_as == pool else worker.retry_at
            self._desired[pool] = (size.replicas, None if size.age_s is None else now - size.age_s)

    def _known_rollouts(self) -> tuple[Rollout, ...]:
        now = self._clock.now()
        return tuple(replace(rollout, age_s=now - said_at) for rollout, said_at in self._rollouts.values())

    def _take_rollouts(self, rollouts: Iterable[Rollout]) -> None:
        for rollout in rollouts:
            section = self._sections.get(rollout.model)
            if section is None or section.revision == rollout.revision:
                continue
            try:
                wanted = ModelConfigSection.model_validate_json(rollout.section)
            except ValidationError as error:
                log.warning("rollout not understood", extra={"model": rollout.model, "reason": str(error)})
                continue
            self._say(f"{rollout.model}: rolling out revision {rollout.revision}")
            self._sections[rollout.model] = wanted
            self._rollouts[rollout.model] = (rollout, self._clock.now() - rollout.age_s)

    def _why_it_goes(self, name: str) -> str:
        worker = self._workers[name]
        target = self._sections[worker.started_as[0]].revision
        if worker.revision == target:
            return "its pool is larger than asked for"
        return f"revision {target} takes its place"

    def _problems(self) -> tuple[PoolProblem, ...]:
        """Of each pool the first one."""
        states = (ComponentState.WAITING, ComponentState.FAILED)
        found: dict[Pool, PoolProblem] = {}
        for worker in self._workers.values():
            if worker.state in states and worker.message:
                model, role = worker.started_as
                is_named = worker.message.startswith(worker.name)
                message = worker.message if is_named else f"{worker.name}: {worker.message}"
                found.setdefault(worker.started_as, PoolProblem(model=model, role=role, message=message))
        return tuple(found.values())

    def _look_at(self, worker: _Worker, status: WorkerStatus | None) -> None:
        """Where the router says that it is, if it means this process."""
        if status is None or status.registration.pid != worker.pid or status.state is WorkerState.LOST:
            return
        role = status.final_role
        worker.pool = None if role is None else (status.registration.model.name, role)
        if status.state is not WorkerState.DRAINING:
            worker.leaving_since = None
        elif worker.leaving_since is None:
            worker.leaving_since = self._clock.now()

    def _member(self, worker: _Worker, status: WorkerStatus | None) -> Member:
        if status is not None and status.registration.pid != worker.pid:
            status = None  # the process before this one
        member = Member(
            name=worker.name,
            pool=worker.pool,
            age=worker.age,
            standing=_standing(worker, status),
            revision=worker.revision,
            is_ready=status is not None and status.state is WorkerState.READY,
        )
        if status is None:
            return member
        load = status.load
        work = load.num_running + load.num_waiting + load.num_leases + load.num_transfers
        return replace(member, work=work, cached_blocks=load.blocks.cached)

    async def _forget_ended(self) -> None:
        """Those that have left, and those that failed so long ago that their place is tried again."""
        now = self._clock.now()
        for worker in list(self._workers.values()):
            has_left = worker.state is ComponentState.STOPPED
            if has_left or (worker.state is ComponentState.FAILED and now >= worker.retry_at):
                await self._stop(worker.name)
                if has_left:
                    self._say(f"{worker.name} has left")

    async def _stop_hanging(self) -> None:
        limit_s = self._config.worker.drain_s + LEAVE_MARGIN_S
        for worker in list(self._workers.values()):
            if worker.leaving_since is not None and self._clock.now() >= worker.leaving_since + limit_s:
                self._say(f"{worker.name} does not end its drain and is stopped")
                await self._stop(worker.name)

    async def _stop(self, name: str) -> None:
        await self._launcher.stop(name)
        self._workers.pop(name, None)

    async def _start(self, pool: Pool, known: Iterable[str]) -> str:
        """A worker under a name that nobody has: not here, and not at the router."""
        model, role = pool
        section = self._sections[model]
        prefix = self._make_spec(section, role, 0).name.rpartition("-")[0]
        spec = self._make_spec(section, role, free_number((*self._workers, *known), prefix))
        self._num_started += 1
        self._workers[spec.name] = _Worker(
            name=spec.name, started_as=pool, pool=pool, age=self._num_started, revision=section.revision
        )
        try:
            await self._launcher.start(spec)
        except BaseException:
            del self._workers[spec.name]
            raise
        return spec.name


def _standing(worker: _Worker, status: WorkerStatus | None) -> Standing:
    """Either side may hear later than the other that it serves."""
    is_running = worker.state is ComponentState.READY
    if status is None:
        return Standing.UNKNOWN if is_running else Standing.IDLE
    if status.state is WorkerState.LOST or (status.state is WorkerState.SUSPECT and not is_running):
        return Standing.IDLE
    return Standing.SUSPECT if status.state is WorkerState.SUSPECT else Standing.READY
