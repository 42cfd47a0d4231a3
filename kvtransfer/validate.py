"""D's verdict on what it has read: accept, or raise the typed error. Nothing is attended to, and no block enters the
prefix cache, before this has passed.

The slot answers "was it still held when the data was complete", the digests answer "is it what P computed". Either
alone leaves a hole: an epoch does not see a flipped bit, digests that arrive with reused blocks' grant would match
the wrong data.
"""

from core.errors import DigestMismatch, StaleLease
from core.handoff import DigestKind, Grant, LeaseRef
from kvtransfer import digest
from kvtransfer.slot import LeaseState, SlotView, parse_slot

_READABLE = (LeaseState.SEALED, LeaseState.CLAIMED)


def check_slot(expected: LeaseRef, snapshot: bytes) -> SlotView:
    """Accept a slot that was read after the data. Raises StaleLease unless lease and epoch are those granted."""
    view = parse_slot(snapshot)
    if view.lease != expected:
        raise StaleLease(
            f"lease {expected.lease_id} epoch {expected.epoch} was granted, the slot holds lease {view.lease.lease_id} "
            f"epoch {view.lease.epoch}: the blocks may have been reused while they were read"
        )
    if not view.state.is_live:
        raise StaleLease(f"lease {expected.lease_id} is {view.state.name.lower()}")
    return view


def check_read(
    grant: Grant, snapshot: bytes | None, local_digests: bytes, *, num_kv_heads: int, heads: range | None = None
) -> None:
    """The whole verdict for a sealed grant. ``local_digests`` were made over D's own blocks in the order of the grant.

    ``num_kv_heads`` are those of P's rank; ``heads`` those of them that were read, if not all.
    ``snapshot`` is None when P died after the data was complete: then equal digests suffice, and without digests
    nothing does. Raises StaleLease or DigestMismatch.
    """
    if snapshot is None:
        if grant.digest is DigestKind.OFF:
            raise StaleLease("P is gone, its lease slot could not be read, and digests are off")
    else:
        view = check_slot(grant.lease, snapshot)
        num_blocks = grant.first_block + len(grant.block_ids)
        if view.state not in _READABLE or view.blocks_ready < num_blocks:
            raise StaleLease(f"only {view.blocks_ready} of {num_blocks} blocks are ready ({view.state.name.lower()})")
        if view.digest != digest.combine(grant.digest, grant.digests):
            raise DigestMismatch("the digest list of the grant is not the one P sealed")
    if grant.digest is not DigestKind.OFF:
        heads = range(num_kv_heads) if heads is None else heads
        expected = digest.of_heads(grant.digests, num_kv_heads, heads)
        digest.verify(expected, local_digests, num_kv_heads=len(heads))
