"""Blocks that are announced while the prompt is computed: in whatever order the news comes, what is read in the end is
what was granted, and nothing stays behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.clock import MonotonicClock
from core.errors import DigestMismatch, LayoutMismatch, PeerLost, ServingError, StaleLease
from core.failpoints import Failpoints
from core.handoff import Grant, Ready
from core.ids import HandoffId
from decode_worker.reading import Reading
from engine.block_pool import BlockPool, Reservation
from kvtransfer import digest
from kvtransfer.backends.base import Link
from kvtransfer.backends.inproc import Fabric, Fault
from kvtransfer.lease import LeaseView
from kvtransfer.memory import REGION_KV
from tests.support.transfer_side import GEOMETRY, Side, lease_ref
from worker.context import WorkerContext

NUM_BLOCKS = 6
DIGEST_BYTES = GEOMETRY.num_kv_heads * digest.DIGEST_BYTES


class Rig:
    """P with a prompt of six blocks, the first of which D holds; D with a transfer thread and its own pool."""

    def __init__(self) -> None:
        self.fabric = Fabric()
        self.p = Side(self.fabric.backend(), "P")
        self.d = Side(self.fabric.backend(), "D")
        self.p.fill(1)
        self.pool = BlockPool(GEOMETRY.num_blocks)
        self.d.custody._pool = self.pool
        self.thread = self.d.thread()
        self.failpoints = Failpoints()
        self.link: Link | None = None
        self.num_handoffs = 0
        self.reservations: list[Reservation] = []

    def hand_off(self) -> tuple[LeaseView, list[int]]:
        self.num_handoffs += 1
        handoff_id = HandoffId(str(self.num_handoffs))
        opened = self.p.leases.open(handoff_id, num_blocks=NUM_BLOCKS, deadline_s=60.0, now=0.0)
        return opened, [(self.num_handoffs * 5 + 3 * each) % GEOMETRY.num_blocks for each in range(NUM_BLOCKS)]

    def ready(self, lease: LeaseView, blocks: list[int], first: int, end: int) -> Ready:
        return Ready(
            handoff_id=lease.handoff_id,
            attempt=1,
            lease=lease.ref,
            slot=lease.slot,
            first_block=first,
            block_ids=tuple(blocks[first:end]),
        )

    def seal(self, lease: LeaseView, blocks: list[int], num_held: int = 1) -> Grant:
        digester = self.p.digester()
        made = digester.digest(blocks[num_held:])
        view = self.p.leases.seal(lease.ref.lease_id, blocks, digest=digest.combine(digester.kind, made), now=0.0)
        assert view is not None
        return Grant(
            lease=view.ref,
            slot=view.slot,
            block_ids=tuple(blocks[num_held:]),
            first_block=num_held,
            num_tokens=NUM_BLOCKS * GEOMETRY.block_size,
            digest=digester.kind,
            digests=made,
        )

    def reading(self) -> Reading:
        context = SimpleNamespace(
            engine=SimpleNamespace(pool=self.pool),
            digester=self.d.digester(),
            geometry=GEOMETRY,
            clock=MonotonicClock(),
            failpoints=self.failpoints,
        )
        assert self.link is not None
        self.reservations.append(self.pool.reserve(NUM_BLOCKS - 1))
        return Reading(
            cast(WorkerContext, context),
            self.thread,
            self.link,
            transfer_id=self.num_handoffs,
            indices=range(1, NUM_BLOCKS),
            reservation=self.reservations[-1],
            deadline_at=MonotonicClock().now() + 30.0,
        )

    async def read(self, ready: Ready, grant: Grant | None = None) -> list[int]:
        """What is announced and then, if there is a grant, the rest."""
        async with self.reading() as reading:
            reading.take(ready)
            return [] if grant is None else await reading.finish(grant)

    async def is_quiet(self) -> None:
        async with asyncio.timeout(10):
            while self.pool.counts().free < GEOMETRY.num_blocks:
                await asyncio.sleep(0.001)


@pytest.fixture(params=[1, 2, 100], ids=lambda num_blocks: f"parts of {num_blocks}")
async def rig(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    monkeypatch.setattr("decode_worker.reading.PART_BYTES", request.param * GEOMETRY.block_bytes)
    rig = Rig()
    rig.thread.start()
    rig.link = await asyncio.wrap_future(rig.thread.connect(rig.p.peer))
    yield rig
    assert await asyncio.to_thread(rig.thread.stop, 5.0)
    for reservation in rig.reservations:
        reservation.release()
    counts = rig.pool.counts()
    assert counts.free == counts.total and not counts.reserved


RANGES = st.tuples(st.integers(1, NUM_BLOCKS - 1), st.integers(1, NUM_BLOCKS)).map(sorted).map(tuple)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_news_that_are_lost_doubled_or_out_of_order_change_nothing(data: st.DataObject) -> None:
    news = data.draw(st.lists(RANGES, max_size=6))

    async def scenario() -> None:
        rig = Rig()
        rig.thread.start()
        rig.link = await asyncio.wrap_future(rig.thread.connect(rig.p.peer))
        lease, remote = rig.hand_off()
        async with rig.reading() as reading:
            for first, end in news:
                reading.take(rig.ready(lease, remote, first, end))
            local = await reading.finish(rig.seal(lease, remote))
        assert reading.result is not None
        assert reading.result.num_bytes == (NUM_BLOCKS - 1) * GEOMETRY.block_bytes, "every block moved once"
        assert (rig.d.blocks[local] == rig.p.blocks[remote[1:]]).all()
        assert rig.pool.counts().in_use == NUM_BLOCKS - 1
        await asyncio.to_thread(rig.thread.stop, 5.0)

    asyncio.run(scenario())


async def test_blocks_move_and_are_digested_before_the_seal(rig: Rig) -> None:
    lease, remote = rig.hand_off()
    async with rig.reading() as reading:
        reading.take(rig.ready(lease, remote, 1, 4))
        async with asyncio.timeout(10):
            while len(reading._digests) < 3:
                await asyncio.sleep(0.001)
        local = await reading.finish(rig.seal(lease, remote))
    assert reading.result is not None and reading.result.early_bytes == 3 * GEOMETRY.block_bytes
    rig.pool.free(local)


async def test_a_bit_that_flips_in_an_early_read_is_found(rig: Rig) -> None:
    faults = iter([Fault(flip=(7, 1))])
    rig.fabric.on_post = lambda reader, peer, batch: next(faults, None) if batch.remote_region == REGION_KV else None
    lease, remote = rig.hand_off()
    with pytest.raises(DigestMismatch, match="block 0"):
        await rig.read(rig.ready(lease, remote, 1, 4), rig.seal(lease, remote))
    await rig.is_quiet()


@pytest.mark.parametrize("is_sealed", [False, True])
async def test_given_up_early_reads_give_their_blocks_back_when_they_are_quiet(rig: Rig, is_sealed: bool) -> None:
    rig.fabric.on_post = lambda reader, peer, batch: Fault(delay_polls=-1)
    lease, remote = rig.hand_off()

    async def read() -> None:
        async with rig.reading() as reading:
            reading.take(rig.ready(lease, remote, 1, 4))
            if is_sealed:
                await reading.finish(rig.seal(lease, remote))
            await asyncio.Event().wait()

    task = asyncio.create_task(read())
    async with asyncio.timeout(10):
        while not rig.fabric._held:
            await asyncio.sleep(0.001)
    task.cancel()
    await asyncio.wait({task})
    assert rig.pool.counts().custody == (NUM_BLOCKS - 1 if is_sealed else 3), "a late write would land in them"
    rig.fabric.on_post = None
    rig.fabric.resume()
    await rig.is_quiet()


async def test_a_dead_source_fails_the_hand_off(rig: Rig) -> None:
    lease, remote = rig.hand_off()
    rig.fabric.kill(rig.p.identity.agent_name)
    with pytest.raises(PeerLost):
        await rig.read(rig.ready(lease, remote, 1, 4), rig.seal(lease, remote))
    await rig.is_quiet()


def _of_another_lease(rig: Rig, lease: LeaseView, remote: list[int]) -> Any:
    grant = rig.seal(lease, remote)
    return Grant(**{name: getattr(grant, name) for name in grant.__slots__} | {"lease": lease_ref(99, 99)})


def _of_other_blocks(rig: Rig, lease: LeaseView, remote: list[int]) -> Grant:
    return rig.seal(lease, remote[::-1])


@pytest.mark.parametrize("change", [_of_another_lease, _of_other_blocks])
async def test_a_grant_of_something_else_than_was_announced_is_refused(rig: Rig, change: Any) -> None:
    lease, remote = rig.hand_off()
    with pytest.raises(StaleLease):
        await rig.read(rig.ready(lease, remote, 1, 3), change(rig, lease, remote))
    await rig.is_quiet()


@pytest.mark.parametrize(("first", "ids"), [(0, (1, 2)), (5, (1, 2)), (1, (1, 10_000))])
async def test_announcements_of_blocks_that_do_not_exist_are_refused(
    rig: Rig, first: int, ids: tuple[int, ...]
) -> None:
    lease, _ = rig.hand_off()
    ready = Ready(
        handoff_id=lease.handoff_id,
        attempt=1,
        lease=lease.ref,
        slot=lease.slot,
        first_block=first,
        block_ids=ids,
    )
    with pytest.raises(LayoutMismatch):
        await rig.read(ready)
    await rig.is_quiet()


async def test_a_failure_of_our_own_while_digesting_fails_the_request_and_nothing_else(rig: Rig) -> None:
    rig.failpoints.set("decode.digested", "error:internal_error")
    lease, remote = rig.hand_off()
    with pytest.raises(ServingError, match=r"decode\.digested"):
        await rig.read(rig.ready(lease, remote, 1, 4), rig.seal(lease, remote))
    await rig.is_quiet()
