"""D makes P's digests in its own memory, whatever its ranks, block size and memory order."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from core.errors import LayoutMismatch
from core.handoff import DigestKind
from core.kv import KVGeometry, KVOrder, kv_head_range
from kvtransfer.digest import DIGEST_BYTES, Digester, of_heads
from kvtransfer.plan import Blocks, plan_blocks, skippable
from kvtransfer.ranks import choose_sources, held_box, shared_box

NUM_KV_HEADS, NUM_LAYERS = 3, 2


def geometry(block_size: int, order: KVOrder, rank: int = 0, num_ranks: int = 1) -> KVGeometry:
    return KVGeometry(
        num_blocks=12,
        block_size=block_size,
        num_layers=NUM_LAYERS,
        num_kv_heads=len(kv_head_range(rank, num_ranks, NUM_KV_HEADS)),
        head_dim=4,
        dtype_bytes=2,
        rank=rank,
        num_ranks=num_ranks,
        order=order,
    )


def random_memory(of: KVGeometry, seed: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, of.num_bytes, dtype=np.uint8)


def read(source: Blocks, target: Blocks, source_kv: NDArray[np.uint8], target_kv: NDArray[np.uint8], skip: int) -> None:
    plan = plan_blocks(source, target, num_kv_heads=NUM_KV_HEADS, first_token=skip)
    for chunk in plan.chunks:
        for remote, local, num_bytes in chunk:
            target_kv[local : local + num_bytes] = source_kv[remote : remote + num_bytes]


sides = st.tuples(st.sampled_from([8, 16, 32]), st.sampled_from(KVOrder), st.sampled_from([1, 2, 3, 4, 6]))


@settings(max_examples=60)
@given(sides, sides, st.data())
def test_digests_of_p_are_made_again_at_d(
    p: tuple[int, KVOrder, int], d: tuple[int, KVOrder, int], data: st.DataObject
) -> None:
    sources = [geometry(p[0], p[1], rank, p[2]) for rank in range(p[2])]
    target = geometry(d[0], d[1], data.draw(st.integers(0, d[2] - 1)), d[2])
    num_tokens = data.draw(st.integers(1, 64))
    num_units = sources[0].blocks_for(num_tokens)
    skip = skippable(data.draw(st.integers(0, num_tokens)), sources[0], target)
    # D takes blocks for all slots of P's last block.
    num_local = target.blocks_for(num_units * p[0]) - skip // d[0]
    local_ids = list(data.draw(st.permutations(range(12))))[:num_local]
    local = Blocks(geometry=target, block_ids=local_ids, first_block=skip // d[0])
    target_kv = random_memory(target, 99)
    units = range(skip // p[0], num_units)
    changed = data.draw(st.booleans())

    digester = Digester(DigestKind.WSUM64, target, target_kv)
    for index in choose_sources(sources, target, NUM_KV_HEADS).read:
        source = sources[index]
        source_kv = random_memory(source, index)
        blocks = list(data.draw(st.permutations(range(12))))[: len(units)]
        made = Digester(DigestKind.WSUM64, source, source_kv).digest(blocks)
        remote = Blocks(geometry=source, block_ids=blocks, first_block=units.start)
        read(remote, local, source_kv, target_kv, skip)

        heads = shared_box(source, target, NUM_KV_HEADS).heads
        first_head = held_box(source, NUM_KV_HEADS).heads.start
        in_list = range(heads.start - first_head, heads.stop - first_head)
        expected = of_heads(made, source.num_kv_heads, in_list)
        assert len(expected) == len(units) * len(heads) * DIGEST_BYTES
        again = {"num_kv_heads": NUM_KV_HEADS, "source_heads": heads}
        assert digester.digest_as(source, local, units, **again) == expected  # type: ignore[arg-type]
        if changed and units:
            plan = plan_blocks(remote, local, num_kv_heads=NUM_KV_HEADS, first_token=skip)
            copy = plan.chunks[0][data.draw(st.integers(0, len(plan.chunks[0]) - 1))]
            target_kv[copy.local_offset + data.draw(st.integers(0, copy.num_bytes - 1))] ^= 1
            assert digester.digest_as(source, local, units, **again) != expected  # type: ignore[arg-type]


@pytest.mark.parametrize("order", KVOrder)
def test_the_same_kv_has_the_same_digests_in_every_memory_order(order: KVOrder) -> None:
    ours, other = geometry(16, KVOrder.BLOCK_HEAD_LAYER), geometry(16, order)
    kv, other_kv = random_memory(ours, 1), np.zeros(other.num_bytes, dtype=np.uint8)
    ids = [3, 0, 7]
    read(Blocks(geometry=ours, block_ids=ids), Blocks(geometry=other, block_ids=[1, 2, 9]), kv, other_kv, 0)
    for kind in (DigestKind.WSUM64, DigestKind.CRC32):
        assert Digester(kind, other, other_kv).digest([1, 2, 9]) == Digester(kind, ours, kv).digest(ids)
    assert Digester(DigestKind.OFF, other, other_kv).digest([1]) == b""


def test_what_is_here_in_part_cannot_be_verified_and_is_refused() -> None:
    large, small = geometry(32, KVOrder.BLOCK_HEAD_LAYER), geometry(16, KVOrder.BLOCK_HEAD_LAYER)
    digester = Digester(DigestKind.WSUM64, small, random_memory(small, 1))
    heads = range(NUM_KV_HEADS)
    part = Blocks(geometry=small, block_ids=[1, 2, 3])  # 48 tokens, of two blocks of 32
    with pytest.raises(LayoutMismatch, match=r"tokens 0\.\.63 are digested, here are 0\.\.47: whole blocks"):
        digester.digest_as(large, part, range(2), num_kv_heads=NUM_KV_HEADS, source_heads=heads)
    behind = replace(part, first_block=1)  # its first half was here before
    with pytest.raises(LayoutMismatch, match=r"tokens 0\.\.31 are digested, here are 16\.\.63"):
        digester.digest_as(large, behind, range(1), num_kv_heads=NUM_KV_HEADS, source_heads=heads)
    stage = replace(small, first_layer=1, num_layers=1)
    digester = Digester(DigestKind.WSUM64, stage, random_memory(stage, 1))
    blocks = Blocks(geometry=stage, block_ids=[0])
    with pytest.raises(
        LayoutMismatch, match=r"a digest covers layers 0\.\.1, here are only 1\.\.1: set transfer\.digest"
    ):
        digester.digest_as(small, blocks, range(1), num_kv_heads=NUM_KV_HEADS, source_heads=heads)


@pytest.mark.parametrize(
    ("tokens", "source", "target", "expected"), [(48, 16, 32, 32), (48, 32, 16, 32), (47, 8, 8, 40)]
)
def test_a_prefix_is_skipped_in_whole_blocks_of_both_sides(
    tokens: int, source: int, target: int, expected: int
) -> None:
    order = KVOrder.BLOCK_HEAD_LAYER
    assert skippable(tokens, geometry(source, order), geometry(target, order)) == expected
