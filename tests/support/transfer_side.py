"""One worker's end of a transfer, for tests: memory, slots, scratch, an open backend, and how peers see it."""

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from core.clock import Clock, MonotonicClock
from core.handoff import DigestKind, Grant, LeaseRef, PeerInfo
from core.ids import HandoffId, Incarnation, LeaseId, WorkerId, new_incarnation
from core.kv import KVFormat, KVGeometry
from kvtransfer.backends.base import Backend, Identity
from kvtransfer.canary import CanaryMemory
from kvtransfer.custody import Custody
from kvtransfer.digest import Digester, combine
from kvtransfer.layout import Region, kv_region
from kvtransfer.lease import LeaseTable, LeaseView
from kvtransfer.memory import REGION_KV, AlignedBuffer, Scratch
from kvtransfer.pairs import Pairs
from kvtransfer.slot import SlotMemory
from kvtransfer.transfer_loop import TransferLoop
from kvtransfer.transfer_thread import TransferThread

GEOMETRY = KVGeometry(num_blocks=32, block_size=16, num_layers=4, num_kv_heads=3, head_dim=8, dtype_bytes=4)
FORMAT = KVFormat(
    model_digest="m",
    tokenizer_digest="t",
    template_digest="c",
    compute_dtype="float32",
    kv_dtype="float32",
    quantisation="none",
    num_layers=4,
    num_kv_heads=3,
    head_dim=8,
)


class RecordingPool:
    """What custody does to the pool: every pin and its end."""

    def __init__(self) -> None:
        self.pins: Counter[int] = Counter()

    def take_custody(self, blocks: Sequence[int]) -> None:
        self.pins.update(blocks)

    def end_custody(self, blocks: Sequence[int]) -> None:
        self.pins.subtract(blocks)
        assert min(self.pins.values(), default=0) >= 0, "custody ended twice"

    @property
    def pinned(self) -> set[int]:
        return {block for block, count in self.pins.items() if count}


class Side:
    """A worker's memory behind an open backend."""

    def __init__(
        self,
        backend: Backend,
        worker_id: str,
        *,
        geometry: KVGeometry = GEOMETRY,
        incarnation: Incarnation | None = None,
        num_cells: int = 8,
        num_slots: int = 16,
        fallback: Backend | None = None,
    ) -> None:
        self.geometry = geometry
        self.backend = backend
        self.fallback = fallback
        self.identity = Identity(worker_id=WorkerId(worker_id), incarnation=incarnation or new_incarnation())
        self.kv = AlignedBuffer(geometry.num_blocks * geometry.block_bytes)
        self.slots = SlotMemory(num_slots)
        self.scratch = Scratch(num_cells)
        self.canary = CanaryMemory(self.identity.incarnation, geometry)
        regions = (
            kv_region(self.kv.region(REGION_KV), geometry),
            Region(memory=self.slots.region()),
            Region(memory=self.scratch.region()),
            *self.canary.regions(),
        )
        link = backend.open(self.identity, regions)
        self.peer = PeerInfo(
            worker_id=self.identity.worker_id,
            incarnation=self.identity.incarnation,
            format=FORMAT,
            geometry=geometry,
            link=link,
            other_links=() if fallback is None else (fallback.open(self.identity, regions),),
            canary_digest=self.canary.digest,
        )
        self.pool = RecordingPool()
        self.custody = Custody(self.pool)
        self.leases = LeaseTable(
            self.slots,
            block_bytes=geometry.block_bytes,
            lease_s=15.0,
            quota_bytes=geometry.num_blocks * geometry.block_bytes,
        )

    @property
    def blocks(self) -> NDArray[np.uint8]:
        """[block, bytes]"""
        return self.kv.data.reshape(self.geometry.num_blocks, self.geometry.block_bytes)

    def fill(self, seed: int) -> None:
        self.kv.data[:] = np.random.default_rng(seed).integers(0, 256, self.kv.data.nbytes, dtype=np.uint8)

    def digester(self, kind: DigestKind = DigestKind.WSUM64) -> Digester:
        return Digester(kind, self.geometry, self.kv.data)

    def seal(self, handoff_id: str, blocks: Sequence[int], *, now: float = 0.0) -> tuple[LeaseView, Grant]:
        """Open and seal a lease over ``blocks`` as they are now."""
        digests = self.digester().digest(blocks)
        opened = self.leases.open(HandoffId(handoff_id), num_blocks=len(blocks), deadline_s=60.0, now=now)
        digest = combine(DigestKind.WSUM64, digests)
        view = self.leases.seal(opened.ref.lease_id, blocks, digest=digest, now=now)
        assert view is not None
        return view, Grant(
            lease=view.ref,
            slot=view.slot,
            block_ids=tuple(blocks),
            first_block=0,
            num_tokens=len(blocks) * self.geometry.block_size,
            digest=DigestKind.WSUM64,
            digests=digests,
        )

    def loop(
        self, clock: Clock, *, stall_s: float = 10.0, handshake_s: float = 5.0, pairs: Pairs | None = None
    ) -> TransferLoop:
        return TransferLoop(
            self.backend,
            fallback=self.fallback,
            geometry=self.geometry,
            scratch=self.scratch,
            landing=self.canary.landing,
            custody=self.custody,
            clock=clock,
            stall_s=stall_s,
            handshake_s=handshake_s,
            pairs=pairs,
        )

    def thread(
        self,
        *,
        clock: Clock | None = None,
        stall_s: float = 10.0,
        handshake_s: float = 5.0,
        on_death: Callable[[], None] | None = None,
    ) -> TransferThread:
        return TransferThread(
            self.backend,
            fallback=self.fallback,
            geometry=self.geometry,
            scratch=self.scratch,
            landing=self.canary.landing,
            custody=self.custody,
            clock=clock or MonotonicClock(),
            name=f"transfer-{self.identity.worker_id}",
            stall_s=stall_s,
            handshake_s=handshake_s,
            on_death=on_death,
        )


def lease_ref(lease_id: int, epoch: int) -> LeaseRef:
    return LeaseRef(lease_id=LeaseId(lease_id), epoch=epoch)
