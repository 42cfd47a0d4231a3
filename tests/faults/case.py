"""One case of the injector: a small cluster, a few requests, one to five faults, and the audit at its end."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from bench.virtual.loop import Process
from bench.virtual.network import DecodeWire, Pipe
from core import types as t
from core.errors import ServingError
from core.handoff import DigestKind, PeerInfo
from core.ids import GatewayId, HandoffId, Incarnation, RequestId
from engine.sequence import Sequence, SequenceKey
from gateway.pipeline import Pipeline
from kvtransfer.backends.base import Batch, Identity
from kvtransfer.backends.inproc import Fault
from kvtransfer.memory import REGION_KV
from tests.faults.audit import Audit, blocks_of
from tests.faults.faults_of_data import let_go
from tests.faults.injected import Injected
from tests.faults.kinds import KINDS, NEEDS_DIGESTS
from tests.support.virtual.cluster import Answer, Hooks, VirtualCluster, make_config
from tests.support.virtual.content_engine import SHAPE, VOCAB, answer_to
from tests.support.virtual.worker import VirtualWorker

_CONFIGS = {
    (kind, is_tight): make_config(digest=kind, held_fraction=0.5 if is_tight else 0.9, max_leases=2 if is_tight else 8)
    for kind in DigestKind
    for is_tight in (False, True)
}
_OVER_S, _IDLE_S, _DEADLINE_S = 60.0, 60.0, 20.0

DEFENCES = {
    "digest_mismatch": "digest",
    "stale_lease": "slot",
    "lease_expired": "lease",
    "layout_mismatch": "bounds",
    "peer_lost": "peer lost",
    "worker_lost": "peer lost",
    "stale_incarnation": "incarnation",
    "transfer_stalled": "time limit",
    "deadline_exceeded": "time limit",
    "backend_failed": "poll",
    "cancelled": "ended",
}
"""By the slug of the error that ended the attempt that was hit."""


def _prompts() -> list[tuple[int, ...]]:
    """Few, some with common beginnings: what they contain is computed once, and prefixes are shared."""
    rng = random.Random(7)
    stems = [tuple(rng.randrange(VOCAB) for _ in range(length)) for length in (0, 8, 13)]
    return [
        (*stem, *(rng.randrange(VOCAB) for _ in range(length)))
        for stem in stems
        for length in (1, 2, 4, 7, 12, 16, 21, 27)
    ]


PROMPTS = _prompts()


@dataclass(kw_only=True)
class CaseResult:
    seed: int
    faults: list[tuple[str, str]]
    """(kind, what became of it): ``missed`` (it never struck), ``no effect``, ``harmless`` or the defence."""
    damage: list[tuple[str, str]]
    num_requests: int = 0


class Case(Hooks):
    """One cluster, some requests, some faults."""

    def __init__(self, seed: int, kinds: Iterable[str] | None = None) -> None:
        self.seed = seed
        self.rng = rng = random.Random(seed)
        self.digest = rng.choices(list(DigestKind), weights=(2, 6, 1))[0]
        usable = [each for each in kinds or KINDS if self.digest is not DigestKind.OFF or each not in NEEDS_DIGESTS]
        self.kinds = [rng.choice(usable) for _ in range(rng.choice((1, 2, 3, 4, 5)))] if usable else []
        self.block_bytes = SHAPE.block_bytes
        self.context = copy_context()
        self.faults: list[Injected] = []
        self.is_quiet = False
        """Faults are over."""
        self.helpers: set[asyncio.Task[None]] = set()
        self.num_claims = 0
        self.strangers: list[tuple[VirtualWorker, SequenceKey]] = []
        """Sequences that the injector added to an engine."""

    # -- hooks --------------------------------------------------------------------------------------------------------

    def on_message(self, pipe: Pipe, message: Any) -> list[tuple[Any, float]]:
        if not self.is_quiet and pipe.name.startswith("handoff"):
            for fault in self.faults:
                deliveries = fault.on_message(pipe, message)
                if deliveries is not None:
                    return deliveries
        return [(message, 0.0)]

    def on_post(self, reader: Identity, peer: PeerInfo, batch: Batch) -> Fault | None:
        self.audit.on_post(reader, peer, batch)
        if self.is_quiet:
            return None
        worker = self.audit.worker(reader.incarnation)
        handoff = self._handoff_of(worker, batch)
        for fault in self.faults:
            applied = fault.on_post(worker, batch, handoff)
            if applied is not None:
                return applied
        return self._fault_of_hanging(peer)

    def _fault_of_hanging(self, peer: PeerInfo) -> Fault | None:
        """Memory of a stopped process can be read over some transports (cma), not over others (tcp)."""
        for worker, until, is_readable in self.hanging:
            if worker.incarnation == peer.incarnation and not is_readable and until > self.cluster.loop.time():
                fault = Fault(delay_polls=-1)
                self.later(until - self.cluster.loop.time(), partial(let_go, fault))
                return fault
        return None

    async def on_reach(self, worker: VirtualWorker, name: str) -> None:
        if not self.is_quiet:
            for fault in self.faults:
                fault.on_reach(worker, name)

    def on_wrong(self, worker: VirtualWorker, sequence: Sequence, index: int, block: int) -> None:
        self.audit.on_wrong(worker, sequence, index, block)

    def on_start(self, worker: VirtualWorker) -> None:
        self.audit.watch(worker)

    def on_gateway(self, pipeline: Pipeline) -> None:
        self.audit.watch_pipeline(pipeline)

    # -- what faults ask for ------------------------------------------------------------------------------------------

    def later(self, seconds: float, act: Callable[[], object]) -> None:
        self.cluster.loop.call_later(seconds, act, context=self.context.copy())

    def hang(self, worker: VirtualWorker, seconds: float, rng: random.Random) -> None:
        self.hanging.append((worker, self.cluster.loop.time() + seconds, rng.random() < 0.5))
        self.audit.renewals_were_disturbed = True
        self.cluster.stop(worker, seconds)

    def stop_orderly(self, worker: VirtualWorker) -> None:
        """As on SIGTERM with no time to drain. Whatever was under way, the worker owes nothing when it exits."""

        async def stop() -> None:
            worker.context.is_draining = True
            await worker.role.stop()
            worker.transfers.end()
            await asyncio.sleep(0.005)  # what was asked of the engine before is done between two steps
            for holder, key in self.strangers:
                if holder is worker:
                    worker.engine.remove(key)
            if not worker.engine.pool.counts().is_idle():
                self.audit.report("leak", f"{worker.process.name} stopped with {worker.engine.pool.counts()}")

        def exit_process(task: asyncio.Task[None]) -> None:
            self.later(0.0, lambda: self.cluster.kill(worker))
            self.later(1.0, lambda: self.replace_lost(worker))

        task = worker.process.spawn(stop(), name="orderly-stop")
        task.add_done_callback(exit_process)
        self.helpers.add(task)

    def replace_lost(self, worker: VirtualWorker) -> None:
        """The supervisor's work."""
        if worker.address.address not in self.cluster.listening:
            self.cluster.restart(worker)

    def holder_of(self, handoff: str) -> VirtualWorker | None:
        for worker in self.cluster.alive:
            if worker.role_name is t.Role.PREFILL and handoff in worker.role.exports._exports:
                return worker
        return None

    def cancel_client(self, handoff: str) -> None:
        for answer in self.cluster.answers:
            if handoff.startswith(f"{answer.request.request_id}-") and answer.task is not None:
                answer.task.cancel()

    @property
    def request_of(self) -> dict[RequestId, Answer]:
        return {answer.request.request_id: answer for answer in self.cluster.answers}

    def answer_of(self, request_id: RequestId) -> list[int]:
        request = self.request_of[request_id].request
        return answer_to(request.prompt_token_ids, request.sampling.max_tokens)

    def claim_again(self, handoff_id: HandoffId, holder: VirtualWorker, reader: VirtualWorker) -> None:
        self.num_claims += 1
        process = Process(f"claimant-{self.num_claims}")
        self.claimants.append(process)
        self.helpers.add(process.spawn(self._claim(process, handoff_id, holder, reader)))

    async def _claim(
        self, process: Process, handoff_id: HandoffId, holder: VirtualWorker, reader: VirtualWorker
    ) -> None:
        """Have ``reader`` fetch what ``holder`` holds for another attempt, as a second gateway would."""
        name, _, attempt = handoff_id.rpartition("-")
        original = self.request_of.get(RequestId(name))
        if original is None:
            return
        gateway = Incarnation(100 + self.num_claims)
        request = replace(
            original.request,
            attempt=int(attempt) + 10,
            gateway_incarnation=gateway,
            gateway_id=GatewayId(process.name),
            deadline_s=_DEADLINE_S,
            choices=tuple(
                t.ChoiceProgress(choice=each.number, accepted=tuple(original.tokens)) for each in original.run.choices
            ),
        )
        wire = DecodeWire(self.cluster.network, process, reader.address)
        tokens = {each.choice: list(each.accepted) for each in request.choices}
        unfinished = set(tokens)
        try:
            async with asyncio.timeout(_DEADLINE_S):
                async for outputs in wire.outputs(request.gateway_id, gateway):
                    if outputs == t.StepOutputs():
                        await wire.admit(
                            t.AdmitRequest(
                                request=request,
                                handoff_id=handoff_id,
                                mode=t.Mode.SPLIT,
                                worker_incarnation=reader.incarnation,
                                prefill=holder.address,
                            )
                        )
                    for chunk in outputs.chunks:
                        known = tokens[chunk.choice]
                        known += chunk.token_ids[max(0, len(known) - chunk.first_index) :]
                        unfinished -= {chunk.choice} if chunk.finish_reason is not None else set()
                    if not unfinished:
                        return
                    if outputs.failed:
                        return
        except (ServingError, TimeoutError):
            return
        finally:
            expected = self.answer_of(RequestId(name))
            if any(known != expected[: len(known)] for known in tokens.values()):
                self.audit.report("wrong answer", f"{handoff_id}: {tokens} for {expected}")

    # -- the case -----------------------------------------------------------------------------------------------------

    async def run(self) -> CaseResult:
        rng = self.rng
        self.audit = Audit()
        num_blocks = rng.choice((12, 16, 24))
        is_tight = num_blocks == 24 and rng.random() < 0.3
        cluster = VirtualCluster(config=_CONFIGS[self.digest, is_tight], hooks=self, seed=self.seed)
        self.cluster = self.audit.cluster = cluster
        self.hanging: list[tuple[VirtualWorker, float, bool]] = []
        self.claimants: list[Process] = []
        cluster.fabric.on_move = self.audit.on_move
        for role in ("prefill", "decode"):
            for number in range(rng.choice((1, 2))):
                cluster.start(f"{role}-{number}", num_blocks=num_blocks, num_cells=rng.choice((1, 2, 8)))
        for kind in self.kinds:
            self.faults.append(KINDS[kind](kind, self, random.Random(rng.random())))
        for _ in range(rng.choice((1, 2, 3))):
            self._ask(deadline_s=rng.choice((_DEADLINE_S,) * 6 + (0.01, 0.1, 1.5)), n=rng.choice((1, 1, 1, 2, 3)))
            await asyncio.sleep(rng.choice((0.0, 0.001, 0.01)))
        await cluster.until(lambda: all(answer.is_over for answer in cluster.answers), _OVER_S)
        await self._calm_down()
        self.audit.check_answers()
        self.audit.check_idle()
        self.audit.check_transfers()
        result = self._result()
        await cluster.close()
        for process in self.claimants:
            await process.bury()
        return result

    def _ask(self, deadline_s: float = _DEADLINE_S, n: int = 1) -> Answer:
        rng = self.rng
        return self.cluster.ask(rng.choice(PROMPTS), max_tokens=rng.randrange(1, 6), deadline_s=deadline_s, n=n)

    async def _calm_down(self) -> None:
        """No more faults: whatever hangs goes on, whoever died is replaced. Then one more request is answered, and
        everything is given back."""
        cluster = self.cluster
        self.is_quiet = True
        self.cluster.gateway.go_on()
        for worker, _, _ in self.hanging:
            if not worker.process.is_killed:
                worker.process.go_on()
        for worker in list(cluster.workers):
            self.replace_lost(worker)
        cluster.fabric.resume()
        await cluster.until(lambda: all(task.done() for task in self.helpers), _IDLE_S)
        await asyncio.sleep(1.0)
        last = self._ask()
        await cluster.until(lambda: last.is_over, _OVER_S)
        if last.error is not None:
            self.audit.report("lost", f"{last.error.slug}: {last.error.message}")
        await cluster.until(lambda: all(worker.is_idle() for worker in cluster.alive), _IDLE_S)

    def _handoff_of(self, worker: VirtualWorker, batch: Batch) -> str:
        """Which hand-off an operation belongs to; empty for probes."""
        if batch.local_region == REGION_KV:
            return self.audit.handoff_of.get((worker.incarnation, blocks_of(batch, self.block_bytes)[0]), "")
        loop = worker.transfers._loop
        for work in loop._active:
            if work.transfer is not None and work.cell is not None and work.cell * 64 == batch.copies[0].local_offset:
                blocks = worker.custody._blocks[work.transfer.transfer_id]
                return self.audit.handoff_of.get((worker.incarnation, blocks[0]), "") if blocks else ""
        return ""

    def _result(self) -> CaseResult:
        return CaseResult(
            seed=self.seed,
            faults=[(fault.kind, self._fate(fault)) for fault in self.faults],
            damage=self.audit.damage,
            num_requests=len(self.cluster.answers),
        )

    def _fate(self, fault: Injected) -> str:
        if not fault.has_struck:
            return "missed"
        if not fault.took_effect:
            return "no effect"
        if fault.handoff in self.audit.quarantined:
            return "custody"
        if fault.handoff is not None:
            slug = self.audit.failures.get(fault.handoff)
        else:
            slug = next(iter(self.audit.failures.values()), None)
        return "harmless" if slug is None else DEFENCES.get(slug, slug)
