"""Which two workers fit together, and how their regions are addressed. Pure.

Formats must be equal (they are hashed; the handshake compares again and names what differs). Geometries may differ in
ranks, block size, number of blocks and memory order: :mod:`kvtransfer.plan` resolves those, and what it cannot is
refused by name here.
"""

from dataclasses import dataclass, replace

from core.errors import LayoutMismatch
from core.handoff import PeerInfo
from core.kv import KVFormat, KVGeometry, MemoryRegion
from kvtransfer.memory import CELL_BYTES, REGION_KV
from kvtransfer.ranks import Box, held_box


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Memory to register and the unit it is read in: for ``kv`` what is contiguous of a block (all of it in our own
    memory order), 64 bytes for ``slots`` and ``scratch``.

    The unit lets a backend prepare strided descriptor lists once; copies of other sizes work too, more slowly.
    """

    memory: MemoryRegion
    unit_bytes: int = CELL_BYTES


def kv_region(memory: MemoryRegion, geometry: KVGeometry) -> Region:
    """The region of a worker's blocks. Raises LayoutMismatch when the memory cannot hold the geometry."""
    needed = geometry.num_bytes
    if memory.name != REGION_KV:
        raise LayoutMismatch(f"the region of the blocks must be named {REGION_KV!r}, not {memory.name!r}")
    if memory.num_bytes < needed:
        raise LayoutMismatch(
            f"region {REGION_KV!r} has {memory.num_bytes} bytes, {geometry.num_blocks} blocks need {needed}"
        )
    return Region(memory=memory, unit_bytes=geometry.strides.block)


def check_compatible(mine: KVFormat, theirs: KVFormat) -> None:
    """Raises LayoutMismatch naming every factor in which two formats differ."""
    differences = mine.differences(theirs)
    if differences:
        raise LayoutMismatch("KV formats differ: " + "; ".join(differences))


def check_geometry(mine: KVGeometry, theirs: KVGeometry) -> None:
    """Raises LayoutMismatch naming every factor that the planner cannot resolve."""
    differences = [
        f"{name}: {getattr(mine, name)!r} != {getattr(theirs, name)!r}"
        for name in ("head_dim", "dtype_bytes")
        if getattr(mine, name) != getattr(theirs, name)
    ]
    small, large = sorted((mine.block_size, theirs.block_size))
    if small < 1 or large % small:
        differences.append(
            f"block_size: {mine.block_size!r} != {theirs.block_size!r}, and neither divides the other; "
            "set models[].kv.block_size of one to a multiple of the other's"
        )
    if differences:
        raise LayoutMismatch("KV geometries differ: " + "; ".join(differences))


def check_peer(peer: PeerInfo, *, mine: KVFormat, geometry: KVGeometry) -> None:
    """The handshake's verdict on a peer: format, geometry, and that its region holds its blocks.

    A worker has one rank today, and fetches from one: both must hold the same heads and layers. Their grants and
    prefix hits count blocks of one size.
    """
    check_compatible(mine, peer.format)
    check_geometry(geometry, peer.geometry)
    ours, theirs = held_box(geometry, mine.num_kv_heads), held_box(peer.geometry, mine.num_kv_heads)
    if ours != theirs:
        raise LayoutMismatch(
            f"{peer.worker_id} is rank {peer.geometry.rank} of {peer.geometry.num_ranks} with {_text(theirs)}, this "
            f"worker rank {geometry.rank} of {geometry.num_ranks} with {_text(ours)}: a hand-off takes one of each"
        )
    if geometry.block_size != peer.geometry.block_size:
        raise LayoutMismatch(
            f"block_size: {geometry.block_size} != {peer.geometry.block_size}: {peer.worker_id} needs the same "
            "models[].kv.block_size as this worker"
        )
    for link in (peer.link, *peer.other_links):
        check_region(replace(peer, link=link))


def check_region(peer: PeerInfo) -> None:
    """Raises LayoutMismatch unless the region of blocks that a peer advertises holds what its geometry says."""
    _, num_bytes = region_of(peer, REGION_KV)
    if num_bytes < peer.geometry.num_bytes:
        raise LayoutMismatch(
            f"{peer.worker_id} advertises {num_bytes} bytes of KV, its geometry needs {peer.geometry.num_bytes}"
        )


def region_of(peer: PeerInfo, name: str) -> tuple[int, int]:
    """(address, bytes) of a region that the peer advertised. Raises LayoutMismatch when it did not."""
    for region, address, num_bytes in peer.link.regions:
        if region == name:
            return address, num_bytes
    raise LayoutMismatch(f"{peer.worker_id} advertises no region {name!r}")


def unit_of(peer: PeerInfo, name: str) -> int:
    """The unit in which a peer's region is read."""
    return peer.geometry.strides.block if name == REGION_KV else CELL_BYTES


def _text(box: Box) -> str:
    heads, layers = box.heads, box.layers
    return f"KV heads {heads.start}..{heads.stop - 1} and layers {layers.start}..{layers.stop - 1}"
