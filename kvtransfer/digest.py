"""Digests of KV: one for each (block, kv head), made at P when a block completes and made again at D in its own
memory.

``wsum64`` is sum(word_i * (2 i + 1)) mod 2^64 over the little-endian 64-bit words of the head's contiguous range. Odd
weights are invertible mod 2^64, so every change of a single word is seen; unequal weights, so reordering is seen too.
``crc32`` is for debugging. Digests travel as little-endian uint64, block first. A head range that is no multiple of 8
bytes is zero-padded.
"""

import zlib
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from core.errors import DigestMismatch
from core.handoff import DigestKind
from core.kv import KVGeometry
from kvtransfer.memory import view_memory

WORD_BYTES = 8
DIGEST_BYTES = 8


class Digester:
    """Digests blocks of one worker's KV memory. Stateless after construction; safe from any thread."""

    def __init__(self, kind: DigestKind, geometry: KVGeometry, kv: NDArray[np.uint8]) -> None:
        """``kv`` is the memory of all blocks as bytes; see :meth:`at_address`."""
        needed = geometry.num_blocks * geometry.block_bytes
        if kv.nbytes < needed:
            raise ValueError(f"{kv.nbytes} bytes of KV memory, the geometry needs {needed}")
        self.kind = kind
        self.geometry = geometry
        shape = (geometry.num_blocks, geometry.num_kv_heads, geometry.head_bytes)
        self._bytes = kv[:needed].reshape(shape)
        self._weights = _weights(geometry.head_bytes)

    @classmethod
    def at_address(cls, kind: DigestKind, geometry: KVGeometry, address: int) -> "Digester":
        """For KV memory that somebody else owns (a tensor) and keeps mapped."""
        return cls(kind, geometry, view_memory(address, geometry.num_blocks * geometry.block_bytes))

    def digest(self, blocks: Sequence[int]) -> bytes:
        """Digests of ``blocks`` in their order: ``len(blocks) * num_kv_heads`` little-endian uint64; empty with
        ``off``."""
        if self.kind is DigestKind.OFF:
            return b""
        out = np.empty((len(blocks), self.geometry.num_kv_heads), dtype="<u8")
        for row, block in enumerate(blocks):
            if self.kind is DigestKind.WSUM64:
                out[row] = wsum64(self._bytes[block], self._weights)
            else:
                out[row] = [zlib.crc32(head) for head in self._bytes[block]]
        return out.tobytes()


def wsum64(ranges: NDArray[np.uint8], weights: NDArray[np.uint64] | None = None) -> NDArray[np.uint64]:
    """Weighted wrap-around sum of each row of ``ranges`` [rows, bytes]. About memory speed: one pass, no temporary."""
    rows, num_bytes = ranges.shape
    if weights is None:
        weights = _weights(num_bytes)
    if num_bytes % WORD_BYTES:
        padded = np.zeros((rows, len(weights) * WORD_BYTES), dtype=np.uint8)
        padded[:, :num_bytes] = ranges
        ranges = padded
    words = ranges.view("<u8")
    result: NDArray[np.uint64] = np.einsum("rw,w->r", words, weights)
    return result


def combine(kind: DigestKind, digests: bytes) -> int:
    """The digest of the digest list that the lease slot carries: 64 bits that bind kind, order and every digest."""
    return int.from_bytes(blake2b(digests, digest_size=8, person=kind.value.encode()).digest(), "little")


def verify(expected: bytes, actual: bytes, *, num_kv_heads: int) -> None:
    """Raises DigestMismatch naming the first differing (block, kv head), blocks counted from the start of the list."""
    if expected == actual:
        return
    if len(expected) != len(actual):
        raise DigestMismatch(f"{len(expected) // DIGEST_BYTES} digests expected, {len(actual) // DIGEST_BYTES} made")
    differing = np.flatnonzero(np.frombuffer(expected, dtype="<u8") != np.frombuffer(actual, dtype="<u8"))
    block, head = divmod(int(differing[0]), num_kv_heads)
    raise DigestMismatch(f"{len(differing)} digests differ, first at block {block} of the hand-off, kv head {head}")


def _weights(num_bytes: int) -> NDArray[np.uint64]:
    num_words = -(-num_bytes // WORD_BYTES)
    return np.arange(num_words, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
