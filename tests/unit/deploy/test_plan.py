"""Who is started and who goes, for any sizes and members."""

from __future__ import annotations

from dataclasses import replace
from random import Random

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


# -- rollouts ---------------------------------------------------------------------------------------------------------


class Cell:
    """Pools whose workers do as the plan says, in the order in which the test lets them."""

    def __init__(self, sizes: dict[Pool, int]) -> None:
        self.sizes = sizes
        self.members: dict[str, Member] = {}
        self.leaving: list[str] = []
        self.num_started = 0
        for pool, size in sizes.items():
            for _ in range(size):
                self.begin(pool, "one", is_ready=True)

    def begin(self, pool: Pool, revision: str, *, is_ready: bool) -> None:
        self.num_started += 1
        standing = Standing.READY if is_ready else Standing.IDLE
        name = f"w{self.num_started}"
        member = Member(name=name, pool=pool, standing=standing, revision=revision, is_ready=is_ready)
        self.members[name] = replace(member, age=self.num_started)

    def step(self) -> Plan:
        steps = plan(self.sizes, self.members.values(), targets={"m": "two"}, leaving={"m"} if self.leaving else ())
        for name in steps.cancel:
            del self.members[name]
        for name in steps.drain:
            del self.members[name]
            self.leaving.append(name)
        for pool in steps.start:
            self.begin(pool, "two", is_ready=False)
        return steps

    def num(self, pool: Pool, revision: str, *, is_ready: bool = True) -> int:
        return sum((m.pool, m.revision, m.is_ready) == (pool, revision, is_ready) for m in self.members.values())


@given(st.integers(1, 5), st.integers(1, 5), st.randoms(use_true_random=False))
def test_a_rollout_ends_and_serves_all_the_time_whatever_comes_first(num_p: int, num_d: int, draw: Random) -> None:
    cell = Cell({P: num_p, D: num_d})
    for _ in range(200):
        steps = cell.step()
        for pool, size in cell.sizes.items():
            num_serving = cell.num(pool, "one") + cell.num(pool, "two")
            num_all = num_serving + cell.num(pool, "two", is_ready=False)
            assert size <= num_serving and num_all <= size + 1, "never fewer that serve, never two more"
        for revision in ("one", "two"):
            serving = [cell.num(pool, revision) for pool in cell.sizes]
            assert revision == "two" or all(serving) or not any(serving), "old ones go with nobody left alone"
        waiting = [m for m in cell.members.values() if not m.is_ready]
        if waiting and draw.random() < 0.5:
            one = draw.choice(waiting)
            cell.members[one.name] = replace(one, is_ready=True, standing=Standing.READY)
        elif cell.leaving:
            cell.leaving.pop(draw.randrange(len(cell.leaving)))
        elif not waiting and steps == Plan():
            break
    assert all(m.revision == "two" and m.is_ready for m in cell.members.values())
    assert [cell.num(pool, "two") for pool in (P, D)] == [num_p, num_d]


def test_a_new_worker_that_does_not_come_to_serve_stops_the_rollout_with_every_old_one_serving() -> None:
    cell = Cell({P: 2, D: 2})
    assert cell.step().start == (P, D)
    new_p, _ = [m for m in cell.members.values() if m.revision == "two"]
    cell.members[new_p.name] = replace(new_p, is_ready=True, standing=Standing.READY)
    for _ in range(5):
        assert cell.step() == Plan()
    assert (cell.num(P, "one"), cell.num(D, "one")) == (2, 2)


def test_a_revision_before_the_last_one_is_replaced_as_well() -> None:
    """Asked for another one half-way: what was started for the first and serves nobody goes at once."""
    cell = Cell({P: 1, D: 1})
    cell.begin(D, "one and a half", is_ready=False)
    assert cell.step() == Plan(start=(P, D), cancel=("w3",))


def test_a_model_of_one_revision_is_only_resized() -> None:
    members = [replace(serving("p", P), revision="two"), replace(serving("d"), revision="two")]
    assert plan({P: 2, D: 1}, members, targets={"m": "two"}) == Plan(start=(P,))
