"""The sampler on a GPU draws what the engine's sampler draws."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from core.ids import RequestId
from core.types import SamplingParams
from engine.kernels.gpu.sampling import NOT_FINITE, Choosing, choose, choose_twin
from engine.sampler import sample, sampling_key
from engine.sequence import Sequence, SequenceKey
from tests.kernels.gpu import DEVICE

OPTIONS = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.5},
    {"temperature": 2.0, "top_k": 200, "top_p": 0.95, "min_p": 0.01},
    {"temperature": 0.01},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_p": 0.0001},
    {"temperature": 5.0, "top_k": 100000, "top_p": 0.999},
]


def choosing_of(options: list[dict[str, float]], keys: list[int]) -> Choosing:
    def column(name: str, default: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([each.get(name, default) for each in options], dtype=dtype, device=DEVICE)

    signed = np.array(keys, np.uint64).view(np.int64)
    return Choosing(
        temperature=column("temperature", 1.0, torch.float32),
        top_k=column("top_k", 0, torch.int32),
        top_p=column("top_p", 1.0, torch.float32),
        min_p=column("min_p", 0.0, torch.float32),
        keys=torch.from_numpy(signed).to(DEVICE),
    )


def chosen(scores: torch.Tensor, choosing: Choosing) -> list[int]:
    out = torch.full((len(scores),), -7, dtype=torch.int32, device=DEVICE)
    choose(scores, choosing, out)
    return out.tolist()


@pytest.mark.parametrize("vocab_size", [1, 17, 5000])
def test_it_draws_what_the_engine_draws(vocab_size: int) -> None:
    scores = torch.randn(len(OPTIONS), vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 3
    sequences = [
        Sequence(
            key=SequenceKey(RequestId(f"r{row}"), 1, row % 2),
            tokens=[1] * (7 + row),
            num_prompt_tokens=7,
            sampling=SamplingParams(seed=row, max_tokens=100, **each),  # type: ignore[arg-type]
        )
        for row, each in enumerate(OPTIONS)
    ]
    keys = [sampling_key(row, row % 2, 7 + row) for row in range(len(OPTIONS))]
    expected = [each.token_id for each in sample(scores.clone(), sequences)]
    assert chosen(scores.to(DEVICE), choosing_of(OPTIONS, keys)) == expected


def test_equal_scores_stay_together_and_the_first_of_equals_wins() -> None:
    scores = torch.zeros(1, 100)
    scores[:, 40:44] = 2.0
    keys = [key * 977 for key in range(40)]
    for option in ({"top_k": 2}, {"top_p": 0.01}):
        drawn = chosen(scores.expand(40, -1).to(DEVICE), choosing_of([{"temperature": 1.0, **option}] * 40, keys))
        assert set(drawn) == {40, 41, 42, 43}
    assert chosen(scores.to(DEVICE), choosing_of([{"temperature": 0.0}], [5])) == [40]


def test_forbidden_tokens_are_never_drawn() -> None:
    scores = torch.full((20, 300), float("-inf"))
    scores[:, 7] = -50.0
    scores[:, 299] = -50.0
    options = [{"temperature": 3.0, "top_k": 100}, {"temperature": 3.0, "top_p": 0.99}] * 10
    assert set(chosen(scores.to(DEVICE), choosing_of(options, [*range(20)]))) == {7, 299}


@pytest.mark.parametrize("value", ["nan", "inf", "all -inf"])
def test_scores_that_are_no_numbers_are_told(value: str) -> None:
    scores = torch.zeros(2, 50)
    if value == "all -inf":
        scores[0] = float("-inf")
    else:
        scores[0, 30] = float(value)
    for options in ([{"temperature": 0.0}] * 2, [{"temperature": 1.0, "top_p": 0.5}] * 2):
        first, second = chosen(scores.to(DEVICE), choosing_of(options, [1, 2]))
        assert first == NOT_FINITE
        assert second >= 0


def test_the_twin_draws_the_same() -> None:
    scores = torch.randn(len(OPTIONS), 999, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    choosing = choosing_of(OPTIONS, [5 + row for row in range(len(OPTIONS))])
    out = torch.empty(len(OPTIONS), dtype=torch.int64, device=DEVICE)
    choose_twin(scores, choosing, out)
    assert chosen(scores, choosing) == out.tolist()


def test_no_rows_draw_nothing() -> None:
    assert chosen(torch.zeros(0, 30, device=DEVICE), choosing_of([], [])) == []
