"""Every family against `transformers` on small random models: the same scores, the same answer, one set of bits."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest
import torch

from engine.engine import Engine, EngineConfig
from modelfiles import ModelFiles, open_model
from tests.support.engine_runs import assert_same_bits, make_sequence, run, teacher_forced
from tests.support.hf_reference import MAX_ERROR, HfReference
from tests.support.tiny_families import CONFIGS, VOCAB_SIZE, write_family

NUM_TOKENS = 8
LENGTHS = (1, 3, 40, 150)


class Family(NamedTuple):
    files: ModelFiles
    engine: Engine
    reference: HfReference


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB_SIZE), k=length)


@pytest.fixture(scope="module", params=CONFIGS)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    tiny = write_family(request.param, tmp_path_factory.mktemp("family"))
    files = open_model(str(tiny.folder))
    return Family(files, Engine(files, EngineConfig(num_blocks=120)), HfReference(model=tiny.reference))


def test_scores_are_the_references(family: Family) -> None:
    _, engine, reference = family
    tokens = prompt(0, 150)
    error = (teacher_forced(engine, tokens) - reference.logits(tokens)).abs().max()
    print(f"largest error {error:.1e}")
    assert error <= MAX_ERROR


def test_greedy_answers_are_the_references(family: Family) -> None:
    _, engine, reference = family
    for length in (1, 30, 140):
        sequence = make_sequence(prompt(length, length), max_tokens=NUM_TOKENS, ignore_eos=True)
        answer = run(engine, sequence).tokens[sequence.key]
        reference.check_greedy(prompt(length, length), answer, lambda tokens: teacher_forced(engine, tokens))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_step_tokens": 9, "max_sequences": 9, "block_size": 24},
        {"dtype": "int8", "max_step_tokens": 50, "max_sequences": 9},
    ],
    ids=["together", "small chunks", "int8"],
)
def test_bits_are_those_of_the_solo_run(family: Family, changes: dict[str, Any]) -> None:
    files, engine, _ = family
    if "dtype" in changes:
        engine = Engine(files, EngineConfig(num_blocks=120, dtype=changes["dtype"]))
    expected = []
    for length in LENGTHS:
        sequence = make_sequence(prompt(length, length), max_tokens=NUM_TOKENS, ignore_eos=True)
        recorded = run(engine, sequence)
        expected.append(recorded.scores[sequence.key])
    other = Engine(files, EngineConfig(**{"num_blocks": 120, **changes}), model=engine.model)
    sequences = [make_sequence(prompt(length, length), max_tokens=NUM_TOKENS, ignore_eos=True) for length in LENGTHS]
    recorded = run(other, *sequences)
    for sequence, scores in zip(sequences, expected, strict=True):
        assert_same_bits(recorded.scores[sequence.key], scores)


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_scores_in_fewer_bits_are_close_to_the_references(family: Family, dtype: str) -> None:
    """Random weights are harder on small integers than trained ones; the real cost is in docs/measurements.md."""
    files, _, reference = family
    tokens = prompt(0, 150)
    mine = teacher_forced(Engine(files, EngineConfig(num_blocks=40, dtype=dtype)), tokens)
    theirs = reference.logits(tokens)
    correlation = float(torch.corrcoef(torch.stack([mine.flatten(), theirs.flatten()]))[0, 1])
    print(f"{dtype}: correlation {correlation:.4f}")
    assert correlation > 0.99
