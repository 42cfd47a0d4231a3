"""A whole mock cluster in one thread and in virtual time: real router, gateway pipeline, hand-offs, schedulers, block
pools and prefix caches. What there is not: HTTP, text, and the sockets of gRPC.

    loop = VirtualLoop(is_metered=True)
    async def story():
        cluster = MockCluster(costs, prefill=32, decode=32)
        await cluster.ready()
        samples = await cluster.play(conversations)
        await cluster.close()
    loop.run(story())

Time passes as fast as the machine computes what happens in it. CPU time is metered by process (``process.cpu_s``).
"""

import asyncio
import itertools
from collections.abc import Iterable
from copy import copy
from dataclasses import replace
from functools import cache, cached_property
from typing import Any

from bench.traffic import OK, Conversation, Sample
from bench.virtual.loop import Process, VirtualLoop
from bench.virtual.mock_worker import MockWorker
from bench.virtual.network import Network, WorkerClients
from bench.virtual.router_wire import CodedRouter, RouterWire
from core import types as t
from core.config import DEFAULT_MODEL, ClusterConfig, load_config
from core.costs import StepCosts
from core.errors import ServingError
from core.ids import GatewayId, WorkerId, new_incarnation, new_request_id
from core.telemetry import Telemetry
from gateway.legs import Peers
from gateway.pipeline import Pipeline, PipelineLimits
from gateway.prompt_blocks import PromptBlocks
from gateway.reporter import Reporter
from gateway.run import Choice, Run
from gateway.stages import StageClock
from gateway.text import TextDelta
from gateway.token_streams import TokenStreams
from kvtransfer.backends.inproc import Fabric
from modelfiles.model import ModelFiles, open_model
from router.handler import RouterHandler

_REPORT_S = 1.0
_READY_S = 60.0
_MARGIN_S = 60.0
"""Beyond its deadline no request can be under way."""

open_files = cache(open_model)


class PlainText:
    """Tokens without text: what :class:`gateway.text.ChoiceText` is for the pipeline."""

    def append(
        self,
        token_ids: tuple[int, ...],
        logprobs: Any = (),
        *,
        finish_reason: t.FinishReason | None = None,
        **rest: Any,
    ) -> TextDelta:
        return TextDelta(token_ids=tuple(token_ids), finish_reason=finish_reason)

    def append_token(self, token_id: int) -> TextDelta:
        return TextDelta(token_ids=(token_id,))


class _Router:
    """As the network sees it."""

    def __init__(self, process: Process, handler: RouterHandler) -> None:
        self.process, self.worker_id = process, WorkerId("router")
        self.role = CodedRouter(handler)


class MockCluster:
    def __init__(
        self,
        costs: StepCosts,
        *overrides: str,
        prefill: int = 0,
        decode: int = 0,
        unified: int = 0,
        model: str = DEFAULT_MODEL,
        max_context: int | None = None,
    ) -> None:
        """Made within a running :class:`VirtualLoop`. ``overrides`` as for ``--set``. ``max_context`` instead of the
        model's own: nothing is computed that would mind."""
        self._max_context = max_context
        counts = {t.Role.PREFILL: prefill, t.Role.DECODE: decode, t.Role.UNIFIED: unified}
        counts = {role: number for role, number in counts.items() if number}
        pools = ", ".join(f"{role}: {{replicas: {number}}}" for role, number in counts.items())
        self.config: ClusterConfig = load_config(
            overrides=[
                f"models.0.name={model}",
                f"models.0.path={model}",
                f"models.0.pools={{{pools}}}",
                f"models.0.execution={{kind: mock, costs: {costs.model_dump_json()}}}",
                *overrides,
            ],
            environ={},
        )
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self._loop = loop
        self._listening: dict[str, Any] = {}
        self.network = Network(self._listening.get)
        self._start_router()
        telemetry = Telemetry(component="virtual")
        self.workers: dict[str, MockWorker] = {}
        for role, number in counts.items():
            for each in range(number):
                worker = MockWorker(
                    self.config,
                    role,
                    f"{role}-{each}",
                    costs=costs,
                    files=self._files,
                    network=self.network,
                    fabric=self._fabric,
                    router=self._router_address,
                    telemetry=telemetry,
                )
                self.workers[worker.worker_id] = self._listening[worker.address.address] = worker
        self.gateway = Process("gateway")
        self.gateway.run(self._start_gateway)

    @cached_property
    def _files(self) -> ModelFiles:
        """One for all workers: its tokenizer is read once."""
        files = open_files(self.config.models[0].path)
        if self._max_context is not None:
            files = copy(files)
            files.config = replace(files.config, max_context=self._max_context)
        return files

    def _start_router(self) -> None:
        self._fabric = Fabric()
        self.router = Process("router")
        self._router_address = t.WorkerAddress(
            worker_id=WorkerId("router"), incarnation=new_incarnation(), address="router:1"
        )

        def start() -> None:
            self.handler = RouterHandler(self.config, Telemetry(component="router"), self._loop)
            self.handler.start()

        self.router.run(start)
        self._listening[self._router_address.address] = _Router(self.router, self.handler)

    def _start_gateway(self) -> None:
        incarnation, gateway_id = new_incarnation(), GatewayId("gateway-0")
        clients = WorkerClients(self.network, self.gateway)
        self._router_wire = RouterWire(self.network, self.gateway, self._router_address)
        self.peers = Peers(clients, TokenStreams(clients, gateway_id, incarnation, self._loop))
        self.reporter = Reporter(self._router_wire, self._loop, gateway_id, incarnation)
        self.gateway.spawn(self.reporter.run(_REPORT_S), name="report")
        limits = PipelineLimits(
            max_attempts=self.config.gateway.limits.max_attempts,
            capacity_patience_s=self.config.router.placement_wait_s,
        )
        self.pipeline = Pipeline(self._router_wire, self.peers, limits)
        self._gateway_key = gateway_id, incarnation

    async def ready(self) -> None:
        """Until every worker has proven a hand-off and the router knows it."""
        async with asyncio.timeout(_READY_S):
            while sum(pool.ready for pool in (await self.handler.status()).pools) < len(self.workers):
                await asyncio.sleep(0.05)

    # -- requests -----------------------------------------------------------------------------------------------------

    async def play(self, conversations: Iterable[Conversation]) -> list[Sample]:
        """All to their ends; the samples in the order in which they ended. ``conversations`` in the order of their
        times; each is asked for when its time has come."""
        samples: list[Sample] = []
        began_at = self._loop.time()
        tasks: set[asyncio.Task[None]] = set()
        for conversation in conversations:
            await asyncio.sleep(began_at + conversation.at_s - self._loop.time())
            task = self.gateway.spawn(self._converse(conversation, began_at, samples))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        if tasks:
            await asyncio.wait(tasks)
        return samples

    async def _converse(self, conversation: Conversation, began_at: float, samples: list[Sample]) -> None:
        said = conversation.prefix
        for number, turn in enumerate(conversation.turns):
            if number:
                await asyncio.sleep(turn.think_s)
            said += turn.tokens
            sample = await self._ask(conversation, said, turn.max_tokens, began_at)
            samples.append(sample)
            if not sample.is_ok:
                return
            said += sample.answer

    async def _ask(
        self, conversation: Conversation, prompt: tuple[int, ...], max_tokens: int, began_at: float
    ) -> Sample:
        gateway_id, incarnation = self._gateway_key
        request = t.GenerateRequest(
            request_id=new_request_id(),
            model=self.config.models[0].name,
            prompt_token_ids=prompt,
            sampling=t.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
            choices=(t.ChoiceProgress(),),
            tenant=conversation.tenant,
            cache_salt=conversation.tenant,
            gateway_id=gateway_id,
            gateway_incarnation=incarnation,
            deadline_s=conversation.deadline_s,
            workload_class=conversation.label,
        )
        times: list[float] = []
        choice = Choice(0, PlainText())  # type: ignore[arg-type]
        choice.sink = lambda delta: times.append(self._loop.time()) if delta.token_ids else None
        blocks = PromptBlocks.of(prompt, block_size=self.config.models[0].kv.block_size, salt=conversation.tenant)
        run, outcome, sent_at = Run(request, [choice], StageClock(self._loop), blocks=blocks), OK, self._loop.time()
        try:
            async with asyncio.timeout(conversation.deadline_s + _MARGIN_S):
                try:
                    await self.pipeline.generate(run)
                finally:
                    self.reporter.add(run.record())
        except ServingError as error:
            outcome = error.slug
        except TimeoutError:
            outcome = "hung"
        placement = run.last_placement
        prefill = None if placement is None else placement.prefill
        return Sample(
            label=conversation.label,
            tenant=conversation.tenant,
            priority=conversation.priority,
            num_prompt_tokens=len(prompt),
            outcome=outcome,
            ttft_s=times[0] - sent_at if times else float("inf"),
            e2e_s=self._loop.time() - sent_at,
            itl_s=tuple(later - earlier for earlier, later in itertools.pairwise(times)),
            answer=tuple(choice.accepted),
            sent_s=sent_at - began_at,
            num_cached_tokens=run.num_cached_tokens,
            attempts=run.attempt,
            mode="" if placement is None else str(placement.mode),
            prefill_worker="" if prefill is None else prefill.worker_id,
            decode_worker="" if placement is None else placement.decode.worker_id,
            reason="" if placement is None else placement.reason,
        )

    # -- the end ------------------------------------------------------------------------------------------------------

    async def idle(self, *, within_s: float = 60.0) -> None:
        """Leases and their like end a moment after the answers. Raises AssertionError naming who holds something."""
        async with asyncio.timeout(within_s):
            while not all(worker.role.is_idle() for worker in self.workers.values()):
                await asyncio.sleep(0.1)
        for worker in self.workers.values():
            worker.check_idle()

    async def close(self) -> None:
        await self.gateway.spawn(self.peers.close())
        await self.gateway.bury()
        for worker in self.workers.values():
            await worker.end()
        await self.handler.close()
        await self.router.bury()
