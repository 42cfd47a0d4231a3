"""Attention over the paged cache for steps that mix prompts and answers: one kernel, any number of new tokens for each
sequence, each row causal behind the prefix that is cached already.

A program has one *tile of rows*: ``rows // G`` consecutive new tokens of one sequence times the G query heads of a kv
head, so a key is read once for all of them. It finds its sequence by bisection over ``query_starts`` (the launch grid
is an upper bound that the host knows without reading lengths) and walks the keys in tiles at absolute positions, with
a running maximum and sum (FlashAttention-2, arXiv 2307.08691; the packing and the search as in "The Anatomy of a
Triton Attention Kernel", arXiv 2511.11581). A row's bits depend on its context and the tile sizes, not on its chunk or
its neighbours: a tile of keys that a row does not see changes nothing of it.

Legend: S sequences, T rows of the step, H query heads, K kv heads, G = H / K, D head_dim, B most blocks of a table.
"""

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from engine.kernels.gpu.launch import check, go_ahead, jit, options, power_of_two, wait

LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """Sizes that decide speed, and the order of sums with it. ``rows`` hold whole groups of query heads."""

    rows: int = 64
    keys: int = 64
    num_warps: int = 4
    num_stages: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Paged:
    """Where the rows of one step find their keys.

    - ``tables_SB``: int32, blocks of each sequence.
    - ``contexts_S``: int32, tokens of each sequence with those of this step; 0 for rows of a graph without a sequence.
    - ``query_starts``: int32 ``[S + 1]``, the first row of each sequence, then their number.
    """

    tables_SB: Tensor
    contexts_S: Tensor
    query_starts: Tensor

    def check(self) -> None:
        num_sequences = len(self.contexts_S)
        check(self.tables_SB, "tables", num_sequences, None, dtype=torch.int32)
        check(self.contexts_S, "contexts", num_sequences, dtype=torch.int32)
        check(self.query_starts, "query_starts", num_sequences + 1, dtype=torch.int32)


def attend(
    q_THD: Tensor,
    kv: Tensor,
    layer: int,
    paged: Paged,
    out_THD: Tensor,
    *,
    scale: float,
    window: int | None = None,
    tiles: Tiles | None = None,
) -> None:
    """``out = softmax(q K^T scale) V`` of every row, over its own key and those before it (with a ``window``: its own
    and the ``window - 1`` before). Rows of ``out`` that belong to no sequence are left alone.

    ``kv``: ``[block, K, layer, k/v, slot, D]``. Raises ValueError for shapes that do not fit.
    """
    num_rows, num_heads, head_dim = q_THD.shape
    num_kv_heads = kv.shape[1]
    tiles = tiles or tiles_for(num_heads // num_kv_heads, head_dim)
    group = check_attention(q_THD, kv, layer, out_THD, tiles)
    paged.check()
    num_sequences = len(paged.contexts_S)
    if not num_rows or not num_sequences:
        return
    tokens = tiles.rows // group
    _attend[(num_rows // tokens + num_sequences, num_kv_heads)](
        q_THD,
        kv,
        out_THD,
        paged.tables_SB,
        paged.contexts_S,
        paged.query_starts,
        num_sequences,
        scale * LOG2_E,
        q_THD.stride(0),
        q_THD.stride(1),
        out_THD.stride(0),
        out_THD.stride(1),
        paged.tables_SB.stride(0),
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
        TOKENS=tokens,
        ROWS=tiles.rows,
        KEYS=tiles.keys,
        **options(q_THD, num_warps=tiles.num_warps, num_stages=tiles.num_stages),
    )


def tiles_for(group: int, head_dim: int) -> Tiles:
    """What fits the shared memory of an A100 or later."""
    rows = max(power_of_two(group), 128 if head_dim <= 128 else 64)
    return Tiles(rows=rows, keys=64 if head_dim <= 128 else 32, num_warps=8 if rows * head_dim >= 8192 else 4)


def check_attention(q_THD: Tensor, kv: Tensor, layer: int, out_THD: Tensor, tiles: Tiles) -> int:
    """The group, query heads for each kv head. Raises ValueError."""
    num_rows, num_heads, head_dim = q_THD.shape
    num_kv_heads = kv.shape[1]
    check(q_THD, "q", None, None, None)
    check(kv, "kv", None, None, None, 2, None, head_dim)
    check(out_THD, "out", num_rows, num_heads, head_dim)
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads are not shared evenly by {num_kv_heads} kv heads")
    group = num_heads // num_kv_heads
    if not 0 <= layer < kv.shape[2]:
        raise ValueError(f"the cache has no layer {layer}, it has {kv.shape[2]}")
    if tiles.rows < max(16, group) or tiles.keys < 16:
        raise ValueError(f"{tiles}: a matrix product wants 16 rows and keys at least, and a whole group of {group}")
    return group


def attend_twin(
    q_THD: Tensor,
    kv: Tensor,
    layer: int,
    paged: Paged,
    out_THD: Tensor,
    *,
    scale: float,
    window: int | None = None,
) -> None:
    """The same in plain torch, one sequence after the other."""
    group = q_THD.shape[1] // kv.shape[1]
    starts = paged.query_starts.tolist()
    for index, context in enumerate(paged.contexts_S.tolist()):
        rows = slice(starts[index], starts[index + 1])
        num_new = rows.stop - rows.start
        if not num_new or not context:
            continue
        blocks = paged.tables_SB[index, : -(-context // kv.shape[4])].long()
        k_NKD, v_NKD = (
            kv[blocks, :, layer, which].transpose(1, 2).flatten(0, 1)[:context].float().repeat_interleave(group, 1)
            for which in (0, 1)
        )
        position = torch.arange(context - num_new, context, device=kv.device)[:, None]
        key = torch.arange(context, device=kv.device)[None]
        is_seen = key <= position
        if window:
            is_seen &= key > position - window
        scores_HTN = torch.einsum("thd,nhd->htn", q_THD[rows].float(), k_NKD) * scale
        weights = torch.softmax(scores_HTN.masked_fill(~is_seen, float("-inf")), -1)
        out_THD[rows] = torch.einsum("htn,nhd->thd", weights, v_NKD).to(out_THD.dtype)


@jit
def tile_of_keys(
    q,
    best,
    total,
    sums,
    kv_head,
    table,
    first,
    context,
    position,
    scale,
    block_stride,
    which_stride,
    slot_stride,
    IS_WHOLE: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """One tile of keys for a tile of rows: the new running maximum, sum and weighted values of each row.

    ``kv_head`` points at the keys of the head in block 0. ``IS_WHOLE``: every row sees every key of the tile.
    """
    key = first + tl.arange(0, KEYS)
    d = tl.arange(0, COLUMNS)
    is_key = key < context
    block = tl.load(table + key // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
    at = kv_head + block * block_stride + key % BLOCK_SIZE * slot_stride
    is_inside = is_key[:, None] & (d[None, :] < HEAD_DIM)
    k = tl.load(at[:, None] + d[None, :], mask=is_inside, other=0.0)
    scores = tl.dot(q, tl.trans(k).to(q.dtype), input_precision="ieee") * scale
    if not IS_WHOLE:
        is_seen = key[None, :] <= position[:, None]
        if WINDOW > 0:
            is_seen = is_seen & (key[None, :] > position[:, None] - WINDOW)
        scores = tl.where(is_seen, scores, float("-inf"))
    peak = tl.maximum(best, tl.max(scores, 1))
    # A row that has seen no key yet has its maximum at minus infinity, and nothing to weigh.
    reference = tl.where(peak == float("-inf"), 0.0, peak)
    weights = tl.exp2(scores - reference[:, None])
    kept = tl.exp2(best - reference)
    v = tl.load(at[:, None] + which_stride + d[None, :], mask=is_inside, other=0.0)
    total = total * kept + tl.sum(weights, 1)
    sums = sums * kept[:, None] + tl.dot(weights.to(q.dtype), v.to(q.dtype), input_precision="ieee")
    return peak, total, sums


@jit
def _owner(query_starts, tile, num_sequences, TOKENS: tl.constexpr):
    """The last sequence whose tiles begin at ``tile`` or before: each has room for one more than it fills."""
    low = 0
    high = num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_starts + middle) // TOKENS + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@jit
def _attend(
    q,
    kv,
    out,
    tables,
    contexts,
    query_starts,
    num_sequences,
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
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    tile = tl.program_id(0)
    head = tl.program_id(1)
    wait(CHAINED)
    go_ahead(CHAINED)
    sequence = _owner(query_starts, tile, num_sequences, TOKENS)
    start = tl.load(query_starts + sequence)
    num_new = tl.load(query_starts + sequence + 1) - start
    context = tl.load(contexts + sequence)
    first = (tile - start // TOKENS - sequence) * TOKENS
    if (first >= num_new) | (context < num_new):
        return
    row = tl.arange(0, ROWS)
    token = first + row // GROUP
    is_row = (row < TOKENS * GROUP) & (token < num_new)
    position = tl.where(is_row, context - num_new + token, -1)
    d = tl.arange(0, COLUMNS)
    is_cell = is_row[:, None] & (d[None, :] < HEAD_DIM)
    member = head * GROUP + row % GROUP
    line = (start + token).to(tl.int64)
    at = line * row_stride + member * head_stride
    q_tile = tl.load(q + at[:, None] + d[None, :], mask=is_cell, other=0.0)
    lowest = context - num_new + first
    highest = tl.minimum(context, lowest + TOKENS)
    # Whole tiles are seen by every row of ours; the ones before (with a window) and behind them in part.
    begin = 0
    whole = 0
    if WINDOW > 0:
        begin = tl.maximum(lowest - WINDOW + 1, 0) // KEYS * KEYS
        whole = tl.minimum((tl.maximum(highest - WINDOW, 0) + KEYS - 1) // KEYS * KEYS, highest)
    end_of_whole = tl.maximum((lowest + 1) // KEYS * KEYS, whole)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    kv_head = kv + head.to(tl.int64) * kv_head_stride + layer_offset
    table = tables + sequence.to(tl.int64) * table_stride
    if WINDOW > 0:
        for at_key in range(begin, whole, KEYS):
            best, total, sums = tile_of_keys(
                q_tile, best, total, sums, kv_head, table, at_key, context, position, scale, block_stride, which_stride,
                slot_stride, False, WINDOW, BLOCK_SIZE, HEAD_DIM, COLUMNS, KEYS,
            )  # fmt: skip
    for at_key in range(whole, end_of_whole, KEYS):
        best, total, sums = tile_of_keys(
            q_tile, best, total, sums, kv_head, table, at_key, context, position, scale, block_stride, which_stride,
            slot_stride, True, WINDOW, BLOCK_SIZE, HEAD_DIM, COLUMNS, KEYS,
        )  # fmt: skip
    for at_key in range(end_of_whole, highest, KEYS):
        best, total, sums = tile_of_keys(
            q_tile, best, total, sums, kv_head, table, at_key, context, position, scale, block_stride, which_stride,
            slot_stride, False, WINDOW, BLOCK_SIZE, HEAD_DIM, COLUMNS, KEYS,
        )  # fmt: skip
    result = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    to = line * out_row_stride + member * out_head_stride
    tl.store(out + to[:, None] + d[None, :], result.to(out.dtype.element_ty), mask=is_cell)
