"""Attention over the paged cache on a GPU against plain torch."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from engine.kernels.gpu.attention import Paged, Tiles, attend, attend_twin
from engine.kernels.gpu.decode_attention import MIN_TILES, Workspace, attend_decode, splits_for
from tests.kernels.gpu import DEVICE, DTYPES, assert_close, random

SMALL = Tiles(rows=16, keys=16)
NUM_BLOCKS, NUM_LAYERS, LAYER = 40, 2, 1


def make_cache(num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype) -> torch.Tensor:
    return random(NUM_BLOCKS, num_kv_heads, NUM_LAYERS, 2, block_size, head_dim, dtype=dtype)


def make_paged(num_new: list[int], contexts: list[int], block_size: int) -> Paged:
    """Every sequence has blocks of its own, in any order."""
    sizes = [-(-context // block_size) for context in contexts]
    order = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(sum(contexts)))
    tables = torch.full((len(contexts), max(sizes) + 1), NUM_BLOCKS + 7, dtype=torch.int32)
    for row, (end, size) in enumerate(zip(accumulate(sizes), sizes, strict=True)):
        tables[row, :size] = order[end - size : end]
    return Paged(
        tables_SB=tables.to(DEVICE),
        contexts_S=torch.tensor(contexts, dtype=torch.int32, device=DEVICE),
        query_starts=torch.tensor([0, *accumulate(num_new)], dtype=torch.int32, device=DEVICE),
    )


MIXED = ([1, 5, 0, 23, 1], [33, 5, 9, 64, 1])
"""An answer behind two blocks, a whole prompt, nothing, a prompt behind a prefix that ends within a block, a token."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_every_row_attends_to_its_own_context(head_dim: int, dtype: torch.dtype) -> None:
    check_mixed(group=3, num_kv_heads=2, head_dim=head_dim, dtype=dtype)


@pytest.mark.parametrize("group", range(1, 9))
def test_query_heads_share_their_kv_head(group: int) -> None:
    check_mixed(group=group, num_kv_heads=1, head_dim=64)


@pytest.mark.parametrize("block_size", [8, 16, 64])
@pytest.mark.parametrize("window", [None, 1, 7, 16, 40])
def test_a_window_hides_what_is_too_far_behind(window: int | None, block_size: int) -> None:
    check_mixed(group=2, num_kv_heads=1, head_dim=64, block_size=block_size, window=window)


def check_mixed(
    *,
    group: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
    block_size: int = 16,
    window: int | None = None,
    mixed: tuple[list[int], list[int]] = MIXED,
) -> None:
    num_new, contexts = mixed
    kv = make_cache(num_kv_heads, head_dim, block_size, dtype)
    q = random(sum(num_new) + 2, group * num_kv_heads, head_dim, dtype=dtype, seed=1)
    paged = make_paged(num_new, contexts, block_size)
    out, expected = torch.full_like(q, 7.0), torch.full_like(q, 7.0)
    attend(q, kv, LAYER, paged, out, scale=head_dim**-0.5, window=window, tiles=SMALL)
    attend_twin(q, kv, LAYER, paged, expected, scale=head_dim**-0.5, window=window)
    assert_close(out, expected)
    assert (out[-2:] == 7.0).all(), "rows of no sequence are left alone"


@pytest.mark.parametrize(
    ("num_new", "contexts"),
    [([1], [1]), ([16], [16]), ([1], [16]), ([1], [17]), ([17], [33]), ([15, 1], [32, 48]), ([0, 0], [5, 0])],
    ids=str,
)
def test_edges_of_blocks_and_of_tiles(num_new: list[int], contexts: list[int]) -> None:
    check_mixed(group=2, num_kv_heads=1, head_dim=64, mixed=(num_new, contexts))


def test_a_step_without_rows_or_sequences_does_nothing() -> None:
    kv, none = make_cache(1, 64, 16, torch.float32), random(0, 2, 64)
    attend(none, kv, LAYER, make_paged([0], [0], 16), torch.empty_like(none), scale=1.0, tiles=SMALL)
    workspace = Workspace(0, 2, 64, 1, DEVICE)
    tables, contexts = (torch.zeros(*shape, dtype=torch.int32, device=DEVICE) for shape in ((0, 1), (0,)))
    attend_decode(none, kv, LAYER, tables, contexts, torch.empty_like(none), workspace, scale=1.0, tiles=SMALL)


def test_a_row_has_the_same_bits_in_every_chunk_and_beside_everybody() -> None:
    kv = make_cache(1, 64, 16, torch.float32)
    context = 50
    q = random(context, 3, 64, seed=2)
    whole = torch.empty_like(q)
    attend(q, kv, LAYER, make_paged([context], [context], 16), whole, scale=0.125, tiles=SMALL)
    blocks = make_paged([context], [context], 16).tables_SB
    for first, end in ((0, 1), (1, 18), (18, 50)):
        paged = Paged(
            tables_SB=torch.cat([blocks, blocks]),
            contexts_S=torch.tensor([7, end], dtype=torch.int32, device=DEVICE),
            query_starts=torch.tensor([0, 3, 3 + end - first], dtype=torch.int32, device=DEVICE),
        )
        rows = torch.cat([random(3, 3, 64, seed=3), q[first:end]])
        out = torch.empty_like(rows)
        attend(rows, kv, LAYER, paged, out, scale=0.125, tiles=SMALL)
        assert torch.equal(out[3:], whole[first:end])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_decode_in_one_split_and_in_several(head_dim: int, dtype: torch.dtype) -> None:
    for num_splits in (1, 4):
        check_decode([1, 0, 16, 17, 300], group=3, head_dim=head_dim, num_splits=num_splits, dtype=dtype)


@pytest.mark.parametrize("group", range(1, 9))
def test_decode_with_shared_kv_heads(group: int) -> None:
    check_decode([64, 65, 200], group=group, head_dim=64, num_splits=2)


@pytest.mark.parametrize("window", [1, 16, 50, 100])
def test_decode_within_a_window(window: int) -> None:
    check_decode([1, 64, 130, 257], group=2, head_dim=64, num_splits=8, window=window)


def check_decode(
    contexts: list[int],
    *,
    group: int,
    head_dim: int,
    num_splits: int,
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
) -> None:
    num_sequences, num_heads = len(contexts), 2 * group
    kv = make_cache(2, head_dim, 16, dtype)
    q = random(num_sequences, num_heads, head_dim, dtype=dtype, seed=4)
    paged = make_paged([1] * num_sequences, contexts, 16)
    workspace = Workspace(num_sequences + 1, num_heads, head_dim, num_splits, DEVICE)
    out, expected = torch.full_like(q, 7.0), torch.full_like(q, 7.0)
    scale = head_dim**-0.5
    attend_decode(
        q, kv, LAYER, paged.tables_SB, paged.contexts_S, out, workspace, scale=scale, window=window, tiles=SMALL
    )
    attend_twin(q, kv, LAYER, paged, expected, scale=scale, window=window)
    assert_close(out, expected)


def test_one_split_has_the_bits_of_the_kernel_for_prompts() -> None:
    kv = make_cache(2, 64, 16, torch.float32)
    contexts = [1, 33, 128]
    paged = make_paged([1, 1, 1], contexts, 16)
    q = random(3, 6, 64, seed=5)
    out, expected = torch.empty_like(q), torch.empty_like(q)
    workspace = Workspace(3, 6, 64, 1, DEVICE)
    attend_decode(q, kv, LAYER, paged.tables_SB, paged.contexts_S, out, workspace, scale=0.125, tiles=SMALL)
    attend(q, kv, LAYER, paged, expected, scale=0.125, tiles=SMALL)
    assert torch.equal(out, expected)


def test_splits_fill_the_device_and_no_more() -> None:
    assert splits_for(1, 8, 132) == 32
    assert splits_for(64, 8, 132) == 1
    assert MIN_TILES > 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer": 9}, "no layer 9"),
        ({"heads": 5}, "not shared evenly"),
        ({"dim": 32}, "kv has shape"),
        ({"tables": torch.int64}, "tables is torch.int64"),
        ({"tiles": Tiles(rows=8, keys=16)}, "wants 16 rows"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, object], message: str) -> None:
    kv = make_cache(2, 64, 16, torch.float32)
    q = random(2, int(str(change.get("heads", 4))), int(str(change.get("dim", 64))))
    paged = make_paged([1, 1], [5, 6], 16)
    if "tables" in change:
        paged = Paged(tables_SB=paged.tables_SB.long(), contexts_S=paged.contexts_S, query_starts=paged.query_starts)
    tiles = change.get("tiles", SMALL)
    assert isinstance(tiles, Tiles)
    with pytest.raises(ValueError, match=message):
        attend(q, kv, int(str(change.get("layer", 0))), paged, torch.empty_like(q), scale=1.0, tiles=tiles)
