"""The begin of a step of answers on the device: from the tokens drawn last, where each row stands.

So a step needs nothing of the host: what the last one drew is where this one begins.

Legend: R rows, B most blocks of a table.
"""

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from engine.kernels.gpu.launch import check, go_ahead, jit, options, wait
from engine.sampler import GAMMA, MIX_1, MIX_2, mix

_GAMMA, _MIX_1, _MIX_2 = tl.constexpr(GAMMA), tl.constexpr(MIX_1), tl.constexpr(MIX_2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Rows between two steps, ``[R]`` each, and what one step is told of them."""

    tokens: Tensor
    """int64: drawn last. A negative one ends its row."""
    next: Tensor
    """int32: the position of that token, to be computed next; negative for a row without a sequence."""
    prefixes: Tensor
    """int64, the bits of :func:`engine.sampler.key_prefix` of each row's sequence."""
    tables_RB: Tensor
    """int32"""
    ids: Tensor
    """int64: the tokens that this step computes. With all below, rows without a sequence have zeros ..."""
    positions: Tensor
    """int32"""
    contexts: Tensor
    """int32: tokens behind which the row's next one is drawn."""
    slots: Tensor
    """int64: where the token's K and V go. ... and -1 here."""
    keys: Tensor
    """int64: of the draw at the end of this step."""

    @classmethod
    def make(cls, num_rows: int, num_blocks: int, device: torch.device) -> "Standing":
        """Rows without sequences."""

        def column(dtype: torch.dtype, value: int = 0) -> Tensor:
            return torch.full((num_rows,), value, dtype=dtype, device=device)

        return cls(
            tokens=column(torch.int64),
            next=column(torch.int32, -1),
            prefixes=column(torch.int64),
            tables_RB=torch.zeros(num_rows, num_blocks, dtype=torch.int32, device=device),
            ids=column(torch.int64),
            positions=column(torch.int32),
            contexts=column(torch.int32),
            slots=column(torch.int64, -1),
            keys=column(torch.int64),
        )


def advance(standing: Standing, num_rows: int, block_size: int) -> None:
    """Fill ``ids``, ``positions``, ``contexts``, ``slots`` and ``keys`` of the first ``num_rows`` rows, and move their
    ``next`` on by one. Raises ValueError for more rows than there are."""
    check(standing.tables_RB, "tables", len(standing.tokens), None, dtype=torch.int32)
    if not 0 <= num_rows <= len(standing.tokens):
        raise ValueError(f"{num_rows} rows asked for, there are {len(standing.tokens)}")
    if num_rows:
        _advance[(num_rows,)](
            standing.tokens,
            standing.next,
            standing.prefixes,
            standing.tables_RB,
            standing.ids,
            standing.positions,
            standing.contexts,
            standing.slots,
            standing.keys,
            standing.tables_RB.stride(0),
            BLOCK_SIZE=block_size,
            **options(standing.tokens, num_warps=1),
        )


def advance_twin(standing: Standing, num_rows: int, block_size: int) -> None:
    """The same row by row in Python."""
    for row in range(num_rows):
        token, position = int(standing.tokens[row]), int(standing.next[row])
        is_live = token >= 0 and position >= 0
        position = position if is_live else 0
        standing.ids[row] = token if is_live else 0
        standing.positions[row] = position
        standing.contexts[row] = position + 1 if is_live else 0
        block = int(standing.tables_RB[row, position // block_size])
        standing.slots[row] = block * block_size + position % block_size if is_live else -1
        key = mix(int(standing.prefixes[row]) + GAMMA * (position + 2))
        standing.keys[row] = key - (1 << 64) if key >> 63 else key
        standing.next[row] = position + 1 if is_live else -1


@jit
def _mixed(value):
    """:func:`engine.sampler.mix`."""
    value = (value ^ (value >> 30)) * tl.full([], _MIX_1, tl.uint64)
    value = (value ^ (value >> 27)) * tl.full([], _MIX_2, tl.uint64)
    return value ^ (value >> 31)


@jit
def _advance(
    tokens,
    nexts,
    prefixes,
    tables,
    ids,
    positions,
    contexts,
    slots,
    keys,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    CHAINED: tl.constexpr,
):
    row = tl.program_id(0)
    wait(CHAINED)
    go_ahead(CHAINED)
    token = tl.load(tokens + row)
    position = tl.load(nexts + row)
    is_live = (token >= 0) & (position >= 0)
    position = tl.where(is_live, position, 0)
    block = tl.load(tables + row.to(tl.int64) * table_stride + position // BLOCK_SIZE).to(tl.int64)
    tl.store(ids + row, tl.where(is_live, token, 0))
    tl.store(positions + row, position)
    tl.store(contexts + row, tl.where(is_live, position + 1, 0))
    tl.store(slots + row, tl.where(is_live, block * BLOCK_SIZE + position % BLOCK_SIZE, -1))
    mixed_in = (position + 2).to(tl.uint64) * tl.full([], _GAMMA, tl.uint64)
    key = _mixed(tl.load(prefixes + row).to(tl.uint64, bitcast=True) + mixed_in)
    tl.store(keys + row, key.to(tl.int64, bitcast=True))
    tl.store(nexts + row, tl.where(is_live, position + 1, -1))
