"""Attention over paged KV on CPU, in a fixed order: a row's bits depend on its own context and nothing else.

For a query at position p the context is cut into tiles of :data:`KEY_TILE` keys at absolute positions; keys behind p
count as minus infinity. Scores of all tiles, then one softmax over the row, then ``P V`` tile by tile, added up from
the first tile to the last. So neither the chunk a token was computed in, nor the batch, the block size or the padding
can change the order of a sum; what remains is that the matrix kernel gives a row the same bits for any multiple of
:data:`~engine.model.linear.ROW_MULTIPLE` rows, and that a tile may end at any multiple of :data:`KEY_MULTIPLE` behind
the last key that counts (tests/unit/engine/test_invariance.py). A layer with a sliding window leaves out the tiles
that no row of the product sees; a tile that another row brought in counts nothing, exactly.

Two shapes of work, one arithmetic: sequences with a single query are batched (:mod:`engine.model.single_queries`),
chunks go by tiles of queries (:class:`_Span`). KV may be kept in bfloat16; all arithmetic is in float32. Index tensors
and masks are built once per step and serve all layers.

Legend: T rows of the step, H query heads, K kv heads, G = H / K, R rows of a product, N keys (padded), D head_dim, M
tiles (rows of the KV cache's ``tiles``).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kv_cache import KVCache
from engine.model.keys import (
    KEY_MULTIPLE,
    KEY_TILE,
    NEVER,
    Span,
    first_key,
    gather,
    is_unseen,
    tile_rows,
    weigh,
)
from engine.model.linear import ROW_MULTIPLE, round_up
from engine.model.mirror import KVMirror, Seat
from engine.model.single_queries import SingleQueries, group_singles

QUERY_ROWS = 96
"""Rows of one product of a chunk: its scores and its keys stay in the second-level cache."""


class AttentionPlan:
    """Where the rows of one step find their keys. ``spans`` are in row order.

    With a ``mirror``, single queries of sequences that have an owner read their keys there.
    """

    def __init__(self, cache: KVCache, spans: Sequence[Span], num_heads: int, mirror: KVMirror | None = None) -> None:
        self._cache = cache
        self._group = num_heads // cache.geometry.num_kv_heads
        self._members: list[tuple[int, Span]] = []
        row = 0
        for span in spans:
            self._members.append((row, span))
            row += span.num_tokens
        self.num_rows = row
        self._slots = _slot_rows(cache, spans)
        self._seats = {} if mirror is None else _seats(mirror, self._members)
        self._appends = _appends(cache, self._seats, self.num_rows)
        self._work: dict[int | None, tuple[list[SingleQueries], list[_Span]]] = {}

    def write(self, layer: int, kv_T2KD: Tensor) -> None:
        """Store K and V of this step's tokens (rows behind ``num_rows`` are padding) in their slots."""
        geometry = self._cache.geometry
        slots = self._cache.slots
        values = kv_T2KD[: self.num_rows].reshape(-1, geometry.head_dim)
        slots[2 * layer * geometry.block_size :].index_copy_(0, self._slots, values.to(slots.dtype))
        if slots.dtype != torch.float32 and self._appends:
            values = values.to(slots.dtype).to(torch.float32)  # the mirror holds what the cache holds
        for append in self._appends:
            mine = values if append.rows is None else values.index_select(0, append.rows)
            append.target[layer].index_copy_(0, append.places, mine)

    def attend(self, layer: int, q_THD: Tensor, out_THD: Tensor, window: int | None = None) -> None:
        """``out = softmax(q K^T / sqrt(D)) V`` over each row's context. Call :meth:`write` of the layer first.

        With a ``window``, over the row's own key and the ``window - 1`` before it.
        """
        if window not in self._work:
            self._work[window] = self._plan(window)
        singles, spans = self._work[window]
        q_TKGD = q_THD.view(q_THD.shape[0], -1, self._group, q_THD.shape[-1])
        out_TKGD = out_THD.view(q_TKGD.shape)
        for single in singles:
            single.attend(layer, q_TKGD, out_TKGD)
        for span in spans:
            span.attend(layer, q_TKGD, out_TKGD)

    def _plan(self, window: int | None) -> "tuple[list[SingleQueries], list[_Span]]":
        singles = [(row, span) for row, span in self._members if span.num_tokens == 1]
        groups = group_singles(self._cache, singles, self._seats, self._group, window)
        spans = [
            _Span(self._cache, span, row, self._group, window) for row, span in self._members if span.num_tokens > 1
        ]
        return groups, spans


@dataclass(frozen=True, slots=True, kw_only=True)
class _Append:
    """New tokens of one arena of the mirror."""

    target: Tensor
    """``[layer, row, D]``"""
    places: Tensor
    rows: Tensor | None
    """Of the step's KV, ``[T x 2 x K]``; None: all of them, in order."""


def _seats(mirror: KVMirror, members: Sequence[tuple[int, Span]]) -> dict[int, Seat]:
    """By row of the step."""
    owned = [(row, span) for row, span in members if span.num_tokens == 1 and span.owner is not None]
    seats = mirror.seat_all([(span.owner, span.block_table, span.start) for _, span in owned])
    return {row: seat for (row, _), seat in zip(owned, seats, strict=True) if seat is not None}


def _appends(cache: KVCache, seats: dict[int, Seat], num_rows: int) -> list[_Append]:
    by_arena: dict[int, list[tuple[int, Seat]]] = {}
    for row, seat in seats.items():
        by_arena.setdefault(seat.arena.capacity, []).append((row, seat))
    num_kv_heads = cache.geometry.num_kv_heads
    per_row = torch.arange(2 * num_kv_heads)
    appends = []
    for members in by_arena.values():
        arena = members[0][1].arena
        bases = torch.tensor([seat.index * num_kv_heads * arena.capacity + seat.num_tokens - 1 for _, seat in members])
        is_value, head = per_row // num_kv_heads, per_row % num_kv_heads
        offsets = (is_value * arena.num_seats * num_kv_heads + head) * arena.capacity
        rows = [row for row, _ in members]
        is_whole_step = rows == list(range(num_rows))
        rows_S1 = torch.tensor(rows)[:, None]
        appends.append(
            _Append(
                target=arena.rows,
                places=(bases[:, None] + offsets).view(-1),
                rows=None if is_whole_step else (rows_S1 * len(per_row) + per_row).view(-1),
            )
        )
    return appends


class _Span:
    """A chunk of one sequence, by tiles of queries."""

    def __init__(self, cache: KVCache, span: Span, first_row: int, group: int, window: int | None) -> None:
        self._cache = cache
        self._span = span
        self._first_row = first_row
        self._group = group
        base = first_key(cache, span.start, window)
        self._num_keys = round_up(span.end - base, KEY_MULTIPLE)
        self._tiles_21KM = tile_rows(cache, [span], [base], self._num_keys)
        step = max(ROW_MULTIPLE, QUERY_ROWS // group // ROW_MULTIPLE * ROW_MULTIPLE)
        self._query_tiles = [
            _QueryTile.of(span.start + first, min(step, span.num_tokens - first), group, window, base)
            for first in range(0, span.num_tokens, step)
        ]

    def attend(self, layer: int, q_TKGD: Tensor, out_TKGD: Tensor) -> None:
        num_kv_heads, head_dim = q_TKGD.shape[1], q_TKGD.shape[3]
        num_tokens, first = self._span.num_tokens, self._first_row
        keys, values = gather(self._cache, self._tiles_21KM, layer, num_kv_heads, self._num_keys)
        q = q_TKGD.new_zeros(num_kv_heads, round_up(num_tokens, ROW_MULTIPLE), self._group, head_dim)
        torch.mul(q_TKGD[first : first + num_tokens].transpose(0, 1), head_dim**-0.5, out=q[:, :num_tokens])
        row = 0
        for tile in self._query_tiles:
            q_tile = q[:, row : row + tile.num_padded].reshape(num_kv_heads, -1, head_dim)
            scores = torch.bmm(q_tile, keys[:, tile.keys].transpose(1, 2))
            scores[:, :, tile.first_masked :].masked_fill_(tile.is_unseen_RN, NEVER)
            out = weigh(scores, values[:, tile.keys]).view(num_kv_heads, tile.num_padded, self._group, head_dim)
            at = first + row
            out_TKGD[at : at + tile.num_tokens] = out[:, : tile.num_tokens].transpose(0, 1)
            row += tile.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class _QueryTile:
    num_tokens: int
    num_padded: int
    keys: slice
    """Of the span's gathered keys."""
    first_masked: int
    """Of those keys, the ones before this are seen by every row of the tile."""
    is_unseen_RN: Tensor

    @classmethod
    def of(cls, position: int, num_tokens: int, group: int, window: int | None, base: int) -> "_QueryTile":
        """``base`` is the position of the span's first gathered key."""
        num_padded = round_up(num_tokens, ROW_MULTIPLE)
        first = 0 if window is None else max(0, position - window + 1) // KEY_TILE * KEY_TILE
        end = base + round_up(position + num_tokens - base, KEY_MULTIPLE)
        first_masked = position // KEY_MULTIPLE * KEY_MULTIPLE if window is None else first
        positions_R1 = torch.arange(position, position + num_padded).repeat_interleave(group)[:, None]
        return cls(
            num_tokens=num_tokens,
            num_padded=num_padded,
            keys=slice(first - base, end - base),
            first_masked=first_masked - first,
            is_unseen_RN=is_unseen(torch.arange(first_masked, end), positions_R1, window),
        )


def _slot_rows(cache: KVCache, spans: Sequence[Span]) -> Tensor:
    """Rows of layer 0 in ``cache.slots`` for each token, ``[T x k/v x K]``."""
    geometry = cache.geometry
    size, block_rows = geometry.block_size, geometry.num_kv_heads * geometry.num_layers * 2 * geometry.block_size
    bases = [
        span.block_table[position // size] * block_rows + position % size
        for span in spans
        for position in range(span.start, span.end)
    ]
    heads_K = torch.arange(geometry.num_kv_heads) * (geometry.num_layers * 2 * size)
    offsets_2K = torch.stack([heads_K, heads_K + size])
    return (torch.tensor(bases)[:, None, None] + offsets_2K).view(-1)
