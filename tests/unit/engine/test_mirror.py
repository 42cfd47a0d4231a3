"""The contiguous copy of running sequences' KV changes nothing but speed."""

from __future__ import annotations

import random

import pytest
import torch

from engine.engine import Engine, EngineConfig
from engine.kv_cache import KVCache, KVShape
from engine.model.mirror import KVMirror
from tests.support.engine_runs import Recorded, assert_same_bits, make_sequence, run
from tests.support.random_llama import RandomLlama

DTYPES = [("float32", "float32"), ("int8", "float32"), ("int8", "bfloat16")]


def answers(files: RandomLlama, dtype: str, kv_dtype: str, mirror_bytes: int, num_blocks: int = 400) -> list[Recorded]:
    """Sequences of very different lengths, some of which end early, one of which grows past a seat's capacity."""
    engine = Engine(
        files,  # type: ignore[arg-type]
        EngineConfig(
            num_blocks=num_blocks,
            block_size=8,
            max_step_tokens=64,
            max_sequences=12,
            dtype=dtype,
            kv_dtype=kv_dtype,
            mirror_bytes=mirror_bytes,
        ),
    )
    rng = random.Random(5)
    lengths = [(240, 30), (5, 40), (130, 3), (31, 9), (1, 60), (300, 5), (64, 64), (17, 2), (127, 12)]
    sequences = [
        make_sequence(rng.choices(range(3, 101), k=prompt), max_tokens=answer, ignore_eos=True)
        for prompt, answer in lengths
    ]
    recorded = run(engine, *sequences)
    assert engine.pool.counts().is_idle()
    return [
        Recorded(tokens={each.key: recorded.tokens[each.key]}, scores={each.key: recorded.scores[each.key]})
        for each in sequences
    ]


@pytest.mark.parametrize(("dtype", "kv_dtype"), DTYPES)
@pytest.mark.parametrize("few_blocks", [False, True], ids=["room for all", "preemptions"])
def test_bits_do_not_depend_on_the_mirror(tiny_files: RandomLlama, dtype: str, kv_dtype: str, few_blocks: bool) -> None:
    expected = answers(tiny_files, dtype, kv_dtype, 0)
    seat_bytes = 256 * 2 * 2 * 2 * 8 * 4
    for mirror_bytes in (3 * seat_bytes, 1 << 26):
        got = answers(tiny_files, dtype, kv_dtype, mirror_bytes, num_blocks=70 if few_blocks else 400)
        for mine, theirs in zip(got, expected, strict=True):
            assert list(mine.tokens.values()) == list(theirs.tokens.values())
            if not few_blocks:  # a preempted sequence draws some tokens twice
                assert_same_bits(*(next(iter(each.scores.values())) for each in (mine, theirs)))


class TestSeats:
    def make(self, max_bytes: int = 1 << 24) -> tuple[KVCache, KVMirror]:
        shape = KVShape(block_size=8, num_layers=2, num_kv_heads=2, head_dim=4, dtype="float32")
        cache = KVCache(shape, 40)
        cache.tensor.copy_(torch.randn(cache.tensor.shape))
        return cache, KVMirror(cache, max_bytes=max_bytes, max_seats=3)

    def test_a_seat_holds_what_the_blocks_hold_and_zeros_behind_it(self) -> None:
        cache, mirror = self.make()
        table = random.Random(1).sample(range(40), 10)
        for position in (70, 13):  # the second time the seat has leavings
            (seat,) = mirror.seat_all([(object(), table, position)])
            assert seat is not None
            for place in range(position):
                expected = cache.tensor[table[place // 8], :, :, :, place % 8]
                assert torch.equal(seat.arena.kv[:, :, seat.index, :, place], expected.permute(1, 2, 0, 3))
            assert not seat.arena.kv[:, :, seat.index, :, position:].any()

    def test_a_seat_is_kept_while_its_owner_takes_every_step_and_filled_anew_otherwise(self) -> None:
        cache, mirror = self.make()
        owner, table = object(), list(range(10))
        (seat,) = mirror.seat_all([(owner, table, 20)])
        cache.tensor.zero_()
        assert mirror.seat_all([(owner, table, 21)]) == [seat]
        assert seat is not None and seat.arena.kv[:, :, seat.index, :, :20].all()
        (seat,) = mirror.seat_all([(owner, table, 30)])
        assert seat is not None and not seat.arena.kv[:, :, seat.index].any()

    def test_memory_is_bounded_and_comes_back(self) -> None:
        seat_bytes = 256 * 2 * 2 * 2 * 4 * 4
        _, mirror = self.make(max_bytes=2 * seat_bytes)
        owners = [object() for _ in range(3)]
        seats = mirror.seat_all([(owner, [0], 1) for owner in owners])
        assert [seat is None for seat in seats] == [False, False, True]
        assert mirror.used_bytes == 2 * seat_bytes
        assert mirror.seat_all([]) == []
        assert mirror.used_bytes == 0


@pytest.mark.parametrize(("dtype", "kv_dtype"), DTYPES)
def test_bits_of_every_exact_dtype_do_not_depend_on_company_chunks_or_blocks(
    tiny_files: RandomLlama, dtype: str, kv_dtype: str
) -> None:
    rng = random.Random(7)
    prompts = [rng.choices(range(3, 101), k=length) for length in (150, 3, 40, 97, 1)]

    def engine(**changes: int) -> Engine:
        config = EngineConfig(
            **{"num_blocks": 400, "block_size": 16, "max_step_tokens": 512, "max_sequences": 8, **changes},  # type: ignore[arg-type]
            dtype=dtype,
            kv_dtype=kv_dtype,
        )
        return Engine(tiny_files, config)  # type: ignore[arg-type]

    alone = []
    for tokens in prompts:
        sequence = make_sequence(tokens, max_tokens=20, ignore_eos=True)
        alone.append(run(engine(), sequence).scores[sequence.key])
    for changes in ({}, {"block_size": 24}, {"max_step_tokens": 11}, {"max_step_tokens": 64, "max_sequences": 3}):
        sequences = [make_sequence(tokens, max_tokens=20, ignore_eos=True) for tokens in prompts]
        together = run(engine(**changes), *sequences)
        for sequence, expected in zip(sequences, alone, strict=True):
            assert_same_bits(together.scores[sequence.key], expected)
