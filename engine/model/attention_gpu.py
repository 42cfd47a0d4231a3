"""The attention of one step with the kernels of a GPU.

A step of answers only goes to the kernel that spreads a sequence's keys over the device; any other to the one that
takes any number of new tokens. ``invariant``: always the latter with tiles of one size, so that a row's sum has one
order.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.kernels.gpu.attention import Paged, attend
from engine.kernels.gpu.decode_attention import Workspace, attend_decode, splits_for
from engine.kernels.gpu.rotary import append
from engine.kv_cache import KVCache
from engine.model.attention import QkNorm, Span
from engine.model.rope import RopeTables

INTERPRETED_PROCESSORS = 8
"""Multiprocessors that the interpreter is asked to fill."""


class GpuAttention:
    """An :class:`~engine.model.attention.AttentionPlan`. ``spans`` are in row order; rows behind them are padding."""

    def __init__(
        self, cache: KVCache, spans: Sequence[Span], num_heads: int, *, num_rows: int, invariant: bool
    ) -> None:
        geometry, device = cache.geometry, cache.tensor.device
        block_size = geometry.block_size
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        for span in spans:
            positions += range(span.start, span.end)
            slots += [
                span.block_table[position // block_size] * block_size + position % block_size
                for position in range(span.start, span.end)
            ]
            starts.append(len(positions))
        num_padding = num_rows - len(positions)
        longest = max((geometry.blocks_for(span.end) for span in spans), default=1)
        tables = torch.zeros(len(spans), longest, dtype=torch.int32)
        for row, span in enumerate(spans):
            size = geometry.blocks_for(span.end)
            tables[row, :size] = torch.tensor(span.block_table[:size], dtype=torch.int32)

        def place(values: Sequence[int], dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

        self._positions_T = place([*positions, *[0] * num_padding])
        self._slots_T = place([*slots, *[-1] * num_padding], torch.int64)
        self._paged = Paged(
            tables_SB=tables.to(device, non_blocking=True),
            contexts_S=place([span.end for span in spans]),
            query_starts=place(starts),
        )
        self._kv = cache.tensor
        self._num_heads, self._num_real = num_heads, len(positions)
        self._scale = geometry.head_dim**-0.5
        self._workspace: Workspace | None = None
        if spans and not invariant and all(span.num_tokens == 1 for span in spans):
            processors = _num_processors(device)
            splits = splits_for(len(spans), geometry.num_kv_heads, processors)
            self._workspace = Workspace(len(spans), num_heads, geometry.head_dim, splits, device)

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
        gains, eps = (None, 0.0) if norm is None else (norm.gains_2D, norm.eps)
        append(qkv, gains, rope.cos, rope.sin, self._positions_T, self._slots_T, self._kv, layer, eps)
        q_THD, out_THD = qkv[: self._num_real, : self._num_heads], out_THD[: self._num_real]
        if self._workspace is None:
            attend(q_THD, self._kv, layer, self._paged, out_THD, scale=self._scale, window=window)
        else:
            tables, contexts = self._paged.tables_SB, self._paged.contexts_S
            attend_decode(
                q_THD, self._kv, layer, tables, contexts, out_THD, self._workspace, scale=self._scale, window=window
            )


def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count
