"""When a worker has no room for one more, and what is done then."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.ids import Incarnation, WorkerId
from core.types import Role
from router.costs import Costs, StepLaw
from router.policy import Candidate, Choice, PolicySettings, Shortfall, Snapshot, decide
from router.room import Room, RoomLimits
from tests.unit.router.builders import MODEL, make_candidate, make_request

COSTS = Costs(
    steps={
        (WorkerId("p0"), Incarnation(1)): StepLaw(fixed_s=0.0, prompt_token_s=1e-3, prompt_pair_s=0.0),
    },
    measured=frozenset({MODEL}),
)
POOLS = frozenset({(MODEL, Role.PREFILL), (MODEL, Role.DECODE)})


def room_of(*workers: Candidate, num_prompt_tokens: int = 100, num_cached_blocks: int = 0) -> Room:
    """``num_cached_blocks``: of the first worker."""
    overlaps = {workers[0].key: num_cached_blocks}
    return Room(
        request=make_request(num_prompt_tokens=num_prompt_tokens),
        snapshot=Snapshot(candidates=workers, pools=POOLS, costs=COSTS, overlaps=overlaps),
        settings=PolicySettings(projected_tokens=64),
        limits=RoomLimits(prefill_backlog_s=1.0, decode_backlog=0.25, held_fraction=0.9, max_transfers=4),
    )


P = make_candidate("p0", Role.PREFILL, num_blocks=100)
D = make_candidate("d0", Role.DECODE, num_blocks=100)


@pytest.mark.parametrize(
    ("worker", "lack"),
    [
        (replace(P, num_requests=5, queued_prompt_tokens=900), ""),
        (replace(P, num_requests=5, queued_prompt_tokens=1100), "has 1.1 s of prompts to read"),
        (replace(P, model="not measured", num_requests=5, queued_prompt_tokens=10**6), ""),
        (replace(P, num_requests=5, held_blocks=83), ""),
        (replace(P, num_requests=5, held_blocks=84), "holds 84 of 90 blocks for decode workers"),
        (replace(D, num_requests=9, used_blocks=100, promised_blocks=114), ""),
        (replace(D, num_requests=9, used_blocks=100, promised_blocks=115), "has promised 115 KV blocks of 100"),
        (replace(D, num_requests=10), "has 10 requests"),
        (replace(D, num_requests=1, num_transfers=4), "4 transfers in flight"),
        (replace(D, is_refusing=True), "has just refused a request"),
        (D, ""),
    ],
)
def test_what_a_worker_has_too_much_of(worker: Candidate, lack: str) -> None:
    found = room_of(worker).lacks(worker)
    assert lack in found and bool(lack) == bool(found)


def test_a_prompt_may_wait_for_as_long_as_it_is_spared_by_what_the_worker_holds() -> None:
    """Else it would be computed once more by whoever has room."""
    busy = replace(P, num_requests=5, queued_prompt_tokens=1300)
    assert "prompts to read" in room_of(busy, num_prompt_tokens=500).lacks(busy)
    assert "prompts to read" in room_of(busy, num_prompt_tokens=500, num_cached_blocks=15).lacks(busy)
    assert room_of(busy, num_prompt_tokens=500, num_cached_blocks=20).lacks(busy) == ""


def test_a_decode_worker_with_prompts_enough_may_still_be_handed_one() -> None:
    reading = replace(D, num_requests=3, queued_prompt_tokens=20_000)
    (_, narrowed) = room_of(P, reading).narrowed().candidates
    assert narrowed == replace(reading, is_reading_enough=True)
    outcome = decide(make_request(), Snapshot(candidates=(P, narrowed), pools=POOLS, costs=COSTS), PolicySettings())
    assert isinstance(outcome, Choice) and str(outcome.path) == "split:p0>d0"


@pytest.mark.parametrize("workers", [(P, D), (D,)], ids=["its pairs are excluded", "no prefill worker is there"])
def test_a_decode_worker_with_prompts_enough_does_not_make_up_for_prefill_workers(
    workers: tuple[Candidate, ...],
) -> None:
    request = make_request(excluded_pairs=(("p0", "d0"),))
    for is_reading_enough in (False, True):
        here = tuple(replace(w, is_reading_enough=is_reading_enough and w.role is Role.DECODE) for w in workers)
        cell = Snapshot(candidates=here, pools=POOLS, costs=COSTS, absent=POOLS - {(MODEL, Role.DECODE)})
        assert isinstance(decide(request, cell, PolicySettings()), Shortfall if is_reading_enough else Choice)


def test_an_empty_worker_has_room_for_whatever_it_can_hold() -> None:
    assert room_of(D, num_prompt_tokens=1599).lacks(D) == ""
    assert room_of(P, num_prompt_tokens=1599).lacks(P) == ""


def test_a_prompt_is_not_read_before_a_decode_worker_has_room_for_it() -> None:
    full = replace(D, num_requests=9, used_blocks=99, promised_blocks=120)
    room = room_of(P, full)
    choice = decide(room.request, room.snapshot, room.settings)
    assert isinstance(choice, Choice) and not room.has_path(choice.path)
    assert isinstance(decide(room.request, room.narrowed(), room.settings), Shortfall)
    assert room.message() == "model 'tiny' has no room now: d0 has promised 120 KV blocks of 100"


def test_the_best_of_those_with_room_is_taken() -> None:
    other = make_candidate("d1", Role.DECODE, num_blocks=100, num_requests=5)
    room = room_of(P, replace(D, is_refusing=True), other)
    choice = decide(room.request, room.narrowed(), room.settings)
    assert isinstance(choice, Choice) and choice.path.decode is other and room.has_path(choice.path)
