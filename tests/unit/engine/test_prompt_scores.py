"""Scores of the prompt: the same bits whatever the chunks, told once, never from the prefix cache."""

from __future__ import annotations

import pytest

from core.types import TokenLogprobs
from engine.engine import Engine, EngineConfig
from engine.sequence import Sequence
from tests.support.engine_runs import Recorded, make_sequence, run
from tests.support.random_llama import RandomLlama

PROMPT = [3 + (7 * index) % 90 for index in range(70)]


def make_engine(files: RandomLlama, **changes: object) -> Engine:
    return Engine(files, EngineConfig(**{"num_blocks": 60, "block_size": 4, **changes}))  # type: ignore[arg-type]


def scored(**options: object) -> Sequence:
    return make_sequence(PROMPT, prompt_logprobs=2, max_tokens=6, **options)


def told(recorded: Recorded, sequence: Sequence) -> list[tuple[TokenLogprobs, ...]]:
    return [output.prompt_logprobs for output in recorded.outputs[sequence.key]]


@pytest.fixture
def expected(tiny_files: RandomLlama) -> tuple[TokenLogprobs, ...]:
    recorded = run(make_engine(tiny_files), sequence := scored())
    return told(recorded, sequence)[0]


@pytest.mark.parametrize("max_step_tokens", [8, 13, 65, 512])
def test_chunks_and_neighbours_change_nothing(
    tiny_files: RandomLlama, expected: tuple[TokenLogprobs, ...], max_step_tokens: int
) -> None:
    assert len(expected) == len(PROMPT) - 1
    engine = make_engine(tiny_files, max_step_tokens=max_step_tokens, max_sequences=4)
    sequences = [scored(), make_sequence(PROMPT[:30]), make_sequence([5, 6, 7], prompt_logprobs=0)]
    recorded = run(engine, *sequences)
    assert told(recorded, sequences[0]) == [expected, (), (), (), (), ()]
    assert [len(one) for one in told(recorded, sequences[1])] == [0] * 8
    (first, *rest) = told(recorded, sequences[2])
    assert [one.top for one in first] == [(), ()]
    assert not any(rest)


def test_the_prefix_cache_is_not_used(tiny_files: RandomLlama, expected: tuple[TokenLogprobs, ...]) -> None:
    engine = make_engine(tiny_files)
    run(engine, make_sequence(PROMPT))
    recorded = run(engine, again := scored())
    assert again.num_cached == 0
    assert told(recorded, again)[0] == expected


def test_a_sequence_that_arrives_with_its_prompt_computed_has_none_to_tell(tiny_files: RandomLlama) -> None:
    """What the prefill worker told is not told again by the decode worker."""
    engine = make_engine(tiny_files)
    first = scored(pause_at=len(PROMPT) + 1)
    engine.add(first)
    while first.state != "paused":
        engine.step()
    arrived = engine.detach(first.key)
    arrived.pause_at = None
    recorded = run(engine, arrived)
    assert not any(told(recorded, arrived))


def test_a_prompt_of_one_token_has_no_scores(tiny_files: RandomLlama) -> None:
    recorded = run(make_engine(tiny_files), alone := make_sequence([9], prompt_logprobs=3))
    assert not any(told(recorded, alone))
