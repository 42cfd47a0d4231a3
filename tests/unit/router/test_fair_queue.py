"""Who is next: classes, tenants, age; bounds on length, fairness and patience, for any order of events."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.priority import PriorityClass
from router.fair_queue import CLASSES, STEP, FairQueue, Full, Ticket

HIGH, NORMAL, LOW = (each.rank(0) for each in CLASSES)


def ticket(
    tenant: str = "a", priority: int = 0, *, since: float = 0.0, cost: float = 1.0, again: bool = False
) -> Ticket:
    return Ticket(tenant=tenant, priority=priority, since=since, cost=cost, was_served=again)


def rank_of(one: Ticket) -> int:
    return CLASSES.index(one.priority_class)


def next_of(queue: FairQueue) -> Ticket:
    return next(queue.in_turn())


def serve_next(queue: FairQueue) -> Ticket:
    served = next_of(queue)
    queue.serve(served)
    return served


EVENTS = st.lists(
    st.one_of(
        st.tuples(
            st.just("enter"),
            st.sampled_from("abc"),
            st.sampled_from((HIGH, NORMAL, NORMAL - 3, LOW)),
            st.integers(1, 50),
            st.booleans(),
        ),
        st.tuples(st.just("serve")),
        st.tuples(st.just("leave"), st.integers(0, 30)),
        st.tuples(st.just("charge"), st.sampled_from("abc"), st.integers(-20, 20)),
    ),
    max_size=80,
)


@given(events=EVENTS, max_waiting=st.integers(0, 6))
def test_every_ticket_leaves_once_and_the_queue_is_bounded(events: list[tuple], max_waiting: int) -> None:  # type: ignore[type-arg]
    queue = FairQueue(max_waiting)
    here: set[Ticket] = set()
    for at, (kind, *rest) in enumerate(events):
        if kind == "enter":
            tenant, priority, cost, again = rest
            new = ticket(tenant, priority, since=at, cost=cost, again=again and len(here) < 9)
            try:
                displaced = queue.enter(new)
            except Full:
                assert not new.was_served and len(here) >= max_waiting
                continue
            if displaced is not None:
                assert displaced in here and not displaced.was_served
                assert (rank_of(displaced), displaced.tenant) != (rank_of(new), new.tenant)
                assert rank_of(displaced) >= rank_of(new), "never a higher class"
                here.remove(displaced)
            here.add(new)
        elif kind == "serve" and here:
            here.remove(serve_next(queue))
        elif kind == "leave" and here:
            gone = sorted(here, key=lambda each: each.number)[rest[0] % len(here)]
            queue.leave(gone)
            here.remove(gone)
        elif kind == "charge":
            queue.charge(rest[0], NORMAL, rest[1])
        assert set(queue.in_turn()) == here and len(queue) == len(here)
        assert all(each in queue for each in here)
        num_new = sum(not each.was_served for each in here)
        assert num_new <= (max_waiting + len(CLASSES) - 1 if max_waiting else 0)
        for one, other in itertools.combinations(queue.in_turn(), 2):
            assert one.was_served or not other.was_served, "what has begun goes first"
            kinds = [(each.tenant, each.priority_class, each.was_served) for each in (one, other)]
            if kinds[0] == kinds[1]:
                assert (one.priority, one.since) <= (other.priority, other.since), "within a tenant by number, then age"


@given(
    costs=st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 100)), min_size=1, max_size=60),
    num_before=st.integers(0, 200),
)
def test_tenants_that_both_wait_have_been_given_nearly_the_same(costs: list[tuple[str, int]], num_before: int) -> None:
    queue = FairQueue(1000)
    for _ in range(num_before):
        queue.charge("a", NORMAL, 10.0)  # alone, it took what it liked: that is not held against it
    for at, (tenant, cost) in enumerate(costs):
        queue.enter(ticket(tenant, since=at, cost=cost))
    had: dict[str, float] = defaultdict(float)
    waiting = Counter(tenant for tenant, _ in costs)
    dearest = max(cost for _, cost in costs)
    while len(queue):
        served = serve_next(queue)
        had[served.tenant] += served.cost
        waiting[served.tenant] -= 1
        for one, other in itertools.combinations((t for t in waiting if waiting[t]), 2):
            assert abs(had[one] - had[other]) <= 2 * dearest


def test_who_comes_back_has_saved_up_nothing() -> None:
    queue = FairQueue(1000)
    for at in range(40):
        queue.enter(ticket("busy", since=at, cost=10))
    for _ in range(20):
        serve_next(queue)
    for at in range(20):
        queue.enter(ticket("back", since=100 + at, cost=10))
    assert Counter(serve_next(queue).tenant for _ in range(20)) == {"busy": 10, "back": 10}


def test_who_has_waited_alone_is_not_held_back_by_what_it_had() -> None:
    queue = FairQueue(1000)
    queue.charge("old", NORMAL, 1e6)
    queue.charge("new", NORMAL, 1.0)
    for at in range(10):
        queue.enter(ticket("old", since=at))
        queue.enter(ticket("new", since=at))
    assert Counter(serve_next(queue).tenant for _ in range(10)) == {"old": 5, "new": 5}


@given(flood=st.lists(st.sampled_from((HIGH, NORMAL, LOW)), max_size=200), patient=st.sampled_from((NORMAL, LOW)))
def test_no_class_stands_still(flood: list[int], patient: int) -> None:
    """Whatever keeps coming before and beside it, the first of a class has its turn in a bounded number of turns."""
    queue = FairQueue(10_000)
    waits = ticket("patient", patient)
    queue.enter(waits)
    turns, coming = 0, iter(flood)
    while True:
        for priority in (HIGH, HIGH, next(coming, HIGH)):
            if PriorityClass.of(priority) is not waits.priority_class:
                queue.enter(ticket("flood", priority))
        turns += 1
        if serve_next(queue) is waits:
            break
    assert turns <= STEP + len(CLASSES)


def test_the_highest_class_goes_first_and_the_others_in_their_turn() -> None:
    queue = FairQueue(1000)
    for at in range(40):
        queue.enter(ticket("a", LOW, since=at))
        queue.enter(ticket("b", HIGH, since=at))
    served = [serve_next(queue).priority_class for _ in range(2 * STEP)]
    assert [at for at, each in enumerate(served) if each is PriorityClass.LOW] == [STEP - 1, 2 * STEP - 1]


def test_a_higher_class_takes_the_place_of_the_youngest_of_the_lowest_and_leaves_the_oldest() -> None:
    queue = FairQueue(4)
    lows = [ticket("a", LOW, since=at) for at in range(3)]
    for each in (*lows, ticket("a", NORMAL)):
        queue.enter(each)
    assert queue.enter(ticket("b", HIGH)) is lows[2]
    assert queue.enter(ticket("b", HIGH)) is lows[1]
    with pytest.raises(Full):
        queue.enter(ticket("b", HIGH))
    assert lows[0] in queue


def test_a_flood_of_one_tenant_leaves_places_to_others() -> None:
    queue = FairQueue(4)
    flood = [ticket("flood", since=at) for at in range(4)]
    for each in flood:
        queue.enter(each)
    assert queue.enter(ticket("quiet", since=9)) is flood[3]
    assert queue.enter(ticket("quiet", since=10)) is flood[2]
    for tenant, is_tenants_doing in (("quiet", True), ("flood", True)):
        with pytest.raises(Full) as refusal:
            queue.enter(ticket(tenant, since=11))
        assert refusal.value.is_tenants_doing is is_tenants_doing


def test_who_was_served_before_is_neither_refused_nor_displaced() -> None:
    queue = FairQueue(1)
    queue.enter(ticket("a", LOW))
    again = ticket("a", LOW, again=True)
    assert queue.enter(again) is None
    for _ in range(3):
        try:
            displaced = queue.enter(ticket("b", HIGH))
        except Full:
            break
        assert displaced is not again
    assert again in queue


def test_what_is_ahead_is_counted_as_it_would_be_served() -> None:
    queue = FairQueue(1000)
    for at in range(10):
        queue.enter(ticket("flood", since=at, cost=10))
    queue.enter(ticket("urgent", HIGH, cost=7))
    assert queue.work_ahead("flood", NORMAL) == 107
    assert queue.work_ahead("new", NORMAL) == 7, "its turn comes at once"
    queue.enter(ticket("new", cost=10))
    assert queue.work_ahead("new", NORMAL) == 7 + 10 + 10
    assert queue.work_ahead("urgent", HIGH) == 7


def test_counters_of_the_absent_are_forgotten() -> None:
    queue = FairQueue(10)
    for number in range(1000):
        queue.charge(f"t{number}", NORMAL, 5.0)
    assert len(queue._lanes[PriorityClass.NORMAL].counters) == 0
