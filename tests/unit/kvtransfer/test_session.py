from hypothesis import given
from hypothesis import strategies as st

from core.handoff import HandoffOutcome
from core.ids import LeaseId
from kvtransfer.custody import CustodyEnd
from kvtransfer.session import (
    SLOT_READ,
    Abort,
    BackendClosed,
    Done,
    Event,
    Failed,
    Finish,
    More,
    Phase,
    Post,
    Quiet,
    Session,
    SlotRead,
    Start,
    Tick,
)
from kvtransfer.slot import SlotMemory
from tests.support.transfer_side import lease_ref

SLOTS = SlotMemory(1)
LEASE = lease_ref(9, SLOTS.begin(0, LeaseId(9)))
GOOD = SLOTS.snapshot(0)
STALE = GOOD[:16] + (LEASE.epoch + 1).to_bytes(8, "little") + GOOD[24:]


def session(num_chunks: int = 3, *, is_open: bool = False) -> Session:
    return Session(num_chunks, lease=LEASE, now=0.0, deadline_at=100.0, stall_s=10.0, window=2, is_open=is_open)


def test_the_slot_is_read_after_all_data_and_only_then_is_it_ok() -> None:
    fetch = session()
    assert fetch.handle(Start(), 1.0) == [Post(0), Post(1)]
    phases = [fetch.phase]
    assert fetch.handle(Done(1), 2.0) == [Post(2)]
    phases.append(fetch.phase)
    assert fetch.handle(Done(0), 3.0) == []
    assert fetch.handle(Done(2), 4.0) == [Post(SLOT_READ)]
    assert [*phases, fetch.phase] == [Phase.POSTING, Phase.WIRE, Phase.VALIDATING] and fetch.is_data_complete
    assert fetch.handle(SlotRead(GOOD), 5.0) == [Finish(HandoffOutcome.OK, ""), Quiet(CustodyEnd.COMPLETE)]
    assert fetch.phase is Phase.OK and fetch.snapshot == GOOD
    assert (fetch.queued_at, fetch.started_at, fetch.arrived_at, fetch.finished_at) == (0.0, 1.0, 4.0, 5.0)


def test_without_chunks_the_slot_is_read_at_once() -> None:
    assert session(0).handle(Start(), 0.0) == [Post(SLOT_READ)]


def test_a_changed_epoch_rejects() -> None:
    fetch = session(0)
    fetch.handle(Start(), 0.0)
    finish, quiet = fetch.handle(SlotRead(STALE), 1.0)
    assert isinstance(finish, Finish) and finish.outcome is HandoffOutcome.STALE_LEASE
    assert quiet == Quiet(CustodyEnd.TERMINAL) and fetch.phase is Phase.REJECTED


def test_an_abort_answers_at_once_and_is_quiet_only_when_every_operation_is_terminal() -> None:
    fetch = session()
    fetch.handle(Start(), 0.0)
    assert fetch.handle(Abort(), 1.0) == [Finish(HandoffOutcome.ABORTED, "given up by the request")]
    phases = [fetch.phase]
    assert fetch.handle(Abort(), 2.0) == []
    assert fetch.handle(Tick(), 10_000.0) == []
    assert fetch.handle(Done(0), 10_001.0) == []
    assert fetch.handle(Done(1), 10_002.0) == [Quiet(CustodyEnd.TERMINAL)]
    assert [*phases, fetch.phase] == [Phase.DRAINING, Phase.ABORTED]


def test_an_abort_before_the_start_is_quiet_at_once() -> None:
    fetch = session()
    assert fetch.handle(Abort(), 1.0)[-1] == Quiet(CustodyEnd.NEVER_POSTED)
    assert fetch.handle(Start(), 2.0) == []


def test_a_failure_waits_for_the_other_operations() -> None:
    fetch = session()
    fetch.handle(Start(), 0.0)
    lost = Failed(0, HandoffOutcome.PEER_LOST, "gone")
    assert fetch.handle(lost, 1.0) == [Finish(HandoffOutcome.PEER_LOST, "gone")]
    assert fetch.handle(Failed(1, HandoffOutcome.PEER_LOST, "gone"), 2.0) == [Quiet(CustodyEnd.PEER_DEAD)]
    assert fetch.phase is Phase.FAILED


def test_a_stall_counts_from_the_last_progress() -> None:
    fetch = session()
    fetch.handle(Start(), 5.0)
    assert fetch.handle(Tick(), 14.9) == []
    fetch.handle(Done(0), 14.9)
    assert fetch.handle(Tick(), 24.0) == []
    (finish,) = fetch.handle(Tick(), 25.0)
    assert isinstance(finish, Finish) and finish.outcome is HandoffOutcome.STALLED


def test_waiting_behind_others_of_the_link_is_not_a_stall() -> None:
    fetch = session()
    fetch.handle(Start(), 5.0)
    assert fetch.handle(Tick(progress_at=14.0), 20.0) == []
    assert not fetch.is_stalled(23.9) and fetch.is_stalled(24.0)
    (finish,) = fetch.handle(Tick(progress_at=14.0), 24.0)
    assert isinstance(finish, Finish) and finish.outcome is HandoffOutcome.STALLED


def test_the_queue_is_not_a_stall_but_the_deadline_ends_it() -> None:
    fetch = session()
    assert fetch.handle(Tick(), 99.0) == []
    finish, quiet = fetch.handle(Tick(), 100.0)
    assert isinstance(finish, Finish) and finish.outcome is HandoffOutcome.ABORTED
    assert quiet == Quiet(CustodyEnd.NEVER_POSTED)


def test_a_slot_that_cannot_be_read_keeps_the_fact_that_the_data_is_complete() -> None:
    fetch = session(1)
    fetch.handle(Start(), 0.0)
    fetch.handle(Done(0), 1.0)
    fetch.handle(Failed(SLOT_READ, HandoffOutcome.PEER_LOST, "gone"), 2.0)
    assert fetch.outcome is HandoffOutcome.PEER_LOST and fetch.is_data_complete and fetch.snapshot is None


def test_the_end_of_the_backend_makes_everything_quiet() -> None:
    fetch = session()
    fetch.handle(Start(), 0.0)
    fetch.handle(Abort(), 0.5)
    assert fetch.handle(BackendClosed(), 1.0) == [Quiet(CustodyEnd.BACKEND_CLOSED)]


def test_an_open_fetch_grows_and_reads_the_slot_only_after_its_last_chunk() -> None:
    fetch = session(0, is_open=True)
    assert fetch.handle(Start(), 0.0) == [] and fetch.phase is Phase.EXPECTING
    assert fetch.handle(More(3, is_last=False), 1.0) == [Post(0), Post(1)]
    assert fetch.phase is Phase.POSTING
    fetch.handle(Done(0), 2.0)
    assert fetch.phase is Phase.WIRE
    fetch.handle(Done(1), 2.0)
    assert fetch.handle(Done(2), 3.0) == [] and fetch.phase is Phase.EXPECTING
    assert not fetch.is_data_complete, "more may come"
    assert fetch.handle(More(1, is_last=True), 4.0) == [Post(3)]
    assert fetch.handle(More(1, is_last=True), 4.0) == [], "it was closed"
    assert fetch.handle(Done(3), 5.0) == [Post(SLOT_READ)]


def test_an_open_fetch_may_end_without_another_chunk() -> None:
    fetch = session(1, is_open=True)
    fetch.handle(Start(), 0.0)
    fetch.handle(Done(0), 1.0)
    assert fetch.handle(More(0, is_last=True), 2.0) == [Post(SLOT_READ)]


def test_chunks_are_told_before_the_start_too() -> None:
    fetch = session(0, is_open=True)
    assert fetch.handle(More(1, is_last=True), 0.0) == []
    assert fetch.handle(Start(), 1.0) == [Post(0)]


def test_waiting_for_the_source_is_no_stall_but_the_deadline_ends_it() -> None:
    fetch = session(1, is_open=True)
    fetch.handle(Start(), 0.0)
    fetch.handle(Done(0), 1.0)
    assert fetch.handle(Tick(), 60.0) == []
    fetch.handle(More(1, is_last=False), 60.0)
    assert fetch.handle(Tick(), 69.0) == []
    (finish,) = fetch.handle(Tick(), 70.0)
    assert isinstance(finish, Finish) and finish.outcome is HandoffOutcome.STALLED
    other = session(0, is_open=True)
    other.handle(Start(), 0.0)
    assert other.handle(Tick(), 100.0)[-1] == Quiet(CustodyEnd.TERMINAL)


def test_what_is_added_to_a_fetch_that_was_given_up_is_not_read() -> None:
    fetch = session(1, is_open=True)
    fetch.handle(Start(), 0.0)
    fetch.handle(Abort(), 1.0)
    assert fetch.handle(More(2, is_last=True), 2.0) == []
    assert fetch.handle(Done(0), 3.0) == [Quiet(CustodyEnd.TERMINAL)]


EVENTS = st.one_of(
    st.just(Start()),
    st.builds(More, st.integers(0, 2), st.booleans()),
    st.builds(Done, st.integers(-1, 4)),
    st.sampled_from([SlotRead(GOOD), SlotRead(STALE), SlotRead(b"")]),
    st.builds(
        Failed,
        st.integers(-1, 4),
        st.sampled_from([HandoffOutcome.PEER_LOST, HandoffOutcome.BACKEND_FAILED]),
        st.just("x"),
    ),
    st.just(Abort()),
    st.just(Tick()),
)


@given(st.integers(0, 4), st.booleans(), st.lists(st.tuples(EVENTS, st.floats(0, 30)), max_size=25))
def test_any_order_of_events_ends_once_and_is_never_quiet_too_early(
    num_chunks: int, is_open: bool, script: list[tuple[Event, float]]
) -> None:
    fetch = session(num_chunks, is_open=is_open)
    now = 0.0
    pending: set[int] = set()
    finishes: list[Finish] = []
    quiets: list[Quiet] = []

    def feed(event: Event) -> None:
        # The backend: an operation is terminal at most once, and only if it was posted.
        if isinstance(event, Done | Failed):
            if event.key not in pending or (isinstance(event, Done) and event.key == SLOT_READ):
                assert event.key in pending or fetch.handle(event, now) == []
                return
            pending.remove(event.key)
        if isinstance(event, SlotRead):
            if SLOT_READ not in pending:
                return
            pending.remove(SLOT_READ)
        for effect in fetch.handle(event, now):
            match effect:
                case Post(key):
                    assert key not in pending and not finishes and not quiets
                    assert key != SLOT_READ or fetch.is_data_complete
                    pending.add(key)
                case Finish():
                    finishes.append(effect)
                case Quiet():
                    assert not pending and finishes
                    quiets.append(effect)

    for event, seconds in script:
        now += seconds
        feed(event)
        assert len(pending - {SLOT_READ}) <= 2
    feed(Abort())
    for key in sorted(pending):
        feed(SlotRead(GOOD) if key == SLOT_READ else Done(key))
    assert len(finishes) == 1 and len(quiets) == 1 and fetch.phase.is_final
    assert (fetch.outcome is HandoffOutcome.OK) == (fetch.phase is Phase.OK)
    if fetch.phase is Phase.OK:
        assert fetch.snapshot == GOOD and fetch.is_data_complete and fetch.num_arrived >= num_chunks
