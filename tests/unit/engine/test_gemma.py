"""Gemma 3 270M, real weights from a GGUF file: the reference's tokens, and one set of bits."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from core.types import FinishReason
from engine.engine import Engine, EngineConfig
from modelfiles import ModelFiles, open_model
from tests.support.engine_runs import assert_same_bits, make_sequence, run, teacher_forced
from tests.support.hf_reference import HfReference

pytestmark = pytest.mark.timeout(300)  # two copies of the weights are unpacked
NUM_TOKENS = 12
LINE = "In the beginning there was nothing but a long list of words. The list was read by a small machine. "
PROMPTS = {
    "The capital of France is": "France",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return": " fibonacci(n-1) + fibonacci(n",
    LINE * 25: "In the beginning there was nothing",
}
"""Prompts and a part of a sensible answer. The last one is longer than the window."""


class Gemma(NamedTuple):
    files: ModelFiles
    engine: Engine

    def encode(self, text: str) -> list[int]:
        return self.files.tokenizer().encode(text, parse_special=True, add_special_tokens=True)


@pytest.fixture(scope="module")
def gemma() -> Gemma:
    torch.set_num_threads(1)
    files = open_model("gemma3-270m")
    return Gemma(files, Engine(files, EngineConfig(num_blocks=100, max_context=1024)))


@pytest.fixture(scope="module")
def reference(gemma: Gemma) -> HfReference:
    return HfReference(gemma.files)


@pytest.mark.parametrize("prompt", PROMPTS, ids=["fact", "code", "longer than the window"])
def test_greedy_answers_are_sensible_and_the_references(prompt: str, gemma: Gemma, reference: HfReference) -> None:
    files, engine = gemma
    tokens = gemma.encode(prompt)
    sequence = make_sequence(tokens, max_tokens=NUM_TOKENS, ignore_eos=True)
    answer = run(engine, sequence).tokens[sequence.key]
    assert PROMPTS[prompt] in files.tokenizer().decode(answer, skip_special_tokens=False)
    reference.check_greedy(tokens, answer, lambda given: teacher_forced(engine, given, last=4))
    error = (teacher_forced(engine, tokens, last=4) - reference.logits(tokens, last=4)).abs()
    print(f"{len(tokens)} tokens: largest error {error.max():.1e}, mean {error.mean():.1e}")
    assert error.mean() <= 5e-5  # of scores around 40


def test_bits_are_those_of_the_solo_run(gemma: Gemma) -> None:
    files, engine = gemma
    other = Engine(
        files, EngineConfig(num_blocks=200, block_size=8, max_step_tokens=200, max_context=1024), model=engine.model
    )
    together = [make_sequence(gemma.encode(prompt), max_tokens=3, ignore_eos=True) for prompt in PROMPTS]
    recorded = run(other, *together)
    for prompt, mine in zip(PROMPTS, together, strict=True):
        alone = make_sequence(gemma.encode(prompt), max_tokens=3, ignore_eos=True)
        assert_same_bits(recorded.scores[mine.key], run(engine, alone).scores[alone.key])


def test_the_end_of_a_turn_ends_the_answer(gemma: Gemma) -> None:
    files, engine = gemma
    sequence = make_sequence(
        gemma.encode("<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\nHello!"),
        max_tokens=NUM_TOKENS,
        eos_token_ids=files.config.eos_token_ids,
        logit_bias=((106, 1000.0),),
    )
    [output] = run(engine, sequence).outputs[sequence.key]
    assert (output.token_id, output.finish_reason) == (106, FinishReason.STOP)
