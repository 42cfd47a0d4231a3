"""One budget for all: nobody overtakes unfairly, nobody starves, nobody runs without blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
    is_caching: bool = False,
) -> tuple[Scheduler, BlockPool]:
    pool = BlockPool(num_blocks)
    tables = BlockTables(pool, block_size=BLOCK, copy_block=lambda source, target, num: None, is_caching=is_caching)
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


def play(one: Scheduler, schedule: Schedule) -> None:
    """What a step does: everything scheduled is computed, complete sequences get a token."""
    for chunk in schedule.chunks:
        sequence = chunk.sequence
        assert len(sequence.block_table) * BLOCK >= chunk.end, "a chunk without blocks"
        is_sampled = chunk.is_sampled
        one.complete(chunk)
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
        play(one, schedule)
    assert sizes == [16, 16, 8, 1]


def test_beside_answers_a_prompt_takes_no_more_than_its_share() -> None:
    """And an answer never waits: each step has its token."""
    one, _ = scheduler(budget=64, max_mixed_tokens=10)
    answer, late = prompt(3), prompt(25)
    one.add(answer)
    play(one, one.schedule())
    one.add(late)
    steps = []
    for _ in range(3):
        schedule = one.schedule()
        steps.append(shares(schedule))
        play(one, schedule)
    assert steps == [[(answer, 1), (late, 10)], [(answer, 1), (late, 10)], [(answer, 1), (late, 5)]]


def test_a_prompt_alone_takes_the_whole_budget() -> None:
    one, _ = scheduler(budget=64, max_mixed_tokens=10)
    one.add(prompt(50))
    assert [chunk.num_tokens for chunk in one.schedule().chunks] == [50]


def test_under_priorities_the_lowest_number_starts_first_and_the_oldest_of_equals() -> None:
    one, _ = scheduler(budget=64, max_sequences=2, policy="priority")
    low, first, second = prompt(3, priority=5), prompt(3, priority=1), prompt(3, priority=1)
    for each in (low, first, second):
        one.add(each)
    assert [each for each, _ in shares(one.schedule())] == [first, second]
    one.finish(first)
    assert low in [each for each, _ in shares(one.schedule())]


def test_without_that_policy_priorities_mean_nothing() -> None:
    one, _ = scheduler(budget=64, max_sequences=1)
    first, urgent = prompt(3, priority=5), prompt(3, priority=-5)
    one.add(first)
    one.add(urgent)
    assert shares(one.schedule()) == [(first, 3)]


def test_the_lowest_priority_is_preempted_however_old_it_is() -> None:
    one, pool = scheduler(num_blocks=5, policy="priority")
    old, urgent = prompt(7, max_tokens=100, priority=1), prompt(7, max_tokens=100, priority=0)
    one.add(old)
    one.add(urgent)
    for _ in range(3):
        play(one, one.schedule())
    assert (old.num_preemptions, urgent.num_preemptions) == (1, 0) and pool.counts().is_conserved()


def test_a_newcomer_waits_until_the_room_that_others_will_want_is_left() -> None:
    """It would be preempted for them otherwise."""
    one, _ = scheduler(num_blocks=8, projected_tokens=8)
    runs, newcomer = prompt(16, max_tokens=20), prompt(7, max_tokens=2)
    one.add(runs)
    play(one, one.schedule())
    one.add(newcomer)  # 3 blocks are free and it needs 2, but the other will want 2 more
    assert shares(one.schedule()) == [(runs, 1)]
    one.finish(runs)
    assert shares(one.schedule()) == [(newcomer, 7)]


def test_a_promise_counts_as_room_to_grow() -> None:
    one, pool = scheduler(num_blocks=8, projected_tokens=8)
    runs = prompt(16, max_tokens=9, reservation=pool.reserve(6))
    newcomer = prompt(7, max_tokens=1)
    one.add(runs)
    play(one, one.schedule())
    one.add(newcomer)
    assert len(one.schedule().chunks) == 2 and one.num_growth_blocks == 0


def test_one_pending_token_comes_before_any_prompt() -> None:
    one, _ = scheduler(budget=16)
    old, new = prompt(40), prompt(3)
    one.add(old)
    play(one, one.schedule())
    one.add(new)
    play(one, one.schedule())  # the old prompt takes the whole budget
    play(one, one.schedule())  # rest of the old, and the new
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
        play(one, one.schedule())
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
    play(one, one.schedule())
    assert one.waiting == [young, later], "the later one must not take the blocks of the head"
    one.finish(old)
    play(one, one.schedule())
    assert one.running == [young, later]


def test_a_head_of_the_line_collects_blocks_that_others_may_not_reserve() -> None:
    one, pool = scheduler(num_blocks=8)
    holder, head = prompt(20), prompt(24)
    one.add(holder)
    play(one, one.schedule())
    one.add(head)
    play(one, one.schedule())
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
    play(one, one.schedule())
    play(one, one.schedule())
    schedule = one.schedule()
    assert [each for each, _ in schedule.failed] == [lone] and lone.is_finished
    assert pool.counts().is_idle()


def test_a_parked_sequence_keeps_its_blocks_and_takes_no_part() -> None:
    one, pool = scheduler()
    parked = prompt(6, pause_at=7)
    one.add(parked)
    play(one, one.schedule())
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
    st.tuples(st.integers(1, 30), st.integers(1, 20), st.integers(0, 30), st.booleans(), st.integers(0, 2)),
    min_size=1,
    max_size=12,
)
limits = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(4, 24),
        "budget": st.integers(4, 24),
        "max_sequences": st.integers(1, 4),
        "max_mixed_tokens": st.sampled_from((1, 5, 100)),
        "projected_tokens": st.sampled_from((1, 8, 100)),
        "policy": st.sampled_from(("fcfs", "priority")),
        "is_caching": st.booleans(),
    }
)


@settings(max_examples=150, deadline=None)
@given(jobs=jobs, limits=limits)
def test_every_sequence_ends_whatever_the_load(
    jobs: list[tuple[int, int, int, bool, int]], limits: dict[str, Any]
) -> None:
    """Finished or failed typed, in a bounded number of steps; blocks are conserved, the first is never preempted."""
    one, pool = scheduler(**limits)
    todo = [
        Job(prompt(length, max_tokens=new, priority=urgency, pause_at=length + 1 if pauses else None), new, at)
        for length, new, at, pauses, urgency in jobs
    ]
    has_priorities = limits["policy"] == "priority"
    targets = {job.sequence.key: len(job.sequence.tokens) + job.num_new for job in todo}
    ended: set[object] = set()
    for step in range(3000):
        for job in todo:
            if job.arrives_at == step:
                one.add(job.sequence)
        alive = [*one.running, *one.waiting]
        first = min(alive, key=lambda each: (each.priority * has_priorities, each.arrival), default=None)
        is_running = first is not None and first.state is SequenceState.RUNNING
        schedule = one.schedule()
        assert schedule.chunks or not alive or schedule.failed, "work, but nothing runs"
        assert sum(chunk.num_tokens for chunk in schedule.chunks) <= limits["budget"]
        assert len(one.running) <= limits["max_sequences"]
        if first is not None and is_running and not first.is_finished:
            assert first.state is SequenceState.RUNNING, "the first of the line was preempted"
        scheduled = {chunk.sequence.key for chunk in schedule.chunks}
        assert all(each.key in scheduled for each in one.running if each.num_pending == 1), "an answer waits"
        for sequence, _ in schedule.failed:
            assert -(-len(sequence.tokens) // BLOCK) > limits["num_blocks"]
            ended.add(sequence.key)
        play(one, schedule)
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
