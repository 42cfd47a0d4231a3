"""Blocks change hands in one place, and the law of conservation holds after every operation."""

from __future__ import annotations

import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from core.errors import OutOfBlocks
from engine.block_pool import BlockPool, Reservation

NUM_BLOCKS = 12


class PoolMachine(RuleBasedStateMachine):
    """Random holders against a model that remembers who holds what."""

    in_use, leases = Bundle("in_use"), Bundle("leases")
    custody, reservations = Bundle("custody"), Bundle("reservations")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.holds: dict[str, list[int]] = {"in_use": [], "leases": [], "custody": []}
        self.promised: list[Reservation] = []

    def _held(self) -> set[int]:
        return {block for blocks in self.holds.values() for block in blocks}

    @rule(target=in_use, num=st.integers(0, 6))
    def allocate(self, num: int) -> object:
        try:
            blocks = self.pool.allocate(num)
        except OutOfBlocks:
            assert num > NUM_BLOCKS - len(self._held()) - sum(each.remaining for each in self.promised)
            return multiple()
        assert not self._held() & set(blocks) and len(set(blocks)) == num
        self.holds["in_use"] += blocks
        return blocks

    @rule(target=reservations, num=st.integers(0, 6))
    def reserve(self, num: int) -> object:
        try:
            reservation = self.pool.reserve(num)
        except OutOfBlocks:
            return multiple()
        self.promised.append(reservation)
        return reservation

    @rule(target=in_use, reservation=reservations, num=st.integers(0, 6))
    def allocate_promised(self, reservation: Reservation, num: int) -> object:
        promised = reservation.remaining
        try:
            blocks = self.pool.allocate(num, reservation)
        except OutOfBlocks:
            assert num > promised, "a promise was not kept"
            return multiple()
        assert reservation.remaining == max(0, promised - num)
        self.holds["in_use"] += blocks
        return blocks

    @rule(reservation=reservations, target_size=st.integers(0, 8))
    def grow(self, reservation: Reservation, target_size: int) -> None:
        before = reservation.remaining
        assert reservation.grow(target_size) == (reservation.remaining >= target_size)
        assert before <= reservation.remaining <= max(before, target_size)

    @rule(reservation=reservations)
    def release(self, reservation: Reservation) -> None:
        reservation.release()
        assert reservation.remaining == 0

    @rule(blocks=consumes(in_use))
    def free(self, blocks: list[int]) -> None:
        self.pool.free(blocks)
        self._forget("in_use", blocks)

    @rule(target=leases, blocks=in_use)
    def lease(self, blocks: list[int]) -> list[int]:
        self.pool.lease(blocks)
        self.holds["leases"] += blocks
        return blocks

    @rule(blocks=consumes(leases))
    def end_lease(self, blocks: list[int]) -> None:
        self.pool.end_lease(blocks)
        self._forget("leases", blocks)

    @rule(target=custody, blocks=in_use)
    def take_custody(self, blocks: list[int]) -> list[int]:
        self.pool.take_custody(blocks)
        self.holds["custody"] += blocks
        return blocks

    @rule(blocks=consumes(custody))
    def end_custody(self, blocks: list[int]) -> None:
        self.pool.end_custody(blocks)
        self._forget("custody", blocks)

    def _forget(self, kind: str, blocks: list[int]) -> None:
        for block in blocks:
            self.holds[kind].remove(block)

    @invariant()
    def law_1(self) -> None:
        counts = self.pool.counts()
        assert counts.is_conserved()
        custody, in_use, leased = (set(self.holds[kind]) for kind in ("custody", "in_use", "leases"))
        assert counts.custody == len(custody)
        assert counts.in_use == len(in_use - custody)
        assert counts.leased == len(leased - in_use - custody)
        assert counts.free == NUM_BLOCKS - len(self._held())
        assert counts.reserved == sum(each.remaining for each in self.promised)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPoolLaws = PoolMachine.TestCase


def test_a_block_freed_twice_is_our_bug() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.free(blocks)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(blocks)
    assert pool.counts().free == 4


def test_a_refused_operation_changes_nothing() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    with pytest.raises(AssertionError):
        pool.free([*blocks, blocks[0]])
    with pytest.raises(AssertionError):
        pool.lease([blocks[0], (set(range(4)) - set(blocks)).pop()])
    assert (pool.counts().in_use, pool.counts().free) == (2, 2)


def test_a_leased_block_outlives_its_sequence() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    pool.lease(blocks)
    pool.free(blocks)
    assert (pool.counts().leased, pool.counts().free) == (2, 1)
    with pytest.raises(OutOfBlocks):
        pool.allocate(2)
    pool.end_lease(blocks)
    assert pool.counts().is_idle()


def test_a_block_in_custody_outlives_everything_else() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.take_custody(blocks)
    pool.free(blocks)
    assert pool.counts().custody == 1
    pool.end_custody(blocks)
    assert pool.counts().free == 2


def test_promised_blocks_are_not_given_to_others() -> None:
    pool = BlockPool(4)
    reservation = pool.reserve(3)
    with pytest.raises(OutOfBlocks, match="promised"):
        pool.allocate(2)
    assert len(pool.allocate(4, reservation)) == 4, "its own promise, and the one block that nobody was promised"


def test_threads_that_allocate_and_free_at_once_lose_nothing() -> None:
    pool = BlockPool(64)

    def work() -> None:
        for _ in range(300):
            reservation = pool.reserve(4)
            blocks = pool.allocate(6, reservation)
            pool.take_custody(blocks)
            pool.free(blocks)
            pool.end_custody(blocks)
            reservation.release()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pool.counts().is_idle() and pool.counts().free == 64
