from dataclasses import replace

import pytest

from core.errors import DigestMismatch, StaleLease
from core.handoff import DigestKind, Grant
from core.ids import HandoffId
from kvtransfer.backends.inproc import Fabric
from kvtransfer.digest import combine
from kvtransfer.lease import LeaseView
from kvtransfer.slot import SLOT_MAGIC, LeaseState, SlotMemory, parse_slot
from kvtransfer.validate import check_read, check_slot
from tests.support.transfer_side import GEOMETRY, Side, lease_ref

HEADS = GEOMETRY.num_kv_heads


def sealed() -> tuple[Side, LeaseView, Grant]:
    side = Side(Fabric().backend(), "P")
    side.fill(3)
    return (side, *side.seal("h", [1, 2, 3]))


def test_slots_are_cache_lines_and_say_what_they_hold() -> None:
    slots = SlotMemory(4)
    assert slots.region().address % 64 == 0 and slots.region().num_bytes == 256
    epoch = slots.begin(2, lease_ref(77, 0).lease_id)
    slots.set_ready(2, 5)
    slots.set_digest(2, 2**64 - 1)
    slots.set_state(2, LeaseState.SEALED)
    view = parse_slot(slots.snapshot(2))
    assert (view.lease, view.state, view.blocks_ready, view.digest) == (
        lease_ref(77, epoch),
        LeaseState.SEALED,
        5,
        2**64 - 1,
    )
    assert parse_slot(slots.snapshot(1)).state is LeaseState.UNUSED


def test_the_epoch_grows_with_every_end_and_survives_reuse() -> None:
    slots = SlotMemory(1)
    epochs = []
    for lease_id in (1, 2, 3):
        epochs.append(slots.begin(0, lease_ref(lease_id, 0).lease_id))
        slots.end(0, LeaseState.RELEASED)
    assert epochs == sorted(set(epochs))
    assert slots.epoch(0) > epochs[-1]


@pytest.mark.parametrize("snapshot", [b"", bytes(64), bytes(63), SLOT_MAGIC.to_bytes(8, "little") + b"\xff" * 56])
def test_bytes_that_are_no_slot_are_stale(snapshot: bytes) -> None:
    with pytest.raises(StaleLease):
        parse_slot(snapshot)


def test_a_slot_is_accepted_only_with_the_granted_lease_and_epoch() -> None:
    side, _, grant = sealed()
    snapshot = side.slots.snapshot(grant.slot)
    assert check_slot(grant.lease, snapshot).state is LeaseState.SEALED
    for other in (lease_ref(grant.lease.lease_id + 1, grant.lease.epoch), lease_ref(grant.lease.lease_id, 99)):
        with pytest.raises(StaleLease):
            check_slot(other, snapshot)
    side.leases.revoke(HandoffId("h"), "test", now=1.0)
    with pytest.raises(StaleLease, match="reused"):
        check_slot(grant.lease, side.slots.snapshot(grant.slot))


def test_equal_digests_and_an_unchanged_slot_are_accepted() -> None:
    side, _, grant = sealed()
    check_read(grant, side.slots.snapshot(grant.slot), grant.digests, num_kv_heads=HEADS)


def test_a_wrong_byte_a_wrong_list_and_too_few_blocks_are_refused() -> None:
    side, _, grant = sealed()
    snapshot = side.slots.snapshot(grant.slot)
    side.blocks[2, 5] ^= 4
    with pytest.raises(DigestMismatch, match="block 1 of the hand-off, kv head 0"):
        check_read(grant, snapshot, side.digester().digest([1, 2, 3]), num_kv_heads=HEADS)
    forged = replace(grant, digests=side.digester().digest([1, 2, 3]))
    with pytest.raises(DigestMismatch, match="not the one P sealed"):
        check_read(forged, snapshot, forged.digests, num_kv_heads=HEADS)
    side.slots.set_ready(grant.slot, 2)
    with pytest.raises(StaleLease, match="only 2 of 3"):
        check_read(grant, side.slots.snapshot(grant.slot), grant.digests, num_kv_heads=HEADS)


def test_after_the_death_of_p_equal_digests_suffice_and_nothing_else_does() -> None:
    _, _, grant = sealed()
    check_read(grant, None, grant.digests, num_kv_heads=HEADS)
    with pytest.raises(DigestMismatch):
        check_read(grant, None, grant.digests[:-1] + b"\0", num_kv_heads=HEADS)
    with pytest.raises(StaleLease, match="digests are off"):
        check_read(replace(grant, digest=DigestKind.OFF, digests=b""), None, b"", num_kv_heads=HEADS)


def test_a_grant_of_the_blocks_that_were_missing_is_bound_by_the_slot_too() -> None:
    side, view, whole = sealed()
    rest = replace(whole, first_block=1, block_ids=whole.block_ids[1:], digests=whole.digests[8 * HEADS :])
    with pytest.raises(DigestMismatch, match="not the one"):
        check_read(rest, side.slots.snapshot(view.slot), rest.digests, num_kv_heads=HEADS)
    side.leases.set_digest(view.ref.lease_id, combine(rest.digest, rest.digests))
    snapshot = side.slots.snapshot(view.slot)
    check_read(rest, snapshot, rest.digests, num_kv_heads=HEADS)
    with pytest.raises(DigestMismatch, match="not the one"):
        check_read(whole, snapshot, whole.digests, num_kv_heads=HEADS)
    side.blocks[3, 0] ^= 1
    with pytest.raises(DigestMismatch, match="block 1 of the hand-off"):
        check_read(rest, snapshot, side.digester().digest([2, 3]), num_kv_heads=HEADS)


def test_a_grant_of_nothing_still_needs_a_living_lease() -> None:
    side, view, whole = sealed()
    nothing = replace(whole, first_block=3, block_ids=(), digests=b"")
    side.leases.set_digest(view.ref.lease_id, combine(nothing.digest, b""))
    check_read(nothing, side.slots.snapshot(view.slot), b"", num_kv_heads=HEADS)
    side.leases.revoke(HandoffId("h"), "test", now=1.0)
    with pytest.raises(StaleLease):
        check_read(nothing, side.slots.snapshot(view.slot), b"", num_kv_heads=HEADS)
    side.leases.set_digest(view.ref.lease_id, 1)  # of a lease that has ended: nothing happens
