"""Room for KV on a GPU: the sum, and the error that shows it."""

from __future__ import annotations

import pytest

from core.errors import ConfigError
from engine.gpu_memory import RESERVE_BYTES, GpuMemory, blocks_within
from engine.kv_cache import KVShape

GIB = 1 << 30
SHAPE = KVShape(block_size=16, num_layers=36, num_kv_heads=8, head_dim=128, dtype="bfloat16")
H200 = GpuMemory(total=140 * GIB, others=1 * GIB, weights=15 * GIB, step=2 * GIB)


def test_blocks_take_what_the_rest_leaves() -> None:
    left = 126 * GIB - 18 * GIB - RESERVE_BYTES
    assert H200.left(0.9) == left
    assert blocks_within(H200, 0.9, SHAPE, min_tokens=8192) == left // SHAPE.block_bytes
    assert SHAPE.block_bytes == 16 * 147456


def test_one_sequence_must_fit_to_the_byte() -> None:
    needed = 10 * SHAPE.block_bytes
    memory = GpuMemory(total=needed + 60, others=10, weights=20, step=30, reserve=0)
    assert blocks_within(memory, 1.0, SHAPE, min_tokens=160) == 10
    with pytest.raises(ConfigError, match="no room for one sequence of 160 tokens"):
        blocks_within(
            GpuMemory(total=needed + 59, others=10, weights=20, step=30, reserve=0), 1.0, SHAPE, min_tokens=160
        )


def test_the_error_shows_the_sum_and_what_to_do() -> None:
    small = GpuMemory(total=16 * GIB, others=2 * GIB, weights=15 * GIB, step=GIB // 2)
    with pytest.raises(ConfigError) as raised:
        blocks_within(small, 0.9, SHAPE, min_tokens=8192)
    told = str(raised.value)
    for part in ("16.00 GiB of memory x 0.9", "2.00 GiB of other", "15.00 GiB of weights", "0.50 GiB of the largest",
                 "0.50 GiB in reserve", "= -3.60 GiB", "raise kv.memory_fraction"):  # fmt: skip
        assert part in told, told
