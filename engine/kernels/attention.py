"""Attention over paged KV on one CPU core, compiled: a row's bits depend on its own context and nothing else.

Keys are taken in tiles of 16 at absolute positions, wherever their blocks lie; a tile is widened to float32 once and
serves all query heads of its kv head and all rows of an item. A score is summed in 16 lanes that are then added by
halves, the weights of a row in lanes over its own keys, ``P V`` from the first key to the last. Neither the chunk a
token is computed in, nor its neighbours, nor the block size can change the order of a sum. Scores of a whole row are
kept until its softmax is known (two passes over the keys, no rescaling).

Work comes as *items*: up to :data:`ITEM_ROWS` consecutive rows of one sequence.

Legend: T rows of the step, H query heads, K kv heads, G = H / K, D head_dim, N keys.
"""

from functools import cache
from typing import Any

import numpy as np

from engine.kernels.simd import KEYS, bits_of, float_of, jit, make_products

ITEM_ROWS = 16
"""Rows that share one reading of their keys. Their scores should stay in the second-level cache."""


@jit
def exp(x: Any) -> Any:
    """``e^x`` in float32 for x <= 88, zero below -87, NaN for NaN; error below 2 units in the last place (the
    polynomial of Cephes' expf)."""
    bounded = x if x > np.float32(-88) else np.float32(-88)  # what has no integer is converted to none
    n = np.float32(np.floor(bounded * np.float32(1.44269504) + np.float32(0.5)))
    r = x - n * np.float32(0.693359375)
    r = r + n * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * (r * r) + r + np.float32(1)
    scaled = p * float_of((np.int32(n) + np.int32(127)) << np.int32(23))
    return np.float32(0) if x < np.float32(-87) else scaled


@jit
def half_of(x: Any) -> Any:
    """The bits of bfloat16 nearest to a float32, ties to even; NaN stays NaN."""
    bits = np.uint32(bits_of(x))
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.uint16(0x7FC0) if x != x else np.uint16(rounded)


@cache
def make_append(head_dim: int, *, is_half: bool) -> Any:
    """``append(qkv, cos, sin, positions, kv, layer, blocks, slots)``: rotate q and k in place, store k and v.

    - ``qkv``: ``[T, H + 2 K, D]`` float32, T no less than the rows of the step.
    - ``cos``, ``sin``: ``[position, D]``, by halves, the sign of the rotation in the first half of ``sin``
      (:mod:`engine.model.rope`).
    - ``positions``, ``blocks``, ``slots``: of each row of the step, int64.
    - ``kv``: as in :func:`make_attend`.
    """
    half = head_dim // 2

    @jit
    def append(qkv: Any, cos: Any, sin: Any, positions: Any, kv: Any, layer: Any, blocks: Any, slots: Any) -> None:
        num_kv_heads = kv.shape[1]
        first_key = qkv.shape[1] - 2 * num_kv_heads
        for row in range(len(positions)):
            position, block, slot = positions[row], blocks[row], slots[row]
            for head in range(first_key + num_kv_heads):
                for d in range(half):
                    low, high = qkv[row, head, d], qkv[row, head, d + half]
                    qkv[row, head, d] = low * cos[position, d] + high * sin[position, d]
                    qkv[row, head, d + half] = high * cos[position, d + half] + low * sin[position, d + half]
            for which in range(2):
                for head in range(num_kv_heads):
                    source = qkv[row, first_key + which * num_kv_heads + head]
                    target = kv[block, head, layer, which, slot]
                    for d in range(head_dim):
                        target[d] = half_of(source[d]) if is_half else source[d]

    return append


@cache
def make_attend(head_dim: int, group: int, *, is_half: bool) -> Any:
    """``attend(qkv, kv, layer, blocks, items, out, scores, tile, scale, window)``.

    - ``qkv``: ``[T, H + 2 K, D]`` float32, of which the queries are read.
    - ``out``: ``[T, H, D]`` float32; rows that no item names are left alone.
    - ``kv``: the cache ``[block, K, layer, k/v, slot, D]``; as uint16 when it is bfloat16 (``is_half``).
    - ``blocks``: block tables one after the other, int64.
    - ``items``: ``[item, (first row, rows, position of the first row, where its block table begins)]``, int64.
    - ``scores``: room for ``[ITEM_ROWS, G, N]`` float32, N a multiple of 16 and no less than the longest context.
    - ``tile``: room for ``[16, D]`` float32.
    - ``window``: how many keys a row sees at most, its own included; 0 for all.
    """
    products = make_products(head_dim, is_half=is_half)
    fetch, score, weigh = products.fetch, products.score, products.weigh

    @jit
    def fetch_tile(
        kv: Any, blocks: Any, table: Any, head: Any, layer: Any, which: Any, first: Any, end: Any, tile: Any
    ) -> None:
        """Keys (or values) ``first .. first + 15`` of one kv head; zero from ``end`` on."""
        block_size = kv.shape[4]
        block_stride, slot_stride = kv.strides[0], kv.strides[4]
        inside = head * kv.strides[1] + layer * kv.strides[2] + which * kv.strides[3]
        base = kv.ctypes.data + inside
        to = tile.ctypes.data
        index, slot = first // block_size, first % block_size
        source = base + blocks[table + index] * block_stride + slot * slot_stride
        ahead = source
        if first + KEYS < end:
            following = first + KEYS
            ahead = base + blocks[table + following // block_size] * block_stride + following % block_size * slot_stride
        for key in range(min(KEYS, end - first)):
            fetch(source, to, ahead)
            to += head_dim * 4
            ahead += slot_stride
            slot += 1
            source += slot_stride
            if slot == block_size and first + key + 1 < end:
                slot = 0
                index += 1
                source = base + blocks[table + index] * block_stride
        for key in range(max(end - first, 0), KEYS):
            tile[key, :] = 0

    @jit
    def last_row(first: Any, position: Any, num_rows: Any, window: Any) -> Any:
        """Of an item, the rows from this one on do not see the tile at ``first`` any more."""
        return num_rows if window == 0 else min(num_rows, first + KEYS - 1 + window - position)

    @jit
    def attend(
        qkv: Any,
        kv: Any,
        layer: Any,
        blocks: Any,
        items: Any,
        out: Any,
        scores: Any,
        tile: Any,
        scale: Any,
        window: Any,
    ) -> None:
        num_kv_heads = kv.shape[1]
        row_bytes, head_bytes = qkv.strides[0], qkv.strides[1]
        out_row_bytes, out_head_bytes = out.strides[0], out.strides[1]
        score_row_bytes, score_head_bytes = scores.strides[0], scores.strides[1]
        for item in range(items.shape[0]):
            first_row, num_rows, position, table = items[item]
            end = position + num_rows
            start = max(0, position - window + 1) // KEYS * KEYS if window > 0 else 0
            for head in range(num_kv_heads):
                for first in range(start, end, KEYS):
                    fetch_tile(kv, blocks, table, head, layer, 0, first, end, tile)
                    for row in range(max(0, first - position), last_row(first, position, num_rows, window)):
                        at = qkv.ctypes.data + (first_row + row) * row_bytes + head * group * head_bytes
                        to = scores.ctypes.data + row * score_row_bytes + (first - start) * 4
                        for _ in range(group):
                            score(at, tile.ctypes.data, to)
                            at += head_bytes
                            to += score_head_bytes
                for row in range(num_rows):
                    mine = position + row
                    lowest = max(0, mine - window + 1) if window > 0 else 0
                    begin = lowest // KEYS * KEYS
                    num_keys = (mine // KEYS + 1) * KEYS - begin
                    for member in range(group):
                        weights = scores[row, member, begin - start : begin - start + num_keys]
                        for key in range(lowest - begin):
                            weights[key] = -np.inf
                        for key in range(mine + 1 - begin, num_keys):
                            weights[key] = -np.inf
                        peak = np.float32(-np.inf)
                        for key in range(num_keys):
                            peak = weights[key] if weights[key] > peak else peak
                        total = np.float32(0)
                        for key in range(num_keys):
                            weight = exp((weights[key] - peak) * scale)
                            weights[key] = weight
                            total += weight
                        share = np.float32(1) / total
                        for key in range(num_keys):
                            weights[key] *= share
                        out[first_row + row, head * group + member, :] = 0
                for first in range(start, end, KEYS):
                    fetch_tile(kv, blocks, table, head, layer, 1, first, end, tile)
                    for row in range(max(0, first - position), last_row(first, position, num_rows, window)):
                        at = scores.ctypes.data + row * score_row_bytes + (first - start) * 4
                        to = out.ctypes.data + (first_row + row) * out_row_bytes + head * group * out_head_bytes
                        for _ in range(group):
                            weigh(at, tile.ctypes.data, to)
                            at += score_head_bytes
                            to += out_head_bytes

    return attend
