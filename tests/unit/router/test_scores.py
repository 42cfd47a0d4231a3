"""What paths cost: law 6 as properties over learned costs, and what each part is for."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.types import Role
from router.costs import Costs, HandoffLaw, StepLaw
from router.scores import Path, Scores, distance
from router.snapshot import Candidate, PolicySettings, Snapshot
from tests.unit.router.builders import make_candidate, make_request

P, D, U = Role.PREFILL, Role.DECODE, Role.UNIFIED
small_st = st.floats(0, 0.01)
laws_st = st.builds(
    StepLaw,
    fixed_s=small_st,
    decode_row_s=st.floats(0, 1e-3),
    decode_position_s=st.floats(0, 1e-6),
    prompt_token_s=st.floats(0, 1e-3),
    prompt_pair_s=st.floats(0, 1e-6),
    max_step_tokens=st.sampled_from([64, 2048]),
    max_mixed_tokens=st.sampled_from([16, 512]),
)
handoffs_st = st.builds(HandoffLaw, fixed_s=small_st, byte_s=st.floats(0, 1e-6))
loads_st = st.fixed_dictionaries(
    {
        "used_blocks": st.integers(0, 200),
        "queued_prompt_tokens": st.integers(0, 20_000),
        "num_requests": st.integers(0, 30),
        "held_blocks": st.integers(0, 150),
        "num_transfers": st.integers(0, 10),
    }
)
SETTINGS = PolicySettings(held_fraction=0.9)


def paths(
    prefill: Candidate, decode: Candidate, unified: Candidate, costs: Costs, *, length: int = 1000, **overlaps: int
) -> list[Path]:
    """Every kind of path of one request; ``overlaps`` are blocks by worker."""
    workers = (prefill, decode, unified)
    keys = {w.address.worker_id: w.key for w in workers}
    snapshot = Snapshot(
        candidates=workers,
        costs=costs,
        overlaps={keys[name]: blocks for name, blocks in overlaps.items()},  # type: ignore[index]
    )
    scores = Scores(make_request(num_prompt_tokens=length), snapshot, SETTINGS)
    return [
        *scores.splits([(prefill, decode)]),
        scores.held(prefill, decode),
        scores.local(unified),
        scores.local(decode),
    ]


def workers(**load: int) -> tuple[Candidate, Candidate, Candidate]:
    return tuple(make_candidate(name, role, **load) for name, role in (("p0", P), ("d0", D), ("u0", U)))  # type: ignore[return-value, arg-type]


def learned(law: StepLaw, handoff: HandoffLaw) -> Costs:
    names = [w.key for w in workers()]
    return Costs(steps=dict.fromkeys(names, law), handoffs_of=dict.fromkeys(names, handoff))


NEARLY = 1 + 1e-9
"""Sums in another order."""


@given(law=laws_st, handoff=handoffs_st, load=loads_st, more=loads_st, length=st.integers(1, 3000))
def test_more_load_never_raises_a_score(
    law: StepLaw, handoff: HandoffLaw, load: dict[str, int], more: dict[str, int], length: int
) -> None:
    costs = learned(law, handoff)
    busier = {name: number + more[name] for name, number in load.items()}
    for idle, busy in zip(
        paths(*workers(**load), costs, length=length), paths(*workers(**busier), costs, length=length), strict=True
    ):
        assert idle.cost_s <= busy.cost_s * NEARLY
        assert idle.score == -idle.cost_s


@given(
    law=laws_st,
    handoff=handoffs_st,
    load=loads_st,
    length=st.integers(1, 3000),
    overlap=st.integers(0, 200),
    less=st.integers(0, 200),
)
def test_less_overlap_never_raises_a_score(
    law: StepLaw, handoff: HandoffLaw, load: dict[str, int], length: int, overlap: int, less: int
) -> None:
    costs = learned(law, handoff)

    def all_paths(blocks: int) -> list[Path]:
        return paths(*workers(**load), costs, length=length, **dict.fromkeys(("p0", "d0", "u0"), blocks))

    for long, short, nothing in zip(all_paths(overlap), all_paths(max(0, overlap - less)), all_paths(0), strict=True):
        assert long.cost_s <= short.cost_s * NEARLY
        assert long.saved_s == pytest.approx(nothing.cost_s - long.cost_s, abs=1e-9)


@given(law=laws_st, handoff=handoffs_st, load=loads_st, length=st.integers(1, 3000), more=st.integers(0, 3000))
def test_a_longer_prompt_never_raises_a_score(
    law: StepLaw, handoff: HandoffLaw, load: dict[str, int], length: int, more: int
) -> None:
    costs = learned(law, handoff)
    for short, long in zip(
        paths(*workers(**load), costs, length=length), paths(*workers(**load), costs, length=length + more), strict=True
    ):
        assert short.cost_s <= long.cost_s * NEARLY


@pytest.mark.parametrize(
    ("path", "load"),
    [
        (0, {"queued_prompt_tokens": 500}),
        (0, {"held_blocks": 90}),
        (0, {"num_transfers": 2}),
        (0, {"num_requests": 3}),
        (0, {"used_blocks": 90}),
        (1, {"num_transfers": 1}),
        (2, {"queued_prompt_tokens": 500}),
        (2, {"num_requests": 3}),
        (2, {"used_blocks": 90}),
        (3, {"num_requests": 8}),
    ],
)
def test_each_kind_of_load_counts(path: int, load: dict[str, int]) -> None:
    idle = {"num_requests": 1}
    assert paths(*workers(**idle), Costs())[path].cost_s < paths(*workers(**(idle | load)), Costs())[path].cost_s


def test_what_is_held_costs_no_read() -> None:
    split, held, *_ = paths(*workers(queued_prompt_tokens=5000), Costs())
    assert held.cost_s < split.cost_s - 0.5 and held.num_cached_tokens == 0


def test_a_slow_worker_costs_more_than_a_fast_one_and_a_slow_link_more_than_a_fast_one() -> None:
    fast, slow = StepLaw(), StepLaw(prompt_token_s=4e-4)
    near, far = HandoffLaw(), HandoffLaw(byte_s=1e-6)
    base = paths(*workers(), learned(fast, near))
    assert base[0].cost_s < paths(*workers(), learned(fast, far))[0].cost_s
    for one, other in zip(base, paths(*workers(), learned(slow, near)), strict=True):
        assert one.is_held or one.cost_s < other.cost_s


# -- where workers are ------------------------------------------------------------------------------------------------


def test_distance_counts_the_widest_border_that_is_known() -> None:
    here = ("z0", "r0", "h0")
    assert distance(here, here) == 0
    assert distance(here, ("z0", "r0", "h1")) == 1
    assert distance(here, ("z0", "r1", "h1")) == 2
    assert distance(here, ("z1", "r0", "h0")) == 3
    assert distance(here, ("", "", "h0")) == distance(here, ("", "", "")) == 0
    assert distance(("", "", "h0"), ("z1", "", "h1")) == 1


def test_a_near_pair_is_preferred_as_long_as_it_is_not_much_busier() -> None:
    prefill = make_candidate("p0", P, place=("z0", "r0", "h0"))
    far = make_candidate("d0", D, place=("z1", "r0", "h1"))
    near = make_candidate("d1", D, place=("z0", "r0", "h0"))

    def lead_of_near(near: Candidate, settings: PolicySettings = SETTINGS) -> float:
        scores = Scores(make_request(), Snapshot(candidates=()), settings)
        one, other = scores.splits([(prefill, far), (prefill, near)])
        return one.cost_s - other.cost_s

    assert lead_of_near(near) == pytest.approx(3 * SETTINGS.distance_s)
    assert lead_of_near(replace(near, used_blocks=95)) < 0
    assert lead_of_near(near, replace(SETTINGS, distance_s=0.0)) == 0
