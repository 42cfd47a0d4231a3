"""Membership under a manual clock: who is alive, who is stale, what a model is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.clock import ManualClock
from core.config import RouterConfig
from core.errors import InvalidRequest, StaleIncarnation
from core.ids import WorkerId
from core.types import CommandKind, Role, WorkerCommand, WorkerState
from router.registry import LivenessTimes, Membership, Registry
from tests.unit.router.builders import make_load, make_registration

DRAIN = WorkerCommand(kind=CommandKind.DRAIN, reason="maintenance")
TIMES = LivenessTimes(suspect_after_s=1.5, lost_after_s=3.0, retention_s=30.0)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(100.0)


@pytest.fixture
def registry(clock: ManualClock) -> Registry:
    return Registry(clock, TIMES)


def state_of(registry: Registry, name: str = "d0") -> WorkerState | None:
    return {w.registration.worker_id: w.state for w in registry.workers()}.get(WorkerId(name))


def test_a_worker_is_starting_until_it_says_otherwise(registry: Registry) -> None:
    membership = registry.join(make_registration())
    assert state_of(registry) is WorkerState.STARTING
    for said in (WorkerState.READY, WorkerState.DRAINING):
        assert registry.heartbeat(membership, make_load(said))
        assert state_of(registry) is said


def test_silence_makes_suspect_then_lost_then_forgotten(registry: Registry, clock: ManualClock) -> None:
    registry.heartbeat(registry.join(make_registration()), make_load())
    expected = [
        (1.4, WorkerState.READY),
        (1.5, WorkerState.SUSPECT),
        (2.9, WorkerState.SUSPECT),
        (3.0, WorkerState.LOST),
        (32.9, WorkerState.LOST),
        (33.0, None),
    ]
    passed = 0.0
    for after_s, state in expected:
        clock.advance(after_s - passed)
        passed = after_s
        registry.sweep()
        assert state_of(registry) is state, after_s


def test_a_heartbeat_ends_the_suspicion(registry: Registry, clock: ManualClock) -> None:
    membership = registry.join(make_registration())
    clock.advance(2.0)
    assert state_of(registry) is WorkerState.SUSPECT
    registry.heartbeat(membership, make_load())
    assert state_of(registry) is WorkerState.READY


def test_a_broken_stream_is_suspect_at_once_and_lost_after_the_grace(registry: Registry, clock: ManualClock) -> None:
    membership = registry.join(make_registration())
    registry.heartbeat(membership, make_load())
    registry.part(membership)
    assert state_of(registry) is WorkerState.SUSPECT
    clock.advance(2.99)
    assert state_of(registry) is WorkerState.SUSPECT
    clock.advance(0.01)
    assert state_of(registry) is WorkerState.LOST


def test_a_rejoin_of_the_same_incarnation_continues_it(registry: Registry) -> None:
    first = registry.join(make_registration())
    registry.heartbeat(first, make_load(in_use=7))
    registry.part(first)
    second = registry.join(make_registration())
    assert state_of(registry) is WorkerState.READY
    assert registry.workers()[0].load.blocks.in_use == 7
    # The end of the old stream, noticed late, says nothing about the new one; nor do its last words.
    registry.part(first)
    assert registry.heartbeat(first, make_load(WorkerState.DRAINING))
    assert state_of(registry) is WorkerState.READY
    assert first.commands.get_nowait() is None
    assert second.commands.empty()


def test_a_new_incarnation_replaces_the_old_one_at_once_and_for_ever(registry: Registry) -> None:
    old = registry.join(make_registration(incarnation=1))
    registry.heartbeat(old, make_load())
    new = registry.join(make_registration(incarnation=2))
    assert [w.registration.incarnation for w in registry.workers()] == [2]
    assert state_of(registry) is WorkerState.STARTING
    assert isinstance(old.commands.get_nowait(), StaleIncarnation)
    with pytest.raises(StaleIncarnation):
        registry.heartbeat(old, make_load())
    with pytest.raises(StaleIncarnation):
        registry.join(make_registration(incarnation=1))
    registry.part(old)
    registry.heartbeat(new, make_load())
    assert state_of(registry) is WorkerState.READY


def test_another_worker_at_the_same_address_means_the_first_one_is_gone(registry: Registry) -> None:
    old = registry.join(make_registration("d0", 1, address="host:9"))
    registry.join(make_registration("d1", 5, address="host:9"))
    assert state_of(registry, "d0") is None and state_of(registry, "d1") is WorkerState.STARTING
    with pytest.raises(StaleIncarnation):
        registry.heartbeat(old, make_load())


def test_a_forgotten_worker_is_asked_to_register_again(registry: Registry, clock: ManualClock) -> None:
    membership = registry.join(make_registration())
    clock.advance(40.0)
    registry.sweep()
    assert not registry.heartbeat(membership, make_load())
    again = registry.join(make_registration(), membership.commands)
    assert registry.heartbeat(again, make_load())
    assert state_of(registry) is WorkerState.READY
    assert membership.commands.empty()  # the stream goes on


def test_a_lost_worker_that_was_only_slow_comes_back(registry: Registry, clock: ManualClock) -> None:
    membership = registry.join(make_registration())
    clock.advance(10.0)
    registry.sweep()
    assert state_of(registry) is WorkerState.LOST
    assert registry.heartbeat(membership, make_load())
    assert state_of(registry) is WorkerState.READY


def test_a_drain_holds_for_the_incarnation_even_over_a_rejoin(registry: Registry) -> None:
    membership = registry.join(make_registration())
    registry.heartbeat(membership, make_load())
    registry.order(WorkerId("d0"), DRAIN)
    assert membership.commands.get_nowait() == DRAIN
    assert state_of(registry) is WorkerState.DRAINING
    again = registry.join(make_registration())
    assert again.commands.get_nowait() == DRAIN  # the stream that carried it may have broken before
    registry.heartbeat(again, make_load())
    assert state_of(registry) is WorkerState.DRAINING
    registry.heartbeat(registry.join(make_registration(incarnation=2)), make_load())
    assert state_of(registry) is WorkerState.READY


def test_a_drained_worker_that_left_is_forgotten_without_delay(registry: Registry, clock: ManualClock) -> None:
    membership = registry.join(make_registration())
    registry.heartbeat(membership, make_load(WorkerState.DRAINING))
    registry.part(membership)
    registry.sweep()
    assert state_of(registry) is None


def test_a_worker_whose_stream_broke_before_it_heard_of_its_drain_is_awaited(
    registry: Registry, clock: ManualClock
) -> None:
    membership = registry.join(make_registration())
    registry.heartbeat(membership, make_load())
    registry.order(WorkerId("d0"), DRAIN)
    registry.part(membership)
    registry.sweep()
    assert state_of(registry) is WorkerState.SUSPECT
    clock.advance(3.0)
    registry.sweep()
    assert state_of(registry) is None


def test_a_worker_that_flips_is_counted_where_it_goes(registry: Registry) -> None:
    membership = registry.join(make_registration())
    registry.heartbeat(membership, make_load())
    assert registry.workers()[0].final_role is Role.DECODE
    registry.order(WorkerId("d0"), WorkerCommand(kind=CommandKind.FLIP, role=Role.PREFILL))
    assert registry.workers()[0].final_role is Role.PREFILL
    registry.part(membership)
    assert (registry.workers()[0].state, registry.workers()[0].final_role) == (WorkerState.SUSPECT, Role.PREFILL)
    registry.join(make_registration())
    registry.order(WorkerId("d0"), DRAIN)
    assert registry.workers()[0].final_role is None


def test_draining_an_unknown_or_lost_worker_is_refused_with_the_known_ones(
    registry: Registry, clock: ManualClock
) -> None:
    registry.join(make_registration("d7"))
    with pytest.raises(InvalidRequest, match="no worker 'd0' to drain; registered: d7"):
        registry.order(WorkerId("d0"), DRAIN)
    clock.advance(5.0)
    with pytest.raises(InvalidRequest):
        registry.order(WorkerId("d7"), DRAIN)


@pytest.mark.parametrize(
    ("registration", "problem"),
    [
        (make_registration(""), "worker_id is empty"),
        (make_registration(incarnation=0), "incarnation is zero"),
        (make_registration(format_hash=""), "format_hash is empty"),
        (make_registration(num_blocks=0), "num_blocks is below 1"),
        (make_registration(block_size=0), "block_size is below 1"),
    ],
)
def test_an_impossible_registration_is_refused(registry: Registry, registration: object, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        registry.join(registration)  # type: ignore[arg-type]
    assert registry.workers() == ()


def test_the_model_record_speaks_for_the_format_with_more_ready_workers(registry: Registry) -> None:
    for name, format_hash, context, state in (
        ("a", "new", 4096, WorkerState.STARTING),
        ("b", "old", 8192, WorkerState.READY),
        ("c", "old", 2048, WorkerState.READY),
        ("d", "new", 4096, WorkerState.READY),
    ):
        membership = registry.join(make_registration(name, format_hash=format_hash, max_context=context))
        registry.heartbeat(membership, make_load(state))
    (record,) = registry.models()
    assert (record.format_hash, record.max_context) == ("old", 2048)


def test_a_sweep_reports_each_change_once(registry: Registry, clock: ManualClock) -> None:
    def changes() -> list[tuple[int, WorkerState | None, WorkerState | None]]:
        return [(c.incarnation, c.before, c.after) for c in registry.sweep()]

    membership = registry.join(make_registration())
    assert changes() == [(1, None, WorkerState.STARTING)]
    assert changes() == []
    registry.heartbeat(membership, make_load())
    assert changes() == [(1, WorkerState.STARTING, WorkerState.READY)]
    registry.join(make_registration(incarnation=2))
    assert changes() == [(1, WorkerState.READY, None), (2, None, WorkerState.STARTING)]
    clock.advance(60.0)
    assert changes() == [(2, WorkerState.STARTING, None)]


def test_suspicion_comes_before_death_but_not_for_two_missed_beats() -> None:
    default = LivenessTimes.of(RouterConfig())
    assert (default.suspect_after_s, default.lost_after_s) == (1.5, 3.0)
    tight = LivenessTimes.of(RouterConfig(heartbeat_s=1.0, heartbeat_timeout_s=3.0))
    assert (tight.suspect_after_s, tight.lost_after_s) == (2.5, 3.0)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("join"), st.sampled_from(["a", "b"]), st.integers(1, 3)),
            st.tuples(st.just("beat"), st.integers(0, 9), st.sampled_from(list(WorkerState)[:3])),
            st.tuples(st.just("part"), st.integers(0, 9), st.none()),
            st.tuples(st.just("wait"), st.sampled_from([0.1, 1.5, 3.0, 40.0]), st.none()),
        ),
        max_size=30,
    )
)
def test_whatever_happens_a_replaced_incarnation_never_returns(events: list[tuple[str, object, object]]) -> None:
    clock = ManualClock()
    registry = Registry(clock, TIMES)
    memberships: list[Membership] = []
    replaced: set[tuple[str, int]] = set()
    current: dict[str, int] = {}
    for kind, first, second in events:
        if kind == "wait":
            clock.advance(first)  # type: ignore[arg-type]
            registry.sweep()
            current = {name: number for name, number in current.items() if state_of(registry, name) is not None}
        elif kind == "join":
            registration = make_registration(first, second)  # type: ignore[arg-type]
            if (first, second) in replaced:
                with pytest.raises(StaleIncarnation):
                    registry.join(registration)
                continue
            memberships.append(registry.join(registration))
            if current.get(first, second) != second:  # type: ignore[call-overload]
                replaced.add((first, current[first]))  # type: ignore[index, arg-type]
            current[first] = second  # type: ignore[index, assignment]
        elif memberships:
            membership = memberships[first % len(memberships)]  # type: ignore[operator]
            key = (membership.worker_id, membership.incarnation)
            if kind == "part":
                registry.part(membership)
            elif key in replaced:
                with pytest.raises(StaleIncarnation):
                    registry.heartbeat(membership, make_load(second))  # type: ignore[arg-type]
            else:
                registry.heartbeat(membership, make_load(second))  # type: ignore[arg-type]
        here = {(str(w.registration.worker_id), int(w.registration.incarnation)) for w in registry.workers()}
        assert here == set(current.items())
        assert not here & replaced
