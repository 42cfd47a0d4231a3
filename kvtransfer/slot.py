"""The lease slot: 64 bytes in P's registered memory that tell a reader whether what it read was still held.

::

    offset  0 u64 magic    8 u64 lease id    16 u64 epoch    24 u32 state    28 u32 blocks ready
           32 u64 digest of the digest list that its holder was granted    40..63 zero

P bumps the epoch *before* it reuses blocks; D reads the slot *after* its data is complete and accepts only the epoch
it was granted. That is right on any transport, because the slot read is posted after the data has arrived. Every
field is written by one aligned store; a reader needs no other consistency than that the epoch is never old once
blocks are reused.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from core.errors import StaleLease
from core.handoff import LeaseRef
from core.ids import LeaseId
from core.kv import MemoryRegion
from kvtransfer.memory import CELL_BYTES, REGION_SLOTS, AlignedBuffer

SLOT_MAGIC = int.from_bytes(b"BATONSL1", "little")
_FORMAT = struct.Struct("<QQQIIQ")


class LeaseState(IntEnum):
    """As written into the slot. Zero is a slot that never held a lease."""

    UNUSED = 0
    FILLING = 1
    SEALED = 2
    CLAIMED = 3
    RELEASED = 4
    EXPIRED = 5
    REVOKED = 6

    @property
    def is_live(self) -> bool:
        return self in (LeaseState.FILLING, LeaseState.SEALED, LeaseState.CLAIMED)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotView:
    """A slot as a reader saw it."""

    lease: LeaseRef
    state: LeaseState
    blocks_ready: int
    digest: int


class SlotMemory:
    """P's slots. Written by the lease table only."""

    def __init__(self, num_slots: int = 1024) -> None:
        self._buffer = AlignedBuffer(num_slots * CELL_BYTES)
        self._u64 = self._buffer.data.view("<u8").reshape(num_slots, CELL_BYTES // 8)
        self._u32 = self._buffer.data.view("<u4").reshape(num_slots, CELL_BYTES // 4)
        self._u64[:, 0] = np.uint64(SLOT_MAGIC)
        self._u64[:, 2] = np.uint64(1)
        self.num_slots = num_slots

    def region(self) -> MemoryRegion:
        return self._buffer.region(REGION_SLOTS)

    def epoch(self, slot: int) -> int:
        return int(self._u64[slot, 2])

    def begin(self, slot: int, lease_id: LeaseId) -> int:
        """A new lease in a slot whose epoch was bumped when the old one ended. Returns the epoch."""
        self._u64[slot, 1] = lease_id
        self._u64[slot, 4] = 0
        self._u32[slot, 7] = 0
        self._u32[slot, 6] = LeaseState.FILLING
        return self.epoch(slot)

    def set_ready(self, slot: int, num_blocks: int) -> None:
        self._u32[slot, 7] = num_blocks

    def set_digest(self, slot: int, digest: int) -> None:
        self._u64[slot, 4] = digest

    def set_state(self, slot: int, state: LeaseState) -> None:
        self._u32[slot, 6] = state

    def end(self, slot: int, state: LeaseState) -> None:
        """Bump the epoch, then tell the reason. Blocks may be reused once this has returned."""
        self._u64[slot, 2] = self.epoch(slot) + 1
        self._u32[slot, 6] = state

    def snapshot(self, slot: int) -> bytes:
        return self._buffer.data[slot * CELL_BYTES : (slot + 1) * CELL_BYTES].tobytes()


def parse_slot(snapshot: bytes) -> SlotView:
    """Raises StaleLease when the bytes are no slot at all."""
    if len(snapshot) != CELL_BYTES:
        raise StaleLease(f"a lease slot has {CELL_BYTES} bytes, {len(snapshot)} were read")
    magic, lease_id, epoch, state, blocks_ready, digest = _FORMAT.unpack_from(snapshot)
    if magic != SLOT_MAGIC or state > max(LeaseState):
        raise StaleLease("what was read is no lease slot")
    return SlotView(
        lease=LeaseRef(lease_id=LeaseId(lease_id), epoch=epoch),
        state=LeaseState(state),
        blocks_ready=blocks_ready,
        digest=digest,
    )
