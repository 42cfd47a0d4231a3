"""The one scheduler: each step hands out a token budget so that what is computed catches up with what each sequence
has.

It knows no prefill and no decode. Chunked prefill, continuous batching, prefix hits, local prefill, sequences that
arrive with their KV and recompute after preemption are the same arithmetic (:mod:`engine.sequence`).

Everything goes by *rank*: arrival under the policy ``fcfs``, priority (lower first) and then arrival under
``priority``. One call of :meth:`Scheduler.schedule`:

1. Running sequences, first by rank, get the blocks that all their tokens need. When there are none left, sequences
   behind them that wait with a part of what they need lose it; then the last running sequence (lowest priority, then
   youngest) is preempted: it gives its blocks back and starts over. The first is never a victim of others, so the work
   always advances and preemption cannot become a livelock.
2. Waiting sequences start in order of rank, each with blocks for all it has, and only while what the running ones are
   projected to grow by stays free: otherwise it would be preempted for them at once. A head of the line that finds no
   room holds a *claim*: blocks that come free are promised to it, so it cannot starve. Behind it only those may start
   whose blocks are theirs already (KV that arrived, a reservation): they take nothing from it.
3. The budget: first one token for each sequence that has just one pending (nobody's answer waits for another's
   prompt), then the rest by rank, as far as it goes, and beside answers at most ``max_mixed_tokens`` (no answer waits
   long for a prompt's chunk). ``max_sequences <= max_step_tokens``, so the first prompt always advances.
"""

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from core.costs import StepWork
from core.errors import OutOfBlocks, ServingError
from engine.block_pool import BlockPool, Reservation
from engine.block_table import BlockTables
from engine.sequence import Sequence, SequenceState

Policy = Literal["fcfs", "priority"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a scheduler may choose within."""

    max_step_tokens: int
    max_sequences: int
    max_mixed_tokens: int
    """Prompt tokens of a step in which answers advance too."""
    projected_tokens: int
    """What a running sequence is projected to grow by, unless it ends before: so much room is left free."""
    policy: Policy = "fcfs"

    def __post_init__(self) -> None:
        assert 1 <= self.max_sequences <= self.max_step_tokens, "a step has a token for every running sequence"
        assert self.max_mixed_tokens >= 1 and self.projected_tokens >= 1


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
    preempted: tuple[Sequence, ...] = ()


class Scheduler:
    """Owns the queues and the blocks of the sequences in them. Not thread-safe: it belongs to the step thread."""

    def __init__(self, pool: BlockPool, tables: BlockTables, limits: Limits) -> None:
        self._pool = pool
        self._tables = tables
        self._limits = limits
        self._num_arrivals = 0
        self._claim: tuple[Sequence, Reservation] | None = None
        self.running: list[Sequence] = []
        """By rank."""
        self.waiting: list[Sequence] = []
        """By rank."""

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def num_growth_blocks(self) -> int:
        """Blocks that the running sequences are projected to want beyond their promises. From any thread."""
        return sum(self._tables.num_growth(each, self._limits.projected_tokens) for each in tuple(self.running))

    def add(self, sequence: Sequence) -> None:
        """Take a sequence and the blocks it brings."""
        assert sequence.state in (SequenceState.NEW, SequenceState.PAUSED), f"cannot add a {sequence.state} sequence"
        assert sequence.num_pending > 0, "nothing to compute"
        assert len(sequence.block_table) >= self._tables.blocks_for(sequence.num_computed), (
            "computed tokens without blocks"
        )
        if sequence.arrival < 0:
            sequence.arrival = self._num_arrivals
            self._num_arrivals += 1
        self._tables.publish(sequence)
        sequence.state = SequenceState.WAITING
        insort(self.waiting, sequence, key=self._rank)

    def park(self, sequence: Sequence) -> None:
        """Take a running sequence out of the steps; it keeps its blocks."""
        self.running.remove(sequence)
        sequence.state = SequenceState.PAUSED

    def finish(self, sequence: Sequence, *, is_broken: bool = False) -> None:
        """End a sequence in whatever state; its blocks, reservation and claim are given back. ``is_broken``: nobody
        may use what its blocks hold."""
        if sequence.state is SequenceState.RUNNING:
            self.running.remove(sequence)
        elif sequence.state is SequenceState.WAITING:
            self.waiting.remove(sequence)
        self._give_back(sequence, is_broken=is_broken)
        sequence.state = SequenceState.FINISHED

    def schedule(self) -> Schedule:
        """What the next step computes. Every chunk's blocks are in its sequence's table, and its own to write."""
        failed: list[tuple[Sequence, ServingError]] = []
        preempted = self._extend_running(failed)
        self._start_waiting(failed)
        return Schedule(chunks=self._spend_budget(), failed=tuple(failed), preempted=tuple(preempted))

    def complete(self, chunk: Chunk, *, is_broken: bool = False) -> int:
        """The chunk is computed; unless its scores are ``is_broken``, others may share what it filled. Returns how many
        of its tokens are of the original prompt."""
        num_prompt = chunk.sequence.mark_computed(chunk.num_tokens)
        if not is_broken:
            self._tables.publish(chunk.sequence)
        return num_prompt

    def _rank(self, sequence: Sequence) -> tuple[int, int]:
        return (sequence.priority if self._limits.policy == "priority" else 0, sequence.arrival)

    # -- 1. blocks for the running ------------------------------------------------------------------------------------

    def _extend_running(self, failed: list[tuple[Sequence, ServingError]]) -> list[Sequence]:
        preempted: list[Sequence] = []
        for sequence in tuple(self.running):
            if sequence.state is not SequenceState.RUNNING:
                continue  # preempted for one before it a moment ago
            if self._tables.num_missing(sequence) == 0 or self._fail_if_too_long(sequence, failed):
                continue
            while True:
                try:
                    self._tables.extend(sequence)
                    break
                except OutOfBlocks:
                    if self._take_from_waiting(sequence):
                        continue
                victim = self.running[-1]
                self._preempt(victim)
                preempted.append(victim)
                if victim is sequence:
                    break
        return preempted

    def _take_from_waiting(self, first: Sequence) -> bool:
        """Take blocks from one waiting sequence behind ``first`` that cannot start. False when there is none.

        Without this, sequences that wait with a part of what they need could block each other for ever.
        """
        rank = self._rank(first)
        if self._claim is not None and self._rank(self._claim[0]) > rank:
            self._drop_claim()
            return True
        for sequence in reversed(self.waiting):
            if self._rank(sequence) <= rank:
                return False
            promised = _promised_blocks(sequence)
            if (sequence.block_table or promised) and self._tables.num_missing(sequence) > promised:
                self._start_over(sequence)
                return True
        return False

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._start_over(sequence)
        sequence.num_preemptions += 1
        sequence.state = SequenceState.WAITING
        insort(self.waiting, sequence, key=self._rank)

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
            if len(self.running) >= self._limits.max_sequences:
                return
            if self._fail_if_too_long(sequence, failed):
                continue
            if len(sequence.block_table) + self._tables.num_missing(sequence) > self._pool.num_blocks:
                self._start_over(sequence)  # not even an empty pool has room for a copy beside the tail that it shares
            unpromised = self._tables.num_to_take(sequence) - _promised_blocks(sequence)
            if unpromised > 0 and (is_blocked or not self._claim_blocks(sequence, unpromised)):
                is_blocked = True
                continue
            try:
                self._tables.extend(sequence, self._claim[1] if unpromised > 0 and self._claim is not None else None)
            except OutOfBlocks:  # a hit that it counted on was evicted meanwhile, by another thread's allocation
                is_blocked = True
                continue
            if unpromised > 0:
                self._drop_claim()
            self.waiting.remove(sequence)
            sequence.state = SequenceState.RUNNING
            insort(self.running, sequence, key=self._rank)

    def _claim_blocks(self, sequence: Sequence, num_blocks: int) -> bool:
        """Promise ``num_blocks`` to the head of the line, as far as there are any. True when it may start."""
        if self._claim is not None and self._claim[0] is not sequence:
            self._drop_claim()
        if self._claim is None:
            self._claim = (sequence, self._pool.reserve(0))
        if not self._claim[1].grow(num_blocks):
            return False
        if not self.running:
            return True
        growth = self.num_growth_blocks + self._tables.num_growth(sequence, self._limits.projected_tokens)
        return self._pool.num_unpromised >= growth

    def _drop_claim(self) -> None:
        if self._claim is not None:
            self._claim[1].release()
            self._claim = None

    # -- 3. the budget ------------------------------------------------------------------------------------------------

    def _spend_budget(self) -> tuple[Chunk, ...]:
        singles = [each for each in self.running if each.num_pending == 1]
        chunks = [Chunk(sequence=each, start=each.num_computed, num_tokens=1) for each in singles]
        budget = self._limits.max_step_tokens - len(singles)
        if singles:
            budget = min(budget, self._limits.max_mixed_tokens)
        for sequence in self.running:
            if sequence.num_pending > 1 and budget > 0:
                num_tokens = min(sequence.num_pending, budget)
                budget -= num_tokens
                chunks.append(Chunk(sequence=sequence, start=sequence.num_computed, num_tokens=num_tokens))
        return tuple(chunks)

    # -- both ---------------------------------------------------------------------------------------------------------

    def _fail_if_too_long(self, sequence: Sequence, failed: list[tuple[Sequence, ServingError]]) -> bool:
        error = self._tables.never_fits(sequence)
        if error is not None:
            self.finish(sequence)
            failed.append((sequence, error))
        return error is not None

    def _give_back(self, sequence: Sequence, *, is_broken: bool = False) -> None:
        self._tables.give_back(sequence, is_broken=is_broken)
        if self._claim is not None and self._claim[0] is sequence:
            self._drop_claim()


def work_of(chunks: Iterable[Chunk]) -> StepWork:
    """What a step of these computes. A chunk of one token behind its sequence's prompt is a decode row; all others are
    prompt."""
    num_prompt = num_pairs = num_rows = num_positions = 0
    for chunk in chunks:
        if chunk.num_tokens == 1 and chunk.start >= chunk.sequence.num_prompt_tokens:
            num_rows += 1
            num_positions += chunk.end
        else:
            num_prompt += chunk.num_tokens
            num_pairs += chunk.num_tokens * (chunk.start + chunk.end + 1) // 2
    return StepWork(
        num_prompt_tokens=num_prompt,
        num_prompt_pairs=num_pairs,
        num_decode_rows=num_rows,
        num_decode_positions=num_positions,
    )


def _promised_blocks(sequence: Sequence) -> int:
    return sequence.reservation.remaining if sequence.reservation is not None else 0
