"""One process's part in a transfer, without an engine: KV memory of the default model's layout behind a backend."""

from core.handoff import PeerInfo
from core.ids import WorkerId, new_incarnation
from core.kv import KVFormat, KVGeometry
from kvtransfer.backends import create_backend
from kvtransfer.backends.base import Backend, Identity
from kvtransfer.canary import CanaryMemory
from kvtransfer.layout import Region, kv_region
from kvtransfer.memory import REGION_KV, AlignedBuffer, Scratch
from kvtransfer.slot import SlotMemory

NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, DTYPE_BYTES = 30, 3, 64, 16, 4
"""The default model in float32."""


class NoPool:
    """Custody without a block pool: nothing else uses these blocks."""

    def take_custody(self, blocks: object) -> None: ...

    def end_custody(self, blocks: object) -> None: ...


class End:
    """One process's memory behind a backend."""

    def __init__(self, backend: str, worker_id: str, num_blocks: int) -> None:
        self.geometry = KVGeometry(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            num_layers=NUM_LAYERS,
            num_kv_heads=NUM_KV_HEADS,
            head_dim=HEAD_DIM,
            dtype_bytes=DTYPE_BYTES,
        )
        self.kv = AlignedBuffer(num_blocks * self.geometry.block_bytes)
        self.slots = SlotMemory(16)
        self.scratch = Scratch(16)
        self.backend: Backend = create_backend(backend)
        identity = Identity(worker_id=WorkerId(worker_id), incarnation=new_incarnation())
        self.canary = CanaryMemory(identity.incarnation, self.geometry)
        regions = (
            kv_region(self.kv.region(REGION_KV), self.geometry),
            Region(memory=self.slots.region()),
            Region(memory=self.scratch.region()),
            *self.canary.regions(),
        )
        self.peer = PeerInfo(
            worker_id=identity.worker_id,
            incarnation=identity.incarnation,
            format=KVFormat(
                model_digest="bench",
                tokenizer_digest="",
                template_digest="",
                compute_dtype="float32",
                kv_dtype="float32",
                quantisation="none",
                num_layers=NUM_LAYERS,
                num_kv_heads=NUM_KV_HEADS,
                head_dim=HEAD_DIM,
            ),
            geometry=self.geometry,
            link=self.backend.open(identity, regions),
            canary_digest=self.canary.digest,
        )
