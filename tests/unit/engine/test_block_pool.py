"""Blocks change hands in one place, and the law of conservation holds after every operation."""

from __future__ import annotations

import itertools
import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from core.errors import OutOfBlocks
from core.ids import BlockHash
from engine.block_pool import BlockPool, Reservation

NUM_BLOCKS = 12


def hash_of(name: int, place: int) -> BlockHash:
    return BlockHash(bytes([name, place]))


class PoolMachine(RuleBasedStateMachine):
    """Random holders against a model that remembers who holds what."""

    in_use, leases = Bundle("in_use"), Bundle("leases")
    custody, reservations = Bundle("custody"), Bundle("reservations")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.holds: dict[str, list[int]] = {"in_use": [], "leases": [], "custody": []}
        self.promised: list[Reservation] = []
        self.content: dict[int, BlockHash] = {}
        self.reported: set[BlockHash] = set()

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
        self._take(blocks)
        return blocks

    def _take(self, blocks: list[int]) -> None:
        for block in blocks:
            self.content.pop(block, None)  # evicted, if it was kept
        self.holds["in_use"] += blocks

    @rule(blocks=in_use, name=st.integers(0, 3))
    def publish(self, blocks: list[int], name: int) -> None:
        """Content is named by the number of the block within its chain; a chain is published once."""
        fresh = [block for block in blocks if block not in self.content]
        hashes = [hash_of(name, place) for place in range(len(fresh))]
        self.pool.publish(fresh, hashes)
        for block, each in zip(fresh, hashes, strict=True):
            if each not in self.content.values():
                self.content[block] = each

    @rule(target=in_use, name=st.integers(0, 3), num=st.integers(0, 6))
    def find(self, name: int, num: int) -> object:
        """Whoever asks for content gets it as far as it is there without a hole, and other blocks for the rest."""
        wanted = [hash_of(name, place) for place in range(5)]
        places = {each: block for block, each in self.content.items()}
        expected = [places[each] for each in itertools.takewhile(places.__contains__, wanted[:num])]
        unheld = num - len(set(expected) & self._held())
        room = NUM_BLOCKS - len(self._held()) - sum(each.remaining for each in self.promised)
        assert self.pool.count_missing(num, wanted) == unheld
        try:
            blocks, num_hits = self.pool.allocate_shared(num, wanted)
        except OutOfBlocks:
            assert unheld > room
            return multiple()
        assert unheld <= room and blocks[:num_hits] == expected and len(set(blocks)) == num
        assert not self._held() & set(blocks[num_hits:])
        self.holds["in_use"] += blocks[:num_hits]
        self._take(blocks[num_hits:])
        return blocks

    @rule(target=in_use, blocks=in_use)
    def share(self, blocks: list[int]) -> list[int]:
        self.pool.share(blocks)
        self.holds["in_use"] += blocks
        return blocks

    @rule(blocks=in_use)
    def forget_content(self, blocks: list[int]) -> None:
        self.pool.forget(blocks)
        for block in blocks:
            self.content.pop(block, None)

    @rule(whole=st.booleans())
    def report(self, whole: bool) -> None:
        """Whoever applies the reports knows what is here."""
        changes = self.pool.take_changes(whole=whole)
        known = set() if whole else self.reported
        assert not known & set(changes.stored) and set(changes.evicted) <= known
        self.reported = known - set(changes.evicted) | set(changes.stored)
        assert self.reported == set(self.content.values())

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
        self._take(blocks)
        return blocks

    @rule(reservation=reservations, target_size=st.integers(0, 8))
    def grow(self, reservation: Reservation, target_size: int) -> None:
        before = reservation.remaining
        assert reservation.grow(target_size) == (reservation.remaining >= target_size)
        assert before <= reservation.remaining <= max(before, target_size)

    @rule(target=reservations, reservation=reservations, num=st.integers(0, 8))
    def split(self, reservation: Reservation, num: int) -> Reservation:
        before, promised = reservation.remaining, self.pool.counts().reserved
        part = reservation.split(num)
        assert part.remaining == min(num, before) and part.remaining + reservation.remaining == before
        assert self.pool.counts().reserved == promised
        self.promised.append(part)
        return part

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
        assert counts.cached == len(self.content.keys() - self._held())
        assert counts.free == NUM_BLOCKS - len(self._held() | self.content.keys())
        for block in self._held():
            is_alone = self.holds["in_use"].count(block) == 1 and block not in custody | leased
            assert self.pool.is_writable(block) == (is_alone and block not in self.content)
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


def hashes(*places: int) -> list[BlockHash]:
    return [hash_of(9, place) for place in places]


def test_kept_blocks_go_least_recently_held_first_and_tails_before_heads() -> None:
    pool = BlockPool(4)
    old, new = pool.allocate(2), pool.allocate(2)
    pool.publish(old, hashes(0, 1))
    pool.publish(new, hashes(2, 3))
    pool.free(new)
    pool.free(old)
    assert pool.counts().cached == 4 and pool.counts().free == 0
    assert pool.allocate(1) == [new[1]]
    assert pool.allocate(2) == [new[0], old[1]]
    assert pool.allocate_shared(1, hashes(0)) == ([old[0]], 1)


def test_a_kept_block_is_promised_like_a_free_one() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    pool.publish(blocks, hashes(0, 1))
    pool.free(blocks)
    reservation = pool.reserve(2)
    with pytest.raises(OutOfBlocks):
        pool.allocate_shared(1, hashes(0))
    assert pool.allocate_shared(2, hashes(0, 1), reservation) == (blocks, 2) and reservation.remaining == 0


def test_a_hit_in_the_hands_of_others_costs_nothing_and_ends_its_promise() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    pool.publish(blocks, hashes(0, 1))
    reservation = pool.reserve(1)
    assert pool.allocate_shared(2, hashes(0, 1), reservation) == (blocks, 2)
    assert reservation.remaining == 0 and pool.num_unpromised == 1


def test_a_block_under_two_leases_is_reusable_when_both_have_ended() -> None:
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    pool.lease(blocks)
    pool.lease(blocks)
    pool.free(blocks)
    pool.end_lease(blocks)
    with pytest.raises(OutOfBlocks):
        pool.allocate(1)
    pool.end_lease(blocks)
    assert pool.allocate(1) == blocks
