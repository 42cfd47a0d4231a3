from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import LayoutMismatch
from core.kv import KVGeometry
from kvtransfer.layout import check_compatible, check_geometry
from kvtransfer.plan import Copy, plan_blocks
from tests.support.transfer_side import FORMAT, GEOMETRY

SMALL = KVGeometry(num_blocks=24, block_size=2, num_layers=1, num_kv_heads=3, head_dim=2, dtype_bytes=1)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    count = draw(st.integers(0, SMALL.num_blocks))
    # A source may be read twice (a shared prefix), a target is written once. Half of them in order: runs are likely.
    ids = st.integers(0, SMALL.num_blocks - 1)
    in_order = st.just(list(range(count)))
    remote = draw(st.one_of(in_order, st.lists(ids, min_size=count, max_size=count)))
    local = draw(st.one_of(in_order, st.permutations(range(SMALL.num_blocks)).map(lambda order: list(order)[:count])))
    return remote, list(local)


@given(pairs(), st.integers(1, 100))
def test_every_target_byte_is_written_once_from_its_source_and_nothing_else(
    blocks: tuple[list[int], list[int]], max_chunk_bytes: int
) -> None:
    remote, local = blocks
    plan = plan_blocks(SMALL, SMALL, remote, local, max_chunk_bytes=max_chunk_bytes)
    size = SMALL.num_blocks * SMALL.block_bytes
    source = np.arange(size)
    target = np.full(size, -1)
    for chunk in plan.chunks:
        assert 0 < sum(copy.num_bytes for copy in chunk) <= max_chunk_bytes
        for copy in chunk:
            part = target[copy.local_offset : copy.local_offset + copy.num_bytes]
            assert (part == -1).all()
            part[:] = source[copy.remote_offset : copy.remote_offset + copy.num_bytes]
    expected = np.full((SMALL.num_blocks, SMALL.block_bytes), -1)
    expected[local] = source.reshape(expected.shape)[remote]
    assert (target.reshape(expected.shape) == expected).all()
    assert plan.num_bytes == len(local) * SMALL.block_bytes
    assert plan.num_copies == sum(len(chunk) for chunk in plan.chunks)


def test_neighbours_on_both_sides_become_one_copy() -> None:
    plan = plan_blocks(SMALL, SMALL, [7, 5, 6, 9], [2, 0, 1, 3])
    size = SMALL.block_bytes
    assert plan.chunks == ((Copy(5 * size, 0, 3 * size), Copy(9 * size, 3 * size, size)),)


def test_chunks_are_cut_between_blocks_when_a_block_fits() -> None:
    size = SMALL.block_bytes
    plan = plan_blocks(SMALL, SMALL, range(5), range(5), max_chunk_bytes=2 * size + 1)
    assert [sum(c.num_bytes for c in chunk) for chunk in plan.chunks] == [2 * size, 2 * size, size]


@pytest.mark.parametrize("blocks", [[24], [-1], [0, 10**9]])
def test_block_ids_of_a_peer_outside_its_geometry_are_refused(blocks: list[int]) -> None:
    with pytest.raises(LayoutMismatch, match="remote block ids"):
        plan_blocks(SMALL, SMALL, blocks, range(len(blocks)))


def test_lists_that_cannot_be_meant_are_refused() -> None:
    with pytest.raises(ValueError, match="written twice"):
        plan_blocks(SMALL, SMALL, [1, 2], [3, 3])
    with pytest.raises(ValueError, match="1 remote blocks for 2"):
        plan_blocks(SMALL, SMALL, [1], [3, 4])


def test_the_number_of_blocks_may_differ() -> None:
    plan = plan_blocks(replace(SMALL, num_blocks=100), SMALL, [99], [0])
    assert plan.num_bytes == SMALL.block_bytes


@pytest.mark.parametrize(
    ("factor", "value"),
    [("block_size", 32), ("num_layers", 5), ("num_kv_heads", 1), ("head_dim", 9), ("dtype_bytes", 2), ("num_ranks", 2)],
)
def test_unequal_geometries_are_refused_by_the_name_of_the_factor(factor: str, value: int) -> None:
    with pytest.raises(LayoutMismatch, match=rf"{factor}: {getattr(GEOMETRY, factor)} != {value}"):
        check_geometry(GEOMETRY, replace(GEOMETRY, **{factor: value}))  # type: ignore[arg-type]


def test_unequal_formats_are_refused_by_the_names_of_all_factors() -> None:
    check_compatible(FORMAT, replace(FORMAT))
    other = replace(FORMAT, kv_dtype="float16", model_digest="other")
    with pytest.raises(LayoutMismatch, match=r"model_digest: 'm' != 'other'; kv_dtype: 'float32' != 'float16'"):
        check_compatible(FORMAT, other)
