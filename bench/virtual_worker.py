"""A worker in virtual time: the engine's own scheduler, block pool and prefix cache, and steps that take what a cost
table says. For :mod:`bench.virtual_cell`.
"""

import heapq
import itertools
import random
from collections.abc import Callable

from core.config import ClusterConfig
from core.costs import StepCosts, StepWork
from core.ids import Incarnation, WorkerId
from core.types import ModelRecord, Role, WorkerLoad, WorkerRegistration, WorkerState
from engine.block_pool import BlockPool
from engine.block_table import BlockTables
from engine.scheduler import Chunk, Limits, Scheduler, work_of
from engine.sequence import Sequence, SequenceKey
from worker.samples import SampleLog

RETRY_S = 0.05
"""Whoever finds no room looks again after this."""
BLOCK_BYTES = 1 << 16


class Timeline:
    """What happens when. Also the :class:`core.clock.Clock` of everything in the cell."""

    def __init__(self) -> None:
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def now(self) -> float:
        return self._now

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._now + max(0.0, seconds), next(self._numbers), event))

    def step(self) -> None:
        self._now, _, event = heapq.heappop(self._events)
        event()


class VirtualWorker:
    """One worker: steps follow each other while there is work."""

    def __init__(
        self,
        config: ClusterConfig,
        role: Role,
        number: int,
        costs: StepCosts,
        *,
        timeline: Timeline,
        choose: random.Random,
        noise: Callable[[], float],
    ) -> None:
        """The first model of ``config``. ``noise`` is a factor of the next step."""
        model = config.models[0]
        pool, kv = model.pools[role], model.kv
        self.role, self.costs = role, costs
        """The costs may be replaced at any time."""
        self.pool = BlockPool(int(kv.num_blocks))
        self._tables = BlockTables(
            self.pool, block_size=kv.block_size, copy_block=lambda source, target, slots: None, is_caching=True
        )
        limits = Limits(
            max_step_tokens=pool.max_step_tokens,
            max_sequences=pool.max_sequences,
            max_mixed_tokens=pool.max_mixed_tokens,
            projected_tokens=config.worker.projected_tokens,
        )
        self.scheduler = Scheduler(self.pool, self._tables, limits)
        self.samples = SampleLog()
        self.registration = WorkerRegistration(
            worker_id=WorkerId(f"{role}-{number}"),
            incarnation=Incarnation(choose.getrandbits(63) | 1),
            role=role,
            model=ModelRecord(
                name=model.name, format_hash="virtual", block_size=kv.block_size, max_context=1 << 20, vocab_size=2000
            ),
            address=f"{role}-{number}:1",
            http_address="",
            pid=0,
            hostname="virtual",
            num_blocks=self.pool.num_blocks,
            block_bytes=BLOCK_BYTES,
            max_sequences=pool.max_sequences,
            max_step_tokens=pool.max_step_tokens,
            transfer_backend="virtual",
            max_mixed_tokens=pool.max_mixed_tokens,
            is_caching=kv.prefix_cache,
        )
        self.is_fetching_until = 0.0
        """Transfers of one worker take turns."""
        self._timeline, self._choose, self._noise = timeline, choose, noise
        self._is_stepping = False
        self._on_token: dict[SequenceKey, Callable[[Sequence], None]] = {}

    @property
    def key(self) -> tuple[WorkerId, Incarnation]:
        return self.registration.worker_id, self.registration.incarnation

    def run(self, sequence: Sequence, on_token: Callable[[Sequence], None]) -> None:
        """``on_token`` is called after each new token; it ends or parks the sequence when it is time."""
        self._on_token[sequence.key] = on_token
        self.scheduler.add(sequence)
        self._turn()

    def end(self, sequence: Sequence) -> None:
        self._on_token.pop(sequence.key, None)
        self.scheduler.finish(sequence)

    def load(self) -> WorkerLoad:
        scheduler = self.scheduler
        sequences = (*scheduler.running, *scheduler.waiting)
        return WorkerLoad(
            state=WorkerState.READY,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            queued_prompt_tokens=sum(max(0, each.num_prompt_tokens - each.num_computed) for each in sequences),
            blocks=self.pool.counts(),
        )

    def _turn(self) -> None:
        if self._is_stepping or not self.scheduler.has_work:
            return
        chunks = self.scheduler.schedule().chunks
        if not chunks:
            self._timeline.after(RETRY_S, self._turn)
            return
        self._is_stepping = True
        work = work_of(chunks)
        seconds = self.costs.step_s(work) * self._noise()
        self._timeline.after(seconds, lambda: self._finish(chunks, work, seconds))

    def _finish(self, chunks: tuple[Chunk, ...], work: StepWork, seconds: float) -> None:
        self._is_stepping = False
        self.samples.add_step(work, seconds)
        sampled = [chunk.sequence for chunk in chunks if chunk.is_sampled]
        for chunk in chunks:
            self.scheduler.complete(chunk)
        for sequence in sampled:
            sequence.tokens.append(self._choose.randrange(300, 2000))
            self._on_token[sequence.key](sequence)
        self._turn()
