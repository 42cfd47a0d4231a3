"""What both shapes of attention share: which keys a query sees, where they lie, how they are weighed.

Legend: as in :mod:`engine.model.attention`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kv_cache import KVCache

KEY_TILE = 128
"""Keys of one sum of ``P V``: above that the matrix kernel cuts a sum in parts by its length."""
KEY_MULTIPLE = 32
NEVER = float("-inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """``num_tokens`` consecutive tokens of one sequence from position ``start``; their rows follow each other in the
    step.
    """

    block_table: Sequence[int]
    start: int
    num_tokens: int
    owner: object | None = None
    """Stands for the sequence: the same object in every step, and no other sequence's while it lives."""

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


def first_key(cache: KVCache, position: int, window: int | None) -> int:
    """Where the keys that ``position`` sees begin, rounded down to where both a tile and a block begin."""
    if window is None:
        return 0
    multiple = math.lcm(KEY_TILE, cache.geometry.block_size)
    return max(0, position - window + 1) // multiple * multiple


def is_unseen(keys: Tensor, positions: Tensor, window: int | None) -> Tensor:
    if window is None:
        return keys > positions
    return (keys > positions) | (keys <= positions - window)


def weigh(scores_BRN: Tensor, values_BND: Tensor) -> Tensor:
    """``softmax(scores) V``, tile after tile. N begins at a tile and is a multiple of :data:`KEY_MULTIPLE`."""
    weights = torch.softmax(scores_BRN, -1)
    num_keys = weights.shape[-1]
    if num_keys <= KEY_TILE:
        return torch.bmm(weights, values_BND)
    out = torch.bmm(weights[:, :, :KEY_TILE], values_BND[:, :KEY_TILE])
    for first in range(KEY_TILE, num_keys, KEY_TILE):
        tile = slice(first, first + KEY_TILE)
        out.baddbmm_(weights[:, :, tile], values_BND[:, tile])
    return out


def gather(cache: KVCache, tiles: Tensor, layer: int, num_batch: int, num_keys: int) -> tuple[Tensor, Tensor]:
    """Keys and values ``[batch, N, D]`` of one layer in float32, copied out of the blocks."""
    copied = cache.tiles[2 * layer :].index_select(0, tiles.view(-1))
    both = copied.to(torch.float32).view(2, num_batch, -1, cache.geometry.head_dim)
    return both[0, :, :num_keys], both[1, :, :num_keys]


def tile_rows(cache: KVCache, spans: Sequence[Span], first_keys: Sequence[int], num_keys: int) -> Tensor:
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
