"""The one scheduler: each step hands out a token budget so that what is computed catches up with what each sequence
has.

It knows no prefill and no decode. Chunked prefill, continuous batching, local prefill, sequences that arrive with
their KV and recompute after preemption are the same arithmetic (:mod:`engine.sequence`).

One call of :meth:`Scheduler.schedule`:

1. Running sequences, oldest first, get the blocks that all their tokens need. When there are none left, younger ones
   that wait with a part of what they need lose it; then the youngest running sequence is preempted: it gives its
   blocks back and starts over. The oldest is never a victim of others, so the work always advances and preemption
   cannot become a livelock.
2. Waiting sequences start in order of arrival, each with blocks for all it has. A head of the line that finds no
   room holds a *claim*: blocks that come free are promised to it, so it cannot starve. Behind it only those may start
   whose blocks are theirs already (KV that arrived, a reservation): they take nothing from it.
3. The budget: first one token for each sequence that has just one pending (nobody's answer waits for another's
   prompt), then the rest, oldest first, as far as it goes. ``max_sequences <= max_step_tokens``, so the oldest prompt
   always advances.
"""

from bisect import insort
from dataclasses import dataclass

from core.errors import OutOfBlocks, ServingError
from engine.block_pool import BlockPool, Reservation
from engine.sequence import Sequence, SequenceState


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """``num_tokens`` pending tokens of one sequence, from position ``start``, to be computed in this step."""

    sequence: Sequence
    start: int
    num_tokens: int

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def is_sampled(self) -> bool:
        """Nothing will be pending afterwards: the next token is drawn from the last row."""
        return self.end == len(self.sequence.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    chunks: tuple[Chunk, ...] = ()
    failed: tuple[tuple[Sequence, ServingError], ...] = ()
    """Sequences that could never fit; already finished, their blocks free."""
    num_preempted: int = 0


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival


class Scheduler:
    """Owns the queues and the blocks of the sequences in them. Not thread-safe: it belongs to the step thread."""

    def __init__(self, pool: BlockPool, *, block_size: int, max_step_tokens: int, max_sequences: int) -> None:
        assert 1 <= max_sequences <= max_step_tokens, "a step has a token for every running sequence"
        self._pool = pool
        self._block_size = block_size
        self._max_step_tokens = max_step_tokens
        self._max_sequences = max_sequences
        self._num_arrivals = 0
        self._claim: tuple[Sequence, Reservation] | None = None
        self.running: list[Sequence] = []
        """By arrival."""
        self.waiting: list[Sequence] = []
        """By arrival."""

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, sequence: Sequence) -> None:
        """Take a sequence and the blocks it brings."""
        assert sequence.state in (SequenceState.NEW, SequenceState.PAUSED), f"cannot add a {sequence.state} sequence"
        assert sequence.num_pending > 0, "nothing to compute"
        assert len(sequence.block_table) >= self._blocks_for(sequence.num_computed), "computed tokens without blocks"
        if sequence.arrival < 0:
            sequence.arrival = self._num_arrivals
            self._num_arrivals += 1
        sequence.state = SequenceState.WAITING
        insort(self.waiting, sequence, key=_arrival)

    def park(self, sequence: Sequence) -> None:
        """Take a running sequence out of the steps; it keeps its blocks."""
        self.running.remove(sequence)
        sequence.state = SequenceState.PAUSED

    def finish(self, sequence: Sequence) -> None:
        """End a sequence in whatever state; its blocks, reservation and claim are given back."""
        if sequence.state is SequenceState.RUNNING:
            self.running.remove(sequence)
        elif sequence.state is SequenceState.WAITING:
            self.waiting.remove(sequence)
        self._give_back(sequence)
        sequence.state = SequenceState.FINISHED

    def schedule(self) -> Schedule:
        """What the next step computes. Every chunk's blocks are in its sequence's table."""
        failed: list[tuple[Sequence, ServingError]] = []
        num_preempted = self._extend_running(failed)
        self._start_waiting(failed)
        return Schedule(chunks=self._spend_budget(), failed=tuple(failed), num_preempted=num_preempted)

    # -- 1. blocks for the running ------------------------------------------------------------------------------------

    def _extend_running(self, failed: list[tuple[Sequence, ServingError]]) -> int:
        num_preempted = 0
        for sequence in tuple(self.running):
            if sequence.state is not SequenceState.RUNNING:
                continue  # preempted for an older one a moment ago
            missing = self._missing_blocks(sequence)
            if missing <= 0:
                continue
            error = self._never_fits(sequence)
            if error is not None:
                self.finish(sequence)
                failed.append((sequence, error))
                continue
            while True:
                try:
                    sequence.block_table += self._pool.allocate(missing, sequence.reservation)
                    break
                except OutOfBlocks:
                    if self._take_from_waiting(sequence):
                        continue
                victim = self.running[-1]
                self._preempt(victim)
                num_preempted += 1
                if victim is sequence:
                    break
        return num_preempted

    def _take_from_waiting(self, older: Sequence) -> bool:
        """Take blocks from one waiting sequence younger than ``older`` that cannot start. False when there is none.

        Without this, sequences that wait with a part of what they need could block each other for ever.
        """
        if self._claim is not None and self._claim[0].arrival > older.arrival:
            self._drop_claim()
            return True
        for sequence in reversed(self.waiting):
            if sequence.arrival <= older.arrival:
                return False
            holds = bool(sequence.block_table) or self._promised_blocks(sequence) > 0
            if holds and self._missing_blocks(sequence) > self._promised_blocks(sequence):
                self._start_over(sequence)
                return True
        return False

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._start_over(sequence)
        sequence.num_preemptions += 1
        sequence.state = SequenceState.WAITING
        insort(self.waiting, sequence, key=_arrival)

    def _start_over(self, sequence: Sequence) -> None:
        self._give_back(sequence)
        sequence.num_computed = 0

    # -- 2. starting the waiting --------------------------------------------------------------------------------------

    def _start_waiting(self, failed: list[tuple[Sequence, ServingError]]) -> None:
        self._start_those_that_fit(failed)
        while self.waiting and not self.running and self._take_from_waiting(self.waiting[0]):
            self._start_those_that_fit(failed)

    def _start_those_that_fit(self, failed: list[tuple[Sequence, ServingError]]) -> None:
        is_blocked = False
        for sequence in tuple(self.waiting):
            if len(self.running) >= self._max_sequences:
                return
            error = self._never_fits(sequence)
            if error is not None:
                self.finish(sequence)
                failed.append((sequence, error))
                continue
            missing = max(0, self._missing_blocks(sequence))
            unpromised = max(0, missing - self._promised_blocks(sequence))
            if unpromised and (is_blocked or not self._claim_blocks(sequence, unpromised)):
                is_blocked = True
                continue
            sequence.block_table += self._pool.allocate(missing - unpromised, sequence.reservation)
            if unpromised:
                assert self._claim is not None
                sequence.block_table += self._pool.allocate(unpromised, self._claim[1])
                self._drop_claim()
            self.waiting.remove(sequence)
            sequence.state = SequenceState.RUNNING
            insort(self.running, sequence, key=_arrival)

    def _claim_blocks(self, sequence: Sequence, num_blocks: int) -> bool:
        """Promise ``num_blocks`` to the head of the line, as far as there are any. True when it may start.

        It may when one more block for each running sequence that still grows would be left; otherwise the next step
        would preempt it for them at once.
        """
        if self._claim is not None and self._claim[0] is not sequence:
            self._drop_claim()
        if self._claim is None:
            self._claim = (sequence, self._pool.reserve(0))
        num_growing = sum(1 for other in self.running if other.can_grow)
        return self._claim[1].grow(num_blocks) and self._pool.num_unpromised >= num_growing

    def _drop_claim(self) -> None:
        if self._claim is not None:
            self._claim[1].release()
            self._claim = None

    # -- 3. the budget ------------------------------------------------------------------------------------------------

    def _spend_budget(self) -> tuple[Chunk, ...]:
        budget = self._max_step_tokens
        chunks: list[Chunk] = []
        for sequence in sorted(self.running, key=lambda each: (each.num_pending > 1, each.arrival)):
            num_tokens = min(sequence.num_pending, budget)
            if num_tokens == 0:
                break
            budget -= num_tokens
            chunks.append(Chunk(sequence=sequence, start=sequence.num_computed, num_tokens=num_tokens))
        return tuple(chunks)

    # -- blocks -------------------------------------------------------------------------------------------------------

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _missing_blocks(self, sequence: Sequence) -> int:
        return self._blocks_for(len(sequence.tokens)) - len(sequence.block_table)

    def _promised_blocks(self, sequence: Sequence) -> int:
        return sequence.reservation.remaining if sequence.reservation is not None else 0

    def _never_fits(self, sequence: Sequence) -> OutOfBlocks | None:
        needed = self._blocks_for(len(sequence.tokens))
        if needed <= self._pool.num_blocks:
            return None
        return OutOfBlocks(
            f"{len(sequence.tokens)} tokens need {needed} KV blocks of {self._block_size} tokens, "
            f"this worker has {self._pool.num_blocks}; raise models[].kv.num_blocks or memory_bytes"
        )

    def _give_back(self, sequence: Sequence) -> None:
        self._pool.free(sequence.block_table)
        sequence.block_table = []
        if sequence.reservation is not None:
            sequence.reservation.release()
        if self._claim is not None and self._claim[0] is sequence:
            self._drop_claim()
