"""From pairs of block ids to copies: sorted, merged, cut into chunks. Pure.

Merging is what matters most (measured: 1024 blocks of 16 KiB as one descriptor move 3.4 times faster than one by
one), so pairs are sorted by source block and neighbours on both sides become one copy. A chunk is what is posted at
once: small enough that an abort is noticed soon, large enough that fixed costs vanish.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from core.errors import LayoutMismatch
from core.kv import KVGeometry
from kvtransfer.layout import check_geometry

MAX_CHUNK_BYTES = 16 * 1024 * 1024


class Copy(NamedTuple):
    """``num_bytes`` bytes from ``remote_offset`` of the peer's region to ``local_offset`` of ours."""

    remote_offset: int
    local_offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one fetch moves. Every target byte is written once; bytes outside the pairs are untouched."""

    chunks: tuple[tuple[Copy, ...], ...]
    num_bytes: int
    num_copies: int
    """Copies over all chunks: the descriptors a backend sees."""


def plan_blocks(
    remote: KVGeometry,
    local: KVGeometry,
    remote_blocks: Sequence[int],
    local_blocks: Sequence[int],
    *,
    max_chunk_bytes: int = MAX_CHUNK_BYTES,
) -> Plan:
    """Plan ``remote_blocks[i] -> local_blocks[i]``.

    Raises LayoutMismatch for unequal geometries and for block ids outside them (they come from a peer), ValueError
    when the two lists differ in length or a local block is named twice.
    """
    check_geometry(local, remote)
    if len(remote_blocks) != len(local_blocks):
        raise ValueError(f"{len(remote_blocks)} remote blocks for {len(local_blocks)} local blocks")
    if len(set(local_blocks)) != len(local_blocks):
        raise ValueError("a local block would be written twice")
    _check_ids(remote_blocks, remote.num_blocks, "remote")
    _check_ids(local_blocks, local.num_blocks, "local")
    block_bytes = local.block_bytes
    runs = merge(
        Copy(source * block_bytes, target * block_bytes, block_bytes)
        for source, target in sorted(zip(remote_blocks, local_blocks, strict=True))
    )
    chunks = cut(runs, max_chunk_bytes=max_chunk_bytes, unit_bytes=block_bytes)
    return Plan(
        chunks=chunks,
        num_bytes=len(local_blocks) * block_bytes,
        num_copies=sum(len(chunk) for chunk in chunks),
    )


def merge(copies: Iterable[Copy]) -> list[Copy]:
    """Join copies that continue their predecessor on both sides. Expects them sorted by remote offset."""
    runs: list[Copy] = []
    for copy in copies:
        if runs:
            last = runs[-1]
            follows_remote = last.remote_offset + last.num_bytes == copy.remote_offset
            if follows_remote and last.local_offset + last.num_bytes == copy.local_offset:
                runs[-1] = last._replace(num_bytes=last.num_bytes + copy.num_bytes)
                continue
        runs.append(copy)
    return runs


def cut(runs: Iterable[Copy], *, max_chunk_bytes: int, unit_bytes: int) -> tuple[tuple[Copy, ...], ...]:
    """Cut runs into chunks of at most ``max_chunk_bytes``, between units where a unit fits into a chunk."""
    if max_chunk_bytes < 1:
        raise ValueError("max_chunk_bytes must be positive")
    step = unit_bytes if unit_bytes <= max_chunk_bytes else 1
    chunks: list[tuple[Copy, ...]] = []
    chunk: list[Copy] = []
    room = max_chunk_bytes
    for remote, local, left in runs:
        while left:
            take = left if left <= room else room - room % step
            if take:
                chunk.append(Copy(remote, local, take))
                remote, local, left, room = remote + take, local + take, left - take, room - take
            if left:
                chunks.append(tuple(chunk))
                chunk, room = [], max_chunk_bytes
    if chunk:
        chunks.append(tuple(chunk))
    return tuple(chunks)


def _check_ids(blocks: Sequence[int], num_blocks: int, side: str) -> None:
    if blocks and (min(blocks) < 0 or max(blocks) >= num_blocks):
        raise LayoutMismatch(
            f"{side} block ids {min(blocks)}..{max(blocks)} exceed the {num_blocks} blocks of the geometry"
        )
