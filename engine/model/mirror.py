"""The KV of sequences that decode, once more: contiguous, in float32, as products want it.

A single query reads its whole context in every layer. Out of the blocks that is a copy of the whole context in every
step; the mirror copies a sequence's context once, when it first decodes, and then takes each new token beside the
cache. A *seat* is the room of one sequence; seats of one capacity lie together in an *arena*
``[layer, k/v, seat, kv_head, position, head_dim]``, so neighbours form one batched product without a copy.

The cache stays the truth: a seat is kept only while its sequence decodes in every step, one token after the other,
and is filled anew otherwise. Its values are those of the cache exactly (bfloat16 widened). Memory is touched when
used, given back when an arena is empty, and bounded by ``max_bytes``; sequences without a seat read their blocks.
"""

import heapq
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kv_cache import KVCache

SMALLEST_CAPACITY = 256
FILL_BLOCKS = 32
"""Blocks that one step of a fill copies: it bounds the temporary memory."""


class Arena:
    """Seats of one capacity (in tokens)."""

    def __init__(self, cache: KVCache, capacity: int, num_seats: int) -> None:
        geometry = cache.geometry
        shape = (geometry.num_layers, 2, num_seats, geometry.num_kv_heads, capacity, geometry.head_dim)
        memory = mmap.mmap(-1, 4 * torch.Size(shape).numel(), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self.capacity = capacity
        self.num_seats = num_seats
        self.kv: Tensor = torch.frombuffer(memory, dtype=torch.float32).view(shape)
        self.rows: Tensor = self.kv.view(geometry.num_layers, -1, geometry.head_dim)
        """One row of a layer for each (k/v, seat, kv_head, position)."""
        self._free = list(range(num_seats))
        self._dirty = [0] * num_seats
        """Positions of a seat that have been written; those behind them are zero."""

    @property
    def is_empty(self) -> bool:
        return len(self._free) == self.num_seats

    def take(self) -> int | None:
        """The lowest free seat: neighbours are what makes one product of many."""
        return heapq.heappop(self._free) if self._free else None

    def leave(self, seat: int, num_tokens: int) -> None:
        self._dirty[seat] = max(self._dirty[seat], num_tokens)
        heapq.heappush(self._free, seat)

    def fill(self, seat: int, cache: KVCache, block_table: Sequence[int], num_tokens: int) -> None:
        """The first ``num_tokens`` positions become those of the blocks, the rest zero: stale values get weight zero,
        but zero times NaN is NaN."""
        block_size = cache.geometry.block_size
        target = self.kv[:, :, seat]
        for first in range(0, cache.geometry.blocks_for(num_tokens), FILL_BLOCKS):
            start = first * block_size
            end = min(num_tokens, start + FILL_BLOCKS * block_size)
            blocks = torch.tensor(block_table[first : first + cache.geometry.blocks_for(end - start)])
            copied = cache.tensor[blocks].permute(2, 3, 1, 0, 4, 5).flatten(3, 4)
            target[:, :, :, start:end] = copied[:, :, :, : end - start]
        if self._dirty[seat] > num_tokens:
            target[:, :, :, num_tokens : self._dirty[seat]] = 0
        self._dirty[seat] = 0


@dataclass(slots=True, kw_only=True)
class Seat:
    owner: object
    arena: Arena
    index: int
    num_tokens: int
    """Of its sequence that it holds when the step is done."""


class KVMirror:
    """Belongs to the step thread, like the sequences."""

    def __init__(self, cache: KVCache, *, max_bytes: int, max_seats: int) -> None:
        self._cache = cache
        self._max_bytes = max_bytes
        self._max_seats = max_seats
        self._arenas: dict[int, Arena] = {}
        self._seats: dict[int, Seat] = {}
        """By ``id`` of the owner, which the seat keeps alive."""
        geometry = cache.geometry
        self._token_bytes = geometry.num_layers * 2 * geometry.num_kv_heads * geometry.head_dim * 4
        self._used_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Of the seats that are taken."""
        return self._used_bytes

    def seat_all(self, singles: Sequence[tuple[object, Sequence[int], int]]) -> list[Seat | None]:
        """Seats of those that compute one token in this step: ``(owner, block table, position of the token)``.

        All earlier positions are in the seat when this returns. Seats of everybody else are taken back.
        """
        staying = {id(owner) for owner, _, _ in singles}
        for gone in [key for key in self._seats if key not in staying]:
            self._take_back(self._seats.pop(gone))
        for capacity in [capacity for capacity, arena in self._arenas.items() if arena.is_empty]:
            del self._arenas[capacity]
        return [self._seat(owner, block_table, position) for owner, block_table, position in singles]

    def _seat(self, owner: object, block_table: Sequence[int], position: int) -> Seat | None:
        seat = self._seats.get(id(owner))
        if seat is None or seat.arena.capacity <= position or seat.num_tokens != position:
            if seat is not None:
                self._take_back(self._seats.pop(id(owner)))
            seat = self._new_seat(owner, position)
            if seat is None:
                return None
            self._seats[id(owner)] = seat
            seat.arena.fill(seat.index, self._cache, block_table, position)
        seat.num_tokens = position + 1
        return seat

    def _new_seat(self, owner: object, position: int) -> Seat | None:
        capacity = max(SMALLEST_CAPACITY, 1 << position.bit_length())
        num_bytes = capacity * self._token_bytes
        if self._used_bytes + num_bytes > self._max_bytes:
            return None
        arena = self._arenas.get(capacity)
        if arena is None:
            num_seats = min(self._max_seats, self._max_bytes // num_bytes)
            arena = self._arenas[capacity] = Arena(self._cache, capacity, num_seats)
        index = arena.take()
        if index is None:
            return None
        self._used_bytes += num_bytes
        return Seat(owner=owner, arena=arena, index=index, num_tokens=0)

    def _take_back(self, seat: Seat) -> None:
        self._used_bytes -= seat.arena.capacity * self._token_bytes
        seat.arena.leave(seat.index, seat.num_tokens)
