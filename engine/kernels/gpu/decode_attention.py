"""Attention of one new token for each sequence, with the keys of a sequence spread over several programs
(FlashDecoding): few sequences fill the device too.

The launch grid is fixed, so a CUDA graph can hold it; how many splits a sequence really uses follows on the device
from its length. Each split leaves its weighted values and the logarithm of its sum; a second kernel joins them, and
has nothing to do where one split was enough.

With ``num_splits=1`` a row's sum has one order, whatever its length: the ``invariant`` mode.

Legend: S sequences, H query heads, K kv heads, G = H / K, D head_dim, N splits, B most blocks of a table.
"""

import torch
import triton.language as tl
from torch import Tensor

from engine.kernels.gpu.attention import LOG2_E, Tiles, check_attention, tile_of_keys
from engine.kernels.gpu.launch import check, go_ahead, jit, options, power_of_two, wait

MIN_TILES = 4
"""A split with fewer tiles of keys costs more than it saves."""
MAX_SPLITS = 32
_MIN_TILES = tl.constexpr(MIN_TILES)


class Workspace:
    """Room for the partial results of up to ``num_sequences``; one for each stream of work on a device."""

    def __init__(
        self, num_sequences: int, num_heads: int, head_dim: int, num_splits: int, device: torch.device
    ) -> None:
        if not 1 <= num_splits <= MAX_SPLITS:
            raise ValueError(f"{num_splits} splits: give 1 to {MAX_SPLITS}")
        self.num_splits = num_splits
        shape = (num_sequences, num_heads, num_splits)
        self.values_SHND = torch.empty(*shape, head_dim, dtype=torch.float32, device=device)
        self.logs_SHN = torch.empty(*shape, dtype=torch.float32, device=device)


def splits_for(num_sequences: int, num_kv_heads: int, num_processors: int) -> int:
    """Splits that give every multiprocessor two programs or so."""
    wanted = -(-2 * num_processors // max(1, num_sequences * num_kv_heads))
    return min(MAX_SPLITS, power_of_two(wanted))


def attend_decode(
    q_SHD: Tensor,
    kv: Tensor,
    layer: int,
    tables_SB: Tensor,
    contexts_S: Tensor,
    out_SHD: Tensor,
    workspace: Workspace,
    *,
    scale: float,
    window: int | None = None,
    tiles: Tiles | None = None,
) -> None:
    """``out = softmax(q K^T scale) V`` over the ``contexts_S`` keys of each sequence, its own new one the last; with a
    ``window`` over the last ``window`` of them. Rows whose context is 0 (padding of a graph) are left alone.

    ``kv``: ``[block, K, layer, k/v, slot, D]``; ``tables_SB`` and ``contexts_S``: int32.
    Raises ValueError for shapes that do not fit.
    """
    num_sequences, num_heads, head_dim = q_SHD.shape
    num_kv_heads, num_splits = kv.shape[1], workspace.num_splits
    tiles = tiles or Tiles(
        rows=max(16, power_of_two(num_heads // num_kv_heads)),
        keys=64 if head_dim <= 128 else 32,
        num_warps=4,
        num_stages=3,
    )
    group = check_attention(q_SHD, kv, layer, out_SHD, tiles)
    check(tables_SB, "tables", num_sequences, None, dtype=torch.int32)
    check(contexts_S, "contexts", num_sequences, dtype=torch.int32)
    room, *heads = workspace.logs_SHN.shape[0], *workspace.values_SHND.shape[1::2]
    if room < num_sequences or heads != [num_heads, head_dim]:
        raise ValueError(
            f"the workspace is for {room} sequences of {heads} (heads, head_dim), wanted {num_sequences} of "
            f"{[num_heads, head_dim]}"
        )
    if not num_sequences:
        return
    _attend_split[(num_sequences, num_kv_heads, num_splits)](
        q_SHD,
        kv,
        out_SHD,
        workspace.values_SHND,
        workspace.logs_SHN,
        tables_SB,
        contexts_S,
        scale * LOG2_E,
        q_SHD.stride(0),
        q_SHD.stride(1),
        out_SHD.stride(0),
        out_SHD.stride(1),
        tables_SB.stride(0),
        kv.stride(0),
        kv.stride(1),
        layer * kv.stride(2),
        kv.stride(3),
        kv.stride(4),
        WINDOW=window or 0,
        BLOCK_SIZE=kv.shape[4],
        GROUP=group,
        HEAD_DIM=head_dim,
        COLUMNS=power_of_two(head_dim),
        ROWS=tiles.rows,
        KEYS=tiles.keys,
        NUM_SPLITS=num_splits,
        **options(q_SHD, num_warps=tiles.num_warps, num_stages=tiles.num_stages),
    )
    if num_splits > 1:
        _join[(num_sequences, num_heads)](
            workspace.values_SHND,
            workspace.logs_SHN,
            out_SHD,
            contexts_S,
            out_SHD.stride(0),
            out_SHD.stride(1),
            WINDOW=window or 0,
            HEAD_DIM=head_dim,
            COLUMNS=power_of_two(head_dim),
            KEYS=tiles.keys,
            NUM_SPLITS=num_splits,
            SPLITS=power_of_two(num_splits),
            **options(q_SHD, num_warps=2),
        )


@jit
def _share(context, WINDOW: tl.constexpr, KEYS: tl.constexpr, NUM_SPLITS: tl.constexpr):
    """The first tile of keys, their number, and how many of them a split takes."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(context - WINDOW, 0) // KEYS
    num_tiles = (context + KEYS - 1) // KEYS - first
    share = (num_tiles + NUM_SPLITS - 1) // NUM_SPLITS
    if NUM_SPLITS > 1:
        share = tl.maximum(share, _MIN_TILES)
    return first, num_tiles, share


@jit
def _attend_split(
    q,
    kv,
    out,
    values,
    logs,
    tables,
    contexts,
    scale,
    row_stride,
    head_stride,
    out_row_stride,
    out_head_stride,
    table_stride,
    block_stride,
    kv_head_stride,
    layer_offset,
    which_stride,
    slot_stride,
    WINDOW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.program_id(2)
    wait(CHAINED)
    go_ahead(CHAINED)
    context = tl.load(contexts + sequence)
    first_tile, num_tiles, share = _share(context, WINDOW, KEYS, NUM_SPLITS)
    if split * share >= num_tiles:
        return
    row = tl.arange(0, ROWS)
    is_row = row < GROUP
    d = tl.arange(0, COLUMNS)
    is_cell = is_row[:, None] & (d[None, :] < HEAD_DIM)
    member = head * GROUP + tl.where(is_row, row, 0)
    at = sequence * row_stride + member * head_stride
    q_tile = tl.load(q + at[:, None] + d[None, :], mask=is_cell, other=0.0)
    position = tl.zeros([ROWS], tl.int32) + (context - 1)
    begin = (first_tile + split * share) * KEYS
    end = tl.minimum(begin + share * KEYS, context)
    whole = end // KEYS * KEYS
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    kv_head = kv + head.to(tl.int64) * kv_head_stride + layer_offset
    table = tables + sequence * table_stride
    for at_key in range(begin, whole, KEYS):
        best, total, sums = tile_of_keys(
            q_tile, best, total, sums, kv_head, table, at_key, context, position, scale, block_stride, which_stride,
            slot_stride, WINDOW == 0, WINDOW, BLOCK_SIZE, HEAD_DIM, COLUMNS, KEYS,
        )  # fmt: skip
    for at_key in range(whole, end, KEYS):
        best, total, sums = tile_of_keys(
            q_tile, best, total, sums, kv_head, table, at_key, context, position, scale, block_stride, which_stride,
            slot_stride, False, WINDOW, BLOCK_SIZE, HEAD_DIM, COLUMNS, KEYS,
        )  # fmt: skip
    result = sums / total[:, None]
    if share >= num_tiles:
        to = sequence * out_row_stride + member * out_head_stride
        tl.store(out + to[:, None] + d[None, :], result.to(out.dtype.element_ty), mask=is_cell)
    else:
        cell = (sequence * tl.num_programs(1) * GROUP + member) * NUM_SPLITS + split
        tl.store(values + cell[:, None] * HEAD_DIM + d[None, :], result, mask=is_cell)
        tl.store(logs + cell, best + tl.log2(total), mask=is_row)


@jit
def _join(
    values,
    logs,
    out,
    contexts,
    out_row_stride,
    out_head_stride,
    WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEYS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLITS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    wait(CHAINED)
    go_ahead(CHAINED)
    _, num_tiles, share = _share(tl.load(contexts + sequence), WINDOW, KEYS, NUM_SPLITS)
    if share >= num_tiles:
        return
    split = tl.arange(0, SPLITS)
    is_used = split * share < num_tiles
    cell = (sequence * tl.num_programs(1) + head) * NUM_SPLITS + split
    log = tl.load(logs + cell, mask=is_used, other=float("-inf"))
    weight = tl.exp2(log - tl.max(log, 0))
    d = tl.arange(0, COLUMNS)
    is_cell = is_used[:, None] & (d[None, :] < HEAD_DIM)
    value = tl.load(values + cell[:, None] * HEAD_DIM + d[None, :], mask=is_cell, other=0.0)
    result = tl.sum(value * weight[:, None], 0) / tl.sum(weight, 0)
    to = sequence * out_row_stride + head * out_head_stride + d
    tl.store(out + to, result.to(out.dtype.element_ty), mask=d < HEAD_DIM)
