import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from core.errors import LeaseExpired, OutOfBlocks, StaleLease
from core.handoff import LeaseRef
from core.ids import HandoffId, Incarnation, LeaseId
from kvtransfer.lease import EndedLease, LeaseTable, LeaseView, Reader, Verdict
from kvtransfer.slot import LeaseState, SlotMemory, parse_slot

H = HandoffId("h")
D1 = Reader(incarnation=Incarnation(11), attempt=1)
D2 = Reader(incarnation=Incarnation(22), attempt=2)


def table(*, num_slots: int = 4, quota_blocks: int = 10) -> tuple[LeaseTable, SlotMemory]:
    slots = SlotMemory(num_slots)
    return LeaseTable(slots, block_bytes=100, lease_s=10.0, quota_bytes=quota_blocks * 100), slots


def sealed(leases: LeaseTable, handoff_id: HandoffId = H, *, deadline_s: float = 100.0) -> LeaseView:
    opened = leases.open(handoff_id, num_blocks=2, deadline_s=deadline_s, now=0.0)
    view = leases.seal(opened.ref.lease_id, [5, 6], digest=7, now=0.0)
    assert view is not None
    return view


def test_a_hand_off_goes_from_open_to_released_and_gives_its_blocks_back_once() -> None:
    leases, slots = table()
    opened = leases.open(H, num_blocks=3, deadline_s=60.0, now=0.0)
    assert opened.state is LeaseState.FILLING and leases.held_bytes == 300
    assert leases.set_ready(opened.ref.lease_id, 1)
    assert parse_slot(slots.snapshot(opened.slot)).blocks_ready == 1
    view = leases.seal(opened.ref.lease_id, [5, 6], digest=7, now=1.0)
    assert view is not None and view.state is LeaseState.SEALED and leases.held_bytes == 200
    claimed = leases.claim(H, D1, now=2.0)
    assert claimed is not None and claimed.state is LeaseState.CLAIMED
    assert parse_slot(slots.snapshot(view.slot)).state is LeaseState.CLAIMED
    verdict, ended = leases.release(view.ref, D1, reason="ok", now=3.0)
    assert verdict is Verdict.APPLIED and ended is not None
    assert (ended.blocks, ended.state, ended.num_bytes) == ((5, 6), LeaseState.RELEASED, 200)
    assert parse_slot(slots.snapshot(view.slot)).lease.epoch == view.ref.epoch + 1
    assert leases.release(view.ref, D1, reason="ok", now=3.5) == (Verdict.DUPLICATE, None)
    assert leases.num_live == leases.held_bytes == 0


def test_a_claim_before_the_seal_is_remembered() -> None:
    leases, _ = table()
    opened = leases.open(H, num_blocks=1, deadline_s=60.0, now=0.0)
    claimed = leases.claim(H, D1, now=1.0)
    assert claimed is not None and claimed.state is LeaseState.FILLING
    view = leases.seal(opened.ref.lease_id, [3], digest=0, now=2.0)
    assert view is not None and view.state is LeaseState.CLAIMED and view.reader == D1


def test_a_claim_for_an_unknown_hand_off_is_left_to_the_caller_to_keep() -> None:
    assert table()[0].claim(H, D1, now=0.0) is None


def test_only_the_newest_claimant_counts() -> None:
    leases, _ = table()
    view = sealed(leases)
    leases.claim(H, D1, now=1.0)
    leases.claim(H, D2, now=2.0)
    assert leases.release(view.ref, D1, reason="ok", now=3.0) == (Verdict.NOT_HOLDER, None)
    assert leases.renew(view.ref, D1.incarnation, now=3.0) is Verdict.NOT_HOLDER
    with pytest.raises(StaleLease, match="attempt 2"):
        leases.claim(H, D1, now=3.0)
    assert leases.claim(H, D2, now=3.0) is not None
    assert leases.release(view.ref, D2, reason="ok", now=4.0)[0] is Verdict.APPLIED


def test_another_reader_of_the_same_attempt_is_refused() -> None:
    leases, _ = table()
    sealed(leases)
    leases.claim(H, D1, now=1.0)
    with pytest.raises(StaleLease):
        leases.claim(H, Reader(incarnation=Incarnation(99), attempt=1), now=1.0)


def test_a_lease_that_nobody_renews_ends_at_the_lease_time() -> None:
    leases, slots = table()
    view = sealed(leases)
    assert leases.next_expiry() == 10.0
    assert leases.expire(9.9) == []
    (ended,) = leases.expire(10.0)
    assert (ended.state, ended.blocks, ended.reason) == (LeaseState.EXPIRED, (5, 6), "lease time")
    assert parse_slot(slots.snapshot(view.slot)).lease != view.ref


def test_renewals_extend_but_never_past_the_deadline() -> None:
    leases, _ = table()
    view = sealed(leases, deadline_s=25.0)
    leases.claim(H, D1, now=5.0)
    for now in (9.0, 14.0, 20.0, 24.0):
        assert leases.expire(now) == []
        assert leases.renew(view.ref, D1.incarnation, now=now) is Verdict.APPLIED
    (ended,) = leases.expire(25.0)
    assert ended.reason == "deadline"


def test_filling_does_not_expire_by_the_lease_time_but_by_the_deadline() -> None:
    leases, _ = table()
    leases.open(H, num_blocks=1, deadline_s=50.0, now=0.0)
    assert leases.expire(49.0) == []
    (ended,) = leases.expire(50.0)
    assert ended.blocks == () and ended.reason == "deadline"


def test_a_seal_after_the_end_leaves_the_blocks_with_the_caller() -> None:
    leases, _ = table()
    opened = leases.open(H, num_blocks=1, deadline_s=60.0, now=0.0)
    ended = leases.revoke(H, "cancelled", now=1.0)
    assert ended is not None and ended.blocks == ()
    assert leases.seal(opened.ref.lease_id, [1], digest=0, now=2.0) is None
    assert not leases.set_ready(opened.ref.lease_id, 1)


def test_tombstones_answer_late_messages_for_two_lease_times_and_then_go() -> None:
    leases, _ = table()
    view = sealed(leases)
    leases.claim(H, D1, now=0.0)
    leases.release(view.ref, D1, reason="digest_mismatch", now=0.0)
    with pytest.raises(LeaseExpired, match="digest_mismatch"):
        leases.claim(H, D2, now=19.0)
    with pytest.raises(LeaseExpired):
        leases.open(H, num_blocks=1, deadline_s=1.0, now=19.0)
    assert leases.release(view.ref, D1, reason="ok", now=19.0)[0] is Verdict.DUPLICATE
    leases.expire(20.0)
    assert leases.stats().num_tombstones == 0
    assert leases.release(view.ref, D1, reason="ok", now=20.0)[0] is Verdict.UNKNOWN


def test_an_abort_before_the_open_refuses_the_open() -> None:
    leases, _ = table()
    assert leases.revoke(H, "client gone", now=0.0) is None
    with pytest.raises(LeaseExpired, match="client gone"):
        leases.open(H, num_blocks=1, deadline_s=60.0, now=1.0)
    assert leases.num_live == 0


def test_the_quota_refuses_without_leaving_state() -> None:
    leases, _ = table(quota_blocks=3)
    leases.open(H, num_blocks=2, deadline_s=60.0, now=0.0)
    other = HandoffId("other")
    with pytest.raises(OutOfBlocks, match="400 of 300 bytes"):
        leases.open(other, num_blocks=2, deadline_s=60.0, now=0.0)
    assert leases.held_bytes == 200 and leases.find(other) is None and leases.stats().refused == 1
    leases.revoke(H, "done", now=1.0)
    assert leases.open(other, num_blocks=3, deadline_s=60.0, now=1.0).state is LeaseState.FILLING


def test_slots_run_out_and_come_back() -> None:
    leases, _ = table(num_slots=1)
    leases.open(H, num_blocks=1, deadline_s=60.0, now=0.0)
    with pytest.raises(OutOfBlocks, match="lease slot"):
        leases.open(HandoffId("other"), num_blocks=1, deadline_s=60.0, now=0.0)
    leases.revoke(H, "done", now=0.0)
    leases.open(HandoffId("other"), num_blocks=1, deadline_s=60.0, now=0.0)


def test_a_dead_reader_holds_nothing_and_another_attempt_may_claim() -> None:
    leases, _ = table()
    view = sealed(leases)
    leases.claim(H, D1, now=1.0)
    assert leases.drop_reader(D1.incarnation) == 1
    assert leases.renew(view.ref, D1.incarnation, now=2.0) is Verdict.NOT_HOLDER
    found = leases.find(H)
    assert found is not None and found.state is LeaseState.SEALED
    assert leases.claim(H, D2, now=2.0) is not None


def test_a_holder_that_gives_its_claim_up_leaves_the_lease_to_others_for_the_rest_of_its_time() -> None:
    leases, slots = table()
    view = sealed(leases)
    leases.claim(H, D1, now=1.0)
    assert leases.unclaim(view.ref, D2) is Verdict.NOT_HOLDER
    assert leases.unclaim(view.ref, D1) is Verdict.APPLIED
    found = leases.find(H)
    assert found is not None and found.state is LeaseState.SEALED and found.reader is None
    assert parse_slot(slots.snapshot(view.slot)).state is LeaseState.SEALED
    assert leases.unclaim(view.ref, D1) is Verdict.NOT_HOLDER, "doubled"
    assert [ended.handoff_id for ended in leases.expire(found.expires_at)] == [H]
    assert leases.unclaim(view.ref, D1) is Verdict.DUPLICATE


def test_a_release_while_filling_ends_the_lease_as_revoked() -> None:
    leases, _ = table()
    opened = leases.open(H, num_blocks=1, deadline_s=60.0, now=0.0)
    leases.claim(H, D1, now=0.0)
    verdict, ended = leases.release(opened.ref, D1, reason="aborted", now=1.0)
    assert verdict is Verdict.APPLIED and ended is not None and ended.state is LeaseState.REVOKED


class LeaseMachine(RuleBasedStateMachine):
    """Any order of calls, with old, foreign and doubled messages among them."""

    handoffs = st.sampled_from([HandoffId(name) for name in "abcd"])
    readers = st.builds(
        Reader, incarnation=st.sampled_from([Incarnation(1), Incarnation(2)]), attempt=st.integers(1, 3)
    )

    def __init__(self) -> None:
        super().__init__()
        self.leases, self.slots = table(num_slots=3, quota_blocks=6)
        self.now = 0.0
        self.next_block = 0
        self.granted: list[tuple[LeaseRef, int]] = []
        self.live_blocks: dict[LeaseId, tuple[int, ...]] = {}
        self.ended: set[LeaseId] = set()

    def take(self, ended: EndedLease | None) -> None:
        if ended is not None:
            assert ended.ref.lease_id not in self.ended, "a lease ended twice"
            self.ended.add(ended.ref.lease_id)
            assert ended.blocks == self.live_blocks.pop(ended.ref.lease_id, ())

    @rule(handoff=handoffs, blocks=st.integers(1, 4), deadline_s=st.floats(1, 40))
    def open(self, handoff: HandoffId, blocks: int, deadline_s: float) -> None:
        before = self.leases.stats()
        try:
            view = self.leases.open(handoff, num_blocks=blocks, deadline_s=deadline_s, now=self.now)
        except (OutOfBlocks, LeaseExpired, ValueError):
            assert self.leases.stats().held_bytes == before.held_bytes
        else:
            self.granted.append((view.ref, view.slot))

    @rule(pick=st.integers(0, 50), count=st.integers(1, 4))
    def seal(self, pick: int, count: int) -> None:
        if not self.granted:
            return
        ref, _ = self.granted[pick % len(self.granted)]
        blocks = tuple(range(self.next_block, self.next_block + count))
        try:
            view = self.leases.seal(ref.lease_id, blocks, digest=count, now=self.now)
        except ValueError:
            return
        assert (view is None) == (ref.lease_id in self.ended)
        if view is not None:
            self.next_block += count
            self.live_blocks[ref.lease_id] = blocks

    @rule(handoff=handoffs, reader=readers)
    def claim(self, handoff: HandoffId, reader: Reader) -> None:
        try:
            view = self.leases.claim(handoff, reader, now=self.now)
        except (LeaseExpired, StaleLease):
            return
        assert view is None or view.reader == reader

    @rule(pick=st.integers(0, 50), reader=readers, shift=st.integers(-1, 1))
    def release(self, pick: int, reader: Reader, shift: int) -> None:
        if not self.granted:
            return
        ref, _ = self.granted[pick % len(self.granted)]
        asked = LeaseRef(lease_id=ref.lease_id, epoch=ref.epoch + shift)
        verdict, ended = self.leases.release(asked, reader, reason="ok", now=self.now)
        assert (ended is not None) == (verdict is Verdict.APPLIED)
        assert ended is None or (shift == 0 and ended.reader == reader)
        self.take(ended)

    @rule(pick=st.integers(0, 50), reader=readers)
    def renew(self, pick: int, reader: Reader) -> None:
        if self.granted:
            self.leases.renew(self.granted[pick % len(self.granted)][0], reader.incarnation, now=self.now)

    @rule(pick=st.integers(0, 50), reader=readers)
    def unclaim(self, pick: int, reader: Reader) -> None:
        if self.granted:
            self.leases.unclaim(self.granted[pick % len(self.granted)][0], reader)

    @rule(handoff=handoffs)
    def revoke(self, handoff: HandoffId) -> None:
        self.take(self.leases.revoke(handoff, "revoked", now=self.now))

    @rule(seconds=st.floats(0, 12))
    def expire(self, seconds: float) -> None:
        self.now += seconds
        for ended in self.leases.expire(self.now):
            self.take(ended)

    @rule(reader=readers)
    def lose(self, reader: Reader) -> None:
        self.leases.drop_reader(reader.incarnation)

    @invariant()
    def a_slot_validates_exactly_its_live_lease(self) -> None:
        for ref, slot in self.granted:
            valid = parse_slot(self.slots.snapshot(slot)).lease == ref
            assert valid == (ref.lease_id not in self.ended)

    @invariant()
    def what_is_held_stays_within_the_quota_and_is_counted_right(self) -> None:
        stats = self.leases.stats()
        assert 0 <= stats.held_bytes <= 600
        assert stats.opened == stats.num_live + stats.released + stats.expired + stats.revoked
        assert sum(map(len, self.live_blocks.values())) <= stats.num_blocks

    def teardown(self) -> None:
        """Bounded: without messages everything ends and is forgotten."""
        for ended in self.leases.expire(self.now + 1000):
            self.take(ended)
        self.leases.expire(self.now + 2000)
        stats = self.leases.stats()
        assert (stats.num_live, stats.held_bytes, stats.num_tombstones) == (0, 0, 0)
        assert not self.live_blocks


LeaseMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLeaseMachine = LeaseMachine.TestCase
