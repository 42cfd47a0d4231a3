"""The life of a worker: compose, serve, stay joined, drain, end.

::

    STARTING --joined, worker/proof.py--> READY --SIGTERM | drain, flip--> DRAINING (worker/drain.py) --> ended
                                            `--a thread or the membership died--> ended (exit code 1: be restarted)

A process has one life after the other if it is flipped (worker/lives.py).
"""

import asyncio
import logging
import os
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass

from core.clock import MonotonicClock
from core.config import ClusterConfig, ModelConfigSection
from core.costs import read_costs
from core.credentials import open_credentials
from core.errors import ConfigError
from core.failpoints import Failpoints
from core.handoff import DigestKind, PeerInfo
from core.ids import WorkerId, new_incarnation
from core.probes import ProbeServer
from core.security_config import Identity as Component
from core.tasks import TaskScope
from core.telemetry import Telemetry
from core.tickets import TicketDesk
from core.types import (
    CommandKind,
    ExecutionKind,
    ModelRecord,
    Role,
    WorkerCommand,
    WorkerLoad,
    WorkerRegistration,
    WorkerState,
)
from engine.engine import Engine, EngineConfig, StepResult
from engine.kernels.digest import compiled_wsum64
from kvtransfer.backends.base import Backend, Identity
from kvtransfer.canary import CanaryMemory
from kvtransfer.circuit import CircuitSettings
from kvtransfer.custody import Custody
from kvtransfer.device_digest import DeviceDigester
from kvtransfer.digest import Digester
from kvtransfer.layout import Region, kv_region
from kvtransfer.lease import LeaseTable
from kvtransfer.memory import Scratch
from kvtransfer.pairs import Pairs
from kvtransfer.quarantine import QuarantineWatch, Verdict
from kvtransfer.slot import SlotMemory
from kvtransfer.transfer_thread import TransferThread
from modelfiles.model import open_model
from rpc.clients import RouterClient
from rpc.server import RpcServer
from worker.context import WorkerContext, WorkerRole
from worker.drain import Drain
from worker.membership import Membership
from worker.metrics import WorkerMetrics
from worker.mock import paced
from worker.observed import Observed
from worker.pair_news import PairNews
from worker.step_thread import StepThread
from worker.tickets import Tickets

log = logging.getLogger(__name__)

_HUNG_STEP_S = 60.0
"""The worker is not ready while a step takes longer ..."""
_DEAD_STEP_S = 300.0
"""... and ends when it takes this long."""
_WATCH_S = 1.0
_STOP_GRACE_S = 1.0
SWITCH_S = 5e-4
"""A thread that wants Python's lock waits so long for one that computes. The default, 5 ms, is what a whole hand-over
takes: the event loop, the transfers and the digests take turns in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferMemory:
    """A worker's part in hand-offs, for both roles: P uses ``leases``, D uses ``transfers``."""

    me: PeerInfo
    leases: LeaseTable
    transfers: TransferThread
    canary: CanaryMemory
    """Peers read it as long as this lives."""


MakeRole = Callable[[WorkerContext, TransferMemory], WorkerRole]


class Worker:
    """One worker, composed but for its role. Also what in-process clusters of tests are made of."""

    def __init__(
        self,
        config: ClusterConfig,
        *,
        model: str,
        role: Role,
        worker_id: WorkerId,
        engine: Engine,
        backend: Backend,
        fallback: Backend | None = None,
        make_role: MakeRole,
        telemetry: Telemetry | None = None,
        http_port: int = 0,
    ) -> None:
        """``http_port`` is wished for: another one is taken if it is not free. One that is configured is owed."""
        section = config.model(model)
        self._http_port = http_port
        self._loop = asyncio.get_running_loop()
        self._stopped = asyncio.Event()
        self.exit_code = 0
        self.steps = StepThread(
            engine,
            on_step=self._on_step,
            on_death=self._on_death,
            failpoints=(failpoints := Failpoints(config.failpoints)),
            core=_own_core(config, section.pools[role].num_threads, role, worker_id),
        )
        transfer = config.transfer
        credentials = open_credentials(config.security, Component.WORKER)
        incarnation, clock = new_incarnation(), MonotonicClock()
        self.context = WorkerContext(
            config=config,
            model=section,
            pool_config=section.pools[role],
            role=role,
            worker_id=worker_id,
            incarnation=incarnation,
            clock=clock,
            telemetry=telemetry or Telemetry(component=worker_id),
            failpoints=failpoints,
            engine=engine,
            steps=self.steps,
            digester=_digester(engine, transfer.digest),
            pairs=Pairs(CircuitSettings(num_failures=transfer.circuit_failures, open_s=transfer.circuit_open_s)),
            on_broken=lambda error: self._die(),
            credentials=credentials,
            tickets=Tickets(TicketDesk(worker_id, incarnation, clock) if credentials is not None else None),
        )
        own = {"model": self.context.model.name, "role": str(role)}
        self.context.observed = Observed(own, self.context.telemetry.registry)
        self._memory = self._join_memory(paced(backend, engine), fallback and paced(fallback, engine))
        self.role = make_role(self.context, self._memory)
        self._drain = Drain(self.context.clock, limit_s=config.worker.drain_s, is_idle=self.role.is_idle)
        self.quarantine = QuarantineWatch(self.context.geometry.num_blocks)
        self.metrics = WorkerMetrics(self.context, self._memory.transfers, self._memory.leases, self.quarantine)
        self._server = RpcServer(self.context.credentials)
        self._probes = ProbeServer(ready=self._why_not_ready, metrics=self._render_metrics)
        self._membership: Membership | None = None
        self._router: RouterClient | None = None
        self._scope = TaskScope("worker", on_failure=lambda error: self._die())
        self.state = WorkerState.STARTING
        self.address = ""
        self.http_address = ""

    def _join_memory(self, backend: Backend, fallback: Backend | None) -> TransferMemory:
        """Register the engine's blocks, the lease slots, the scratch cells and the canary with the backends, once."""
        context, transfer = self.context, self.context.config.transfer
        slots, scratch = SlotMemory(transfer.max_leases), Scratch()
        canary = CanaryMemory(context.incarnation, context.geometry)
        identity = Identity(worker_id=context.worker_id, incarnation=context.incarnation)
        regions = (
            kv_region(context.engine.kv_region, context.geometry),
            Region(memory=slots.region()),
            Region(memory=scratch.region()),
            *canary.regions(),
        )
        link = backend.open(identity, regions)
        other_links = () if fallback is None else (fallback.open(identity, regions),)
        geometry = context.geometry
        return TransferMemory(
            canary=canary,
            me=PeerInfo(
                worker_id=context.worker_id,
                incarnation=context.incarnation,
                format=context.format,
                geometry=geometry,
                link=link,
                other_links=other_links,
                canary_digest=canary.digest,
            ),
            leases=LeaseTable(
                slots,
                block_bytes=geometry.block_bytes,
                lease_s=transfer.lease_s,
                quota_bytes=int(geometry.num_blocks * transfer.held_fraction) * geometry.block_bytes,
            ),
            transfers=TransferThread(
                backend,
                fallback=fallback,
                geometry=geometry,
                scratch=scratch,
                landing=canary.landing,
                custody=Custody(context.engine.pool),
                clock=context.clock,
                name="baton-transfers",
                stall_s=transfer.stall_s,
                handshake_s=transfer.handshake_s,
                pairs=context.pairs,
                on_death=lambda: self._loop.call_soon_threadsafe(self._die),
            ),
        )

    # -- life ---------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Bind, serve, join the router. Raises ConfigError."""
        context = self.context
        self.steps.start()
        self._memory.transfers.start()
        self.role.add_services(self._server)
        await self.role.start()
        worker = context.config.worker
        bound = await self._server.start(f"{worker.host}:{worker.port}")
        self.address = address = worker.advertised(bound)
        self.http_address = http_address = await self._start_probes(worker.host)
        context.proof.on_settled = self._look_ready
        self._router = RouterClient(context.config.router.address, context.credentials)
        self._membership = Membership(
            self._router,
            self._registration(address, http_address),
            load=self.load,
            cache_changes=lambda whole: context.engine.pool.take_changes(whole=whole),
            take_samples=context.samples.take,
            take_pairs=PairNews(context, self._memory.transfers).take,
            on_command=self._on_command,
            heartbeat_s=context.config.router.heartbeat_s,
        )
        self._scope.spawn(self._membership.run(), name="membership")
        self._scope.spawn(self._watch_steps(), name="watch-steps")
        if context.engine.limits.is_mock:
            log.warning("mock execution: no model is run, answers are made up", extra={"worker_id": context.worker_id})
        log.info("worker serves", extra={"worker_id": context.worker_id, "address": address, "http": http_address})

    async def _start_probes(self, host: str) -> str:
        if configured := self.context.config.worker.http_port:
            return await self._probes.start(f"{host}:{configured}")
        try:
            return await self._probes.start(f"{host}:{self._http_port}")
        except ConfigError:
            return await self._probes.start(f"{host}:0")

    async def run_until_stopped(self) -> int:
        """Serve until a drain has ended or a thread is dead. Returns the exit code."""
        await self._stopped.wait()
        return self.exit_code

    async def stop(self) -> bool:
        """End everything at once; what is unfinished is handed back. The engine stays: it is whoever made it that
        closes it. False if something hangs that may still touch its memory."""
        self.state = WorkerState.DRAINING
        self.context.is_draining = True
        await self.role.stop()
        await self._server.stop(_STOP_GRACE_S)
        await self._scope.close()
        if self._router is not None:
            await self._router.close()
        await self._probes.stop()
        is_quiet = await asyncio.to_thread(self._memory.transfers.stop, 2.0)
        return await asyncio.to_thread(self.steps.stop) and is_quiet

    async def _watch_steps(self) -> None:
        """A device that hangs answers no call; nothing but a new process helps, and nobody should wait until then."""
        while self.steps.step_age_s() < _DEAD_STEP_S:
            self._watch_quarantine()
            await asyncio.sleep(_WATCH_S)
        log.critical("a step hangs", extra={"worker_id": self.context.worker_id, "seconds": _DEAD_STEP_S})
        self._die()

    def _watch_quarantine(self) -> None:
        """Blocks that never come back cost the process in the end, but first it finishes what it can."""
        stats = self._memory.transfers.custody()
        verdict = self.quarantine.look(stats, self.context.clock.now())
        fields = {"worker_id": self.context.worker_id, "blocks": stats.num_quarantined_blocks}
        if verdict is Verdict.ALARM:
            log.error("a quarantine does not drain", extra=fields)
        elif verdict is Verdict.RESTART and self.state is not WorkerState.DRAINING:
            log.critical("a quarantine does not drain, the worker must be restarted", extra=fields)
            self.exit_code = 1
            self.drain("a quarantine does not drain")

    @property
    def next_role(self) -> Role | None:
        """What this engine is to serve as after this life."""
        return self._drain.next_role

    def drain(self, reason: str, *, next_role: Role | None = None) -> None:
        """Refuse new work, finish, then leave or take the next role. The last word on that counts."""
        self._drain.next_role = next_role
        if self.state is not WorkerState.DRAINING:
            log.info("draining", extra={"worker_id": self.context.worker_id, "reason": reason, "next_role": next_role})
            self.state = WorkerState.DRAINING
            self.context.is_draining = True
            self._drain.begin()
            self.role.begin_drain()
            self._scope.spawn(self._finish(), name="drain")
        if self._membership is not None:
            self._membership.report_now()

    def hurry(self) -> None:
        """Of a drain: hand back what is unfinished now."""
        self._drain.hurry()

    async def _finish(self) -> None:
        if not await self._drain.finish():
            log.warning("drain limit reached, handing back what is left", extra={"worker_id": self.context.worker_id})
        self._stopped.set()

    def _on_command(self, command: WorkerCommand) -> None:
        reason = command.reason or "asked by the router"
        if command.kind is CommandKind.DRAIN:
            self.drain(reason)
        elif command.kind is CommandKind.FLIP:
            role = command.role
            if role not in self.context.model.pools:  # the router's configuration is another one
                log.error("cannot be flipped, leaves", extra={"worker_id": self.context.worker_id, "role": role})
                role = None
            self.drain(reason, next_role=role)
        elif command.kind in (CommandKind.JOINED, CommandKind.PEERS):
            self.context.tickets.learn(command)
            self.context.proof.meet(command.peers)
            self.role.meet(command.peers)

    def _look_ready(self) -> None:
        """A port is not enough: peers that cannot read each other's memory would fail every request."""
        if self.state is WorkerState.STARTING:
            self.state = WorkerState.READY
            log.info("worker ready", extra={"worker_id": self.context.worker_id, "address": self.address})
            if self._membership is not None:
                self._membership.report_now()

    # -- from the step thread -----------------------------------------------------------------------------------------

    def _on_step(self, result: StepResult, started_at: float, ended_at: float) -> None:
        self._loop.call_soon_threadsafe(self._take_step, result, started_at, ended_at)

    def _take_step(self, result: StepResult, started_at: float, ended_at: float) -> None:
        self._observe_step(result, started_at, ended_at)
        if result.num_tokens:
            self.context.samples.add_step(result.work, ended_at - started_at)
        self.role.on_step(result, started_at, ended_at)

    def _observe_step(self, result: StepResult, started_at: float, ended_at: float) -> None:
        firsts = [one for one in result.outputs if one.index == 0 or (one.sequence.first_step_at or 0.0) >= started_at]
        self.context.observed.step(
            ended_at - started_at, num_tokens=len(result.outputs), num_firsts=len(firsts), ended_at=ended_at
        )

    def _on_death(self, error: Exception) -> None:
        self._loop.call_soon_threadsafe(self._die)

    def _die(self) -> None:
        """The engine, the transfers or the membership is lost: be restarted. Peers and gateways see the broken streams
        at once."""
        self.exit_code = 1
        self._stopped.set()

    # -- reports ------------------------------------------------------------------------------------------------------

    def load(self) -> WorkerLoad:
        engine = self.context.engine
        counters = engine.counters()
        return self.role.fill_load(
            WorkerLoad(
                state=self.state,
                num_running=counters.num_running,
                num_waiting=counters.num_waiting,
                queued_prompt_tokens=counters.queued_prompt_tokens,
                blocks=engine.pool.counts(),
                prompt_tokens_computed=counters.prompt_tokens_computed,
                tokens_generated=counters.tokens_generated,
                num_steps=counters.num_steps,
                busy_s=self.steps.busy_s,
                next_role=self._drain.next_role,
                drain_left_s=self._drain.left_s,
            )
        )

    def _registration(self, address: str, http_address: str) -> WorkerRegistration:
        context, limits = self.context, self.context.engine.limits
        return WorkerRegistration(
            worker_id=context.worker_id,
            incarnation=context.incarnation,
            role=context.role,
            model=ModelRecord(
                name=context.model.name,
                format_hash=context.format.hash(),
                block_size=context.geometry.block_size,
                max_context=limits.max_context,
                vocab_size=limits.vocab_size,
                execution=ExecutionKind.MOCK if limits.is_mock else ExecutionKind.REAL,
            ),
            revision=context.model.revision,
            address=address,
            http_address=http_address,
            pid=os.getpid(),
            hostname=socket.gethostname(),
            labels=tuple(sorted(context.config.worker.labels.items())),
            num_blocks=limits.num_blocks,
            block_bytes=context.geometry.block_bytes,
            max_sequences=limits.max_sequences,
            max_step_tokens=limits.max_step_tokens,
            transfer_backend=context.config.transfer.backend,
            max_mixed_tokens=context.pool_config.max_mixed_tokens,
            is_caching=context.model.kv.prefix_cache,
        )

    def _why_not_ready(self) -> str | None:
        if self.state is WorkerState.DRAINING:
            return str(self.state)
        if not self.steps.is_alive:
            return "the step thread is dead"
        if self.steps.step_age_s() > _HUNG_STEP_S:
            return f"a step has been running for more than {_HUNG_STEP_S:.0f} s"
        if not self._memory.transfers.is_alive:
            return "the transfer thread is dead"
        if self._membership is None or not self._membership.is_joined:
            return "not joined to the router"
        return self.context.proof.why_not

    def _render_metrics(self, accept: str = "") -> bytes:
        self.metrics.refresh(self.load())
        return self.context.telemetry.render_metrics(accept)


def _digester(engine: Engine, kind: DigestKind) -> Digester:
    """Where the blocks are."""
    if engine.device_memory is not None:
        return DeviceDigester(kind, engine.geometry, engine.device_memory)
    return Digester.at_address(kind, engine.geometry, engine.kv_region.address, sums=compiled_wsum64())


def _own_core(config: ClusterConfig, num_threads: int, role: Role, worker_id: str) -> int | None:
    """A core for the step thread: prefill and decode workers of equal number get different ones, as far as there
    are."""
    number = re.search(r"(\d+)$", worker_id)
    if not config.worker.pin_threads or num_threads != 1 or number is None:
        return None
    cores = sorted(os.sched_getaffinity(0))
    return cores[(2 * int(number[1]) + (role is not Role.PREFILL)) % len(cores)]


def load_engine(config: ClusterConfig, model: ModelConfigSection, role: Role) -> Engine:
    """Weights, KV memory and all. Takes seconds; raises ConfigError with the remedy."""
    return Engine(open_model(model.path), engine_config(model, role))


def engine_config(model: ModelConfigSection, role: Role) -> EngineConfig:
    """What the settings say of the engine of one worker. Raises ConfigError for a cost table that cannot be read."""
    pool, costs = model.pools[role], model.execution.costs
    return EngineConfig(
        block_size=model.kv.block_size,
        num_blocks=model.kv.num_blocks,
        memory_bytes=model.kv.memory_bytes,
        memory_fraction=model.kv.memory_fraction,
        max_step_tokens=pool.max_step_tokens,
        max_sequences=pool.max_sequences,
        max_context=model.max_context,
        device=pool.device,
        dtype=model.dtype,
        kv_dtype=model.kv.dtype,
        invariant=pool.device == "cpu" if model.invariant == "auto" else model.invariant,
        prefix_cache=model.kv.prefix_cache,
        prefault=model.kv.prefault,
        policy=pool.policy,
        max_mixed_tokens=pool.max_mixed_tokens,
        costs=read_costs(costs) if isinstance(costs, str) else costs,
    )
