"""A cluster in one thread and in virtual time: the product's gateway pipeline, prefill and decode roles, with a plain
router between them. Whoever injects faults overrides the hooks of :class:`Hooks`."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bench.virtual.cluster import PlainText
from bench.virtual.loop import Process, VirtualLoop
from bench.virtual.network import HandoffWire, Network, Pipe, WorkerClients
from core import types as t
from core.config import ClusterConfig, parse_config
from core.errors import NoWorker, ServingError, WorkerLost
from core.handoff import DigestKind, PeerInfo
from core.ids import GatewayId, HandoffId, Incarnation, PlacementId, RequestId, WorkerId
from core.telemetry import Telemetry
from engine.sequence import Sequence
from gateway.legs import Peers
from gateway.pipeline import Pipeline, PipelineLimits
from gateway.run import Choice, Run
from gateway.stages import StageClock
from gateway.token_streams import TokenStreams
from kvtransfer.backends.base import Batch, Identity
from kvtransfer.backends.inproc import Fabric, Fault
from tests.support.virtual.worker import VirtualWorker

NOTICE_S = 0.5
"""Until the router knows that a worker is gone."""
_TELEMETRY = Telemetry(component="virtual")


class Hooks:
    """What may go wrong, and who watches. The default is that nothing does."""

    def on_message(self, pipe: Pipe, message: Any) -> list[tuple[Any, float]]:
        return [(message, 0.0)]

    def on_post(self, reader: Identity, peer: PeerInfo, batch: Batch) -> Fault | None:
        return None

    async def on_reach(self, worker: VirtualWorker, name: str) -> None:
        pass

    def on_wrong(self, worker: VirtualWorker, sequence: Sequence, index: int, block: int) -> None:
        raise AssertionError(f"{worker.worker_id} would have attended to a wrong block {block} (place {index})")

    def on_start(self, worker: VirtualWorker) -> None:
        pass

    def on_gateway(self, pipeline: Pipeline) -> None:
        pass


def make_config(
    *, digest: DigestKind = DigestKind.WSUM64, held_fraction: float = 0.9, max_leases: int = 8
) -> ClusterConfig:
    """Times are short: a case lasts some seconds."""
    return parse_config(
        {
            "models": [{"name": "m", "pools": {"prefill": {}, "decode": {}}}],
            "router": {"mode": "split"},
            "worker": {"projected_tokens": 4},
            "transfer": {
                "backend": "inproc",
                "lease_s": 3.0,
                "renew_s": 1.0,
                "stall_s": 1.5,
                "handshake_s": 1.0,
                "circuit_open_s": 0.2,
                "digest": str(digest),
                "held_fraction": held_fraction,
                "max_leases": max_leases,
            },
        }
    )


@dataclass(kw_only=True, eq=False)
class Answer:
    """One request as its client sees it."""

    request: t.GenerateRequest
    run: Run
    error: ServingError | None = None
    is_over: bool = False
    task: asyncio.Task[None] | None = None

    @property
    def tokens(self) -> list[int]:
        return list(self.run.choices[0].accepted)


@dataclass(kw_only=True)
class VirtualRouter:
    """Places on workers that it knows, avoiding those that are blamed."""

    cluster: VirtualCluster
    known: dict[WorkerId, VirtualWorker] = field(default_factory=dict)
    num_placements: int = 0
    share_local: float = 0.0
    """Of the requests whose decode worker is to read the prompt."""

    async def place(self, request: t.PlaceRequest) -> t.Placement:
        rng = self.cluster.rng
        for _ in range(40):
            usable = [
                each
                for each in self.known.values()
                if (each.worker_id, each.incarnation) not in request.excluded_workers
            ]
            pairs = [
                (p, d)
                for p in usable
                if p.role_name is t.Role.PREFILL
                for d in usable
                if d.role_name is t.Role.DECODE
                and (p.worker_id, p.incarnation, d.worker_id, d.incarnation) not in request.excluded_pairs
                and (p.worker_id, p.incarnation) not in d.context.pairs.broken()
            ]
            held = request.held
            holding = [(p, d) for p, d in pairs if held is not None and p.address == held.holder]
            if pairs:
                prefill, decode = rng.choice(holding or pairs)
                self.num_placements += 1
                if not holding and rng.random() < self.share_local:
                    return t.Placement(
                        placement_id=PlacementId(f"p{self.num_placements}"),
                        handoff_id=HandoffId(""),
                        mode=t.Mode.LOCAL,
                        decode=decode.address,
                    )
                handoff_id = HandoffId(f"{request.request_id}-{request.attempt}")
                return t.Placement(
                    placement_id=PlacementId(f"p{self.num_placements}"),
                    handoff_id=held.handoff_id if held is not None and holding else handoff_id,
                    mode=t.Mode.SPLIT,
                    decode=decode.address,
                    prefill=prefill.address,
                    is_held=bool(holding),
                )
            await asyncio.sleep(0.1)
        raise NoWorker("no pair is left")

    async def end_placement(self, end: t.PlacementEnd) -> None:
        pass

    async def report_gateway(self, report: t.GatewayReport) -> t.ClusterView:
        raise NotImplementedError

    async def close(self) -> None:
        pass


class VirtualCluster:
    """Made within a running :class:`VirtualLoop`."""

    def __init__(self, *, config: ClusterConfig, hooks: Hooks, seed: int) -> None:
        self.config = config
        self.hooks = hooks
        self.rng = random.Random(seed)
        self.loop: VirtualLoop = asyncio.get_running_loop()  # type: ignore[assignment]
        self.fabric = Fabric()
        self.fabric.on_post = lambda reader, peer, batch: self.hooks.on_post(reader, peer, batch)
        self.listening: dict[str, VirtualWorker] = {}
        self.workers: list[VirtualWorker] = []
        """All that ever lived."""
        self.network = Network(self.listening.get)
        self.network.on_message = lambda pipe, message: self.hooks.on_message(pipe, message)
        self.router = VirtualRouter(cluster=self)
        self.answers: list[Answer] = []
        self._num_started = 0
        self._num_gateways = 0
        self._lost_gateways: list[Process] = []
        self._start_gateway()

    def _start_gateway(self) -> None:
        self._num_gateways += 1
        self.gateway = Process(f"gateway/{self._num_gateways}")
        self.gateway.run(self._make_gateway)

    def _make_gateway(self) -> None:
        clients = WorkerClients(self.network, self.gateway)
        streams = TokenStreams(clients, GatewayId("g"), Incarnation(self._num_gateways), self.loop)
        self.peers = Peers(clients, streams)
        limits = PipelineLimits(max_attempts=4, capacity_patience_s=5.0)
        self.pipeline = Pipeline(self.router, self.peers, limits)
        self.hooks.on_gateway(self.pipeline)

    def restart_gateway(self) -> None:
        """It is killed, its clients are lost with it, and another one takes its place."""
        self.gateway.kill()
        self.network.lose(self.gateway)
        self._lost_gateways.append(self.gateway)
        for answer in self.answers:
            if not answer.is_over:
                answer.is_over, answer.error = True, WorkerLost("the gateway was killed")
        self._start_gateway()

    def stop_gateway(self, seconds: float) -> None:
        gateway = self.gateway
        self.network.stop(gateway)
        self.loop.call_later(seconds, lambda: gateway.is_killed or gateway.go_on())

    # -- workers ------------------------------------------------------------------------------------------------------

    def start(self, worker_id: str, *, num_blocks: int, num_cells: int = 8) -> VirtualWorker:
        self._num_started += 1
        role = t.Role.PREFILL if worker_id.startswith("prefill") else t.Role.DECODE
        address = t.WorkerAddress(
            worker_id=WorkerId(worker_id), incarnation=Incarnation(1000 + self._num_started), address=f"{worker_id}:1"
        )
        worker = VirtualWorker(
            config=self.config,
            role=role,
            address=address,
            fabric=self.fabric,
            num_blocks=num_blocks,
            num_cells=num_cells,
            telemetry=_TELEMETRY,
            reach=lambda worker, name: self.hooks.on_reach(worker, name),
            on_wrong=lambda *wrong: self.hooks.on_wrong(*wrong),
            dial=lambda worker, to: HandoffWire(self.network, worker, to),
        )
        self.workers.append(worker)
        self.listening[address.address] = worker
        self.router.known[worker.worker_id] = worker
        self.hooks.on_start(worker)
        return worker

    def kill(self, worker: VirtualWorker) -> None:
        """SIGKILL: nothing of it runs any more, its memory is not to be had, its connections break."""
        if worker.process.is_killed:
            return
        worker.process.kill()
        self.fabric.kill(worker.agent_name)
        if self.listening.get(worker.address.address) is worker:
            del self.listening[worker.address.address]
        self.network.lose(worker.process)
        self.loop.call_later(NOTICE_S, self._forget, worker)

    def restart(self, worker: VirtualWorker) -> VirtualWorker:
        """A new incarnation at the same address."""
        self.kill(worker)
        return self.start(worker.worker_id, num_blocks=worker.num_blocks, num_cells=worker.scratch.num_cells)

    def stop(self, worker: VirtualWorker, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after ``seconds``."""
        if worker.process.is_stopped:
            return
        self.network.stop(worker.process)
        self.loop.call_later(seconds, self._go_on, worker)

    def _go_on(self, worker: VirtualWorker) -> None:
        if not worker.process.is_killed:
            worker.process.go_on()

    def _forget(self, worker: VirtualWorker) -> None:
        if self.router.known.get(worker.worker_id) is worker:
            del self.router.known[worker.worker_id]

    @property
    def alive(self) -> list[VirtualWorker]:
        return [worker for worker in self.workers if not worker.process.is_killed]

    # -- requests -----------------------------------------------------------------------------------------------------

    def ask(self, prompt: tuple[int, ...], *, max_tokens: int, deadline_s: float = 30.0, n: int = 1) -> Answer:
        request = t.GenerateRequest(
            request_id=RequestId(f"r{len(self.answers)}"),
            model="m",
            prompt_token_ids=prompt,
            sampling=t.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, n=n),
            gateway_id=GatewayId("g"),
            gateway_incarnation=Incarnation(self._num_gateways),
            deadline_s=deadline_s,
        )
        choices = [Choice(number, PlainText()) for number in range(n)]  # type: ignore[arg-type]
        run = Run(request, choices, StageClock(self.loop))
        answer = Answer(request=request, run=run)
        self.answers.append(answer)
        answer.task = self.gateway.spawn(self._drive(answer), name=request.request_id)
        return answer

    async def _drive(self, answer: Answer) -> None:
        try:
            await self.pipeline.generate(answer.run)
        except ServingError as error:
            answer.error = error
        finally:
            answer.is_over = True

    # -- the end ------------------------------------------------------------------------------------------------------

    async def until(self, condition: Callable[[], bool], within_s: float) -> bool:
        """False when it does not come true within that time."""
        ends_at = self.loop.time() + within_s
        pause_s = 0.01
        while not condition():
            if self.loop.time() >= ends_at:
                return False
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.25)
        return True

    async def close(self) -> None:
        """Nothing is left afterwards: no task, no timer that matters, no memory."""
        for worker in self.workers:
            if worker.process.is_killed:
                await worker.process.bury()
        for gateway in self._lost_gateways:
            await gateway.bury()
        await self.gateway.spawn(self.peers.close())
        await self.gateway.bury()
        for worker in self.workers:
            if not worker.process.is_killed:
                await worker.end()
