"""Digests of KV: one for each (block, kv head), made at P when a block completes and made again at D in its own
memory.

The unit is *P's*: one of its blocks (in its block size), one of the KV heads of its rank, all layers of its rank. Its
bytes are taken in the order ``[layer, k/v, slot, head_dim]``, whatever the memory order of either side; in
``BLOCK_HEAD_LAYER`` that is a contiguous range. So D can make P's digests whenever it holds whole units of P:

- another rank: heads are digested apart, D checks those that it read (:func:`of_heads`);
- another block size: a unit is a part of one block of D, or several of them. D reads whole blocks of P, so what it
  skips of a prefix is a multiple of both block sizes (:func:`kvtransfer.plan.skippable`), and it takes blocks for all
  slots of P's last one;
- other layers: a unit has all layers of P's rank. A D that holds a part of them cannot check it, and is refused.

``wsum64`` is sum(word_i * (2 i + 1)) mod 2^64 over the little-endian 64-bit words of a unit. Odd weights are invertible
mod 2^64, so every change of a single word is seen; unequal weights, so reordering is seen too. ``crc32`` is for
debugging. Digests travel as little-endian uint64, block first. A unit that is no multiple of 8 bytes is zero-padded.
"""

import threading
import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from core.errors import DigestMismatch, LayoutMismatch
from core.handoff import DigestKind
from core.kv import KVGeometry, KVOrder
from kvtransfer.memory import view_memory
from kvtransfer.plan import Blocks
from kvtransfer.ranks import held_box

WORD_BYTES = 8
DIGEST_BYTES = 8


WeightedSums = Callable[[NDArray[np.uint64], NDArray[np.int64], NDArray[np.uint64]], None]
"""``sums(words, blocks, out)``: ``wsum64`` of ``words[block, kv_head, word]`` for each of ``blocks`` into ``out[index,
kv_head]``. From any thread."""


class Digester:
    """Digests blocks of one worker's KV memory. Stateless after construction; safe from any thread."""

    def __init__(
        self, kind: DigestKind, geometry: KVGeometry, kv: NDArray[np.uint8], *, sums: WeightedSums | None = None
    ) -> None:
        """``kv`` is the memory of all blocks as bytes; see :meth:`at_address`. ``sums`` is a faster ``wsum64`` for our
        own memory order."""
        if kv.nbytes < geometry.num_bytes:
            raise ValueError(f"{kv.nbytes} bytes of KV memory, the geometry needs {geometry.num_bytes}")
        self.kind = kind
        self.geometry = geometry
        strides = geometry.strides
        row_bytes = geometry.head_dim * geometry.dtype_bytes
        assert strides.head_dim == geometry.dtype_bytes, "the elements of a head lie together in every order"
        self._cells = np.lib.stride_tricks.as_strided(
            kv[: geometry.num_bytes],
            (geometry.num_blocks, geometry.num_kv_heads, geometry.num_layers, 2, geometry.block_size, row_bytes),
            (*strides[:-1], 1),
            writeable=False,
        )
        """[block, kv_head, layer, k/v, slot, bytes]"""
        self._sums = sums
        self._words: NDArray[np.uint64] | None = None
        """[block, kv_head, word], where a head's bytes of a block are whole words that lie together."""
        is_ours = geometry.order is KVOrder.BLOCK_HEAD_LAYER and geometry.head_bytes % WORD_BYTES == 0
        if kind is DigestKind.WSUM64 and sums is not None and is_ours:
            shape = (geometry.num_blocks, geometry.num_kv_heads, geometry.head_bytes // WORD_BYTES)
            self._words = kv[: geometry.num_bytes].view("<u8").reshape(shape)

    @classmethod
    def at_address(
        cls, kind: DigestKind, geometry: KVGeometry, address: int, *, sums: WeightedSums | None = None
    ) -> "Digester":
        """For KV memory that somebody else owns (a tensor) and keeps mapped."""
        return cls(kind, geometry, view_memory(address, geometry.num_bytes), sums=sums)

    def digest(self, blocks: Sequence[int]) -> bytes:
        """Digests of ``blocks`` in their order: ``len(blocks) * num_kv_heads`` little-endian uint64; empty with
        ``off``."""
        if self._words is not None and self._sums is not None:
            ids = np.asarray(blocks, dtype=np.int64)
            if ((ids < 0) | (ids >= self.geometry.num_blocks)).any():
                raise IndexError(f"blocks {list(blocks)} are not all among the {self.geometry.num_blocks} here")
            out = np.empty((len(ids), self.geometry.num_kv_heads), dtype="<u8")
            self._sums(self._words, ids, out)
            return out.tobytes()
        return self._digest(len(blocks), self.geometry.num_kv_heads, (self._cells[block] for block in blocks))

    def digest_as(
        self, source: KVGeometry, local: Blocks, units: range, *, num_kv_heads: int, source_heads: range
    ) -> bytes:
        """What ``source`` digests of its blocks ``units`` (numbered within the sequence), made of ``local`` blocks:
        of ``source_heads``, the heads of the model that were read from it.

        ``num_kv_heads``: all of the model. Raises LayoutMismatch when a unit of the source is not here as a whole.
        """
        mine, theirs = held_box(self.geometry, num_kv_heads), held_box(source, num_kv_heads)
        layers = slice(theirs.layers.start - mine.layers.start, theirs.layers.stop - mine.layers.start)
        if layers.start < 0 or theirs.layers.stop > mine.layers.stop:
            raise LayoutMismatch(
                f"a digest covers layers {theirs.layers.start}..{theirs.layers.stop - 1}, here are only "
                f"{mine.layers.start}..{mine.layers.stop - 1}: set transfer.digest to off or make the stages equal"
            )
        size = source.block_size
        if units and not local.first_token <= units.start * size <= units.stop * size <= local.end_token:
            raise LayoutMismatch(
                f"tokens {units.start * size}..{units.stop * size - 1} are digested, here are "
                f"{local.first_token}..{local.end_token - 1}: whole blocks of both sides must be transferred"
            )
        heads = slice(source_heads.start - mine.heads.start, source_heads.stop - mine.heads.start)
        cells = self._cells[:, heads, layers]
        return self._digest(len(units), len(source_heads), (self._unit(cells, local, unit, size) for unit in units))

    def _unit(self, cells: NDArray[np.uint8], local: Blocks, unit: int, size: int) -> NDArray[np.uint8]:
        """[kv_head, layer, k/v, slot, bytes] of the ``size`` tokens of a source's block."""
        own_size = self.geometry.block_size
        first, slot = divmod(unit * size - local.first_token, own_size)
        if size <= own_size:
            return cells[local.block_ids[first], :, :, :, slot : slot + size]
        parts = [cells[block] for block in local.block_ids[first : first + size // own_size]]
        return np.concatenate(parts, axis=3)

    def _digest(self, num_blocks: int, num_heads: int, units: Iterable[NDArray[np.uint8]]) -> bytes:
        if self.kind is DigestKind.OFF:
            return b""
        out = np.empty((num_blocks, num_heads), dtype="<u8")
        for row, unit in enumerate(units):
            heads = np.ascontiguousarray(unit).reshape(num_heads, -1)  # no copy in our own memory order
            out[row] = wsum64(heads) if self.kind is DigestKind.WSUM64 else [zlib.crc32(head.data) for head in heads]
        return out.tobytes()


@lru_cache(maxsize=8)
def _weights(num_bytes: int) -> NDArray[np.uint64]:
    num_words = -(-num_bytes // WORD_BYTES)
    weights = np.arange(num_words, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    weights.setflags(write=False)
    return weights


class DigestMemory:
    """Digests of complete blocks, made once for as long as a block keeps its content. Safe from any thread.

    ``generations(blocks)`` says how often each block was given out for new content: a complete block does not change
    within one of them, so equal numbers before and after mean that a digest is that of the block.
    """

    def __init__(self, digester: Digester, generations: Callable[[Sequence[int]], Sequence[int]]) -> None:
        self._digester = digester
        self._generations = generations
        self._lock = threading.Lock()
        geometry = digester.geometry
        self._made = np.zeros((geometry.num_blocks, geometry.num_kv_heads), dtype="<u8")
        self._made_in = np.full(geometry.num_blocks, -1, dtype=np.int64)
        self.num_made = 0
        """Blocks that were digested, since start."""

    @property
    def kind(self) -> DigestKind:
        return self._digester.kind

    def digest(self, blocks: Sequence[int], *, num_complete: int) -> bytes:
        """As :meth:`Digester.digest`. The first ``num_complete`` of ``blocks`` are complete: they are remembered, the
        others are digested each time. The caller holds the blocks."""
        if self.kind is DigestKind.OFF or not blocks:
            return b""
        ids = np.asarray(blocks, dtype=np.int64)
        generations = np.asarray(self._generations(blocks), dtype=np.int64)
        with self._lock:
            is_known = self._made_in[ids] == generations
            out = self._made[ids]
        is_known[num_complete:] = False
        fresh = np.flatnonzero(~is_known)
        made = self._digester.digest(ids[fresh].tolist())
        out[fresh] = np.frombuffer(made, dtype="<u8").reshape(-1, out.shape[1])
        kept = fresh[fresh < num_complete]
        now = np.asarray(self._generations(ids[kept].tolist()), dtype=np.int64)
        kept = kept[now == generations[kept]]
        with self._lock:
            self._made[ids[kept]] = out[kept]
            self._made_in[ids[kept]] = generations[kept]
            self.num_made += len(fresh)
        return out.tobytes()


def wsum64(ranges: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Weighted wrap-around sum of each row of ``ranges`` [rows, bytes]. About memory speed: one pass, no temporary."""
    rows, num_bytes = ranges.shape
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


def of_heads(digests: bytes, num_kv_heads: int, heads: range) -> bytes:
    """Of a list with ``num_kv_heads`` digests for each block, those of ``heads`` (by their place in the list)."""
    if heads == range(num_kv_heads):
        return digests
    return np.frombuffer(digests, dtype="<u8").reshape(-1, num_kv_heads)[:, heads.start : heads.stop].tobytes()


def verify(expected: bytes, actual: bytes, *, num_kv_heads: int) -> None:
    """Raises DigestMismatch naming the first differing (block, kv head), blocks counted from the start of the list."""
    if expected == actual:
        return
    if len(expected) != len(actual):
        raise DigestMismatch(f"{len(expected) // DIGEST_BYTES} digests expected, {len(actual) // DIGEST_BYTES} made")
    differing = np.flatnonzero(np.frombuffer(expected, dtype="<u8") != np.frombuffer(actual, dtype="<u8"))
    block, head = divmod(int(differing[0]), num_kv_heads)
    raise DigestMismatch(f"{len(differing)} digests differ, first at block {block} of the hand-off, kv head {head}")
