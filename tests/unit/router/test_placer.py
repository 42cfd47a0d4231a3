"""The shell around the policy: what is placed where the best path has no room."""

from __future__ import annotations

from core.clock import ManualClock
from core.costs import StepWork
from core.types import CostSamples, Mode, Placement, Role, StepSample, WorkerState
from router.absences import Absences
from router.cost_book import CostBook
from router.costs import num_pairs
from router.load import LoadBook
from router.placer import Placer
from router.policy import Lack, PolicySettings, Reason, Shortfall
from router.pools import PoolBook
from router.prefix_index import PrefixIndex
from router.registry import LivenessTimes, Registry
from router.room import RoomLimits
from tests.unit.router.builders import make_load, make_registration, make_request


class Cell:
    """Workers whose prompts take so many milliseconds a token, and that have so much to read already."""

    def __init__(self, **workers: tuple[Role, float, int]) -> None:
        clock = ManualClock(50.0)
        registry = Registry(clock, LivenessTimes(suspect_after_s=60, lost_after_s=120))
        costs = CostBook()
        self.placer = Placer(
            registry=registry,
            load=LoadBook(clock, projected_tokens=32),
            prefixes=PrefixIndex(clock),
            costs=costs,
            pools=PoolBook(clock, ()),
            absences=Absences(clock, after_s=2.0),
            settings=PolicySettings(),
            room_limits=RoomLimits(prefill_backlog_s=1.0),
        )
        for name, (role, token_ms, num_queued) in workers.items():
            registration = make_registration(name, role=role, num_blocks=1000)
            membership = registry.join(registration)
            load = make_load(WorkerState.READY, total=1000, in_use=1, num_running=1, queued_prompt_tokens=num_queued)
            registry.heartbeat(membership, load)
            works = [StepWork(num_prompt_tokens=n, num_prompt_pairs=num_pairs(n, 0)) for n in (50, 100, 250) * 20]
            samples = [StepSample(work=w, seconds=1e-3 * token_ms * w.num_prompt_tokens) for w in works]
            costs.learn(registration, CostSamples(steps=tuple(samples)))

    def place(self, num_prompt_tokens: int) -> Placement | Shortfall:
        return self.placer.place_now(make_request(num_prompt_tokens=num_prompt_tokens))


def test_what_would_be_read_locally_is_split_where_the_decode_worker_has_prompts_enough() -> None:
    """The decode worker is much faster, so reading there would be cheaper, its queue included."""
    workers = {"p0": (Role.PREFILL, 10.0, 0), "d0": (Role.DECODE, 1.0, 900)}
    placed = Cell(**workers).place(300)
    assert isinstance(placed, Placement) and placed.reason == Reason.LOCAL_CHEAPER
    placed = Cell(**(workers | {"d0": (Role.DECODE, 1.0, 1500)})).place(300)
    assert isinstance(placed, Placement) and placed.mode is Mode.SPLIT, placed
    assert placed.prefill is not None and placed.prefill.worker_id == "p0"


def test_nobody_has_room_where_both_ways_are_full() -> None:
    placed = Cell(p0=(Role.PREFILL, 10.0, 150), d0=(Role.DECODE, 1.0, 1500)).place(300)
    assert isinstance(placed, Shortfall) and placed.lack is Lack.NO_ROOM


def test_a_decode_worker_that_may_read_is_taken_before_one_that_may_not() -> None:
    workers = {
        "p0": (Role.PREFILL, 10.0, 150),
        "d0": (Role.DECODE, 1.0, 1500),
        "d1": (Role.DECODE, 1.0, 950),
    }
    placed = Cell(**workers).place(300)
    assert isinstance(placed, Placement) and placed.mode is Mode.LOCAL and placed.decode.worker_id == "d1"
