"""What holds whatever happens between P's leases and D's transfers: any order of offers, reads, faults, deaths and
second thoughts, over the inproc backend, a real block pool and a clock that the test moves."""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.clock import ManualClock
from core.errors import DigestMismatch, LeaseExpired, OutOfBlocks, ServingError, StaleLease
from core.handoff import Grant, HandoffOutcome, LeaseRef, PeerInfo
from core.ids import HandoffId, Incarnation, LeaseId
from engine.block_pool import BlockPool
from kvtransfer.backends.base import Batch, Identity, Link
from kvtransfer.backends.inproc import Fabric, Fault
from kvtransfer.custody import Custody
from kvtransfer.fetch import FetchRequest, Transfer, pinned_future
from kvtransfer.lease import LeaseTable, Reader, Verdict
from kvtransfer.memory import CELL_BYTES, REGION_KV, REGION_SLOTS
from kvtransfer.slot import SlotMemory
from kvtransfer.transfer_loop import Work
from kvtransfer.validate import check_read
from tests.support.transfer_side import GEOMETRY, Side

HEADS, BLOCK = GEOMETRY.num_kv_heads, GEOMETRY.block_bytes
QUOTA_BLOCKS = GEOMETRY.num_blocks


@dataclass(eq=False)
class Offer:
    """A grant, and what its blocks held when it was made."""

    p: Side
    handoff: HandoffId
    grant: Grant
    content: bytes


@dataclass(eq=False)
class Fetch:
    offer: Offer
    work: Work
    transfer: Transfer
    local: tuple[int, ...]
    is_freed: bool = False
    """Its request is over: it has given its blocks back."""
    is_judged: bool = False
    data_moves: int = 0
    epoch_at_slot_read: int | None = None
    """What P's slot said when it was read; None again when data came after it."""


class Handoffs:
    """P and D, and everything that can happen between them, as actions in any order."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.fabric, self.clock = Fabric(), ManualClock()
        self.fabric.on_post, self.fabric.on_move, self.fabric.on_done = self.on_post, self.on_move, self.on_done
        self.fault = "none"
        self.starts: list[Side] = []
        self.epochs: dict[tuple[Incarnation, int], int] = {}
        self.start_p()
        self.d = Side(self.fabric.backend(), "D", num_cells=3)
        self.pool = BlockPool(GEOMETRY.num_blocks)
        self.d.custody = Custody(self.pool)
        self.loop = self.d.loop(self.clock, stall_s=5.0)
        self.offers: list[Offer] = []
        self.fetches: list[Fetch] = []
        self.squats: list[tuple[list[int], bytes]] = []
        self.links: list[Link] = []
        self.connecting: list[Future[Link]] = []
        self.moved_bytes = 0
        self.num_offers = 0
        self.offer()
        self.connect()
        self.pass_time(0.0, 4)

    @property
    def p(self) -> Side:
        return self.starts[-1]

    # -- the world's doings -------------------------------------------------------------------------------------------

    def start_p(self) -> None:
        side = Side(self.fabric.backend(), "P", incarnation=Incarnation(len(self.starts) + 1), num_slots=4)
        side.fill(len(self.starts))
        self.starts.append(side)

    def on_post(self, reader: Identity, peer: PeerInfo, batch: Batch) -> Fault | None:
        fault = self.rng.choice(("none", "none", "slow", "hang")) if self.fault == "mixed" else self.fault
        match fault:
            case "hang":
                return Fault(delay_polls=-1)
            case "slow":
                return Fault(delay_polls=self.rng.randrange(1, 6))
            case "fail":
                return Fault(fail="injected", fail_after_bytes=batch.num_bytes // 2)
            case "flip":
                return Fault(flip=(batch.num_bytes // 3, 4))
        return None

    def fetch_of(self, batch: Batch) -> Fetch | None:
        target = batch.copies[0].local_offset
        for fetch in self.fetches:
            if batch.local_region == REGION_KV and target // BLOCK in fetch.local and not fetch.transfer.quiet.done():
                return fetch
            if batch.remote_region == REGION_SLOTS and fetch.work.cell == target // CELL_BYTES:
                return fetch
        return None

    def on_move(self, reader: Identity, batch: Batch) -> None:
        fetch = self.fetch_of(batch)
        if fetch is None:
            assert batch.local_region != REGION_KV, "an operation outlives its custody"
        elif batch.local_region == REGION_KV:
            fetch.data_moves += 1
            fetch.epoch_at_slot_read = None
        else:
            fetch.epoch_at_slot_read = fetch.offer.p.slots.epoch(fetch.offer.grant.slot)

    def on_done(self, batch: Batch) -> None:
        if batch.local_region == REGION_KV:
            self.moved_bytes += batch.num_bytes

    # -- what may happen -----------------------------------------------------------------------------------------------

    def act(self) -> None:
        """One thing happens; what always holds is checked afterwards."""
        actions = (
            (3, self.offer),
            (1, self.connect),
            (6, self.read),
            (2, self.give_up),
            (3, self.squat),
            (2, self.leave),
            (1, self.reuse),
            (2, self.weather),
            (1, self.fabric.resume),
            (0.2, self.restart),
            (10, self.turn),
        )
        self.rng.choices([action for _, action in actions], [weight for weight, _ in actions])[0]()
        self.check()

    def offer(self) -> None:
        blocks = self.rng.sample(range(QUOTA_BLOCKS), self.rng.randrange(1, 6))
        self.num_offers += 1
        handoff = HandoffId(f"h{self.num_offers}")
        before = self.p.leases.stats()
        try:
            view, grant = self.p.seal(handoff, blocks, now=self.clock.now())
        except OutOfBlocks:
            after = self.p.leases.stats()
            assert (after.num_live, after.held_bytes) == (before.num_live, before.held_bytes)
            assert self.p.leases.find(handoff) is None
            return
        key = (self.p.identity.incarnation, view.slot)
        assert view.ref.epoch > self.epochs.get(key, 0), "an epoch came twice"
        self.epochs[key] = view.ref.epoch
        self.offers.append(Offer(self.p, handoff, grant, self.p.blocks[blocks].tobytes()))

    def connect(self) -> None:
        future: Future[Link] = pinned_future()
        start = self.p if self.rng.random() < 0.7 else self.rng.choice(self.starts)
        self.loop.connect(start.peer, future)
        self.connecting.append(future)

    def read(self) -> None:
        """D fetches one of the last offers, over a link to the start that made it, perhaps one that has ended."""
        readable = [
            (offer, link)
            for offer in self.offers[-4:]
            for link in self.links
            if link.peer.incarnation == offer.p.identity.incarnation
        ]
        if readable:
            self.fetch(*self.rng.choice(readable))

    def fetch(self, offer: Offer, link: Link) -> None:
        try:
            local = tuple(self.pool.allocate(len(offer.grant.block_ids)))
        except OutOfBlocks:
            return
        busy = {block for each in self.fetches if not each.transfer.quiet.done() for block in each.local}
        assert busy.isdisjoint(local), "a block was given out while an operation may write to it"
        request = FetchRequest(
            transfer_id=len(self.fetches),
            remote_blocks=offer.grant.block_ids,
            local_blocks=local,
            lease=offer.grant.lease,
            slot=offer.grant.slot,
            deadline_s=self.rng.choice((0.5, 60.0)),
        )
        work = self.loop.begin(link, request)
        assert work.transfer is not None
        self.fetches.append(Fetch(offer, work, work.transfer, local))
        self.loop.fetch(work)

    def give_up(self) -> None:
        """A request ends; its blocks are given back at once."""
        running = [each for each in self.fetches if not each.is_judged]
        if running:
            fetch = self.rng.choice(running)
            self.loop.abort(fetch.work)
            self.free(fetch)

    def squat(self) -> None:
        """Somebody else gets blocks, and writes there."""
        try:
            blocks = self.pool.allocate(self.rng.randrange(1, 8))
        except OutOfBlocks:
            return
        self.d.blocks[blocks] = self.rng.randrange(256)
        self.squats.append((blocks, self.d.blocks[blocks].tobytes()))

    def leave(self) -> None:
        if self.squats:
            blocks, content = self.squats.pop(self.rng.randrange(len(self.squats)))
            assert self.d.blocks[blocks].tobytes() == content, "bytes came late"
            self.pool.free(blocks)

    def reuse(self) -> None:
        """P gives a lease up and its blocks to others."""
        offer = self.rng.choice(self.offers)
        if offer.p.leases.revoke(offer.handoff, "preempted", now=self.clock.now()) is not None:
            offer.p.blocks[list(offer.grant.block_ids)] = self.rng.randrange(256)

    def weather(self) -> None:
        self.fault = self.rng.choice(("none", "none", "mixed", "mixed", "hang", "fail", "flip"))

    def restart(self) -> None:
        """P comes back with a new incarnation; the old one is dead, or only believed to be."""
        if self.rng.random() < 0.5:
            self.fabric.kill(self.p.identity.agent_name)
        self.start_p()
        self.offer()
        self.connect()

    def turn(self) -> None:
        self.pass_time(self.rng.choice((0.0, 0.0, 0.1, 3.0)), self.rng.randrange(1, 5))

    def pass_time(self, seconds: float, turns: int) -> None:
        self.clock.advance(seconds)
        for side in self.starts:
            side.leases.expire(self.clock.now())
        for _ in range(turns):
            self.loop.turn()
        for future in [each for each in self.connecting if each.done()]:
            self.connecting.remove(future)
            if future.exception() is None:
                self.links.append(future.result(0))
        self.judge()

    # -- what D does with a result ------------------------------------------------------------------------------------

    def judge(self) -> None:
        for fetch in self.fetches:
            if not fetch.transfer.result.done() or fetch.is_judged:
                continue
            fetch.is_judged = True
            result, offer = fetch.transfer.result.result(0), fetch.offer
            if result.outcome is HandoffOutcome.OK:
                assert fetch.epoch_at_slot_read == offer.grant.lease.epoch, "the slot was read before the last data"
                assert result.num_bytes == len(fetch.local) * BLOCK and fetch.data_moves > 0
                made = self.d.digester().digest(fetch.local)
                try:
                    check_read(offer.grant, result.snapshot, made, num_kv_heads=HEADS)
                except (DigestMismatch, StaleLease):
                    pass
                else:
                    assert fetch.is_freed or self.d.blocks[list(fetch.local)].tobytes() == offer.content
            self.free(fetch)

    def free(self, fetch: Fetch) -> None:
        if not fetch.is_freed:
            fetch.is_freed = True
            self.pool.free(fetch.local)

    # -- what always holds --------------------------------------------------------------------------------------------

    def every_block_counts_once(self) -> None:
        counts = self.pool.counts()
        assert counts.is_conserved()
        loud = {block for each in self.fetches if not each.transfer.quiet.done() for block in each.local}
        assert counts.custody == len(loud)
        over = [each for each in self.fetches if each.transfer.result.done() and not each.transfer.quiet.done()]
        assert self.d.custody.stats().num_quarantined_blocks == sum(len(each.local) for each in over)
        assert counts.in_use == sum(len(blocks) for blocks, _ in self.squats) + sum(
            len(each.local) for each in self.fetches if not each.is_freed and each.transfer.quiet.done()
        )

    def one_start_of_a_worker_is_usable_at_once(self) -> None:
        usable = Counter(link.peer.worker_id for link in self.loop._peers.usable)
        assert max(usable.values(), default=0) <= 1
        assert self.loop.stats().num_links == usable.total()

    def what_is_held_is_within_the_quota(self) -> None:
        assert all(0 <= side.leases.held_bytes <= QUOTA_BLOCKS * BLOCK for side in self.starts)

    def every_attempt_is_counted_once_with_the_bytes_that_moved(self) -> None:
        stats = self.loop.stats()
        ended = [each.transfer.result.result(0) for each in self.fetches if each.transfer.result.done()]
        counted = {outcome: number for outcome, number in stats.transfers if number}
        assert counted == Counter(result.outcome for result in ended)
        assert set(counted) <= set(HandoffOutcome)
        assert stats.bytes_received[0][1] == self.moved_bytes == sum(each.work.num_bytes for each in self.fetches)
        assert sum(n for _, n in self.d.custody.stats().ended) == sum(f.transfer.quiet.done() for f in self.fetches)

    def check(self) -> None:
        self.every_block_counts_once()
        self.one_start_of_a_worker_is_usable_at_once()
        self.what_is_held_is_within_the_quota()
        self.every_attempt_is_counted_once_with_the_bytes_that_moved()

    def calm_down(self) -> None:
        """The faults stop: everything ends, and every pin is undone."""
        self.fault = "none"
        self.fabric.resume()
        for _ in range(4):
            self.pass_time(16.0, 20)
        assert all(each.transfer.result.done() and each.transfer.quiet.done() for each in self.fetches)
        assert not self.connecting and self.loop.is_idle
        while self.squats:
            self.leave()
        self.check()
        assert self.pool.counts().is_idle() and self.d.scratch.num_free == self.d.scratch.num_cells
        assert all(side.leases.num_live == 0 for side in self.starts)


@settings(max_examples=150)
@given(st.integers(0, 2**32 - 1))
def test_whatever_happens_between_p_and_d_the_invariants_hold(seed: int) -> None:
    handoffs = Handoffs(random.Random(seed))
    for _ in range(60):
        handoffs.act()
    handoffs.calm_down()


# -- messages ---------------------------------------------------------------------------------------------------------

READERS = (Reader(incarnation=Incarnation(1), attempt=1), Reader(incarnation=Incarnation(2), attempt=2))
Said = tuple[str, int, int, int]
"""(what, lease, reader, shift of the epoch)."""
sayings = st.lists(
    st.tuples(
        st.sampled_from(["claim", "renew", "release", "abort"]), st.integers(0, 2), st.integers(0, 1), st.just(0)
    ),
    max_size=12,
)


class Book:
    """Three sealed leases, and messages about them."""

    def __init__(self) -> None:
        self.slots = SlotMemory(4)
        self.leases = LeaseTable(self.slots, block_bytes=10, lease_s=15.0, quota_bytes=100)
        self.refs: list[LeaseRef] = []
        for number in range(3):
            opened = self.leases.open(HandoffId(str(number)), num_blocks=2, deadline_s=60.0, now=0.0)
            self.leases.seal(opened.ref.lease_id, [2 * number, 2 * number + 1], digest=number, now=0.0)
            self.refs.append(opened.ref)

    def say(self, said: Said) -> None:
        what, number, reader, shift = said
        handoff, by = HandoffId(str(number)), READERS[reader]
        ref = LeaseRef(lease_id=self.refs[number].lease_id, epoch=self.refs[number].epoch + shift)
        try:
            match what:
                case "claim":
                    self.leases.claim(handoff, by, now=1.0)
                case "renew":
                    self.leases.renew(ref, by.incarnation, now=1.0)
                case "release":
                    self.leases.release(ref, by, reason="ok", now=1.0)
                case "abort":
                    view = self.leases.find(handoff)
                    if view is not None and view.reader == by:
                        self.leases.revoke(handoff, "aborted", now=1.0)
        except ServingError:
            pass

    def state(self) -> tuple[object, ...]:
        views = tuple(self.leases.find(HandoffId(str(number))) for number in range(3))
        return views, self.leases.held_bytes, tuple(self.slots.snapshot(slot) for slot in range(4))


@given(sayings, st.data())
def test_messages_that_come_twice_do_what_they_do_once(script: list[Said], data: st.DataObject) -> None:
    once, doubled = Book(), Book()
    for said in script:
        once.say(said)
        for _ in range(data.draw(st.integers(1, 3))):
            doubled.say(said)
    assert once.state() == doubled.state()


@given(sayings, st.integers(0, 12), st.data())
def test_a_message_of_an_ended_lease_or_another_epoch_changes_nothing(
    script: list[Said], cut: int, data: st.DataObject
) -> None:
    """However late it comes, and whatever came before."""
    book = Book()
    for said in script[:cut]:
        book.say(said)
    what = data.draw(st.sampled_from(["renew", "release"]))
    number, reader = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 1))
    gone = book.leases.find(HandoffId(str(number))) is None
    shift = data.draw(st.integers(-2, 2) if gone else st.sampled_from([-2, -1, 1, 2]))
    before = book.state()
    book.say((what, number, reader, shift))
    assert book.state() == before


@given(sayings)
def test_messages_that_are_lost_leave_only_what_the_lease_time_ends(script: list[Said]) -> None:
    book = Book()
    for said in script:
        book.say(said)
    book.leases.expire(1000.0)
    assert book.state()[0] == (None, None, None) and book.leases.held_bytes == 0


def test_an_unknown_lease_is_told_from_an_ended_one() -> None:
    book = Book()
    unknown = LeaseRef(lease_id=LeaseId(99), epoch=1)
    assert book.leases.renew(unknown, Incarnation(1), now=1.0) is Verdict.UNKNOWN
    book.say(("claim", 0, 0, 0))
    book.say(("release", 0, 0, 0))
    assert book.leases.renew(book.refs[0], Incarnation(1), now=1.0) is Verdict.DUPLICATE
    with pytest.raises(LeaseExpired):
        book.leases.claim(HandoffId("0"), READERS[1], now=1.0)
