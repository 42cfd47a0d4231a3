"""The KV memory is what its geometry says: peers read it by arithmetic."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import replace

import pytest
import torch

from core.errors import ConfigError
from engine.kv_cache import KVCache, KVShape, num_blocks_for

SHAPE = KVShape(block_size=4, num_layers=3, num_kv_heads=2, head_dim=8, dtype="float32")


def test_blocks_and_heads_are_contiguous_ranges_at_computed_addresses() -> None:
    cache = KVCache(SHAPE, 5)
    geometry, region = cache.geometry, cache.region
    assert region.address % mmap.PAGESIZE == 0
    assert region.num_bytes == 5 * geometry.block_bytes
    cache.tensor[3, 1] = 7.0
    memory = (ctypes.c_float * (region.num_bytes // 4)).from_address(region.address)
    values = torch.tensor(list(memory))
    first = (3 * geometry.block_bytes + geometry.head_bytes) // 4
    last = first + geometry.head_bytes // 4
    assert (values[first:last] == 7.0).all()
    assert values[:first].eq(0).all() and values[last:].eq(0).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compiled_code_sees_the_same_memory(dtype: str) -> None:
    cache = KVCache(replace(SHAPE, dtype=dtype), 5)
    cache.tensor[2, 1, 2, 1, 3, :] = -2.0
    numbers = cache.array[2, 1, 2, 1, 3]
    assert (numbers == (0xC000 if dtype == "bfloat16" else -2.0)).all()
    assert cache.array.ctypes.data == cache.region.address and cache.array.nbytes == cache.region.num_bytes


def test_memory_that_cannot_hold_one_sequence_is_refused_with_the_remedy() -> None:
    assert num_blocks_for(SHAPE, memory_bytes=10 * SHAPE.block_bytes + 5, min_tokens=40) == 10
    with pytest.raises(ConfigError, match=f"memory_bytes to {11 * SHAPE.block_bytes}"):
        num_blocks_for(SHAPE, memory_bytes=10 * SHAPE.block_bytes + 5, min_tokens=41)


def test_more_memory_than_there_can_be_is_refused_with_the_setting_to_change() -> None:
    shape = KVShape(block_size=16, num_layers=30, num_kv_heads=3, head_dim=64, dtype="float32")
    with pytest.raises(ConfigError, match=r"lower models\[\]\.kv\.memory_bytes"):
        KVCache(shape, 1 << 40)
