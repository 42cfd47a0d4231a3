"""The planner against a slow reference that finds every cell by its logical coordinates."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from core.errors import LayoutMismatch
from core.kv import KVGeometry, KVOrder, kv_head_range, ranks_with_kv_head
from kvtransfer.backends.inproc import Fabric
from kvtransfer.copies import Copies, Copy
from kvtransfer.layout import check_compatible, check_geometry, check_peer, kv_region
from kvtransfer.memory import REGION_KV, AlignedBuffer
from kvtransfer.plan import Blocks, Plan, needs_gather, plan_blocks
from kvtransfer.ranks import choose_sources, shared_box
from tests.support.coordinates import cells, rank_of
from tests.support.transfer_side import FORMAT, GEOMETRY, Side

SMALL = KVGeometry(num_blocks=24, block_size=2, num_layers=1, num_kv_heads=3, head_dim=2, dtype_bytes=1)


class Memory:
    """One rank's memory, one number for each byte, and the same seen by coordinates."""

    def __init__(self, geometry: KVGeometry, fill: int) -> None:
        self.geometry = geometry
        self.bytes: NDArray[np.int64] = np.full(geometry.num_blocks * geometry.block_bytes, fill)
        self.cells = cells(geometry, self.bytes)


@dataclass
class Case:
    num_kv_heads: int
    sources: list[KVGeometry]
    targets: list[KVGeometry]
    source_blocks: list[list[int]]
    target_blocks: list[list[int]]
    first_block: tuple[int, int]
    first_token: int
    end_token: int | None
    max_chunk_bytes: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_kv_heads = draw(st.sampled_from([1, 2, 3, 4, 6]))
    num_layers = draw(st.integers(1, 3))
    sides = []
    for _ in range(2):
        shape = KVGeometry(
            num_blocks=draw(st.integers(8, 14)),
            block_size=draw(st.sampled_from([8, 16, 32])),
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            head_dim=2,
            dtype_bytes=draw(st.just(2)),
            order=draw(st.sampled_from(KVOrder)),
        )
        num_ranks = draw(st.sampled_from([1, 2, 3, 4, 6]))
        stages = [range(num_layers)]
        if num_layers > 1 and draw(st.booleans()):  # a pipeline of two stages
            cut = draw(st.integers(1, num_layers - 1))
            stages = [range(cut), range(cut, num_layers)]
        sides.append(
            [
                replace(rank_of(shape, rank, num_ranks, num_kv_heads), first_layer=stage.start, num_layers=len(stage))
                for stage in stages
                for rank in range(num_ranks)
            ]
        )
    sizes = [side[0].block_size for side in sides]
    num_tokens = draw(st.integers(1, 8 * min(sizes)))
    # Both lists begin at one token, at the start of a block on either side.
    start = draw(st.integers(0, num_tokens // max(sizes))) * max(sizes)
    first_block = (start // sizes[0], start // sizes[1])
    tables = []
    for side, first in zip(sides, first_block, strict=True):
        count = side[0].blocks_for(num_tokens) - first
        ids = st.one_of(st.just(list(range(count))), st.permutations(range(side[0].num_blocks)))
        tables.append([list(draw(ids))[:count] for _ in side])
    return Case(
        num_kv_heads=num_kv_heads,
        sources=sides[0],
        targets=sides[1],
        source_blocks=tables[0],
        target_blocks=tables[1],
        first_block=first_block,
        first_token=draw(st.integers(0, num_tokens)),
        end_token=draw(st.sampled_from([None, num_tokens])),
        max_chunk_bytes=draw(st.sampled_from([3, 64, 1000, 1 << 24])),
    )


def apply(plan: Plan, source: Memory, target: Memory, max_chunk_bytes: int) -> None:
    num_bytes = 0
    for chunk in plan.chunks:
        assert 0 < chunk.num_bytes <= max_chunk_bytes
        for copy in chunk:
            assert min(copy.remote_offset, copy.local_offset) >= 0 and copy.num_bytes > 0
            assert copy.remote_offset + copy.num_bytes <= len(source.bytes), "within the advertised region"
            assert copy.local_offset + copy.num_bytes <= len(target.bytes)
            part = target.bytes[copy.local_offset : copy.local_offset + copy.num_bytes]
            assert (part == -1).all(), "written once"
            part[:] = source.bytes[copy.remote_offset : copy.remote_offset + copy.num_bytes]
            num_bytes += copy.num_bytes
    assert plan.num_bytes == num_bytes
    assert plan.num_copies == sum(len(chunk) for chunk in plan.chunks)


@settings(max_examples=150)
@given(cases())
def test_every_cell_comes_once_from_the_cell_with_its_coordinates_and_nothing_else_is_touched(case: Case) -> None:
    size = case.sources[0].block_size, case.targets[0].block_size
    num_slots = max(
        (first + len(blocks[0])) * each
        for first, blocks, each in zip(case.first_block, (case.source_blocks, case.target_blocks), size, strict=True)
    )
    num_layers = max(each.first_layer + each.num_layers for each in case.targets)
    shape = (case.num_kv_heads, num_layers, 2, num_slots, 2, 2)
    truth = np.arange(np.prod(shape)).reshape(shape)  # [kv_head, layer, kv, token, head_dim, byte]

    sources = []
    for geometry, blocks in zip(case.sources, case.source_blocks, strict=True):
        memory = Memory(geometry, fill=-2)
        heads = kv_head_range(geometry.rank, geometry.num_ranks, case.num_kv_heads)
        layers = slice(geometry.first_layer, geometry.first_layer + geometry.num_layers)
        for place, block in enumerate(blocks, case.first_block[0]):
            tokens = slice(place * size[0], (place + 1) * size[0])
            memory.cells[block] = truth[heads.start : heads.stop, layers, :, tokens]
        sources.append(memory)

    for geometry, blocks in zip(case.targets, case.target_blocks, strict=True):
        target = Memory(geometry, fill=-1)
        chosen = choose_sources(case.sources, geometry, case.num_kv_heads)
        assert sorted(chosen.read + chosen.unread) == list(chosen.to_release) == list(range(len(sources)))
        for index, (source, source_blocks) in enumerate(zip(sources, case.source_blocks, strict=True)):
            plan = plan_blocks(
                Blocks(geometry=source.geometry, block_ids=source_blocks, first_block=case.first_block[0]),
                Blocks(geometry=geometry, block_ids=blocks, first_block=case.first_block[1]),
                num_kv_heads=case.num_kv_heads,
                first_token=case.first_token,
                end_token=case.end_token,
                max_chunk_bytes=case.max_chunk_bytes,
            )
            if index in chosen.unread:
                assert plan.num_bytes == 0 and plan.chunks == ()
            apply(plan, source, target, case.max_chunk_bytes)

        end = min(
            (first + len(blocks[0])) * each
            for first, blocks, each in zip(
                case.first_block, (case.source_blocks, case.target_blocks), size, strict=True
            )
        )
        end = end if case.end_token is None else min(end, case.end_token)
        expected = Memory(geometry, fill=-1)
        heads = kv_head_range(geometry.rank, geometry.num_ranks, case.num_kv_heads)
        layers = slice(geometry.first_layer, geometry.first_layer + geometry.num_layers)
        for place, block in enumerate(blocks, case.first_block[1]):
            for slot in range(size[1]):
                token = place * size[1] + slot
                if max(case.first_token, case.first_block[1] * size[1]) <= token < end:
                    expected.cells[block, :, :, :, slot] = truth[heads.start : heads.stop, layers, :, token]
        assert (target.bytes == expected.bytes).all()


@pytest.mark.parametrize("num_kv_heads", range(1, 9))
@pytest.mark.parametrize("num_ranks", range(1, 9))
def test_ranks_share_the_heads_evenly_and_every_head_has_a_rank(num_kv_heads: int, num_ranks: int) -> None:
    held = [kv_head_range(rank, num_ranks, num_kv_heads) for rank in range(num_ranks)]
    assert {head for heads in held for head in heads} == set(range(num_kv_heads))
    assert max(map(len, held)) - min(map(len, held)) <= 1
    for head in range(num_kv_heads):
        holders = [rank for rank in range(num_ranks) if head in held[rank]]
        assert list(ranks_with_kv_head(head, num_ranks, num_kv_heads)) == holders


def test_replicated_heads_are_read_from_the_copy_of_the_readers_number() -> None:
    sources = [rank_of(GEOMETRY, rank, 6, 3) for rank in range(6)]  # heads 0 0 1 1 2 2
    read = [choose_sources(sources, rank_of(GEOMETRY, rank, 3, 3), 3).read for rank in range(3)]
    assert read == [(0,), (3,), (4,)]
    whole = choose_sources(sources, rank_of(GEOMETRY, 0, 1, 3), 3)
    assert (whole.read, whole.unread, whole.to_release) == ((0, 2, 4), (1, 3, 5), (0, 1, 2, 3, 4, 5))


def test_a_source_that_lacks_something_is_refused_by_its_name() -> None:
    target = rank_of(GEOMETRY, 0, 1, 3)
    with pytest.raises(LayoutMismatch, match="no rank of the source gives rank 0 of 1 its layer 0 of KV head 1"):
        choose_sources([rank_of(GEOMETRY, 0, 2, 3)], target, 3)
    twice = [replace(target, num_layers=3), replace(target, first_layer=2, num_layers=2)]
    with pytest.raises(LayoutMismatch, match=r"more than one rank of the source .* layer 2 of KV head 0"):
        choose_sources(twice, target, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_kv_heads": 6}, "num_kv_heads: rank 0 of 2 holds 3 of the model's 6 KV heads, its geometry says 6"),
        ({"rank": 2}, "rank 2 of 2 ranks does not exist"),
    ],
)
def test_heads_are_counted_for_a_rank_and_in_all(change: dict[str, int], message: str) -> None:
    good = replace(GEOMETRY, num_kv_heads=3, num_ranks=2)
    with pytest.raises(LayoutMismatch, match=message):
        shared_box(replace(good, **change), good, 6)  # type: ignore[arg-type]


# -- runs, chunks, marks ----------------------------------------------------------------------------------------------


def plan_of(remote: list[int], local: list[int], *, max_chunk_bytes: int = 1 << 24) -> Plan:
    source, target = Blocks(geometry=SMALL, block_ids=remote), Blocks(geometry=SMALL, block_ids=local)
    return plan_blocks(source, target, num_kv_heads=3, max_chunk_bytes=max_chunk_bytes)


def test_neighbours_on_both_sides_become_one_copy() -> None:
    plan = plan_of([7, 5, 6, 9], [2, 0, 1, 3])
    size = SMALL.block_bytes
    assert [list(chunk) for chunk in plan.chunks] == [
        [Copy(5 * size, 0, 3 * size), Copy(9 * size, 3 * size, size)],
    ]


def test_chunks_are_cut_between_blocks_when_a_block_fits() -> None:
    size = SMALL.block_bytes
    plan = plan_of(list(range(5)), list(range(5)), max_chunk_bytes=2 * size + 1)
    assert [chunk.num_bytes for chunk in plan.chunks] == [2 * size, 2 * size, size]
    scattered = plan_of([0, 1, 4, 6, 7], [9, 10, 4, 0, 1], max_chunk_bytes=2 * size)
    assert [chunk.num_bytes for chunk in scattered.chunks] == [2 * size, 2 * size, size]
    assert all(copy.num_bytes % size == 0 for chunk in scattered.chunks for copy in chunk)


DEFAULT = KVGeometry(num_blocks=256, block_size=16, num_layers=30, num_kv_heads=3, head_dim=64, dtype_bytes=2)
"""The default model's blocks in bfloat16."""


def copies_of_64_blocks(source: KVGeometry, target: KVGeometry) -> tuple[int, int, bool]:
    """(copies, bytes, mark) for 1,024 tokens whose blocks are no neighbours anywhere."""
    sides = [Blocks(geometry=side, block_ids=range(0, 2 * side.blocks_for(1024), 2)) for side in (source, target)]
    plan = plan_blocks(*sides, num_kv_heads=3)
    return plan.num_copies, plan.num_bytes, plan.needs_gather


def test_a_head_range_of_a_block_is_one_copy_in_our_order() -> None:
    assert copies_of_64_blocks(DEFAULT, DEFAULT) == (64, 64 * DEFAULT.block_bytes, False)
    one = rank_of(DEFAULT, 1, 3, 3)
    assert copies_of_64_blocks(DEFAULT, one) == (64, 64 * DEFAULT.head_bytes, False)
    assert copies_of_64_blocks(one, DEFAULT) == (64, 64 * DEFAULT.head_bytes, False)


def test_fragments_are_marked_for_gathering() -> None:
    layers = replace(DEFAULT, order=KVOrder.LAYER_BLOCK_HEAD)
    assert copies_of_64_blocks(layers, layers) == (64 * 60, 64 * DEFAULT.block_bytes, False), "6 KiB each"
    head_of_layers = rank_of(layers, 1, 3, 3)
    assert copies_of_64_blocks(layers, head_of_layers) == (64 * 60, 64 * DEFAULT.head_bytes, True), "2 KiB each"
    tokens = replace(DEFAULT, order=KVOrder.LAYER_BLOCK_SLOT)
    assert copies_of_64_blocks(tokens, DEFAULT) == (64 * 60 * 48, 64 * DEFAULT.block_bytes, True), "128 bytes each"
    assert copies_of_64_blocks(DEFAULT, replace(DEFAULT, block_size=32)) == (64 * 180, 64 * DEFAULT.block_bytes, True)
    assert not needs_gather(DEFAULT, rank_of(DEFAULT, 1, 3, 3), 3)
    assert needs_gather(DEFAULT, replace(DEFAULT, block_size=32), 3)
    assert not needs_gather(SMALL, SMALL, 3), "small blocks that move whole: there is nothing to gather"


def test_a_tail_cut_short_does_not_mark_a_large_plan() -> None:
    sides = [Blocks(geometry=DEFAULT, block_ids=range(40))] * 2
    plan = plan_blocks(*sides, num_kv_heads=3, end_token=39 * 16 + 3)
    assert plan.num_copies == 180 and not plan.needs_gather
    assert plan.num_bytes == 39 * DEFAULT.block_bytes + 3 * DEFAULT.block_bytes // 16


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [[24], [-1], [0, 10**9]])
def test_block_ids_of_a_peer_outside_its_geometry_are_refused(blocks: list[int]) -> None:
    with pytest.raises(LayoutMismatch, match="remote block ids"):
        plan_of(blocks, list(range(len(blocks))))


def test_lists_that_cannot_be_meant_are_refused() -> None:
    with pytest.raises(ValueError, match="written twice"):
        plan_of([1, 2], [3, 3])
    with pytest.raises(ValueError, match="1 remote blocks for 2"):
        plan_of([1], [3, 4])


def test_nothing_to_move_is_an_empty_plan() -> None:
    plan = plan_of([], [])
    assert plan.chunks == () and plan.num_bytes == plan.num_copies == 0


def test_block_sizes_of_which_neither_divides_the_other_are_refused() -> None:
    with pytest.raises(LayoutMismatch, match=r"block_size: 16 != 24, and neither divides the other; set .*block_size"):
        check_geometry(GEOMETRY, replace(GEOMETRY, block_size=24))
    check_geometry(GEOMETRY, replace(GEOMETRY, block_size=32))


@pytest.mark.parametrize(("factor", "value"), [("head_dim", 9), ("dtype_bytes", 2)])
def test_unequal_geometries_are_refused_by_the_name_of_the_factor(factor: str, value: int) -> None:
    with pytest.raises(LayoutMismatch, match=rf"{factor}: {getattr(GEOMETRY, factor)} != {value}"):
        check_geometry(GEOMETRY, replace(GEOMETRY, **{factor: value}))  # type: ignore[arg-type]


def test_unequal_formats_are_refused_by_the_names_of_all_factors() -> None:
    check_compatible(FORMAT, replace(FORMAT))
    other = replace(FORMAT, kv_dtype="float16", model_digest="other")
    with pytest.raises(LayoutMismatch, match=r"model_digest: 'm' != 'other'; kv_dtype: 'float32' != 'float16'"):
        check_compatible(FORMAT, other)


def test_a_worker_that_holds_another_part_of_the_model_is_refused_at_the_handshake() -> None:
    side = Side(Fabric().backend(), "p")
    check_peer(side.peer, mine=FORMAT, geometry=GEOMETRY)
    other = rank_of(GEOMETRY, 1, 2, 3)
    expected = r"p is rank 0 of 1 with KV heads 0..2 and layers 0..3, this worker rank 1 of 2 with KV heads 1..2"
    with pytest.raises(LayoutMismatch, match=expected):
        check_peer(side.peer, mine=FORMAT, geometry=other)
    larger = replace(GEOMETRY, block_size=32)
    with pytest.raises(LayoutMismatch, match=r"block_size: 32 != 16: p needs the same models\[\].kv.block_size"):
        check_peer(side.peer, mine=FORMAT, geometry=larger)


@pytest.mark.parametrize("order", KVOrder)
def test_the_unit_of_a_region_is_what_is_contiguous_of_a_block(order: KVOrder) -> None:
    geometry = replace(GEOMETRY, order=order)
    unit = kv_region(AlignedBuffer(geometry.num_bytes).region(REGION_KV), geometry).unit_bytes
    whole = geometry.block_bytes
    assert unit == (whole if order is KVOrder.BLOCK_HEAD_LAYER else whole // geometry.num_layers // 2)


def test_copies_read_like_a_tuple() -> None:
    rows = (Copy(0, 10, 5), Copy(20, 0, 7))
    copies = Copies.of(rows)
    assert tuple(copies) == rows and copies[1] == rows[1] and list(copies[:1]) == [rows[0]] and len(copies) == 2
    assert Copies.of(copies) is copies and copies.num_bytes == 12
