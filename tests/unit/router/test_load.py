"""The router's estimates: what a report cannot contain yet, how it is given back, and what has been read since."""

from dataclasses import replace

import pytest

from core.clock import ManualClock
from core.ids import GatewayId, Incarnation, PlacementId, WorkerId
from core.types import Role, WorkerState
from router.costs import Costs, StepLaw
from router.load import LoadBook, place_of
from router.policy import Candidate, Choice, PolicySettings, Snapshot, decide
from router.registry import LivenessTimes, Membership, Registry
from tests.unit.router.builders import MODEL, make_load, make_registration, make_request


class Cell:
    """One prefill and one decode worker under a manual clock."""

    def __init__(self) -> None:
        self.clock = ManualClock(50.0)
        self.registry = Registry(self.clock, LivenessTimes(suspect_after_s=60, lost_after_s=120))
        self.book = LoadBook(self.clock, projected_tokens=32)
        self.costs = Costs()
        """Nothing is measured."""
        self.members: dict[str, Membership] = {}
        for name, role in (("p0", Role.PREFILL), ("d0", Role.DECODE)):
            self.members[name] = self.registry.join(make_registration(name, role=role))
            self.report(name)

    def report(self, name: str, **counts: int) -> None:
        self.registry.heartbeat(self.members[name], make_load(WorkerState.READY, **counts))

    def candidate(self, name: str) -> Candidate:
        candidates = self.book.candidates(self.registry.workers(), self.costs)
        return next(c for c in candidates if c.address.worker_id == name)

    def place(self, placement_id: str, num_prompt_tokens: int = 100, mode: str = "split", **request: object) -> None:
        workers = self.book.candidates(self.registry.workers(), self.costs)
        asked = make_request(num_prompt_tokens=num_prompt_tokens, **request)  # type: ignore[arg-type]
        pools = frozenset((w.model, w.role) for w in workers)
        choice = decide(asked, Snapshot(candidates=workers, pools=pools), PolicySettings(mode=mode))  # type: ignore[arg-type]
        assert isinstance(choice, Choice)
        self.book.reserve(PlacementId(placement_id), asked, choice.path)


@pytest.fixture
def cell() -> Cell:
    return Cell()


def test_a_placement_counts_on_both_legs_until_a_report_can_contain_it(cell: Cell) -> None:
    cell.place("a")
    assert cell.candidate("p0").queued_prompt_tokens == 100
    assert cell.candidate("p0").used_blocks == 7  # ceil(100 / 16)
    assert cell.candidate("d0").used_blocks == 9  # ceil((100 + 32) / 16)
    assert cell.candidate("d0").queued_prompt_tokens == 0
    assert cell.candidate("d0").num_requests == 1
    cell.clock.advance(0.1)
    cell.report("p0", queued_prompt_tokens=100)  # the request may not have arrived when this was written
    assert cell.candidate("p0").queued_prompt_tokens == 200
    cell.clock.advance(1.0)
    cell.report("p0", queued_prompt_tokens=40)
    assert cell.candidate("p0").queued_prompt_tokens == 40
    assert cell.candidate("d0").num_requests == 1  # it has not reported since


def test_a_local_placement_counts_its_prompt_where_it_decodes(cell: Cell) -> None:
    cell.place("a", mode="local")
    worker = cell.candidate("d0")
    assert (worker.queued_prompt_tokens, worker.used_blocks, worker.num_requests) == (100, 9, 1)
    assert cell.candidate("p0").num_requests == 0


def test_a_placement_of_what_is_held_counts_where_it_decodes_only(cell: Cell) -> None:
    cell.place("a", holder=cell.candidate("p0").address)
    assert (cell.candidate("p0").queued_prompt_tokens, cell.candidate("p0").used_blocks) == (0, 0)
    assert (cell.candidate("d0").queued_prompt_tokens, cell.candidate("d0").used_blocks) == (0, 9)
    assert cell.candidate("d0").num_requests == 1


def test_reports_count_every_block_that_is_not_free_or_cached(cell: Cell) -> None:
    cell.report("d0", in_use=12, num_running=2, num_waiting=3)
    worker = cell.candidate("d0")
    assert (worker.used_blocks, worker.num_requests) == (12, 5)


def test_a_reported_end_gives_the_estimate_back_once(cell: Cell) -> None:
    cell.place("a")
    assert cell.book.release(PlacementId("a"))
    assert not cell.book.release(PlacementId("a"))
    assert cell.candidate("p0").queued_prompt_tokens == 0 and len(cell.book) == 0


def test_a_lost_gateway_gives_back_all_of_its_incarnation(cell: Cell) -> None:
    cell.place("a", gateway=("g0", 7))
    cell.place("b", gateway=("g0", 8))
    assert cell.book.release_gateway(GatewayId("g0"), Incarnation(7)) == 1
    assert len(cell.book) == 1


def test_an_estimate_expires_after_its_requests_deadline(cell: Cell) -> None:
    alive = [("p0", 1), ("d0", 1)]
    cell.place("a", deadline_s=10.0)
    cell.clock.advance(14.9)
    assert cell.book.expire(alive) == 0  # type: ignore[arg-type]
    cell.clock.advance(0.1)
    assert cell.book.expire(alive) == 1  # type: ignore[arg-type]


def test_estimates_of_vanished_workers_vanish(cell: Cell) -> None:
    cell.place("a")
    assert cell.book.expire([("d0", 1)]) == 0  # type: ignore[list-item]
    assert cell.book.expire([("d0", 2)]) == 1  # type: ignore[list-item]


def test_turns_are_counted_for_each_incarnation(cell: Cell) -> None:
    cell.place("a")
    cell.place("b")
    assert cell.candidate("d0").num_placed == 2
    cell.members["d0"] = cell.registry.join(make_registration("d0", 2))
    assert cell.candidate("d0").num_placed == 0


def test_where_a_worker_is_comes_from_its_labels_and_its_hostname(cell: Cell) -> None:
    assert cell.candidate("p0").place == ("", "", "here")
    labels = (("rack", "r1"), ("zone", "z1"))
    assert place_of(replace(make_registration("d1"), labels=labels)) == ("z1", "r1", "here")
    assert place_of(replace(make_registration("d1"), labels=(*labels, ("host", "node-7")))) == ("z1", "r1", "node-7")


def test_what_a_worker_holds_and_fetches_is_part_of_its_load(cell: Cell) -> None:
    cell.report("p0", held_bytes=5 * 1024)
    cell.report("d0", num_transfers=3)
    assert cell.candidate("p0").held_blocks == 5 and cell.candidate("d0").num_transfers == 3


# -- what has been read since ------------------------------------------------------------------------------------------


@pytest.fixture
def quick(cell: Cell) -> Cell:
    """Everybody is known to read 1,000 tokens a second."""
    law = StepLaw(fixed_s=0.0, decode_row_s=0.0, decode_position_s=0.0, prompt_token_s=1e-3, prompt_pair_s=0.0)
    names = (WorkerId("p0"), Incarnation(1)), (WorkerId("d0"), Incarnation(1))
    cell.costs = Costs(steps=dict.fromkeys(names, law), measured=frozenset({MODEL}))
    return cell


def left(cell: Cell, name: str = "p0") -> object:
    """In grades of a fiftieth of what is known."""
    return pytest.approx(cell.candidate(name).queued_prompt_tokens, abs=20)


def test_a_prompt_counts_less_and_less_before_any_report(quick: Cell) -> None:
    quick.place("a", num_prompt_tokens=300)
    assert left(quick) == 300
    quick.clock.advance(0.1)
    assert left(quick) == 200
    quick.place("b", num_prompt_tokens=500)
    quick.clock.advance(0.25)
    assert left(quick) == 450
    quick.clock.advance(0.6)
    assert left(quick) == 0
    quick.place("c", num_prompt_tokens=100)
    assert left(quick) == 100, "what idled is not ahead of its time"


def test_a_report_is_the_most_that_there_is(quick: Cell) -> None:
    quick.report("p0", queued_prompt_tokens=600)
    assert left(quick) == 600
    quick.clock.advance(0.2)
    quick.report("p0", queued_prompt_tokens=100)
    assert left(quick) == 100


def test_a_step_that_still_runs_is_in_a_report_and_is_read_all_the_same(quick: Cell) -> None:
    """A step of these workers has 256 tokens at most: a report is too high by no more."""
    quick.report("p0", queued_prompt_tokens=250)
    assert left(quick) == 250
    quick.clock.advance(0.2)
    quick.report("p0", queued_prompt_tokens=250)
    assert left(quick) == 50
    quick.report("p0", queued_prompt_tokens=900)
    assert left(quick) == 900 - 256, "others have come, of whom nobody said anything here"


def test_a_placement_that_a_report_may_contain_is_not_two(quick: Cell) -> None:
    quick.place("a", num_prompt_tokens=200)
    quick.clock.advance(0.05)
    quick.report("p0", queued_prompt_tokens=200)
    assert left(quick) == 200


def test_a_worker_that_is_silent_is_not_taken_to_read_on(quick: Cell) -> None:
    quick.report("p0", queued_prompt_tokens=5000)
    quick.clock.advance(20.0)
    assert left(quick) == 4000


def test_what_ended_is_not_left(quick: Cell) -> None:
    quick.place("a", num_prompt_tokens=300)
    quick.place("b", num_prompt_tokens=100)
    quick.book.release(PlacementId("a"))
    assert left(quick) == 100


def test_what_a_decode_worker_reads_goes_by_the_answers_beside_it(quick: Cell) -> None:
    steps = {key: replace(law, decode_row_s=0.01, max_mixed_tokens=10) for key, law in quick.costs.steps.items()}
    quick.costs = replace(quick.costs, steps=steps)
    quick.report("d0", queued_prompt_tokens=200, num_running=2)  # 10 tokens in each step of 0.01 + 2 * 0.01 s
    assert left(quick, "d0") == 200
    quick.clock.advance(0.3)
    assert left(quick, "d0") == 100
