"""A worker of the virtual cluster: the product's roles, hand-off, leases, custody, transfer loop, scheduler, block pool
and prefix cache; the model is a cost table, threads are timers."""

import asyncio
from typing import Any, cast

from bench.virtual.loop import Process
from bench.virtual.network import HandoffWire, Network
from bench.virtual.router_wire import RouterWire
from bench.virtual.threads import Later, TimedSteps, VirtualTransferThread
from core.config import ClusterConfig
from core.costs import StepCosts
from core.failpoints import Failpoints
from core.handoff import PeerInfo
from core.ids import WorkerId, new_incarnation
from core.telemetry import Telemetry
from core.types import (
    CommandKind,
    ExecutionKind,
    ModelRecord,
    Role,
    WorkerAddress,
    WorkerCommand,
    WorkerLoad,
    WorkerRegistration,
    WorkerState,
)
from decode_worker.service import DecodeRole
from engine.engine import Engine, StepResult
from engine.mock import MockExecution, Pace
from kvtransfer.backends.base import Identity
from kvtransfer.backends.inproc import Fabric
from kvtransfer.canary import CanaryMemory
from kvtransfer.circuit import CircuitSettings
from kvtransfer.custody import Custody
from kvtransfer.digest import Digester
from kvtransfer.layout import Region, kv_region
from kvtransfer.lease import LeaseTable
from kvtransfer.memory import Scratch
from kvtransfer.pairs import Pairs
from kvtransfer.slot import SlotMemory
from modelfiles.model import ModelFiles
from prefill_worker.service import PrefillRole
from worker.context import WorkerContext
from worker.membership import Membership
from worker.mock import paced
from worker.process import engine_config

_POLL_S = 0.001
"""How long a read that is done may go unseen: the product's thread looks as often."""
_SCRATCH_CELLS = 64
_CANARY_BYTES = 1 << 12


class MockWorker:
    """One worker. Everything of it belongs to ``process``."""

    def __init__(
        self,
        config: ClusterConfig,
        role: Role,
        worker_id: str,
        *,
        costs: StepCosts,
        files: ModelFiles,
        network: Network,
        fabric: Fabric,
        router: WorkerAddress,
        telemetry: Telemetry,
    ) -> None:
        """Made within a running virtual loop. ``telemetry`` is shared by all: the figures of one worker are its
        engine's."""
        self._config, self._network, self._router, self._telemetry = config, network, router, telemetry
        self.worker_id = WorkerId(worker_id)
        self.address = WorkerAddress(worker_id=self.worker_id, incarnation=new_incarnation(), address=f"{worker_id}:1")
        self.process = Process(worker_id)
        self.role_name = role
        self.costs = costs
        """Counts from the next step on."""
        self.engine = Engine(files, engine_config(config.models[0], role))
        assert isinstance(self.engine.execution, MockExecution)
        self.engine.execution.pace = Pace(now=lambda: 0.0, sleep=lambda seconds: None)  # steps wait in TimedSteps
        self.state = WorkerState.STARTING
        self.process.run(self._compose, fabric)

    def _compose(self, fabric: Fabric) -> None:
        config, engine, loop = self._config, self.engine, asyncio.get_running_loop()
        transfer, geometry = config.transfer, engine.geometry
        model = config.models[0]
        self.steps = TimedSteps(engine, on_step=self._on_step, step_s=lambda result: self.costs.step_s(result.work))
        context = self.context = WorkerContext(
            config=config,
            model=model,
            pool_config=model.pools[self.role_name],
            role=self.role_name,
            worker_id=self.worker_id,
            incarnation=self.address.incarnation,
            clock=cast(Any, loop),
            telemetry=self._telemetry,
            failpoints=Failpoints(),
            engine=engine,
            steps=cast(Any, self.steps),
            digester=Digester.at_address(transfer.digest, geometry, engine.kv_region.address),
            pairs=Pairs(CircuitSettings(num_failures=transfer.circuit_failures, open_s=transfer.circuit_open_s)),
            on_broken=self._break,
        )
        context.proof.on_settled = self._look_ready
        backend = paced(fabric.backend(), engine, now=loop.time)
        slots, scratch = SlotMemory(transfer.max_leases), Scratch(_SCRATCH_CELLS)
        canary = CanaryMemory(self.address.incarnation, geometry, min_bytes=_CANARY_BYTES)
        self._memory = slots, scratch, canary  # registered: it must live as long as the backend
        regions = (
            kv_region(engine.kv_region, geometry),
            Region(memory=slots.region()),
            Region(memory=scratch.region()),
            *canary.regions(),
        )
        me = PeerInfo(
            worker_id=self.worker_id,
            incarnation=self.address.incarnation,
            format=engine.format,
            geometry=geometry,
            link=backend.open(Identity(worker_id=self.worker_id, incarnation=self.address.incarnation), regions),
            canary_digest=canary.digest,
        )
        self.transfers = VirtualTransferThread(
            backend,
            geometry=geometry,
            scratch=scratch,
            landing=canary.landing,
            custody=Custody(engine.pool),
            clock=cast(Any, loop),
            name="transfers",
            stall_s=transfer.stall_s,
            handshake_s=transfer.handshake_s,
            num_glances=0,
            pairs=context.pairs,
            beside=Later(),
        )
        self.transfers.max_turn_s = _POLL_S
        leases = LeaseTable(
            slots,
            block_bytes=geometry.block_bytes,
            lease_s=transfer.lease_s,
            quota_bytes=int(geometry.num_blocks * transfer.held_fraction) * geometry.block_bytes,
        )
        if self.role_name is Role.PREFILL:
            self.role: Any = PrefillRole(context, leases, me)
        else:
            self.role = DecodeRole(context, self.transfers, me, dial=self._dial)
        self.membership = Membership(
            cast(Any, RouterWire(self._network, self.process, self._router)),
            self._registration(),
            load=self.load,
            cache_changes=lambda whole: engine.pool.take_changes(whole=whole),
            take_samples=context.samples.take,
            take_pairs=lambda: (),
            on_command=self._on_command,
            heartbeat_s=config.router.heartbeat_s,
        )
        self.process.spawn(self.role.start(), name="start")
        self.process.spawn(self.membership.run(), name="membership")

    def _dial(self, to: WorkerAddress) -> Any:
        return HandoffWire(self._network, self, to)

    def _break(self, error: BaseException) -> None:
        asyncio.get_running_loop().call_exception_handler({"message": f"{self.worker_id} broke", "exception": error})

    def _on_step(self, result: StepResult, started: float, ended: float) -> None:
        """As :class:`worker.process.Worker` takes it from its thread."""
        if result.num_tokens:
            self.context.samples.add_step(result.work, ended - started)
        self.role.on_step(result, started, ended)

    def _on_command(self, command: WorkerCommand) -> None:
        assert command.kind in (CommandKind.JOINED, CommandKind.PEERS), f"nobody drains here: {command}"
        self.context.proof.meet(command.peers)
        self.role.meet(command.peers)

    def _look_ready(self) -> None:
        self.state = WorkerState.READY
        self.membership.report_now()

    def load(self) -> WorkerLoad:
        counters = self.engine.counters()
        load: WorkerLoad = self.role.fill_load(
            WorkerLoad(
                state=self.state,
                num_running=counters.num_running,
                num_waiting=counters.num_waiting,
                queued_prompt_tokens=counters.queued_prompt_tokens,
                blocks=self.engine.pool.counts(),
                prompt_tokens_computed=counters.prompt_tokens_computed,
                tokens_generated=counters.tokens_generated,
                num_steps=counters.num_steps,
                busy_s=self.steps.busy_s,
            )
        )
        return load

    def _registration(self) -> WorkerRegistration:
        engine, limits = self.engine, self.engine.limits
        return WorkerRegistration(
            worker_id=self.worker_id,
            incarnation=self.address.incarnation,
            role=self.role_name,
            model=ModelRecord(
                name=self._config.models[0].name,
                format_hash=engine.format.hash(),
                block_size=engine.geometry.block_size,
                max_context=limits.max_context,
                vocab_size=limits.vocab_size,
                execution=ExecutionKind.MOCK,
            ),
            address=self.address.address,
            http_address="",
            pid=0,
            hostname="virtual",
            num_blocks=limits.num_blocks,
            block_bytes=engine.geometry.block_bytes,
            max_sequences=limits.max_sequences,
            max_step_tokens=limits.max_step_tokens,
            transfer_backend="inproc",
            max_mixed_tokens=self._config.models[0].pools[self.role_name].max_mixed_tokens,
            is_caching=self._config.models[0].kv.prefix_cache,
        )

    def check_idle(self) -> None:
        """Laws 1 and 2. Raises AssertionError naming the worker that still holds something."""
        counts, counters = self.engine.pool.counts(), self.engine.counters()
        assert counts.is_conserved() and counts.is_idle(), f"{self.worker_id}: {counts}"
        assert counters.num_running == counters.num_waiting == 0, f"{self.worker_id}: {counters}"

    async def end(self) -> None:
        await self.process.spawn(self.role.stop(), name="stop")
        self.transfers.end()
        await self.process.bury()
        self.engine.close()
