"""The default model on the real engine: the reference's tokens, and one set of bits whatever the path (law 3)."""

from __future__ import annotations

import random
from typing import Any

import pytest

from engine.engine import Engine, EngineConfig
from engine.sequence import Sequence
from modelfiles.model import ModelFiles
from tests.support.engine_runs import Recorded, assert_same_bits, make_sequence, run, teacher_forced
from tests.support.hf_reference import MAX_ERROR, HfReference

PROMPTS = {
    "one token": "Hi",
    "chat": "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "plain": "The three laws of robotics, as Isaac Asimov wrote them, are:\n1.",
    "scripts": "Translate: \u6f22\u5b57 \U0001f680 caf\u00e9 na\u00efve \u0416\u0443\u043a.",
    "code": "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "several tiles": "In the beginning there was nothing but a long list of words. " * 12,
}
NUM_TOKENS = 20


def encode(files: ModelFiles, text: str) -> list[int]:
    return files.tokenizer().encode(text, parse_special=True)


def share(engine: Engine, files: ModelFiles, **changes: Any) -> Engine:
    """Another engine on the same weights."""
    return Engine(files, EngineConfig(**{"num_blocks": 300, **changes}), model=engine.model)


@pytest.fixture(scope="module")
def alone(real_engine: Engine, real_files: ModelFiles) -> dict[str, tuple[Sequence, Recorded]]:
    """Each prompt by itself on the default engine."""
    runs = {}
    for name, text in PROMPTS.items():
        sequence = make_sequence(encode(real_files, text), max_tokens=NUM_TOKENS, ignore_eos=True)
        runs[name] = (sequence, run(real_engine, sequence))
    return runs


@pytest.mark.parametrize("name", PROMPTS)
def test_greedy_tokens_are_the_references(
    name: str, real_engine: Engine, real_files: ModelFiles, reference: HfReference, alone: Any
) -> None:
    sequence, recorded = alone[name]
    answer = recorded.tokens[sequence.key]
    divergence = reference.check_greedy(
        encode(real_files, PROMPTS[name]), answer, lambda tokens: teacher_forced(real_engine, tokens)
    )
    print(f"{name}: {'equal' if divergence is None else f'near tie at token {divergence}'}")


def test_scores_are_as_near_to_the_exact_ones_as_the_references(
    real_engine: Engine, real_files: ModelFiles, reference: HfReference
) -> None:
    tokens = encode(real_files, PROMPTS["several tiles"])
    exact = reference.exact_logits(tokens)
    mine = (teacher_forced(real_engine, tokens) - exact).abs()
    theirs = (reference.logits(tokens) - exact).abs()
    print(f"largest error: {mine.max():.1e}, the reference's {theirs.max():.1e}")
    assert mine.max() <= MAX_ERROR
    assert mine.mean() <= 2 * theirs.mean()


def test_the_capital_of_france(real_files: ModelFiles, alone: Any) -> None:
    sequence, recorded = alone["chat"]
    assert "Paris" in real_files.tokenizer().decode(recorded.tokens[sequence.key], skip_special_tokens=True)


@pytest.mark.parametrize(
    "changes",
    [
        {"max_step_tokens": 512},
        {"max_step_tokens": 64, "block_size": 8, "num_blocks": 600},
        {"max_step_tokens": 7, "max_sequences": 7, "block_size": 32},
        {"num_blocks": 24, "projected_tokens": 1},
    ],
    ids=["together", "chunks of 64, blocks of 8", "chunks of 7, blocks of 32", "preempted"],
)
def test_bits_are_those_of_the_solo_run(
    changes: dict[str, Any], real_engine: Engine, real_files: ModelFiles, alone: Any
) -> None:
    engine = share(real_engine, real_files, **changes)
    names = list(PROMPTS)
    random.Random(str(changes)).shuffle(names)
    sequences = {
        name: make_sequence(encode(real_files, PROMPTS[name]), max_tokens=NUM_TOKENS, ignore_eos=True) for name in names
    }
    mates = [
        make_sequence(
            random.Random(index).choices(range(100, 40_000), k=1 + 9 * index),
            max_tokens=5 + index,
            temperature=1.0,
            seed=index,
        )
        for index in range(2)
    ]
    recorded = run(engine, *sequences.values(), *mates)
    assert bool(engine.counters().num_preemptions) == (changes.get("num_blocks") == 24)
    assert engine.pool.counts().is_idle()
    for name, sequence in sequences.items():
        expected, solo = alone[name]
        assert recorded.tokens[sequence.key] == solo.tokens[expected.key], name
        assert_same_bits(recorded.scores[sequence.key], solo.scores[expected.key])


@pytest.mark.parametrize("num_accepted", [1, 7, 19])
def test_bits_are_those_of_an_answer_that_was_never_interrupted(
    num_accepted: int, real_engine: Engine, real_files: ModelFiles, alone: Any
) -> None:
    """A retry prefills prompt and accepted tokens again."""
    expected, solo = alone["plain"]
    tokens, scores = solo.tokens[expected.key], solo.scores[expected.key]
    prompt = encode(real_files, PROMPTS["plain"])
    retried = make_sequence(
        [*prompt, *tokens[:num_accepted]], num_prompt_tokens=len(prompt), max_tokens=NUM_TOKENS, ignore_eos=True
    )
    recorded = run(real_engine, retried)
    assert recorded.tokens[retried.key] == tokens[num_accepted:]
    assert_same_bits(recorded.scores[retried.key], scores[num_accepted:])


def test_bits_are_the_same_when_another_engine_computed_the_prompt(
    real_engine: Engine, real_files: ModelFiles, alone: Any
) -> None:
    """The hand-off in small: blocks copied byte by byte from one engine's memory into another's."""
    holder, reader = share(real_engine, real_files), share(real_engine, real_files)
    reader.pool.allocate(11)  # so that the block numbers differ
    expected, solo = alone["several tiles"]
    prompt = encode(real_files, PROMPTS["several tiles"])
    paused = make_sequence(prompt, max_tokens=NUM_TOKENS, ignore_eos=True, pause_at=len(prompt) + 1)
    first = run(holder, paused).tokens[paused.key]
    held = holder.detach(paused.key).block_table
    blocks = reader.pool.allocate(len(held))
    reader.cache.tensor[blocks] = holder.cache.tensor[held]
    arrived = make_sequence(
        [*prompt, *first],
        num_prompt_tokens=len(prompt),
        num_computed=len(prompt),
        block_table=blocks,
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
    )
    recorded = run(reader, arrived)
    assert first + recorded.tokens[arrived.key] == solo.tokens[expected.key]
    assert_same_bits(recorded.scores[arrived.key], solo.scores[expected.key][1:])
    assert arrived.num_prompt_computed == 0 == reader.counters().prompt_tokens_computed
