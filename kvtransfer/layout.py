"""Which two workers fit together, and where a block lies in its region. Pure.

Formats must be equal (they are hashed; the handshake compares again and names what differs). Geometries may differ in
the number of blocks; other differences are refused by name until the planner can resolve them.
"""

from dataclasses import dataclass

from core.errors import LayoutMismatch
from core.handoff import PeerInfo
from core.kv import KVFormat, KVGeometry, KVOrder, MemoryRegion
from kvtransfer.memory import CELL_BYTES, REGION_KV

_GEOMETRY_FACTORS = (
    "order",
    "block_size",
    "num_layers",
    "num_kv_heads",
    "head_dim",
    "dtype_bytes",
    "num_ranks",
    "rank",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Memory to register and the unit it is read in: a block for ``kv``, 64 bytes for ``slots`` and ``scratch``.

    The unit lets a backend prepare strided descriptor lists once; copies of other sizes work too, more slowly.
    """

    memory: MemoryRegion
    unit_bytes: int = CELL_BYTES


def kv_region(memory: MemoryRegion, geometry: KVGeometry) -> Region:
    """The region of a worker's blocks. Raises LayoutMismatch when the memory cannot hold the geometry."""
    needed = geometry.num_blocks * geometry.block_bytes
    if memory.name != REGION_KV:
        raise LayoutMismatch(f"the region of the blocks must be named {REGION_KV!r}, not {memory.name!r}")
    if memory.num_bytes < needed:
        raise LayoutMismatch(
            f"region {REGION_KV!r} has {memory.num_bytes} bytes, {geometry.num_blocks} blocks need {needed}"
        )
    return Region(memory=memory, unit_bytes=geometry.block_bytes)


def check_compatible(mine: KVFormat, theirs: KVFormat) -> None:
    """Raises LayoutMismatch naming every factor in which two formats differ."""
    differences = mine.differences(theirs)
    if differences:
        raise LayoutMismatch("KV formats differ: " + "; ".join(differences))


def check_geometry(mine: KVGeometry, theirs: KVGeometry) -> None:
    """Raises LayoutMismatch naming every factor that the planner cannot resolve yet."""
    differences = [
        f"{name}: {getattr(mine, name)!r} != {getattr(theirs, name)!r}"
        for name in _GEOMETRY_FACTORS
        if getattr(mine, name) != getattr(theirs, name)
    ]
    if differences:
        raise LayoutMismatch("KV geometries differ: " + "; ".join(differences))
    if mine.order is not KVOrder.BLOCK_HEAD_LAYER:
        raise LayoutMismatch(f"KV geometry order {mine.order!r} is not known here")


def check_peer(peer: PeerInfo, *, mine: KVFormat, geometry: KVGeometry, backend: str) -> None:
    """The handshake's verdict on a peer: format, geometry, backend, and that its region holds its blocks."""
    check_compatible(mine, peer.format)
    check_geometry(geometry, peer.geometry)
    if peer.link.backend != backend:
        raise LayoutMismatch(f"transfer backends differ: {backend!r} != {peer.link.backend!r}")
    _, num_bytes = region_of(peer, REGION_KV)
    needed = peer.geometry.num_blocks * peer.geometry.block_bytes
    if num_bytes < needed:
        raise LayoutMismatch(f"{peer.worker_id} advertises {num_bytes} bytes of KV, its geometry needs {needed}")


def region_of(peer: PeerInfo, name: str) -> tuple[int, int]:
    """(address, bytes) of a region that the peer advertised. Raises LayoutMismatch when it did not."""
    for region, address, num_bytes in peer.link.regions:
        if region == name:
            return address, num_bytes
    raise LayoutMismatch(f"{peer.worker_id} advertises no region {name!r}")


def unit_of(peer: PeerInfo, name: str) -> int:
    """The unit in which a peer's region is read."""
    return peer.geometry.block_bytes if name == REGION_KV else CELL_BYTES
