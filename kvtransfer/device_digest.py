"""Digests of KV that lies in a device's memory, which no address of this process leads to: the device makes them.

They are those of :mod:`kvtransfer.digest`. What the device does not make itself (another kind of digest, the units of a
peer with other blocks) is made of a copy of the blocks.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from core.handoff import DigestKind
from core.kv import KVGeometry
from kvtransfer.digest import Digester
from kvtransfer.plan import Blocks


class BlockMemory(Protocol):
    """Blocks somewhere else. From any thread."""

    def sums(self, blocks: Sequence[int]) -> NDArray[np.uint64]:
        """``wsum64`` of each kv head of each block, ``[block, kv_head]``."""

    def read(self, blocks: Sequence[int]) -> NDArray[np.uint8]:
        """The blocks' bytes, ``[block, byte]``."""


class DeviceDigester(Digester):
    """A :class:`~kvtransfer.digest.Digester` of blocks in a device's memory, in our own memory order."""

    def __init__(self, kind: DigestKind, geometry: KVGeometry, memory: BlockMemory) -> None:
        self.kind = kind
        self.geometry = geometry
        self._memory = memory

    def digest(self, blocks: Sequence[int]) -> bytes:
        if self.kind is DigestKind.OFF or not blocks:
            return b""
        if min(blocks) < 0 or max(blocks) >= self.geometry.num_blocks:
            raise IndexError(f"blocks {list(blocks)} are not all among the {self.geometry.num_blocks} here")
        if self.kind is DigestKind.WSUM64 and self.geometry.head_bytes % 8 == 0:
            return self._memory.sums(blocks).astype("<u8").tobytes()
        return self._copied(blocks).digest(range(len(blocks)))

    def digest_as(
        self, source: KVGeometry, local: Blocks, units: range, *, num_kv_heads: int, source_heads: range
    ) -> bytes:
        if self.kind is DigestKind.OFF:
            return b""
        renumbered = replace(local, block_ids=tuple(range(len(local.block_ids))))
        return self._copied(local.block_ids).digest_as(
            source, renumbered, units, num_kv_heads=num_kv_heads, source_heads=source_heads
        )

    def _copied(self, blocks: Sequence[int]) -> Digester:
        """Of a copy of these blocks alone, numbered from 0."""
        geometry = replace(self.geometry, num_blocks=len(blocks))
        return Digester(self.kind, geometry, np.ascontiguousarray(self._memory.read(blocks)).reshape(-1))
