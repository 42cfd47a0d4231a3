"""A whole cell of mock workers in this process: real router, gateway, gRPC, schedulers, block pools, prefix caches and
hand-offs; only the model's forward pass is a cost table (:mod:`engine.mock`). It is there in a second.

    costs = StepCosts.linear(fixed_s=0.01, prompt_token_s=1e-4, decode_row_s=1e-4)
    async with MockCell(costs, prefill=2, decode=2) as cell:
        samples = await play(cell.ask, workload)          # bench/traffic.py, bench/workloads.py
        cell.workers["decode-1"].costs = costs.scaled(decode=4)   # slower from its next step on
        print(cell.cache_hit_ratio())

Workers that compute nothing share two cores well, but their Python does not: a cell of 16 workers makes a few thousand
tokens a second. Choose steps of 10 ms and more, so that what is measured is the cell and not the interpreter.
"""

import asyncio
import socket
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import cache
from itertools import count
from types import TracebackType
from typing import Self

from bench.traffic import OK, Request, Sample, Stopwatch
from core.clock import MonotonicClock
from core.config import DEFAULT_MODEL, ClusterConfig, ExecutionConfig, ModelConfigSection, load_config
from core.costs import StepCosts
from core.errors import ServingError
from core.ids import GatewayId, WorkerId, new_incarnation, new_request_id
from core.telemetry import Telemetry
from core.types import ChoiceProgress, ExecutionKind, GenerateRequest, Role, SamplingParams
from decode_worker.service import DecodeRole
from engine.engine import Engine
from engine.mock import MockExecution
from gateway.access.assembly import open_access
from gateway.app import Gateway
from gateway.models import ServedModel
from gateway.pipeline import Pipeline, PipelineLimits
from gateway.ports import RpcClients
from gateway.prompt_blocks import PromptBlocks
from gateway.run import Choice, Run
from gateway.server import BACKLOG, Server
from gateway.stages import StageClock
from gateway.text import ChoiceText, TextRules
from kvtransfer.backends import create_backend
from kvtransfer.backends.base import Backend
from kvtransfer.backends.inproc import Fabric
from modelfiles.model import ModelFiles, open_model
from prefill_worker.service import PrefillRole
from router.service import RouterServer
from rpc.clients import RouterClient
from worker.context import WorkerContext, WorkerRole
from worker.process import SWITCH_S, TransferMemory, Worker, engine_config

SETTINGS = (
    "gateway.listen=127.0.0.1:0",
    "router.listen=127.0.0.1:0",
    "router.heartbeat_s=0.1",
    "worker.pin_threads=false",
    "models.0.kv.num_blocks=2048",
)
READY_S = 30.0
_POLL_S = 0.01

open_files = cache(open_model)
"""Reading a tokenizer takes longer than starting a cell: once for the process."""


@cache
def _served_model(section: str) -> ServedModel:
    """Likewise. ``section`` as JSON."""
    return ServedModel.load(ModelConfigSection.model_validate_json(section))


class MockWorker:
    """One worker of a cell."""

    def __init__(self, worker: Worker, engine: Engine) -> None:
        self.worker = worker
        """As in production, with its role, pool and metrics."""
        self.engine = engine

    @property
    def costs(self) -> StepCosts:
        """Assign another table at any time: it counts from the next step and the next transfer on."""
        return self._execution.costs

    @costs.setter
    def costs(self, costs: StepCosts) -> None:
        self._execution.costs = costs

    @property
    def _execution(self) -> MockExecution:
        assert isinstance(self.engine.execution, MockExecution)
        return self.engine.execution


class MockCell:
    """``async with MockCell(costs, decode=4) as cell``: ready when entered, everything ended when left."""

    def __init__(
        self,
        costs: StepCosts | Mapping[str, StepCosts],
        *overrides: str,
        prefill: int = 0,
        decode: int = 0,
        unified: int = 0,
        model: str = DEFAULT_MODEL,
        backend: str = "inproc",
    ) -> None:
        """``costs``: of all workers, or by worker id (``decode-0``) or role (``decode``). ``overrides``: settings as
        for ``--set``, such as ``models.0.pools.decode.max_sequences=16``. ``model`` lends its tokenizer, context
        and number of KV blocks per byte. ``backend`` moves the small KV: ``inproc``, ``tcp`` or ``nixl``."""
        counts = {Role.PREFILL: prefill, Role.DECODE: decode, Role.UNIFIED: unified}
        self._counts = {role: number for role, number in counts.items() if number}
        self._costs: Mapping[str, StepCosts] = {str(r): costs for r in Role} if isinstance(costs, StepCosts) else costs
        first = next(iter(self._costs.values()))
        pools = ", ".join(f"{role}: {{replicas: {number}}}" for role, number in self._counts.items())
        self.config: ClusterConfig = load_config(
            overrides=[
                *SETTINGS,
                f"models.0.name={model}",
                f"models.0.path={model}",
                f"models.0.pools={{{pools}}}",
                f"models.0.execution={{kind: mock, costs: {first.model_dump_json()}}}",
                *overrides,
            ],
            environ={},
        )
        self._backend = backend
        self._fabric = Fabric()
        self._numbers = {role: count() for role in Role}
        self._stack = AsyncExitStack()
        self.workers: dict[str, MockWorker] = {}
        """By id: ``prefill-0``, ``decode-0``, ``unified-0``, ..."""

    @property
    def model(self) -> ModelConfigSection:
        return self.config.models[0]

    @property
    def files(self) -> ModelFiles:
        return open_files(self.model.path)

    async def __aenter__(self) -> Self:
        switch_s = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)  # as in a worker: many threads take turns
        self._stack.callback(sys.setswitchinterval, switch_s)
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def _start(self) -> None:
        self.router_server = RouterServer(self.config)
        """The router itself, to look into."""
        await self.router_server.start()
        self._stack.push_async_callback(self.router_server.stop)
        section = self.config.router.model_copy(update={"listen": self.router_server.address})
        self.config = self.config.model_copy(update={"router": section})
        self.router = RouterClient(self.router_server.address)
        for role, number in self._counts.items():
            for _ in range(number):
                await self.add_worker(role)
        await self._start_gateway()
        async with asyncio.timeout(READY_S):
            while self.gateway.why_not_ready() is not None or not await self._are_all_joined():
                await asyncio.sleep(_POLL_S)

    async def _are_all_joined(self) -> bool:
        status = await self.router.status()
        return sum(pool.ready for pool in status.pools) == len(self.workers)

    async def _start_gateway(self) -> None:
        self._incarnation = new_incarnation()
        text_side = self.model.model_copy(update={"execution": ExecutionConfig()})
        self._served = replace(_served_model(text_side.model_dump_json()), execution=ExecutionKind.MOCK)
        self.gateway = Gateway(
            self.config,
            router=self.router,
            clients=RpcClients(),
            models=[self._served],
            telemetry=Telemetry(component="gateway"),
            gateway_id=GatewayId("gateway-0"),
            incarnation=self._incarnation,
            access=await open_access(self.config.gateway.access, incarnation=self._incarnation),
        )
        self.gateway.start()
        self._stack.push_async_callback(self.gateway.close)
        limits = PipelineLimits(
            max_attempts=self.config.gateway.limits.max_attempts,
            capacity_patience_s=self.config.router.placement_wait_s,
        )
        self._pipeline = Pipeline(self.router, self.gateway.peers, limits)

    # -- workers come and go ------------------------------------------------------------------------------------------

    async def add_worker(self, role: Role, costs: StepCosts | None = None) -> MockWorker:
        """One more. The router knows it a moment after this returns."""
        worker_id = f"{role}-{next(self._numbers[role])}"
        table = costs or self._costs.get(worker_id) or self._costs[str(role)]
        execution = self.model.execution.model_copy(update={"costs": table})
        section = self.model.model_copy(update={"execution": execution})
        engine = Engine(self.files, engine_config(section, role))
        self._stack.callback(engine.close)
        worker = Worker(
            self.config,
            model=self.model.name,
            role=role,
            worker_id=WorkerId(worker_id),
            engine=engine,
            backend=self._make_backend(),
            make_role=_make_role,
        )
        self.workers[worker_id] = MockWorker(worker, engine)
        await worker.start()
        self._stack.push_async_callback(self.remove_worker, worker_id)
        return self.workers[worker_id]

    async def remove_worker(self, worker_id: str) -> None:
        """End a worker at once, whatever it is at. Nothing happens when it has ended before."""
        found = self.workers.pop(worker_id, None)
        if found is not None:
            await found.worker.stop()

    def _make_backend(self) -> Backend:
        return self._fabric.backend() if self._backend == "inproc" else create_backend(self._backend)

    # -- requests -----------------------------------------------------------------------------------------------------

    async def ask(self, request: Request) -> Sample:
        """Drive one request through the gateway's own pipeline, without HTTP: an :data:`~bench.traffic.Ask`. A typed
        error is an outcome."""
        choice = Choice(0, ChoiceText(self._served.tokenizer, TextRules()))
        asked = GenerateRequest(
            request_id=new_request_id(),
            model=self.model.name,
            prompt_token_ids=request.prompt,
            sampling=SamplingParams(
                temperature=0.0 if request.seed is None else 1.0,
                seed=request.seed or 0,
                max_tokens=request.max_tokens,
                ignore_eos=True,
            ),
            choices=(ChoiceProgress(),),
            priority=request.priority,
            tenant=request.tenant,
            cache_salt=request.tenant,
            gateway_id=GatewayId("gateway-0"),
            gateway_incarnation=self._incarnation,
            deadline_s=request.deadline_s,
            workload_class=request.label,
        )
        watch = Stopwatch(request)
        choice.sink = lambda delta: watch.tokens(delta.token_ids)
        blocks = PromptBlocks.of(request.prompt, block_size=self.model.kv.block_size, salt=request.tenant)
        run, outcome = Run(asked, [choice], StageClock(MonotonicClock()), blocks=blocks), OK
        try:
            await self._pipeline.generate(run)
        except ServingError as error:
            outcome = error.slug
        finally:
            self.gateway.reporter.add(run.record())
        placement = run.last_placement
        prefill = None if placement is None else placement.prefill
        return watch.sample(
            outcome,
            num_cached_tokens=run.num_cached_tokens,
            attempts=run.attempt,
            mode="" if placement is None else str(placement.mode),
            prefill_worker="" if prefill is None else prefill.worker_id,
            decode_worker="" if placement is None else placement.decode.worker_id,
            reason="" if placement is None else placement.reason,
        )

    async def serve_http(self) -> str:
        """Serve the gateway's API on a free port of this machine; returns its URL, for :func:`bench.traffic.over_http`
        or any client."""
        server = Server(self.gateway, self.config.gateway)
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.bind(("127.0.0.1", 0))
        listener.listen(BACKLOG)
        serving = asyncio.create_task(server.serve(sockets=[listener]))

        async def stop() -> None:
            server.should_exit = True
            await serving

        self._stack.push_async_callback(stop)
        while not server.started and not serving.done():
            await asyncio.sleep(_POLL_S)
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    # -- what happened ------------------------------------------------------------------------------------------------

    def cache_hit_ratio(self) -> float:
        """Of all prompt tokens that workers had to have, the part that was found in a prefix cache. Since start."""
        counters = [each.engine.counters() for each in self.workers.values()]
        cached = sum(each.prompt_tokens_cached for each in counters)
        return cached / max(1, cached + sum(each.prompt_tokens_computed for each in counters))

    def check_idle(self) -> None:
        """Laws 1 and 2. Raises AssertionError naming the worker that still holds something."""
        for worker_id, each in self.workers.items():
            counts, counters = each.engine.pool.counts(), each.engine.counters()
            assert counts.is_conserved() and counts.is_idle(), f"{worker_id}: {counts}"
            assert counters.num_running == counters.num_waiting == 0, f"{worker_id}: {counters}"


def _make_role(context: WorkerContext, memory: TransferMemory) -> WorkerRole:
    if context.role is Role.PREFILL:
        return PrefillRole(context, memory.leases, memory.me)
    return DecodeRole(context, memory.transfers, memory.me)
