"""One budget for all: nobody overtakes unfairly, nobody starves, nobody runs without blocks."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import OutOfBlocks
from engine.block_pool import BlockPool
from engine.block_table import BlockTables
from engine.scheduler import Limits, Policy, Schedule, Scheduler
from engine.sequence import Sequence, SequenceState
from tests.support.engine_runs import make_sequence

BLOCK = 4


def scheduler(
    num_blocks: int = 32,
    *,
    budget: int = 16,
    max_sequences: int = 8,
    max_mixed_tokens: int = 1000,
    projected_tokens: int = 1,
    policy: Policy = "fcfs",
) -> tuple[Scheduler, BlockPool]:
    pool = BlockPool(num_blocks)
    tables = BlockTables(pool, block_size=BLOCK, copy_block=lambda source, target, num: None, is_caching=False)
    limits = Limits(
        max_step_tokens=budget,
        max_sequences=max_sequences,
        max_mixed_tokens=max_mixed_tokens,
        projected_tokens=projected_tokens,
        policy=policy,
    )
    return Scheduler(pool, tables, limits), pool


def prompt(num_tokens: int, **options: object) -> Sequence:
    return make_sequence(range(num_tokens), **options)


def play(schedule: Schedule) -> None:
    """What a step does: everything scheduled is computed, complete sequences get a token."""
    for chunk in schedule.chunks:
        sequence = chunk.sequence
        assert len(sequence.block_table) * BLOCK >= chunk.end, "a chunk without blocks"
        is_sampled = chunk.is_sampled
        sequence.mark_computed(chunk.num_tokens)
        if is_sampled:
            sequence.tokens.append(0)


def shares(schedule: Schedule) -> list[tuple[Sequence, int]]:
    return [(chunk.sequence, chunk.num_tokens) for chunk in schedule.chunks]


def test_a_long_prompt_is_cut_into_chunks_of_the_budget() -> None:
    one, _ = scheduler(budget=16)
    long = prompt(40)
    one.add(long)
    sizes = []
    for _ in range(4):
        schedule = one.schedule()
        sizes.append(schedule.chunks[0].num_tokens)
        play(schedule)
    assert sizes == [16, 16, 8, 1]


def test_one_pending_token_comes_before_any_prompt() -> None:
    one, _ = scheduler(budget=16)
    old, new = prompt(40), prompt(3)
    one.add(old)
    play(one.schedule())
    one.add(new)
    play(one.schedule())  # the old prompt takes the whole budget
    play(one.schedule())  # rest of the old, and the new
    late = prompt(30)
    one.add(late)
    assert shares(one.schedule()) == [(old, 1), (new, 1), (late, 14)]


def test_prompts_are_served_in_order_of_arrival() -> None:
    one, _ = scheduler(budget=16)
    first, second, third = prompt(10), prompt(10), prompt(10)
    for each in (first, second, third):
        one.add(each)
    assert shares(one.schedule()) == [(first, 10), (second, 6)]


def test_no_more_sequences_run_than_allowed() -> None:
    one, _ = scheduler(budget=16, max_sequences=2)
    for _ in range(4):
        one.add(prompt(2))
    assert len(one.schedule().chunks) == 2 and len(one.waiting) == 2


def test_a_sequence_that_brings_its_kv_computes_one_token() -> None:
    one, pool = scheduler()
    arrived = prompt(9, num_computed=8, block_table=pool.allocate(2))
    one.add(arrived)
    assert shares(one.schedule()) == [(arrived, 1)]
    assert len(arrived.block_table) == 3


def crowd() -> tuple[Scheduler, BlockPool, Sequence, Sequence]:
    """Two sequences in five blocks: at nine tokens both want a third block, and one of them must go."""
    one, pool = scheduler(num_blocks=5)
    old, young = prompt(7, max_tokens=100), prompt(7, max_tokens=100)
    one.add(old)
    one.add(young)
    for _ in range(3):
        play(one.schedule())
    return one, pool, old, young


def test_the_youngest_makes_room_and_starts_over() -> None:
    _, pool, old, young = crowd()
    assert (old.num_preemptions, young.num_preemptions) == (0, 1)
    assert young.state is SequenceState.WAITING
    assert (young.num_computed, young.block_table, len(young.tokens)) == (0, [], 9)
    assert len(old.block_table) == 3 and pool.counts().is_conserved()


def test_a_preempted_sequence_keeps_its_place_in_the_line() -> None:
    one, _, old, young = crowd()
    later = prompt(1)
    one.add(later)
    play(one.schedule())
    assert one.waiting == [young, later], "the later one must not take the blocks of the head"
    one.finish(old)
    play(one.schedule())
    assert one.running == [young, later]


def test_a_head_of_the_line_collects_blocks_that_others_may_not_reserve() -> None:
    one, pool = scheduler(num_blocks=8)
    holder, head = prompt(20), prompt(24)
    one.add(holder)
    play(one.schedule())
    one.add(head)
    play(one.schedule())
    assert head.state is SequenceState.WAITING and pool.counts().reserved > 0
    with pytest.raises(OutOfBlocks):
        pool.reserve(1)
    one.finish(holder)
    assert [chunk.sequence for chunk in one.schedule().chunks] == [head]
    assert pool.counts().reserved == 0


def test_a_claim_ends_with_its_sequence() -> None:
    one, pool = scheduler(num_blocks=8)
    holder, head = prompt(20), prompt(24)
    one.add(holder)
    one.schedule()
    one.add(head)
    one.schedule()
    one.finish(head)
    one.finish(holder)
    assert pool.counts().is_idle()


def test_those_with_blocks_of_their_own_pass_a_blocked_head() -> None:
    one, pool = scheduler(num_blocks=8)
    arrived_blocks, reservation = pool.allocate(2), pool.reserve(2)
    holder, head = prompt(8), prompt(28)
    arrived = prompt(8, num_computed=7, block_table=arrived_blocks)
    promised = prompt(8, reservation=reservation)
    one.add(holder)
    one.schedule()
    for each in (head, arrived, promised, prompt(1)):
        one.add(each)
    started = {chunk.sequence.key for chunk in one.schedule().chunks}
    assert started == {holder.key, arrived.key, promised.key}


def test_what_can_never_fit_fails_and_harms_nobody() -> None:
    one, _ = scheduler(num_blocks=4)
    too_long, fine = prompt(17), prompt(3)
    one.add(too_long)
    one.add(fine)
    schedule = one.schedule()
    ((failed, error),) = schedule.failed
    assert failed is too_long and isinstance(error, OutOfBlocks) and "num_blocks" in error.message
    assert shares(schedule) == [(fine, 3)]


def test_a_lone_sequence_that_outgrows_the_pool_fails_typed() -> None:
    one, pool = scheduler(num_blocks=2)
    lone = prompt(7, max_tokens=100)
    one.add(lone)
    play(one.schedule())
    play(one.schedule())
    schedule = one.schedule()
    assert [each for each, _ in schedule.failed] == [lone] and lone.is_finished
    assert pool.counts().is_idle()


def test_a_parked_sequence_keeps_its_blocks_and_takes_no_part() -> None:
    one, pool = scheduler()
    parked = prompt(6, pause_at=7)
    one.add(parked)
    play(one.schedule())
    one.park(parked)
    assert not one.has_work and pool.counts().in_use == 2
    one.finish(parked)
    assert pool.counts().is_idle()


@dataclass
class Job:
    sequence: Sequence
    num_new: int
    arrives_at: int


jobs = st.lists(
    st.tuples(st.integers(1, 30), st.integers(1, 20), st.integers(0, 30), st.booleans()), min_size=1, max_size=12
)


@settings(max_examples=150, deadline=None)
@given(jobs=jobs, num_blocks=st.integers(4, 24), budget=st.integers(4, 24), max_sequences=st.integers(1, 4))
def test_every_sequence_ends_whatever_the_load(
    jobs: list[tuple[int, int, int, bool]], num_blocks: int, budget: int, max_sequences: int
) -> None:
    """Finished or failed typed, in a bounded number of steps; blocks are conserved, the oldest is never preempted."""
    one, pool = scheduler(num_blocks, budget=budget, max_sequences=max_sequences)
    todo = [
        Job(prompt(length, max_tokens=new, **({"pause_at": length + 1} if pauses else {})), new, at)
        for length, new, at, pauses in jobs
    ]
    targets = {job.sequence.key: len(job.sequence.tokens) + job.num_new for job in todo}
    ended: set[object] = set()
    for step in range(3000):
        for job in todo:
            if job.arrives_at == step:
                one.add(job.sequence)
        alive = [*one.running, *one.waiting]
        oldest = min(one.running, key=lambda each: each.arrival, default=None)
        schedule = one.schedule()
        assert schedule.chunks or not alive or schedule.failed, "work, but nothing runs"
        assert sum(chunk.num_tokens for chunk in schedule.chunks) <= budget
        assert len(one.running) <= max_sequences
        if oldest is not None and not oldest.is_finished:
            assert oldest.state is SequenceState.RUNNING, "the oldest was preempted"
        for sequence, _ in schedule.failed:
            assert -(-len(sequence.tokens) // BLOCK) > num_blocks
            ended.add(sequence.key)
        play(schedule)
        for chunk in schedule.chunks:
            sequence = chunk.sequence
            if sequence.num_pending == 1 and sequence.pause_at == len(sequence.tokens):
                one.park(sequence)
                one.finish(sequence)
                ended.add(sequence.key)
            elif len(sequence.tokens) >= targets[sequence.key]:
                one.finish(sequence)
                ended.add(sequence.key)
        assert pool.counts().is_conserved()
        if len(ended) == len(todo):
            break
    assert len(ended) == len(todo), "somebody starved"
    assert pool.counts().is_idle()
