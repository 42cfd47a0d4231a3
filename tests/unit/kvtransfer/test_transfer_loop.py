"""The transfer thread's work over the inproc backend, turn by turn, with the test owning time and faults."""

import random
from concurrent.futures import Future
from dataclasses import replace
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.clock import ManualClock
from core.errors import DigestMismatch, LayoutMismatch, PeerLost, StaleIncarnation, TransferStalled
from core.handoff import Grant, HandoffOutcome, PeerInfo
from core.ids import HandoffId
from kvtransfer.backends.base import Batch, Identity, Link, Op
from kvtransfer.backends.inproc import Fabric, Fault
from kvtransfer.custody import CustodyEnd
from kvtransfer.fetch import Addition, FetchRequest, FetchResult, Transfer, pinned_future
from kvtransfer.memory import REGION_KV, REGION_SLOTS
from kvtransfer.transfer_loop import TransferLoop, Work
from kvtransfer.validate import check_read
from tests.support.transfer_side import GEOMETRY, Side

HEADS = GEOMETRY.num_kv_heads


class Pair:
    """P and D on one fabric, D's loop, and time."""

    def __init__(self, *, num_cells: int = 8, stall_s: float = 10.0) -> None:
        self.fabric = Fabric()
        self.clock = ManualClock()
        self.p = Side(self.fabric.backend(), "P")
        self.d = Side(self.fabric.backend(), "D", num_cells=num_cells)
        self.p.fill(1)
        self.d.fill(2)
        self.loop: TransferLoop = self.d.loop(self.clock, stall_s=stall_s)
        self.ids = count(1)

    def connect(self, peer: PeerInfo | None = None) -> Future[Link]:
        future: Future[Link] = pinned_future()
        self.loop.connect(peer or self.p.peer, future)
        return future

    def link(self) -> Link:
        future = self.connect()
        self.settle()
        return future.result(0)

    def fetch(
        self, link: Link, grant: Grant, local: tuple[int, ...], *, deadline_s: float = 60.0
    ) -> tuple[Work, Transfer]:
        request = FetchRequest(
            transfer_id=next(self.ids),
            remote_blocks=grant.block_ids,
            local_blocks=local,
            lease=grant.lease,
            slot=grant.slot,
            deadline_s=deadline_s,
        )
        work = self.loop.begin(link, request)
        self.loop.fetch(work)
        assert work.transfer is not None
        return work, work.transfer

    def settle(self, turns: int = 50) -> None:
        for _ in range(turns):
            self.loop.turn()

    def on_post(self, region: str, fault: Fault) -> None:
        """The fault applies to operations on that region of the peer."""

        def hook(reader: Identity, peer: PeerInfo, batch: Batch) -> Fault | None:
            return fault if batch.remote_region == region else None

        self.fabric.on_post = hook

    def ended(self, why: CustodyEnd) -> int:
        return dict(self.d.custody.stats().ended)[why]


def outcome(transfer: Transfer) -> FetchResult:
    assert transfer.result.done(), "no result yet"
    return transfer.result.result(0)


def test_a_fetch_brings_exactly_the_blocks_and_a_valid_slot() -> None:
    pair = Pair()
    _, grant = pair.p.seal("h", [3, 4, 9])
    before = pair.d.blocks.copy()
    _, transfer = pair.fetch(pair.link(), grant, (7, 8, 1))
    assert pair.d.pool.pinned == {7, 8, 1}
    pair.settle()
    result = outcome(transfer)
    assert result.outcome is HandoffOutcome.OK and result.error() is None
    assert result.num_bytes == 3 * GEOMETRY.block_bytes and result.num_copies == 2
    check_read(grant, result.snapshot, pair.d.digester().digest([7, 8, 1]), num_kv_heads=HEADS)
    before[[7, 8, 1]] = pair.p.blocks[[3, 4, 9]]
    assert (pair.d.blocks == before).all()
    assert transfer.quiet.done() and pair.d.pool.pinned == set() and pair.ended(CustodyEnd.COMPLETE) == 1
    assert pair.loop.stats().bytes_received == (("inproc", result.num_bytes),)


def test_blocks_reused_while_they_were_read_are_found_out_by_the_slot() -> None:
    pair = Pair()
    _, grant = pair.p.seal("h", [3, 4])
    link = pair.link()

    def reuse(batch: Batch) -> None:
        if batch.remote_region == REGION_KV:
            pair.p.leases.revoke(HandoffId("h"), "preempted", now=0.0)
            pair.p.fill(77)

    pair.fabric.on_done = reuse
    _, transfer = pair.fetch(link, grant, (0, 1))
    pair.settle()
    assert outcome(transfer).outcome is HandoffOutcome.STALE_LEASE
    assert transfer.quiet.done() and pair.d.pool.pinned == set()


def test_a_flipped_bit_passes_the_slot_and_fails_the_digests() -> None:
    pair = Pair()
    _, grant = pair.p.seal("h", [3, 4])
    link = pair.link()
    pair.on_post(REGION_KV, Fault(flip=(GEOMETRY.block_bytes + 5, 1)))
    _, transfer = pair.fetch(link, grant, (0, 1))
    pair.settle()
    result = outcome(transfer)
    assert result.outcome is HandoffOutcome.OK
    with pytest.raises(DigestMismatch, match="block 1"):
        check_read(grant, result.snapshot, pair.d.digester().digest([0, 1]), num_kv_heads=HEADS)


def test_an_abandoned_fetch_keeps_custody_until_the_late_write_is_over() -> None:
    pair = Pair()
    _, grant = pair.p.seal("h", [3])
    link = pair.link()
    pair.on_post(REGION_KV, Fault(delay_polls=-1))
    work, transfer = pair.fetch(link, grant, (0,))
    pair.settle()
    pair.loop.abort(work)
    assert outcome(transfer).outcome is HandoffOutcome.ABORTED
    pair.clock.advance(1e6)
    pair.settle()
    assert not transfer.quiet.done() and pair.d.pool.pinned == {0}
    assert pair.d.custody.stats().num_quarantined_blocks == 1
    before = pair.d.blocks[0].copy()
    pair.fabric.resume()
    pair.settle()
    assert (pair.d.blocks[0] != before).any(), "the write came late indeed"
    assert transfer.quiet.done() and pair.d.pool.pinned == set() and pair.ended(CustodyEnd.TERMINAL) == 1


def test_a_hung_peer_is_a_stall_and_its_death_ends_custody() -> None:
    pair = Pair()
    _, grant = pair.p.seal("h", [3])
    link = pair.link()
    pair.on_post(REGION_KV, Fault(delay_polls=-1))
    _, transfer = pair.fetch(link, grant, (0,))
    pair.settle()
    pair.clock.advance(9.9)
    pair.settle()
    assert not transfer.result.done()
    pair.clock.advance(0.2)
    pair.settle()
    assert outcome(transfer).outcome is HandoffOutcome.STALLED
    assert isinstance(outcome(transfer).error(), TransferStalled)
    assert not transfer.quiet.done()
    pair.fabric.kill(pair.p.identity.agent_name)
    pair.settle()
    assert transfer.quiet.done() and pair.ended(CustodyEnd.PEER_DEAD) == 1


def test_a_peer_that_dies_in_the_middle_is_peer_lost_at_the_next_poll() -> None:
    pair = Pair()
    _, grant = pair.p.seal("h", [3])
    link = pair.link()
    pair.on_post(REGION_KV, Fault(delay_polls=5))
    _, transfer = pair.fetch(link, grant, (0,))
    pair.settle(2)
    pair.fabric.kill(pair.p.identity.agent_name)
    pair.settle(1)
    assert outcome(transfer).outcome is HandoffOutcome.PEER_LOST
    assert isinstance(outcome(transfer).error(), PeerLost)
    assert transfer.quiet.done()


def test_a_peer_that_dies_before_the_slot_read_leaves_complete_data() -> None:
    pair = Pair()
    _, grant = pair.p.seal("h", [3])
    link = pair.link()
    pair.fabric.on_done = lambda batch: pair.fabric.kill(pair.p.identity.agent_name)
    _, transfer = pair.fetch(link, grant, (0,))
    pair.settle()
    result = outcome(transfer)
    assert result.outcome is HandoffOutcome.PEER_LOST and result.is_data_complete and result.snapshot is None
    check_read(grant, result.snapshot, pair.d.digester().digest([0]), num_kv_heads=HEADS)


def test_a_failed_operation_is_a_backend_failure_with_its_reason() -> None:
    pair = Pair()
    _, grant = pair.p.seal("h", [3])
    link = pair.link()
    pair.on_post(REGION_KV, Fault(fail="cable unplugged", fail_after_bytes=100))
    _, transfer = pair.fetch(link, grant, (0,))
    pair.settle()
    result = outcome(transfer)
    assert (result.outcome, result.detail) == (HandoffOutcome.BACKEND_FAILED, "cable unplugged")
    assert not result.is_data_complete and transfer.quiet.done()


def test_a_slot_index_outside_the_advertised_region_is_refused_not_read() -> None:
    pair = Pair()
    _, grant = pair.p.seal("h", [3])
    _, transfer = pair.fetch(pair.link(), replace(grant, slot=10_000), (0,))
    pair.settle()
    assert outcome(transfer).outcome is HandoffOutcome.INCOMPATIBLE
    assert transfer.quiet.done()


def test_block_ids_outside_the_geometry_change_nothing() -> None:
    pair = Pair()
    _, grant = pair.p.seal("h", [3])
    link = pair.link()
    with pytest.raises(LayoutMismatch):
        pair.fetch(link, replace(grant, block_ids=(99,)), (0,))
    assert pair.d.pool.pinned == set() and pair.loop.is_idle


def test_fetches_wait_for_a_scratch_cell_and_all_get_one() -> None:
    pair = Pair(num_cells=1)
    _, grant = pair.p.seal("h", [3])
    link = pair.link()
    transfers = [pair.fetch(link, grant, (block,))[1] for block in range(5)]
    pair.settle()
    assert [outcome(transfer).outcome for transfer in transfers] == [HandoffOutcome.OK] * 5
    assert pair.d.scratch.num_free == 1


def test_a_fetch_whose_deadline_passes_in_the_queue_never_posts() -> None:
    pair = Pair(num_cells=1)
    _, grant = pair.p.seal("h", [3])
    link = pair.link()
    pair.on_post(REGION_KV, Fault(delay_polls=-1))
    pair.fetch(link, grant, (0,))
    _, waiting = pair.fetch(link, grant, (1,), deadline_s=5.0)
    pair.settle()
    pair.clock.advance(5.0)
    pair.settle()
    assert outcome(waiting).outcome is HandoffOutcome.ABORTED
    assert waiting.quiet.done() and pair.ended(CustodyEnd.NEVER_POSTED) == 1


def test_connecting_twice_gives_one_link() -> None:
    pair = Pair()
    first, second = pair.connect(), pair.connect()
    pair.settle()
    assert first.result(0) is second.result(0) is pair.connect().result(0)
    assert pair.loop.stats().connects == 1


def test_a_link_is_given_out_only_after_it_has_read_a_slot() -> None:
    pair = Pair()
    pair.on_post(REGION_SLOTS, Fault(flip=(0, 255)))
    future = pair.connect()
    pair.settle()
    with pytest.raises(Exception, match="no lease slot"):
        future.result(0)
    assert pair.loop.stats().num_links == 0
    pair.fabric.on_post = None
    assert pair.link() is not None


def test_a_handshake_that_hangs_ends_in_time() -> None:
    pair = Pair()
    pair.on_post(REGION_SLOTS, Fault(delay_polls=-1))
    future = pair.connect()
    pair.settle()
    pair.clock.advance(5.0)
    pair.settle()
    with pytest.raises(TransferStalled):
        future.result(0)


def test_a_new_incarnation_ends_the_old_link_its_fetches_and_its_claims_to_be_alive() -> None:
    pair = Pair()
    _, grant = pair.p.seal("h", [3])
    link = pair.link()
    pair.on_post(REGION_KV, Fault(delay_polls=-1))
    _, transfer = pair.fetch(link, grant, (0,))
    pair.settle()
    old, restarted = pair.p, Side(pair.fabric.backend(), "P")
    future = pair.connect(restarted.peer)
    pair.settle()
    assert outcome(transfer).outcome is HandoffOutcome.PEER_LOST
    assert future.result(0).peer.incarnation == restarted.identity.incarnation
    assert pair.loop.stats().num_retired_links == 1, "an operation is pending on the old link"
    with pytest.raises(StaleIncarnation):
        pair.connect(old.peer).result(0)
    _, late = pair.fetch(link, grant, (1,))
    pair.settle()
    assert outcome(late).outcome is HandoffOutcome.PEER_LOST
    pair.fabric.kill(old.identity.agent_name)
    pair.settle()
    assert transfer.quiet.done() and pair.loop.stats().num_retired_links == 0


def test_a_probe_of_an_older_incarnation_that_ends_late_does_not_depose_the_newer_one() -> None:
    pair = Pair()
    pair.on_post(REGION_SLOTS, Fault(delay_polls=-1))
    late = pair.connect()
    pair.settle()
    pair.fabric.on_post = None
    restarted = Side(pair.fabric.backend(), "P")
    newer = pair.connect(restarted.peer)
    pair.settle()
    with pytest.raises(PeerLost):
        late.result(0)
    pair.fabric.resume()
    pair.settle()
    assert newer.result(0) is pair.connect(restarted.peer).result(0)
    with pytest.raises(StaleIncarnation):
        pair.connect().result(0)
    assert pair.loop.stats().num_links == 1 and pair.loop.stats().num_retired_links == 0


def test_a_dead_link_to_the_same_incarnation_can_be_connected_again() -> None:
    pair = Pair()
    link = pair.link()
    link.is_dead = True
    again = pair.link()
    assert again is not link and not again.is_dead


def test_shutting_down_resolves_everything_and_destroys_the_backend() -> None:
    pair = Pair(num_cells=2)
    _, grant = pair.p.seal("h", [3])
    link = pair.link()
    pair.on_post(REGION_KV, Fault(delay_polls=-1))
    transfers = [pair.fetch(link, grant, (block,))[1] for block in range(4)]
    pair.settle()
    assert pair.loop.shut_down() is False
    assert {outcome(transfer).outcome for transfer in transfers} == {HandoffOutcome.BACKEND_FAILED}
    assert all(transfer.quiet.done() for transfer in transfers) and pair.d.pool.pinned == set()
    assert pair.ended(CustodyEnd.BACKEND_CLOSED) == 2 and pair.ended(CustodyEnd.NEVER_POSTED) == 2
    pair.fabric.resume()
    with pytest.raises(PeerLost):
        Side(pair.fabric.backend(), "X").backend.connect(pair.d.peer)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_whatever_happens_every_fetch_ends_and_every_block_comes_back(seed: int) -> None:
    """Random faults, aborts, deaths, restarts: afterwards nothing is pinned, and what was accepted is what P sealed."""
    rng = random.Random(seed)
    pair = Pair(num_cells=2, stall_s=5.0)

    def faults(reader: Identity, peer: PeerInfo, batch: Batch) -> Fault | None:
        roll = rng.random()
        if roll < 0.1:
            return Fault(delay_polls=-1)
        if roll < 0.2:
            return Fault(fail="x", fail_after_bytes=rng.randrange(batch.num_bytes))
        return Fault(delay_polls=rng.randrange(4))

    p = pair.p
    link: Link | None = None
    works: list[tuple[Work, Grant, tuple[int, ...]]] = []
    judged: set[Work] = set()
    for step in range(40):
        if link is None or link.is_dead or rng.random() < 0.05:
            if rng.random() < 0.5 or not pair.fabric.is_alive(p.identity.agent_name):
                pair.fabric.kill(p.identity.agent_name)
                p = Side(pair.fabric.backend(), "P")
                p.fill(step)
            pair.fabric.on_post = None
            future = pair.connect(p.peer)
            pair.settle(5)
            link = future.result(0) if future.done() and future.exception() is None else None
            pair.fabric.on_post = faults
        free = [block for block in range(GEOMETRY.num_blocks) if block not in pair.d.pool.pinned]
        if link is not None and len(free) > 4:
            source = rng.sample(range(GEOMETRY.num_blocks), rng.randrange(1, 5))
            _, grant = p.seal(f"h{step}", source)
            local = tuple(rng.sample(free, len(source)))
            work, _ = pair.fetch(link, grant, local)
            works.append((work, grant, local))
        if works and rng.random() < 0.3:
            pair.loop.abort(rng.choice(works)[0])
        if rng.random() < 0.1:
            p.leases.revoke(HandoffId(f"h{step}"), "preempted", now=0.0)
        pair.clock.advance(rng.random())
        pair.settle(rng.randrange(4))
        p.leases.expire(1e9)
        for work, grant, local in works:
            transfer = work.transfer
            assert transfer is not None and (transfer.quiet.done() or set(local) <= pair.d.pool.pinned)
            assert not transfer.quiet.done() or transfer.result.done()
            if transfer.result.done() and work not in judged:
                judged.add(work)
                result = transfer.result.result(0)
                if result.outcome is HandoffOutcome.OK:
                    check_read(grant, result.snapshot, pair.d.digester().digest(local), num_kv_heads=HEADS)
    pair.fabric.on_post = None
    pair.fabric.resume()
    pair.clock.advance(1000.0)
    pair.settle()
    assert all(work.transfer is not None and work.transfer.quiet.done() for work, _, _ in works)
    assert pair.d.pool.pinned == set() and pair.loop.is_idle and pair.d.scratch.num_free == 2
    assert sum(number for _, number in pair.loop.stats().transfers) == len(works)


class Growing:
    """An open fetch of a lease that is still filled."""

    def __init__(self, pair: Pair, num_blocks: int) -> None:
        self.pair = pair
        self.view = pair.p.leases.open(HandoffId("h"), num_blocks=num_blocks, deadline_s=60.0, now=0.0)
        request = FetchRequest(
            transfer_id=next(pair.ids),
            remote_blocks=(),
            local_blocks=(),
            lease=self.view.ref,
            slot=self.view.slot,
            deadline_s=60.0,
            is_open=True,
        )
        self.work = pair.loop.begin(pair.link(), request)
        pair.loop.fetch(self.work)
        assert self.work.transfer is not None
        self.transfer = self.work.transfer

    def more(self, remote: list[int], local: list[int], *, is_last: bool = False) -> Future[bool]:
        arrived: Future[bool] = pinned_future()
        plans = self.pair.loop.plan_more(self.work, [Addition(remote, local)])
        assert plans is not None
        self.pair.loop.more(self.work, [(plans[0], arrived)], is_last=is_last)
        return arrived

    def seal(self, blocks: list[int]) -> None:
        self.pair.p.leases.seal(self.view.ref.lease_id, blocks, digest=0, now=0.0)


def test_blocks_move_while_the_lease_is_filled_and_the_slot_is_read_at_the_end() -> None:
    pair = Pair()
    growing = Growing(pair, 3)
    first = growing.more([3, 4], [7, 8])
    assert pair.d.pool.pinned == {7, 8}
    pair.settle()
    assert first.result(0) and not growing.transfer.result.done()
    pair.clock.advance(50.0)
    pair.settle()
    assert not growing.transfer.result.done(), "how long the prompt takes is no stall"
    growing.seal([3, 4, 9])
    last = growing.more([9], [1], is_last=True)
    pair.settle()
    result = outcome(growing.transfer)
    assert last.result(0) and result.outcome is HandoffOutcome.OK and result.is_data_complete
    assert result.num_bytes == 3 * GEOMETRY.block_bytes and result.early_bytes == 2 * GEOMETRY.block_bytes
    assert (pair.d.blocks[[7, 8, 1]] == pair.p.blocks[[3, 4, 9]]).all()
    assert growing.transfer.quiet.done() and pair.d.pool.pinned == set() and pair.loop.is_idle


def _copy_when_posting(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """As NIXL does within one machine: it is done when ``post`` returns."""
    backend = pair.d.backend
    post = backend.post

    def copy(link: Link, batch: Batch) -> Op:
        op = post(link, batch)
        backend.poll(op)
        return op

    monkeypatch.setattr(backend, "post", copy)


def test_where_posting_is_the_copy_a_part_is_told_before_the_next_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair()
    growing = Growing(pair, 3)
    pair.settle()
    _copy_when_posting(pair, monkeypatch)
    arrivals: list[Future[bool]] = [pinned_future() for _ in range(3)]
    told: list[list[bool]] = []

    def look(reader: Identity, peer: PeerInfo, batch: Batch) -> Fault | None:
        if batch.remote_region == REGION_KV:
            told.append([arrived.done() for arrived in arrivals])
        return None

    pair.fabric.on_post = look
    plans = pair.loop.plan_more(growing.work, [Addition([block], [block]) for block in (3, 5, 9)])
    assert plans is not None
    pair.loop.more(growing.work, list(zip(plans, arrivals, strict=True)), is_last=False)
    assert told == [[False, False, False]], "others have their turn before the next"
    pair.settle()
    assert told[1:] == [[True, False, False], [True, True, False]] and arrivals[2].result(0)
    growing.seal([3, 5, 9])
    growing.more([], [], is_last=True)
    pair.settle()
    assert outcome(growing.transfer).outcome is HandoffOutcome.OK


def test_what_was_not_posted_when_a_fetch_is_given_up_never_is(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair()
    growing = Growing(pair, 2)
    pair.settle()
    _copy_when_posting(pair, monkeypatch)
    before = pair.d.blocks.copy()
    arrivals: list[Future[bool]] = [pinned_future() for _ in range(2)]
    plans = pair.loop.plan_more(growing.work, [Addition([3], [7]), Addition([4], [8])])
    assert plans is not None
    pair.loop.more(growing.work, list(zip(plans, arrivals, strict=True)), is_last=False)
    pair.loop.abort(growing.work)
    assert [arrived.result(0) for arrived in arrivals] == [False, False]
    pair.settle()
    assert (pair.d.blocks[8] == before[8]).all() and growing.transfer.quiet.done()
    assert pair.d.pool.pinned == set() and pair.loop.is_idle


def test_early_reads_of_a_lease_that_ended_meanwhile_are_found_out() -> None:
    pair = Pair()
    growing = Growing(pair, 2)
    growing.more([3], [7])
    pair.settle()
    pair.p.leases.revoke(HandoffId("h"), "preempted", now=0.0)
    growing.more([4], [8], is_last=True)
    pair.settle()
    assert outcome(growing.transfer).outcome is HandoffOutcome.STALE_LEASE


def test_an_abandoned_early_read_keeps_custody_until_it_is_quiet_and_takes_no_more() -> None:
    pair = Pair()
    growing = Growing(pair, 2)
    pair.on_post(REGION_KV, Fault(delay_polls=-1))
    early = growing.more([3], [7])
    pair.settle()
    pair.loop.abort(growing.work)
    assert outcome(growing.transfer).outcome is HandoffOutcome.ABORTED and early.result(0) is False
    assert growing.more([4], [8]).result(0) is False
    assert pair.d.pool.pinned == {7, 8}
    pair.fabric.resume()
    pair.settle()
    assert growing.transfer.quiet.done() and pair.d.pool.pinned == set()
    assert pair.loop.plan_more(growing.work, [Addition([4], [8])]) is None, "it is over: nothing is pinned any more"
    assert pair.d.pool.pinned == set()


def test_the_death_of_the_source_ends_an_early_read() -> None:
    pair = Pair()
    growing = Growing(pair, 2)
    pair.fabric.kill(pair.p.identity.agent_name)
    early = growing.more([3], [7])
    pair.settle()
    assert outcome(growing.transfer).outcome is HandoffOutcome.PEER_LOST and early.result(0) is False
    assert not outcome(growing.transfer).is_data_complete and pair.d.pool.pinned == set()
