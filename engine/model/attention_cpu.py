"""The attention of one step on one CPU core.

The arithmetic is :mod:`engine.kernels.attention`'s. KV may be kept in bfloat16; all arithmetic is in float32.

Legend: T rows of the step, H query heads, K kv heads, D head_dim.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.attention import ITEM_ROWS, make_append, make_attend
from engine.kernels.simd import KEYS
from engine.kv_cache import KVCache
from engine.model.attention import QkNorm, Span
from engine.model.linear import round_up
from engine.model.rope import RopeTables


class CpuAttention:
    """An :class:`~engine.model.attention.AttentionPlan`. ``spans`` are in row order; rows behind them are padding."""

    def __init__(self, cache: KVCache, spans: Sequence[Span], num_heads: int) -> None:
        geometry = cache.geometry
        block_size, head_dim, group = geometry.block_size, geometry.head_dim, num_heads // geometry.num_kv_heads
        tables: list[int] = []
        items: list[tuple[int, int, int, int]] = []
        positions: list[int] = []
        blocks: list[int] = []
        for span in spans:
            row = len(positions) - span.start
            items += [
                (row + first, min(ITEM_ROWS, span.end - first), first, len(tables))
                for first in range(span.start, span.end, ITEM_ROWS)
            ]
            positions += range(span.start, span.end)
            blocks += [span.block_table[position // block_size] for position in range(span.start, span.end)]
            tables += span.block_table[: geometry.blocks_for(span.end)]
        self._positions_T = np.array(positions, np.int64)
        self._blocks_T = np.array(blocks, np.int64)
        self._slots_T = self._positions_T % block_size
        self._tables = np.array(tables, np.int64)
        self._items = np.array(items, np.int64).reshape(-1, 4)
        most_rows = max((num_rows for _, num_rows, _, _ in items), default=0)
        most_keys = round_up(max((span.end for span in spans), default=0), KEYS)
        self._scores = np.empty((most_rows, group, most_keys), np.float32)
        self._tile = np.empty((KEYS, head_dim), np.float32)
        self._scale = np.float32(head_dim**-0.5)
        self._queries_and_keys = slice(0, num_heads), slice(num_heads, num_heads + geometry.num_kv_heads)
        self._kv = cache.array
        is_half = cache.tensor.dtype == torch.bfloat16
        self._append = make_append(head_dim, is_half=is_half)
        self._attend = make_attend(head_dim, group, is_half=is_half)

    def attend(
        self,
        layer: int,
        qkv: Tensor,
        rope: RopeTables,
        out_THD: Tensor,
        *,
        norm: QkNorm | None = None,
        window: int | None = None,
    ) -> None:
        if norm is not None:
            for heads, gain_D in zip(self._queries_and_keys, norm.gains_2D, strict=True):
                x_THD = qkv[:, heads]
                x_THD.copy_(F.rms_norm(x_THD, gain_D.shape, gain_D, norm.eps))
        rows, cos, sin = qkv.numpy(), rope.cos.numpy(), rope.sin.numpy()
        self._append(rows, cos, sin, self._positions_T, self._kv, layer, self._blocks_T, self._slots_T)
        self._attend(
            rows,
            self._kv,
            layer,
            self._tables,
            self._items,
            out_THD.numpy(),
            self._scores,
            self._tile,
            self._scale,
            window or 0,
        )
