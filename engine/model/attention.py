"""Attention over paged KV on CPU, in a fixed order: a row's bits depend on its own context and nothing else.

For a query at position p the context is cut into tiles of :data:`KEY_TILE` keys at absolute positions; keys behind p
count as minus infinity, the last tile is always whole. Scores of all tiles, then one softmax over the row, then ``P
V`` tile by tile, added up from the first tile to the last. So neither the chunk a token was computed in, nor the
batch, the block size or the padding can change the order of a sum; what remains is that the matrix kernel gives a row
the same bits for any multiple of :data:`~engine.model.linear.ROW_MULTIPLE` rows
(tests/unit/engine/test_invariance.py). A layer with a sliding window leaves out the tiles that no row of the product
sees; a tile that another row brought in counts nothing, exactly.

Two shapes of work, one arithmetic: sequences with a single query are batched by length (:class:`_Singles`), chunks go
by tiles of queries (:class:`_Span`). Index tensors and masks are built once per step and serve all layers.

Legend: T rows of the step, S sequences of a group, H query heads, K kv heads, G = H / K, R rows of a product, N keys
(padded), D head_dim, M tiles (rows of the KV cache's ``tiles``).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kv_cache import KVCache
from engine.model.linear import ROW_MULTIPLE, round_up

KEY_TILE = 128
QUERY_ROWS = 48
"""Rows of one product of a chunk: its scores and its keys stay in the second-level cache."""
GROUP_BYTES = 4 << 20
"""KV that one group of single queries gathers: more falls out of the cache between the gather and its use."""
NEVER = float("-inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """``num_tokens`` consecutive tokens of one sequence from position ``start``; their rows follow each other in the
    step.
    """

    block_table: Sequence[int]
    start: int
    num_tokens: int

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


class AttentionPlan:
    """Where the rows of one step find their keys. ``spans`` are in row order."""

    def __init__(self, cache: KVCache, spans: Sequence[Span], num_heads: int) -> None:
        self._cache = cache
        self._group = num_heads // cache.geometry.num_kv_heads
        self._members: list[tuple[int, Span]] = []
        row = 0
        for span in spans:
            self._members.append((row, span))
            row += span.num_tokens
        self.num_rows = row
        self._slots_T2K = torch.cat([_slot_rows(cache, span) for span in spans])
        self._work: dict[int | None, _Work] = {}

    def write(self, layer: int, kv_T2KD: Tensor) -> None:
        """Store K and V of this step's tokens (rows behind ``num_rows`` are padding) in their slots."""
        geometry = self._cache.geometry
        rows = self._slots_T2K + layer * 2 * geometry.block_size
        values = kv_T2KD[: self.num_rows].reshape(-1, geometry.head_dim)
        self._cache.slots.index_copy_(0, rows.view(-1), values.to(self._cache.slots.dtype))

    def attend(self, layer: int, q_THD: Tensor, out_THD: Tensor, window: int | None = None) -> None:
        """``out = softmax(q K^T / sqrt(D)) V`` over each row's context. Call :meth:`write` of the layer first.

        With a ``window``, over the row's own key and the ``window - 1`` before it.
        """
        work = self._work.get(window)
        if work is None:
            work = self._work[window] = _Work.of(self._cache, self._members, self._group, window)
        q_TKGD = q_THD.view(q_THD.shape[0], -1, self._group, q_THD.shape[-1])
        out_TKGD = out_THD.view(q_TKGD.shape)
        for singles in work.singles:
            singles.attend(layer, q_TKGD, out_TKGD)
        for span in work.spans:
            span.attend(layer, q_TKGD, out_TKGD)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """Index tensors and masks of one step for all layers of one window."""

    singles: "list[_Singles]"
    spans: "list[_Span]"

    @classmethod
    def of(cls, cache: KVCache, members: Sequence[tuple[int, Span]], group: int, window: int | None) -> "_Work":
        geometry = cache.geometry
        per_token_bytes = 2 * geometry.num_kv_heads * geometry.head_dim * geometry.dtype_bytes
        spans = [_Span(cache, span, row, group, window) for row, span in members if span.num_tokens > 1]
        buckets: dict[int, list[tuple[int, Span]]] = {}
        for row, span in members:
            if span.num_tokens == 1:
                seen = span.end - _first_key(cache, span.start, window)
                buckets.setdefault(_bucket(seen), []).append((row, span))
        singles: list[_Singles] = []
        for bucket in buckets.values():
            longest = max(span.end - _first_key(cache, span.start, window) for _, span in bucket)
            most = max(1, GROUP_BYTES // (round_up(longest, KEY_TILE) * per_token_bytes))
            singles += [
                _Singles(cache, bucket[first : first + most], group, window) for first in range(0, len(bucket), most)
            ]
        return cls(singles=singles, spans=spans)


class _Singles:
    """One query each of several sequences of similar length."""

    def __init__(self, cache: KVCache, members: Sequence[tuple[int, Span]], group: int, window: int | None) -> None:
        self._cache = cache
        self._group = group
        self._rows_S = torch.tensor([row for row, _ in members])
        spans = [span for _, span in members]
        first_keys = [_first_key(cache, span.start, window) for span in spans]
        self._num_keys = round_up(
            max(span.end - first for span, first in zip(spans, first_keys, strict=True)), KEY_TILE
        )
        self._tiles_2SKM = _tile_rows(cache, spans, first_keys, self._num_keys)
        keys_SN = torch.tensor(first_keys)[:, None] + torch.arange(self._num_keys)
        self._is_unseen_S1N = _is_unseen(keys_SN, torch.tensor([span.start for span in spans])[:, None], window)[
            :, None
        ]

    def attend(self, layer: int, q_TKGD: Tensor, out_TKGD: Tensor) -> None:
        num_sequences, num_kv_heads = self._tiles_2SKM.shape[1:3]
        head_dim = q_TKGD.shape[-1]
        num_batch, num_rows = num_sequences * num_kv_heads, round_up(self._group, ROW_MULTIPLE)
        keys, values = _gather(self._cache, self._tiles_2SKM, layer, num_batch, self._num_keys)
        q = q_TKGD.new_zeros(num_sequences, num_kv_heads, num_rows, head_dim)
        torch.mul(q_TKGD.index_select(0, self._rows_S), head_dim**-0.5, out=q[:, :, : self._group])
        scores = torch.bmm(q.view(num_batch, num_rows, head_dim), keys.transpose(1, 2))
        scores.view(num_sequences, -1, self._num_keys).masked_fill_(self._is_unseen_S1N, NEVER)
        out = _weigh(scores, values).view(num_sequences, num_kv_heads, num_rows, head_dim)
        out_TKGD.index_copy_(0, self._rows_S, out[:, :, : self._group])


class _Span:
    """A chunk of one sequence, by tiles of queries."""

    def __init__(self, cache: KVCache, span: Span, first_row: int, group: int, window: int | None) -> None:
        self._cache = cache
        self._span = span
        self._first_row = first_row
        self._group = group
        first_key = _first_key(cache, span.start, window)
        self._num_keys = round_up(span.end - first_key, KEY_TILE)
        self._tiles_21KM = _tile_rows(cache, [span], [first_key], self._num_keys)
        step = max(ROW_MULTIPLE, QUERY_ROWS // group // ROW_MULTIPLE * ROW_MULTIPLE)
        self._query_tiles = [
            _QueryTile.of(span.start + first, min(step, span.num_tokens - first), group, window, first_key)
            for first in range(0, span.num_tokens, step)
        ]

    def attend(self, layer: int, q_TKGD: Tensor, out_TKGD: Tensor) -> None:
        num_kv_heads, head_dim = q_TKGD.shape[1], q_TKGD.shape[3]
        num_tokens, first = self._span.num_tokens, self._first_row
        keys, values = _gather(self._cache, self._tiles_21KM, layer, num_kv_heads, self._num_keys)
        q = q_TKGD.new_zeros(num_kv_heads, round_up(num_tokens, ROW_MULTIPLE), self._group, head_dim)
        torch.mul(q_TKGD[first : first + num_tokens].transpose(0, 1), head_dim**-0.5, out=q[:, :num_tokens])
        row = 0
        for tile in self._query_tiles:
            q_tile = q[:, row : row + tile.num_padded].reshape(num_kv_heads, -1, head_dim)
            scores = torch.bmm(q_tile, keys[:, tile.keys].transpose(1, 2))
            scores[:, :, tile.first_masked :].masked_fill_(tile.is_unseen_RN, NEVER)
            out = _weigh(scores, values[:, tile.keys]).view(num_kv_heads, tile.num_padded, self._group, head_dim)
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
        end = round_up(position + num_tokens, KEY_TILE)
        first_masked = position // KEY_TILE * KEY_TILE if window is None else first
        positions_R1 = torch.arange(position, position + num_padded).repeat_interleave(group)[:, None]
        return cls(
            num_tokens=num_tokens,
            num_padded=num_padded,
            keys=slice(first - base, end - base),
            first_masked=first_masked - first,
            is_unseen_RN=_is_unseen(torch.arange(first_masked, end), positions_R1, window),
        )


def _first_key(cache: KVCache, position: int, window: int | None) -> int:
    """Where the keys that ``position`` sees begin, rounded down to where both a tile and a block begin."""
    if window is None:
        return 0
    multiple = math.lcm(KEY_TILE, cache.geometry.block_size)
    return max(0, position - window + 1) // multiple * multiple


def _is_unseen(keys: Tensor, positions: Tensor, window: int | None) -> Tensor:
    if window is None:
        return keys > positions
    return (keys > positions) | (keys <= positions - window)


def _weigh(scores_BRN: Tensor, values_BND: Tensor) -> Tensor:
    """``softmax(scores) V``, tile after tile."""
    weights = torch.softmax(scores_BRN, -1)
    out = torch.bmm(weights[:, :, :KEY_TILE], values_BND[:, :KEY_TILE])
    for first in range(KEY_TILE, weights.shape[-1], KEY_TILE):
        tile = slice(first, first + KEY_TILE)
        out.baddbmm_(weights[:, :, tile], values_BND[:, tile])
    return out


def _gather(cache: KVCache, tiles: Tensor, layer: int, num_batch: int, num_keys: int) -> tuple[Tensor, Tensor]:
    """Keys and values ``[batch, N, D]`` of one layer in float32, copied out of the blocks."""
    geometry = cache.geometry
    rows = tiles.view(-1) + 2 * layer
    both = cache.tiles.index_select(0, rows).to(torch.float32).view(2, num_batch, -1, geometry.head_dim)
    return both[0, :, :num_keys], both[1, :, :num_keys]


def _tile_rows(cache: KVCache, spans: Sequence[Span], first_keys: Sequence[int], num_keys: int) -> Tensor:
    """Rows of layer 0 in ``cache.tiles``, ``[k/v, S, K, M]``, enough for ``num_keys`` from each span's first key.

    Blocks behind a span's end may be in its table already, but hold another sequence's leavings: the pad block stands
    in.
    """
    geometry = cache.geometry
    num_blocks = geometry.blocks_for(num_keys)
    tables = [
        span.block_table[first // geometry.block_size : geometry.blocks_for(span.end)]
        for span, first in zip(spans, first_keys, strict=True)
    ]
    padded = [[*table, *[cache.pad_block] * (num_blocks - len(table))] for table in tables]
    blocks_SM = torch.tensor(padded)
    heads_K = torch.arange(geometry.num_kv_heads)
    rows_SKM = (blocks_SM[:, None, :] * geometry.num_kv_heads + heads_K[:, None]) * (2 * geometry.num_layers)
    return torch.stack([rows_SKM, rows_SKM + 1])


def _slot_rows(cache: KVCache, span: Span) -> Tensor:
    """Rows of layer 0 in ``cache.slots`` for each token, ``[T, k/v, K]``."""
    geometry = cache.geometry
    positions_T = torch.arange(span.start, span.end)
    first_block = span.start // geometry.block_size
    blocks = torch.tensor(span.block_table[first_block : geometry.blocks_for(span.end)])
    blocks_T = blocks[positions_T // geometry.block_size - first_block]
    heads_K = torch.arange(geometry.num_kv_heads)
    tiles_TK = (blocks_T[:, None] * geometry.num_kv_heads + heads_K) * (2 * geometry.num_layers)
    tiles_T2K = torch.stack([tiles_TK, tiles_TK + 1], 1)
    return tiles_T2K * geometry.block_size + (positions_T % geometry.block_size)[:, None, None]


def _bucket(num_tokens: int) -> int:
    """Sequences of one bucket are padded to the longest of them: at most twice the keys of any."""
    return (-(-num_tokens // KEY_TILE) - 1).bit_length()
