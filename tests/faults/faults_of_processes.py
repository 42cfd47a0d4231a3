"""Processes that die, hang and return; clients that leave; second claims; a writer that goes on."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

from core import types as t
from engine.sequence import Sequence, SequenceKey
from tests.faults.injected import AtAnyEvent, Injected
from tests.support.virtual.content_engine import BLOCK_SIZE
from tests.support.virtual.worker import VirtualWorker

if TYPE_CHECKING:
    from tests.faults.case import Case


class ProcessFault(AtAnyEvent):
    def __init__(self, kind: str, case: Case, rng: random.Random, role: t.Role, what: str) -> None:
        super().__init__(kind, case, rng)
        self._role, self._what = role, what

    def strike(self) -> None:
        cluster, rng = self.case.cluster, self.rng
        candidates = [each for each in cluster.alive if each.role_name is self._role and not each.process.is_stopped]
        if not candidates:
            self.took_effect = False
            return
        worker = rng.choice(candidates)
        match self._what:
            case "dies":
                cluster.kill(worker)
                self.case.later(rng.choice((0.6, 2.0)), lambda: self.case.replace_lost(worker))
            case "returns":
                cluster.restart(worker)
            case "hangs":
                self.case.hang(worker, rng.choice((0.01, 0.2, 1.0, 3.0, 8.0)), rng)
            case "stops":
                self.case.stop_orderly(worker)
            case "twice":  # taken for dead while it hung; wakes up beside its successor
                self.case.hang(worker, rng.choice((0.5, 4.0)), rng)
                cluster.start(worker.worker_id, num_blocks=worker.num_blocks, num_cells=worker.scratch.num_cells)
                self.case.later(10.0, lambda: cluster.kill(worker))


class GatewayFault(AtAnyEvent):
    """Whoever asked for the requests is gone, or silent for a while."""

    def __init__(self, kind: str, case: Case, rng: random.Random, what: str) -> None:
        super().__init__(kind, case, rng)
        self._what = what

    def strike(self) -> None:
        if self._what == "dies":
            self.case.cluster.restart_gateway()
        else:
            self.case.cluster.stop_gateway(self.rng.choice((0.2, 1.0, 4.0)))


class ClientGone(AtAnyEvent):
    def strike(self) -> None:
        running = [answer for answer in self.case.cluster.answers if not answer.is_over]
        self.took_effect = bool(running)
        if running:
            answer = self.rng.choice(running)
            self.handoff = f"{answer.request.request_id}-{answer.run.attempt}"
            assert answer.task is not None
            answer.task.cancel()


class SecondClaim(Injected):
    """Another D claims the hand-off with a higher attempt; what the first one says of it counts no more."""

    def __init__(self, kind: str, case: Case, rng: random.Random) -> None:
        super().__init__(kind, case, rng)
        self._at = rng.choice(("decode.opened", "decode.granted", "decode.fetched", "prefill.seal", "prefill.sealed"))

    def on_reach(self, worker: VirtualWorker, name: str) -> None:
        if name == self._at and self._is_due():
            self._soon(self._strike)

    def _strike(self) -> None:
        cluster = self.case.cluster
        held = [
            (worker, export)
            for worker in cluster.alive
            if worker.role_name is t.Role.PREFILL
            for export in worker.role.exports._exports.values()
        ]
        readers = [each for each in cluster.alive if each.role_name is t.Role.DECODE]
        self.took_effect = bool(held and readers)
        if self.took_effect:
            holder, export = self.rng.choice(held)
            self.handoff = export.handoff_id
            self.case.claim_again(export.handoff_id, holder, self.rng.choice(readers))


class WriterGoesOn(Injected):
    """P continues a sequence whose blocks are held for a reader, tail included."""

    def on_reach(self, worker: VirtualWorker, name: str) -> None:
        if name == "prefill.sealed" and self._is_due():
            worker.process.spawn(self._go_on(worker), name="goes-on")

    async def _go_on(self, worker: VirtualWorker) -> None:
        request = self.case.request_of
        exports = [
            export
            for export in worker.role.exports._exports.values()
            if export.grant is not None and export.num_tokens % BLOCK_SIZE and export.request_id in request
        ]
        self.took_effect = bool(exports)
        if not exports:
            return
        export = self.rng.choice(exports)
        self.handoff = export.handoff_id
        asked = request[export.request_id].request
        blocks = list(export.grant.block_ids)
        tokens = [*asked.prompt_token_ids, *self.case.answer_of(export.request_id)][: export.num_tokens + 1]
        sequence = Sequence(
            key=SequenceKey(request_id=t.RequestId(f"{export.handoff_id}-goes-on"), attempt=self.number, choice=0),
            sampling=replace(asked.sampling, max_tokens=len(tokens) - asked.num_prompt_tokens + 3),
            tokens=tokens,
            num_prompt_tokens=asked.num_prompt_tokens,
            num_computed=export.num_tokens,
            block_table=blocks,
        )
        self.case.strangers.append((worker, sequence.key))
        worker.engine.pool.share(blocks)
        await worker.steps.call(lambda engine: engine.add(sequence))
