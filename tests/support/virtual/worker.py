"""A prefill or decode worker as a process of the virtual loop: the product's roles, export, holders, intake, leases,
custody and transfer loop, over the content engine and the inproc backend."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, cast

from bench.virtual.loop import Process
from bench.virtual.threads import Later, VirtualTransferThread
from core.config import ClusterConfig
from core.failpoints import Failpoints
from core.handoff import PeerInfo
from core.ids import Incarnation, WorkerId
from core.telemetry import Telemetry
from core.types import Role, WorkerAddress, WorkerLoad, WorkerState
from decode_worker.service import DecodeRole
from engine.engine import Engine, StepResult
from engine.sequence import Sequence
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
from prefill_worker.service import PrefillRole
from tests.support.virtual.content_engine import FORMAT, ContentEngine
from worker.context import WorkerContext

_STEP_S = 0.002
_COMMAND_S = 0.0002
_HEARTBEAT_S = 1.0

Reach = Callable[["VirtualWorker", str], Awaitable[None]]


class _Failpoints(Failpoints):
    """Every failpoint is reached, and the one who injects faults hears of it."""

    def __init__(self, reach: Callable[[str], Awaitable[None]]) -> None:
        super().__init__()
        self._reach = reach

    async def reach(self, name: str, who: str = "") -> None:
        await self._reach(name)


class VirtualSteps:
    """The step thread as timers: commands between steps, steps while there is work."""

    def __init__(self, engine: Engine, on_step: Callable[[StepResult, float, float], None]) -> None:
        self._engine = engine
        self._on_step = on_step
        self._is_stepping = False
        self._commands: deque[tuple[Callable[[Engine], Any], asyncio.Future[Any]]] = deque()

    async def call(self, command: Callable[[Engine], Any]) -> Any:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._commands.append((command, future))
        loop.call_later(_COMMAND_S, self._perform)
        return await asyncio.shield(future)

    def _perform(self) -> None:
        command, future = self._commands.popleft()
        try:
            future.set_result(command(self._engine))
        except Exception as error:
            future.set_exception(error)
            future.exception()
        self.wake()

    def wake(self) -> None:
        if not self._is_stepping and self._engine.has_work:
            self._is_stepping = True
            asyncio.get_running_loop().call_later(_STEP_S, self._step)

    def _step(self) -> None:
        self._is_stepping = False
        if self._engine.has_work:
            self._on_step(self._engine.step(), 0.0, 0.0)
        self.wake()


class VirtualWorker:
    """One incarnation. Everything in it belongs to ``process``."""

    def __init__(
        self,
        *,
        config: ClusterConfig,
        role: Role,
        address: WorkerAddress,
        fabric: Fabric,
        num_blocks: int,
        num_cells: int,
        telemetry: Telemetry,
        reach: Reach,
        on_wrong: Callable[[VirtualWorker, Sequence, int, int], None],
        dial: Callable[[VirtualWorker, WorkerAddress], Any],
    ) -> None:
        self.address = address
        self.role_name = role
        self.num_blocks = num_blocks
        self._config, self._telemetry, self._reach, self._dial = config, telemetry, reach, dial
        self.process = Process(f"{address.worker_id}/{address.incarnation}")
        self.engine = ContentEngine(num_blocks=num_blocks, on_wrong=partial(on_wrong, self))
        self.backend = fabric.backend()
        self.scratch, self.slots = Scratch(num_cells), SlotMemory(config.transfer.max_leases)
        self.canary = CanaryMemory(address.incarnation, self.engine.geometry, min_bytes=0)
        self.process.run(self._compose)

    def _compose(self) -> None:
        config, engine, loop = self._config, self.engine, asyncio.get_running_loop()
        transfer, geometry, model = config.transfer, engine.geometry, config.models[0]
        self.steps = VirtualSteps(engine, lambda *step: loop.call_soon(self.role.on_step, *step))
        self.context = WorkerContext(
            config=config,
            model=model,
            pool_config=model.pools[self.role_name],
            role=self.role_name,
            worker_id=self.address.worker_id,
            incarnation=self.address.incarnation,
            clock=cast(Any, loop),
            telemetry=self._telemetry,
            failpoints=_Failpoints(partial(self._reach, self)),
            engine=engine,
            steps=cast(Any, self.steps),
            digester=Digester.at_address(transfer.digest, geometry, engine.kv_region.address),
            pairs=Pairs(CircuitSettings(num_failures=transfer.circuit_failures, open_s=transfer.circuit_open_s)),
            on_broken=lambda error: None,
        )
        link = self.backend.open(
            Identity(worker_id=self.address.worker_id, incarnation=self.address.incarnation),
            (
                kv_region(engine.kv_region, geometry),
                Region(memory=self.slots.region()),
                Region(memory=self.scratch.region()),
                *self.canary.regions(),
            ),
        )
        self.me = PeerInfo(
            worker_id=self.address.worker_id,
            incarnation=self.address.incarnation,
            format=FORMAT,
            geometry=geometry,
            link=link,
            canary_digest=self.canary.digest,
        )
        self.custody = Custody(engine.pool)
        self.transfers = VirtualTransferThread(
            self.backend,
            geometry=geometry,
            scratch=self.scratch,
            landing=self.canary.landing,
            custody=self.custody,
            clock=cast(Any, loop),
            name="transfers",
            stall_s=transfer.stall_s,
            handshake_s=transfer.handshake_s,
            num_glances=0,
            pairs=self.context.pairs,
            beside=Later(),
        )
        self.leases = LeaseTable(
            self.slots,
            block_bytes=geometry.block_bytes,
            lease_s=transfer.lease_s,
            quota_bytes=int(geometry.num_blocks * transfer.held_fraction) * geometry.block_bytes,
        )
        if self.role_name is Role.PREFILL:
            self.role: Any = PrefillRole(self.context, self.leases, self.me)
        else:
            self.role = DecodeRole(self.context, self.transfers, self.me, dial=partial(self._dial, self))
        self.process.spawn(self.role.start(), name="start")
        if self.role_name is Role.DECODE:
            self.process.spawn(self._heartbeat(), name="heartbeat")

    async def _heartbeat(self) -> None:
        """What the membership does, as far as a role depends on it: D looks for room that nobody told it of."""
        while True:
            await asyncio.sleep(_HEARTBEAT_S)
            self.role.fill_load(WorkerLoad(state=WorkerState.READY, blocks=self.engine.pool.counts()))

    @property
    def worker_id(self) -> WorkerId:
        return self.address.worker_id

    @property
    def incarnation(self) -> Incarnation:
        return self.address.incarnation

    @property
    def agent_name(self) -> str:
        return self.me.link.agent_name

    def is_idle(self) -> bool:
        return bool(self.role.is_idle()) and self.engine.pool.counts().is_idle()

    async def end(self) -> None:
        """An orderly stop; afterwards nothing of the process is left."""
        await self.process.spawn(self.role.stop(), name="stop")
        self.transfers.end()
        await self.process.bury()
