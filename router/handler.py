"""One cell behind the gRPC handler: the books, the waiting room, and a sweep that keeps time."""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import partial

from core.clock import Clock, MonotonicClock
from core.config import ClusterConfig
from core.errors import OutOfBlocks, QueueFull, ServingError, WorkerDraining
from core.ids import format_incarnation, new_incarnation
from core.priority import PriorityClass
from core.tasks import TaskScope
from core.telemetry import Telemetry
from core.tickets import TicketOffice
from core.types import (
    ClusterNews,
    ClusterStatus,
    ClusterView,
    CommandKind,
    CostSamples,
    GatewayReport,
    LauncherReport,
    Placement,
    PlacementEnd,
    PlaceRequest,
    PoolSize,
    RequestRecords,
    Rollout,
    WorkerCommand,
    WorkerLoad,
    WorkerRegistration,
)
from router.absences import Absences, Pool
from router.admin import Admin, RecordRing
from router.break_even import Weights
from router.cost_book import CostBook
from router.gateways import GatewayBook
from router.introductions import Introductions
from router.load import LoadBook, Reservation
from router.metrics import RouterMetrics
from router.news import News
from router.placer import Placer
from router.policy import FALLBACKS, PolicySettings
from router.pools import PoolBook
from router.prefix_index import PrefixIndex
from router.registry import Commands, LivenessTimes, Membership, Registry
from router.rollouts import RolloutBook
from router.room import RoomLimits
from router.scaling import Autoscaler
from router.waiting import GENERATED_WEIGHT, Refusal, WaitingRoom

log = logging.getLogger(__name__)

_REFUSED = frozenset({QueueFull.slug, OutOfBlocks.slug})
"""A worker had no room: nothing was done for the request."""
SWEEP_S = 0.1
"""How often silence, waiting times and expiries are looked at; changes that arrive act at once."""


class RouterHandler:
    """One cell: registry, load, pools, waiting room, records. Implements ``rpc.server.RouterHandler``.

    Everything here runs on one event loop and is kept in memory only: a restarted router is empty, and whole again when
    its workers and gateways have re-joined.
    """

    def __init__(self, config: ClusterConfig, telemetry: Telemetry, clock: Clock | None = None) -> None:
        clock = clock or MonotonicClock()
        settings = config.router
        self.incarnation = new_incarnation()
        self.http_address = ""
        self._clock = clock
        self._registry = Registry(clock, LivenessTimes.of(settings))
        office = TicketOffice(clock) if config.security.is_on else None
        self._introductions = Introductions(
            self._registry, is_local=settings.mode == "local", clock=clock, office=office
        )
        self._gateways = GatewayBook(clock, timeout_s=settings.heartbeat_timeout_s)
        self._load = LoadBook(clock, projected_tokens=config.worker.projected_tokens)
        self.prefixes = PrefixIndex(clock)
        self._costs = CostBook()
        self._pools = PoolBook(clock, config.models)
        self._rollouts = RolloutBook(clock, config.models)
        self._records = RecordRing(clock, settings.max_records)
        self._placer = Placer(
            registry=self._registry,
            load=self._load,
            prefixes=self.prefixes,
            pools=self._pools,
            costs=self._costs,
            absences=Absences(clock, after_s=settings.fallback_after_s),
            settings=policy_settings(config),
            room_limits=room_limits(config),
            office=office,
        )
        self._room = WaitingRoom(
            clock,
            place_now=self._placer.place_now,
            release=self._take_back,
            placement_wait_s=settings.placement_wait_s,
            forgive_s=settings.heartbeat_timeout_s,
            max_waiting=settings.max_waiting,
            max_wait_s=settings.max_wait_s,
            projected_tokens=config.worker.projected_tokens,
            on_refusal=self._note_refusal,
        )
        self._admin = Admin(
            registry=self._registry,
            gateways=self._gateways,
            pools=self._pools,
            rollouts=self._rollouts,
            models=config.models,
            incarnation=self.incarnation,
            pid=os.getpid(),
        )
        self._news = News(clock, self._records, self._status)
        self._absent: frozenset[Pool] = frozenset()
        self._telemetry = telemetry
        self._metrics = RouterMetrics(telemetry.registry, [(pool.model, pool.role) for pool in self._pools.sizes()])
        self._autoscaler = Autoscaler(
            config.models,
            clock=clock,
            pools=self._pools,
            metrics=self._metrics,
            scale=partial(self._rescale, by="by the autoscaler"),
            flip=lambda worker_id: self._reflip(worker_id, "the autoscaler"),
        )
        self._tasks = TaskScope("router")
        self._time = TaskScope("router-time", on_failure=lambda error: self.on_broken())
        self.on_broken: Callable[[], None] = lambda: None
        """Called when timekeeping has failed: nothing would expire any more, so the process should end."""

    # -- gateways -----------------------------------------------------------------------------------------------------

    async def place(self, request: PlaceRequest) -> Placement:
        """See :class:`router.waiting.WaitingRoom`. Raises ModelNotFound, ContextTooLong, QueueFull or NoWorker."""
        for end in request.ended:
            await self.end_placement(end)
        since = self._clock.now()
        span = self._telemetry.begin("route", parent=request.traceparent, kind="server", attempt=request.attempt)
        try:
            with span, self._autoscaler.placing(request) as placed:
                placement = await self._room.place(request)
                placed(placement.prediction.num_cached_tokens)
                span.set(
                    mode=placement.mode,
                    reason=placement.reason,
                    prefill=placement.prefill.worker_id if placement.prefill is not None else "",
                    decode=placement.decode.worker_id,
                    wait_s=placement.queue_s,
                    runner_up=placement.runner_up,
                    cached_tokens=placement.prediction.num_cached_tokens,
                    predicted_ttft_s=placement.prediction.ttft_s,
                    cost_s=placement.prediction.cost_s,
                )
        except ServingError as error:
            model = request.model if request.model in self._placer.model_names() else ""
            self._metrics.refusals.labels(model, error.slug).inc()
            log.info(
                "not placed",
                extra={"request": request.request_id, "model": request.model, "slug": error.slug, "why": error.message},
            )
            raise
        finally:
            self._metrics.wait_s.observe(self._clock.now() - since)
        self._metrics.placements.labels(request.model, placement.mode, placement.reason).inc()
        if placement.reason in FALLBACKS:
            self._metrics.fallbacks.labels(request.model, placement.reason).inc()
        priority = PriorityClass.of(request.priority)
        self._metrics.queue_wait_s.labels(request.model, priority).observe(placement.queue_s)
        log.info(
            "placed",
            extra={
                "request": request.request_id,
                "attempt": request.attempt,
                "mode": placement.mode,
                "prefill": placement.prefill.worker_id if placement.prefill is not None else "",
                "decode": placement.decode.worker_id,
                "reason": placement.reason,
                "queue_s": round(placement.queue_s, 6),
            },
        )
        return placement

    def _take_back(self, placement: Placement) -> None:
        reservation = self._load.release(placement.placement_id)
        if reservation is not None:
            self._room.correct(reservation.account, -_charge(reservation))

    def _note_refusal(self, request: PlaceRequest, refusal: Refusal) -> None:
        priority = PriorityClass.of(request.priority)
        self._metrics.queue_refusals.labels(request.model, priority, refusal).inc()
        self._news.shed(request, refusal)

    async def end_placement(self, end: PlacementEnd) -> None:
        if not end.placement_id:
            for placement_id in self._load.of_attempt(end.request_id, end.attempt):
                await self.end_placement(replace(end, placement_id=placement_id))
            return
        was_refused = end.outcome in _REFUSED
        reservation = self._load.release(end.placement_id, was_refused=was_refused)
        if reservation is not None:
            self._metrics.ended.labels(end.outcome).inc()
            self._room.correct(reservation.account, _correction(reservation, end, was_refused=was_refused))
            self._room.wake_for_room()
        if end.blamed_worker is not None and end.outcome != WorkerDraining.slug:  # it leaves, and did nothing wrong
            log.warning(
                "worker blamed",
                extra={"worker": end.blamed_worker, "request": end.request_id, "outcome": end.outcome},
            )

    async def report_gateway(self, report: GatewayReport) -> ClusterView:
        """A gateway's heartbeat. A new incarnation releases what the old one had placed."""
        is_new = report.gateway_id not in self._gateways
        replaced = self._gateways.report(report)
        if replaced is not None:
            self._load.release_gateway(*replaced)
        if replaced is not None or is_new:
            self._news.gateway(report.gateway_id, is_lost=False)
        self._records.push(report.records)
        self._news.end(report)
        return self._placer.view()

    # -- workers ------------------------------------------------------------------------------------------------------

    async def join(
        self, registration: WorkerRegistration, messages: AsyncIterator[WorkerRegistration | WorkerLoad]
    ) -> AsyncGenerator[WorkerCommand, None]:
        """One worker's stream, from its registration until either side ends it. Raises StaleIncarnation."""
        commands: Commands = asyncio.Queue()
        stream = _WorkerStream(registration, self._join(registration, commands))
        reader = self._tasks.spawn(self._read(stream, messages, commands), name=f"worker-{registration.worker_id}")
        try:
            yield self._introductions.begin(stream.membership)
            while (command := await commands.get()) is not None:
                if isinstance(command, ServingError):
                    raise command
                yield command
        finally:
            reader.cancel()
            self._registry.part(stream.membership)
            self._after_change()

    async def _read(
        self,
        stream: "_WorkerStream",
        messages: AsyncIterator[WorkerRegistration | WorkerLoad],
        commands: Commands,
    ) -> None:
        """Take in a worker's messages; its last word, or a mistake of it, ends the stream through ``commands``."""
        try:
            async for message in messages:
                if isinstance(message, WorkerRegistration):
                    stream.registration, stream.membership = message, self._join(message, commands)
                elif not self._hear(stream.membership, message):
                    reason = "the router does not know this worker any more"
                    commands.put_nowait(WorkerCommand(kind=CommandKind.REREGISTER, reason=reason))
                else:
                    self._costs.learn(stream.registration, message.samples)
                    self._news.hear(stream.registration, message)
                self._after_change()
                self._room.wake_for_room()
        except ServingError as error:
            commands.put_nowait(error)
        finally:
            commands.put_nowait(None)

    def _join(self, registration: WorkerRegistration, commands: Commands) -> Membership:
        membership = self._registry.join(registration, commands)
        max_blocks = registration.num_blocks if registration.is_caching else 0
        self.prefixes.begin((registration.worker_id, registration.incarnation), max_blocks=max_blocks)
        self._metrics.incarnations.labels(registration.model.name, registration.role).inc()
        self._after_change()
        return membership

    def _hear(self, membership: Membership, load: WorkerLoad) -> bool:
        """A heartbeat: the load to the registry, what became of cached blocks to the index. False: join again."""
        if not self._registry.heartbeat(
            membership, replace(load, stored_hashes=(), evicted_hashes=(), samples=CostSamples(), pairs=())
        ):
            return False
        if self._registry.is_current(membership):
            worker = (membership.worker_id, membership.incarnation)
            self.prefixes.apply(worker, stored=load.stored_hashes, evicted=load.evicted_hashes)
        return True

    # -- operators ----------------------------------------------------------------------------------------------------

    async def status(self) -> ClusterStatus:
        return self._status()

    def watch(self, interval_s: float) -> AsyncGenerator[ClusterNews, None]:
        return self._news.watch(interval_s)

    def _status(self) -> ClusterStatus:
        return self._admin.status(
            http_address=self.http_address,
            num_placements=len(self._load),
            num_waiting=len(self._room),
            scaling=self._autoscaler.statuses(),
        )

    async def drain(self, worker_id: str, reason: str) -> None:
        self._admin.drain(worker_id, reason)
        self._news.send_away(worker_id, reason or "asked by an operator")
        self._after_change()

    async def flip(self, worker_id: str, reason: str) -> tuple[PoolSize, ...]:
        return self._reflip(worker_id, reason)

    def _reflip(self, worker_id: str, reason: str) -> tuple[PoolSize, ...]:
        before = self._pools.sizes()
        sizes = self._admin.flip(worker_id, reason)
        if _by_pool(before) != _by_pool(sizes):  # asked again, nothing happens
            self._news.send_away(worker_id, reason or "asked by an operator", is_flip=True)
        log.info("flip", extra={"worker": worker_id, "reason": reason, "pools": _by_pool(sizes)})
        self._after_change()
        self._pools.wake()
        self._room.wake()
        return sizes

    async def scale(self, pools: tuple[PoolSize, ...]) -> tuple[PoolSize, ...]:
        return self._rescale(pools, by="asked by an operator")

    def _rescale(self, pools: Sequence[PoolSize], *, by: str) -> tuple[PoolSize, ...]:
        before = self._pools.sizes()
        sizes = self._pools.scale(pools)
        self._news.scale(before, sizes, by)
        log.info("scaled", extra={"pools": _by_pool(sizes)})
        self._room.wake()
        return sizes

    async def report_pools(self, report: LauncherReport) -> tuple[PoolSize, ...]:
        """A launcher's word. What a router before this one was told is taken over from it."""
        before = self._pools.sizes()
        sizes = self._pools.adopt(report.pools)
        self._pools.note_problems(report.problems)
        self._rollouts.adopt(report.rollouts)
        if _by_pool(before) != _by_pool(sizes):
            log.info("sizes taken over from the launcher", extra={"pools": _by_pool(sizes)})
            self._news.scale(before, sizes, "as the launcher remembers")
            self._room.wake()
        return sizes

    def watch_pools(self) -> AsyncGenerator[tuple[PoolSize, ...], None]:
        return self._pools.watch()

    async def start_rollout(self, rollout: Rollout) -> None:
        self._rollouts.start(rollout)
        log.info("rollout", extra={"model": rollout.model, "revision": rollout.revision})
        self._pools.wake()

    async def find_records(self, request_id: str, limit: int) -> RequestRecords:
        return self._records.find(request_id, limit)

    # -- time ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to keep time. Needs the running event loop."""
        self._time.spawn(self._keep_time(), name="sweep")

    async def close(self) -> None:
        await self._tasks.close()
        await self._time.close()

    def sweep(self) -> None:
        """Judge silence, forget what is over, wake who waits. Called every ``SWEEP_S`` and by tests."""
        for gateway in self._gateways.sweep():
            released = self._load.release_gateway(*gateway)
            self._news.gateway(gateway[0], is_lost=True)
            log.warning("gateway lost", extra={"gateway": gateway[0], "released_placements": released})
        workers = self._registry.workers()
        alive = [(w.registration.worker_id, w.registration.incarnation) for w in workers]
        self._load.expire(alive)
        self.prefixes.keep_only(alive)
        self.prefixes.sweep()
        self._costs.expire(alive)
        self._introductions.keep_fresh()
        self._after_change()
        if (absent := self._placer.snapshot().absent) != self._absent:
            self._absent = absent
            self._room.wake()
        self._room.tick()
        self._autoscaler.tick(workers, self._costs.costs)
        self._news.tick(workers, len(self._room))
        self._metrics.show_workers(workers)
        for pool in self._pools.sizes():
            self._metrics.pool_size.labels(pool.model, pool.role).set(pool.replicas)
        self._metrics.gateways.set(len(self._gateways.statuses()))
        self._metrics.open_placements.set(len(self._load))
        self._metrics.waiting.set(len(self._room))
        for model, priority, length in self._room.lengths():
            self._metrics.queue_length.labels(model, priority).set(length)
        self._metrics.prefix_blocks.set(self.prefixes.num_hashes)

    async def _keep_time(self) -> None:
        while True:
            self.sweep()
            await asyncio.sleep(SWEEP_S)

    def _after_change(self) -> None:
        """Report what changed state and, if anything did, let those who wait try again."""
        changes = self._registry.sweep()
        for change in changes:
            if change.after is not None:
                self._metrics.transitions.labels(change.after).inc()
            log.info(
                "worker state",
                extra={
                    "worker": change.worker_id,
                    "incarnation": format_incarnation(change.incarnation),
                    "before": change.before or "",
                    "after": change.after or "gone",
                },
            )
        self._news.change(changes)
        if changes:
            self._introductions.tell()
            self._room.wake()
            self._pools.wake()


def _by_pool(sizes: tuple[PoolSize, ...]) -> dict[str, int]:
    return {f"{pool.model}/{pool.role}": pool.replicas for pool in sizes}


def room_limits(config: ClusterConfig) -> RoomLimits:
    """What counts as room."""
    settings = config.router
    return RoomLimits(
        prefill_backlog_s=settings.prefill_backlog_s,
        decode_backlog=settings.decode_backlog,
        held_fraction=config.transfer.held_fraction,
        max_transfers=settings.max_transfers,
    )


def policy_settings(config: ClusterConfig) -> PolicySettings:
    """What the policy goes by."""
    settings, even = config.router, config.router.break_even
    return PolicySettings(
        mode=settings.mode,
        policy=settings.policy,
        projected_tokens=config.worker.projected_tokens,
        weights=Weights(gap=even.gap_weight, itl=even.itl_weight, slack=even.ttft_slack),
        held_fraction=config.transfer.held_fraction,
        distance_s=settings.distance_s,
        explore=even.explore,
        seed=even.seed,
        fallback=settings.fallback,
        fallback_tokens=settings.fallback_tokens,
    )


def _correction(reservation: Reservation, end: PlacementEnd, *, was_refused: bool) -> float:
    """What a tenant has had is what was charged beforehand and this."""
    attained = 0.0 if was_refused else reservation.num_tokens + GENERATED_WEIGHT * end.num_generated
    return attained - _charge(reservation)


def _charge(reservation: Reservation) -> float:
    return reservation.num_tokens + GENERATED_WEIGHT * reservation.num_projected


class _WorkerStream:
    """The membership that a stream speaks for: a re-registration on the same stream replaces it."""

    __slots__ = ("membership", "registration")

    def __init__(self, registration: WorkerRegistration, membership: Membership) -> None:
        self.registration = registration
        self.membership = membership
