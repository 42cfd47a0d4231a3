"""The attention of one step with the kernels of a GPU.

A step of answers only goes to the kernel that spreads a sequence's keys over the device; any other to the one that
takes any number of new tokens. ``invariant``: always the latter with tiles of one size, so that a row's sum has one
order.
"""

from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuAttention:
    """An :class:`~engine.model.attention.AttentionPlan` over index arrays on the device."""

    kv: Tensor
    """``[block, K, layer, k/v, slot, D]``"""
    positions_T: Tensor
    slots_T: Tensor
    """-1 for padding."""
    paged: Paged
    num_heads: int
    num_real: int
    """Rows in front of the padding."""
    workspace: Workspace | None
    """Each sequence has one new token, and its keys may be spread over several programs."""

    @classmethod
    def of_spans(
        cls, cache: KVCache, spans: Sequence[Span], num_heads: int, *, num_rows: int, invariant: bool
    ) -> "GpuAttention":
        """``spans`` are in row order; rows behind them are padding."""
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
        paged = Paged(
            tables_SB=on_device(tables, device),
            contexts_S=on_device(torch.tensor([span.end for span in spans], dtype=torch.int32), device),
            query_starts=on_device(torch.tensor(starts, dtype=torch.int32), device),
        )
        is_spread = bool(spans) and not invariant and all(span.num_tokens == 1 for span in spans)
        return cls(
            kv=cache.tensor,
            positions_T=on_device(torch.tensor([*positions, *[0] * num_padding], dtype=torch.int32), device),
            slots_T=on_device(torch.tensor([*slots, *[-1] * num_padding], dtype=torch.int64), device),
            paged=paged,
            num_heads=num_heads,
            num_real=len(positions),
            workspace=spread(cache, len(spans), num_heads) if is_spread else None,
        )

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
        append(qkv, gains, rope.cos, rope.sin, self.positions_T, self.slots_T, self.kv, layer, eps)
        q_THD, out_THD = qkv[: self.num_real, : self.num_heads], out_THD[: self.num_real]
        scale = self.kv.shape[-1] ** -0.5
        if self.workspace is None:
            attend(q_THD, self.kv, layer, self.paged, out_THD, scale=scale, window=window)
        else:
            tables, contexts = self.paged.tables_SB, self.paged.contexts_S
            attend_decode(q_THD, self.kv, layer, tables, contexts, out_THD, self.workspace, scale=scale, window=window)


def spread(cache: KVCache, num_sequences: int, num_heads: int) -> Workspace:
    """Room for the attention of so many sequences with one new token each."""
    geometry, device = cache.geometry, cache.tensor.device
    splits = splits_for(num_sequences, geometry.num_kv_heads, _num_processors(device))
    return Workspace(num_sequences, num_heads, geometry.head_dim, splits, device)


def on_device(values: Tensor, device: torch.device) -> Tensor:
    """A copy of CPU memory, in the order of the device's work; nobody waits for it."""
    if device.type != "cuda" or not values.numel():
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count
