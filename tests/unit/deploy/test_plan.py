"""Who is started and who goes, for any sizes and members."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from core.types import Role
from deploy.plan import Member, Plan, Pool, Standing, free_number, plan

P: Pool = ("m", Role.PREFILL)
D: Pool = ("m", Role.DECODE)
OTHER: Pool = ("other", Role.DECODE)


def serving(name: str, pool: Pool | None = D, **facts: int) -> Member:
    return Member(name=name, pool=pool, standing=Standing.READY, **facts)


def test_what_is_as_wanted_is_left_alone() -> None:
    assert plan({P: 1, D: 1}, [serving("p", P), serving("d"), serving("x", OTHER)]) == Plan()


def test_who_leaves_counts_nowhere_and_is_replaced_before_it_is_gone() -> None:
    assert plan({D: 2}, [serving("d0"), serving("d1", None)]) == Plan(start=(D,))


def test_a_worker_that_flips_counts_where_it_goes() -> None:
    assert plan({P: 1, D: 2}, [serving("p0", P), serving("d0"), serving("p1", D)]) == Plan()


def test_the_least_busy_goes_and_of_equals_the_coldest_and_then_the_youngest() -> None:
    busy, cold = serving("busy", work=3, age=9), serving("cold", work=1, cached_blocks=1, age=1)
    warm, young = serving("warm", work=1, cached_blocks=7, age=2), serving("young", work=1, cached_blocks=7, age=3)
    members = [busy, warm, young, cold]
    assert plan({D: 3}, members).drain == ("cold",)
    assert plan({D: 2}, members).drain == ("cold", "young")
    assert plan({D: 0}, members).drain == ("cold", "young", "warm", "busy")


def test_who_serves_nobody_goes_first_and_at_once() -> None:
    starting, failing = (Member(name=name, pool=D, standing=Standing.IDLE) for name in ("starting", "failing"))
    suspect = Member(name="suspect", pool=D, standing=Standing.SUSPECT, work=9)
    assert plan({D: 2}, [serving("idle"), suspect, starting, failing]) == Plan(cancel=("starting", "failing"))
    assert plan({D: 1}, [serving("idle"), suspect]) == Plan(drain=("suspect",))


def test_who_serves_and_is_not_known_to_a_new_router_yet_is_left_alone() -> None:
    unknown = [Member(name=f"d{n}", pool=D, standing=Standing.UNKNOWN) for n in range(2)]
    assert plan({D: 1}, unknown) == Plan()
    assert plan({D: 1}, [*unknown, serving("known")]) == Plan(drain=("known",))


@given(
    st.dictionaries(st.sampled_from([P, D, OTHER]), st.integers(0, 4)),
    st.lists(st.tuples(st.sampled_from([P, D, OTHER, None]), st.sampled_from(Standing), st.integers(0, 3)), max_size=8),
)
def test_the_steps_lead_to_the_sizes_and_nobody_who_serves_is_stopped(
    desired: dict[Pool, int], facts: list[tuple[Pool | None, Standing, int]]
) -> None:
    members = [
        Member(name=f"w{n}", pool=pool, standing=standing, work=work, age=n)
        for n, (pool, standing, work) in enumerate(facts)
    ]
    steps = plan(desired, members)
    gone = {*steps.cancel, *steps.drain}
    assert len(gone) == len(steps.cancel) + len(steps.drain)
    for pool, size in desired.items():
        left = [m for m in members if m.pool == pool and m.name not in gone]
        too_many = [m for m in left if m.standing is Standing.UNKNOWN]
        assert 0 <= len(left) + steps.start.count(pool) - size <= len(too_many)
        assert not (steps.start.count(pool) and any(m.pool == pool and m.name in gone for m in members))
    for member in members:
        assert member.name not in (steps.drain if member.standing is Standing.IDLE else steps.cancel)
        if member.pool not in desired:
            assert member.name not in gone


def test_a_number_that_nobody_has() -> None:
    assert free_number([], "decode") == 0
    assert free_number(["decode-0", "decode-2", "prefill-1", "decode-x"], "decode") == 1
    assert free_number(["a.decode-0", "decode-0", "decode-1"], "a.decode") == 1
