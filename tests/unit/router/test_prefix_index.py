"""The index of cached blocks: what workers said of them, what placements expect, and how it is forgotten."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from core.clock import ManualClock
from core.ids import BlockHash, Incarnation, WorkerId
from router import prefix_index
from router.prefix_index import PrefixIndex, WorkerKey
from tests.unit.router.builders import chain


def key(name: str, incarnation: int = 1) -> WorkerKey:
    return WorkerId(name), Incarnation(incarnation)


A, B = key("a"), key("b")
PROMPT = chain("x", 10)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(100.0)


@pytest.fixture
def index(clock: ManualClock) -> PrefixIndex:
    index = PrefixIndex(clock)
    for worker in (A, B):
        index.begin(worker, max_blocks=100)
    return index


def store(index: PrefixIndex, worker: WorkerKey, hashes: Sequence[BlockHash]) -> None:
    index.apply(worker, stored=hashes, evicted=())


def evict(index: PrefixIndex, worker: WorkerKey, hashes: Sequence[BlockHash]) -> None:
    index.apply(worker, stored=(), evicted=hashes)


# -- what workers say -------------------------------------------------------------------------------------------------


def test_each_worker_has_the_run_of_first_blocks_that_it_holds(index: PrefixIndex) -> None:
    store(index, A, PROMPT[:7])
    store(index, B, PROMPT[:3] + chain("y", 4))
    assert index.overlaps(PROMPT) == {A: 7, B: 3}
    assert index.overlaps(PROMPT[:2]) == {A: 2, B: 2}
    assert index.overlaps(chain("y", 6)) == {B: 4}
    assert index.overlaps(chain("z", 6)) == index.overlaps(()) == {}


def test_a_block_behind_a_gap_is_of_no_use(index: PrefixIndex) -> None:
    store(index, A, PROMPT)
    evict(index, A, PROMPT[2:3])
    assert index.overlaps(PROMPT) == {A: 2}
    evict(index, A, PROMPT[:1])
    assert index.overlaps(PROMPT) == {}


def test_what_is_said_twice_counts_once(index: PrefixIndex) -> None:
    for _ in range(2):
        store(index, A, PROMPT)
    for _ in range(2):
        evict(index, A, PROMPT[5:])
    assert (index.num_blocks(A), index.num_hashes, index.overlaps(PROMPT)) == (5, 5, {A: 5})


def test_a_new_stream_tells_everything_anew(index: PrefixIndex) -> None:
    store(index, A, PROMPT)
    index.begin(A, max_blocks=100)
    assert index.overlaps(PROMPT) == {}
    store(index, A, PROMPT[:2])
    assert index.overlaps(PROMPT) == {A: 2}


def test_an_incarnation_takes_nothing_over_from_another(index: PrefixIndex) -> None:
    store(index, A, PROMPT)
    index.begin(key("a", 2), max_blocks=100)
    assert index.overlaps(PROMPT) == {A: 10}
    index.keep_only([key("a", 2), B])
    assert index.overlaps(PROMPT) == {} and index.num_blocks(A) == 0
    store(index, A, PROMPT)  # its last words
    assert index.overlaps(PROMPT) == {}


def test_no_worker_is_credited_with_more_than_it_has_room_for(index: PrefixIndex) -> None:
    store(index, A, chain("y", 1000))
    assert index.num_blocks(A) == index.num_hashes == 100
    for number in range(10):
        index.expect([A, B], chain(f"z{number}", 50), for_s=1)
    assert index.num_expected == 200


def test_what_lost_workers_held_is_freed_piece_by_piece(index: PrefixIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_index, "FREED_IN_ONE_SWEEP", 40)
    store(index, A, chain("y", 100))
    store(index, B, chain("y", 10))
    index.keep_only([B])
    assert index.overlaps(chain("y", 100)) == {B: 10}, "at once"
    sizes = []
    for _ in range(4):
        index.sweep()
        sizes.append(index.num_hashes)
    assert sizes[0] > 10 and sizes[-1] == 10


# -- what placements expect -------------------------------------------------------------------------------------------


def test_what_is_on_its_way_counts_until_its_time_is_over(index: PrefixIndex, clock: ManualClock) -> None:
    index.expect([A], PROMPT, for_s=5)
    assert index.overlaps(PROMPT) == {A: 10}
    clock.advance(4.9)
    index.sweep()
    assert index.overlaps(PROMPT) == {A: 10}
    clock.advance(0.2)
    index.sweep()
    assert index.overlaps(PROMPT) == {} and index.num_hashes == 0


def test_what_the_worker_confirms_stays(index: PrefixIndex, clock: ManualClock) -> None:
    index.expect([A], PROMPT, for_s=5)
    store(index, A, PROMPT[:4])
    clock.advance(6)
    index.sweep()
    assert index.overlaps(PROMPT) == {A: 4}


def test_what_is_asked_for_again_is_not_expected_for_longer(index: PrefixIndex, clock: ManualClock) -> None:
    """If the worker never confirms the first, it may as well never compute the second."""
    index.expect([A], PROMPT[:5], for_s=5)
    clock.advance(3)
    index.expect([A, B], PROMPT, for_s=5)
    clock.advance(3)
    index.sweep()
    assert index.overlaps(PROMPT) == {B: 10}
    index.expect([A], PROMPT[:5], for_s=5)
    assert index.overlaps(PROMPT) == {A: 10, B: 10}
    clock.advance(2)
    index.sweep()
    assert index.overlaps(PROMPT) == {A: 5}, "those that were asked for first"


def test_what_was_expected_of_a_lost_worker_is_nobody_elses(index: PrefixIndex, clock: ManualClock) -> None:
    index.expect([A], PROMPT, for_s=5)
    index.keep_only([B])
    index.sweep()
    index.begin(key("c"), max_blocks=100)
    assert index.overlaps(PROMPT) == {}
    clock.advance(6)
    index.sweep()
    index.begin(key("d"), max_blocks=100)
    store(index, key("d"), PROMPT[:1])
    assert index.overlaps(PROMPT) == {key("d"): 1}


def test_an_expectation_never_takes_away_what_is_held(index: PrefixIndex, clock: ManualClock) -> None:
    store(index, A, PROMPT)
    index.expect([A], PROMPT, for_s=1)
    clock.advance(2)
    index.sweep()
    assert index.overlaps(PROMPT) == {A: 10}


def test_expectations_end_with_their_stream(index: PrefixIndex, clock: ManualClock) -> None:
    index.expect([A], PROMPT, for_s=5)
    index.begin(A, max_blocks=100)
    assert index.overlaps(PROMPT) == {}
    store(index, A, PROMPT)
    clock.advance(6)
    index.sweep()
    assert index.overlaps(PROMPT) == {A: 10}


def test_a_burst_with_one_prefix_leaves_one_note(index: PrefixIndex) -> None:
    for _ in range(1000):
        index.expect([A], PROMPT, for_s=5)
    assert index.num_expectations == 1


# -- against a plain model --------------------------------------------------------------------------------------------

HASHES = chain("x", 6)
workers_st = st.sampled_from([key(name, incarnation) for name in "ab" for incarnation in (1, 2)])
hashes_st = st.lists(st.sampled_from(HASHES), max_size=6, unique=True)


class Machine(RuleBasedStateMachine):
    """Sets for each worker: what it holds, and until when it is expected to hold what."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock(1.0)
        self.index = PrefixIndex(self.clock)
        self.held: dict[WorkerKey, set[BlockHash]] = {}
        self.expected: dict[WorkerKey, dict[BlockHash, float]] = {}
        self.is_evicted = False

    @rule(worker=workers_st)
    def begin(self, worker: WorkerKey) -> None:
        self.index.begin(worker, max_blocks=100)
        self.held[worker], self.expected[worker] = set(), {}

    @rule(worker=workers_st, stored=hashes_st, evicted=hashes_st)
    def apply(self, worker: WorkerKey, stored: list[BlockHash], evicted: list[BlockHash]) -> None:
        self.index.apply(worker, stored=stored, evicted=evicted)
        if worker in self.held:
            for one in evicted:
                self.held[worker].discard(one)
                self.is_evicted = self.is_evicted or one in self.expected[worker]
                self.expected[worker].pop(one, None)
            self.held[worker].update(stored)

    @rule(workers=st.sets(workers_st), hashes=hashes_st, seconds=st.sampled_from([2.0, 4.0, 8.0]))
    def expect(self, workers: set[WorkerKey], hashes: list[BlockHash], seconds: float) -> None:
        self.index.expect(workers, hashes, for_s=seconds)
        for worker in workers & self.held.keys():
            for one in hashes:
                self.expected[worker].setdefault(one, self.clock.now() + seconds)

    @rule(alive=st.sets(workers_st))
    def keep_only(self, alive: set[WorkerKey]) -> None:
        self.index.keep_only(alive)
        self.held = {worker: held for worker, held in self.held.items() if worker in alive}

    @rule(seconds=st.sampled_from([1.0, 2.0, 4.0]))
    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.index.sweep()
        for expected in self.expected.values():
            for one in [one for one, until in expected.items() if until <= self.clock.now()]:
                del expected[one]

    @invariant()
    def the_runs_are_those_of_the_model(self) -> None:
        """What was evicted and asked for again may be expected a little less long than the model says."""
        for start in (0, 2):
            hashes = HASHES[start:]
            found = self.index.overlaps(hashes)
            assert found.keys() <= self.held.keys()
            for worker, held in self.held.items():
                most = run_of(hashes, held | self.expected[worker].keys())
                least = most if not self.is_evicted else run_of(hashes, held)
                assert least <= found.get(worker, 0) <= most


def run_of(hashes: Sequence[BlockHash], there: set[BlockHash]) -> int:
    return next((number for number, one in enumerate(hashes) if one not in there), len(hashes))


TestAgainstAModel = Machine.TestCase
TestAgainstAModel.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(seed=st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_forty_workers_at_once(seed: int) -> None:
    """More than the bits of a machine word's small numbers."""
    rng = random.Random(seed)
    index = PrefixIndex(ManualClock(1.0))
    lengths = {key(f"w{number}"): rng.randrange(11) for number in range(40)}
    for worker, length in lengths.items():
        index.begin(worker, max_blocks=100)
        store(index, worker, PROMPT[:length])
    assert index.overlaps(PROMPT) == {worker: length for worker, length in lengths.items() if length}
