"""Paged attention equals the textbook, and its bits are those of the row's own context."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from engine.kv_cache import KVCache, KVShape
from engine.model.attention import Span
from engine.model.attention_cpu import CpuAttention
from engine.model.rope import RopeTables

HEADS, KV_HEADS, DIM, LENGTH = 6, 2, 16, 700
AS_THEY_ARE = RopeTables(torch.ones(LENGTH, DIM), torch.zeros(LENGTH, DIM))
"""Of a rotation by nothing."""


class Paged:
    """The same random Q, K and V of one sequence, in a cache of some block size, in shuffled blocks full of garbage."""

    def __init__(self, block_size: int = 16, *, garbage: float = float("nan")) -> None:
        generator = torch.Generator().manual_seed(1)
        self.q = torch.randn(LENGTH, HEADS, DIM, generator=generator)
        self.kv = torch.randn(LENGTH, 2, KV_HEADS, DIM, generator=generator)
        shape = KVShape(block_size=block_size, num_layers=2, num_kv_heads=KV_HEADS, head_dim=DIM, dtype="float32")
        num_blocks = -(-LENGTH // block_size)
        self.cache = KVCache(shape, num_blocks + 3)
        self.cache.tensor[: num_blocks + 3] = garbage
        self.table = random.Random(2).sample(range(num_blocks + 3), num_blocks)

    def run(self, *spans: tuple[int, int], layer: int = 1, window: int | None = None) -> Tensor:
        """Attention of the given (start, number) spans in one step; earlier keys must have been written."""
        plan = CpuAttention(
            self.cache, [Span(block_table=self.table, start=start, num_tokens=number) for start, number in spans], HEADS
        )
        rows = torch.cat([torch.arange(start, start + number) for start, number in spans])
        padded = torch.cat([rows, torch.zeros(3, dtype=torch.long)])
        out = torch.full((len(padded), HEADS, DIM), 5.0)
        qkv = torch.cat([self.q[padded], self.kv[padded].flatten(1, 2)], 1)
        plan.attend(layer, qkv, AS_THEY_ARE, out, window=window)
        assert (out[len(rows) :] == 5.0).all(), "padding is left alone"
        return out[: len(rows)]


def textbook(paged: Paged, window: int = LENGTH) -> Tensor:
    """Causal attention in float64, each query to its own key and the `window - 1` before it."""
    q, kv = paged.q.double(), paged.kv.double().repeat_interleave(HEADS // KV_HEADS, 2)
    scores = torch.einsum("qhd,khd->hqk", q, kv[:, 0]) * DIM**-0.5
    seen = torch.ones(LENGTH, LENGTH).tril().triu(1 - window).bool()
    scores.masked_fill_(~seen, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), kv[:, 1])


@pytest.fixture(scope="module")
def whole() -> Tensor:
    return Paged().run((0, LENGTH))


def test_a_whole_prompt_equals_the_textbook(whole: Tensor) -> None:
    assert torch.allclose(whole.double(), textbook(Paged()), atol=1e-5)


@pytest.mark.parametrize("block_size", [1, 8, 16, 24, 128, 200])
def test_bits_do_not_depend_on_the_block_size(whole: Tensor, block_size: int) -> None:
    assert torch.equal(Paged(block_size).run((0, LENGTH)), whole)


@pytest.mark.parametrize("chunk", [1, 2, 7, 64, 129, 512])
def test_bits_do_not_depend_on_the_chunks(whole: Tensor, chunk: int) -> None:
    paged = Paged()
    parts = [paged.run((start, min(chunk, LENGTH - start))) for start in range(0, LENGTH, chunk)]
    assert torch.equal(torch.cat(parts), whole)


def test_bits_do_not_depend_on_who_shares_the_step(whole: Tensor) -> None:
    paged = Paged()
    paged.run((0, LENGTH))  # writes all keys; the runs below write the same values again
    positions = [699, 0, 127, 128, 3, 255, 256, 500, 640, 31, 511, 64]
    single = paged.run(*((position, 1) for position in positions))
    assert torch.equal(single, whole[positions])
    mixed = paged.run((5, 1), (100, 33), (600, 1), (300, 2), (250, 1))
    assert torch.equal(mixed, torch.cat([whole[5:6], whole[100:133], whole[600:601], whole[300:302], whole[250:251]]))


def test_leavings_of_other_sequences_are_never_seen() -> None:
    """Freed blocks may hold anything, NaN included: zero weight times NaN would be NaN."""
    clean, dirty = Paged(garbage=0.0), Paged()
    for start, number in ((0, 130), (130, 1), (131, 1), (132, 90)):
        assert torch.equal(dirty.run((start, number)), clean.run((start, number)))


@pytest.mark.parametrize("window", [1, 2, 100, 128, 129, 300, 699, 1000])
def test_a_window_equals_the_textbook_and_its_bits_do_not_depend_on_chunks_or_blocks(window: int) -> None:
    whole = Paged().run((0, LENGTH), window=window)
    assert torch.allclose(whole.double(), textbook(Paged(), window), atol=1e-5)
    for chunk, block_size in ((1, 16), (7, 24), (64, 128), (129, 200), (512, 1)):
        paged = Paged(block_size)
        parts = [paged.run((start, min(chunk, LENGTH - start)), window=window) for start in range(0, LENGTH, chunk)]
        assert torch.equal(torch.cat(parts), whole), f"chunks of {chunk}, blocks of {block_size}"
    paged.run((0, LENGTH))
    mates = paged.run((640, 1), (5, 1), (127, 1), (300, 60), (699, 1), window=window)
    assert torch.equal(mates, torch.cat([whole[640:641], whole[5:6], whole[127:128], whole[300:360], whole[699:]]))
