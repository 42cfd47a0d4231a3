"""Law 3 in bfloat16 on the machine at hand (docs/adr/0015): bits were equal wherever we measured; what is promised is a
bound."""

from __future__ import annotations

import functools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from core.errors import OutOfBlocks
from engine.engine import Engine, EngineConfig
from engine.model.linear_bfloat16 import Bfloat16Linear
from modelfiles.model import ModelFiles
from tests.support.engine_runs import make_sequence, run
from tests.support.random_requests import Asked, Model, requests

RESOLUTION = 2.0**-8
"""Of bfloat16: the largest relative error of one rounding."""
MAX_ERROR = 16 * RESOLUTION
"""Of scores, relative to the largest one of their row: what sums in another order were measured to move, and room."""


@functools.cache
def tiny() -> Model:
    return Model("bfloat16")


def check_within_bound(
    tokens: list[int], scores: list[Tensor], expected_tokens: list[int], expected_scores: list[Tensor]
) -> int:
    """Equal tokens, or a first divergence at a near tie; scores agree up to there. Returns how many rows differ."""
    num_unequal = 0
    for at, (mine, theirs) in enumerate(zip(scores, expected_scores, strict=False)):
        bound = MAX_ERROR * float(theirs.abs().max())
        num_unequal += not torch.equal(mine, theirs)
        assert float((mine - theirs).abs().max()) <= bound, f"scores of token {at}"
        if tokens[at] != expected_tokens[at]:
            best = theirs.topk(2).values
            assert float(best[0] - best[1]) <= bound, f"token {at} differs, and was no near tie"
            return num_unequal
    assert tokens == expected_tokens
    return num_unequal


@pytest.mark.parametrize("seed", range(6))
def test_a_row_differs_by_one_rounding_at_most_in_any_company(seed: int) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    shape = (rng.randint(1, 1600), rng.randint(1, 1600))
    layer = Bfloat16Linear(torch.randn(shape, generator=generator) * 0.05)
    x = torch.randn(256, shape[1], generator=generator)
    expected = layer(x)
    num_unequal = 0
    for num_rows in range(4, 257, 12):
        first = rng.randint(0, 256 - num_rows)
        rows = slice(first, first + num_rows)
        y = layer(x[rows].contiguous())
        num_unequal += not torch.equal(y, expected[rows])
        torch.testing.assert_close(y, expected[rows], rtol=2 * RESOLUTION, atol=RESOLUTION)
    print(f"{shape}: other bits in {num_unequal} of {len(range(4, 257, 12))} companies")


@settings(max_examples=12)
@given(
    asked=st.lists(requests, min_size=2, max_size=5),
    block_size=st.sampled_from((1, 3, 16)),
    num_slots=st.sampled_from((180, 600)),
    max_step_tokens=st.sampled_from((8, 30, 256)),
)
def test_answers_are_within_the_bound_in_any_company(
    asked: list[Asked], block_size: int, num_slots: int, max_step_tokens: int
) -> None:
    greedy = [Asked(prompt=each.prompt, options=(("max_tokens", 12), ("ignore_eos", True))) for each in asked]
    engine = tiny().engine(
        block_size=block_size,
        num_blocks=-(-num_slots // block_size),
        max_step_tokens=max_step_tokens,
        max_sequences=4,
        projected_tokens=1,
    )
    sequences = [each.sequence(engine) for each in greedy]
    recorded = run(engine, *sequences)
    for each, sequence in zip(greedy, sequences, strict=True):
        if any(isinstance(output.error, OutOfBlocks) for output in recorded.outputs[sequence.key]):
            continue
        answer = tiny().alone(each)
        expected = [torch.frombuffer(bytearray(row), dtype=torch.float32) for row in answer.scores]
        check_within_bound(recorded.tokens[sequence.key], recorded.scores[sequence.key], list(answer.tokens), expected)


@pytest.mark.soak
@pytest.mark.parametrize("max_step_tokens", [7, 64, 512])
def test_answers_of_the_default_model_are_within_the_bound(real_files: ModelFiles, max_step_tokens: int) -> None:
    torch.set_num_threads(1)
    solo = Engine(real_files, EngineConfig(num_blocks=300, dtype="bfloat16"))
    changes = {"block_size": 8, "num_blocks": 60, "max_step_tokens": max_step_tokens, "max_sequences": 7}
    crowded = Engine(real_files, EngineConfig(dtype="bfloat16", projected_tokens=1, **changes), model=solo.model)
    rng = random.Random(max_step_tokens)
    prompts = [rng.choices(range(100, 40_000), k=length) for length in (1, 5, 30, 90, 200)]
    sequences = [make_sequence(prompt, max_tokens=24, ignore_eos=True) for prompt in prompts]
    recorded = run(crowded, *sequences)
    num_unequal = 0
    for prompt, sequence in zip(prompts, sequences, strict=True):
        alone = make_sequence(prompt, max_tokens=24, ignore_eos=True)
        expected = run(solo, alone)
        num_unequal += check_within_bound(
            recorded.tokens[sequence.key],
            recorded.scores[sequence.key],
            expected.tokens[alone.key],
            expected.scores[alone.key],
        )
    print(f"chunks of {max_step_tokens}: other bits in {num_unequal} of {24 * len(prompts)} rows")
