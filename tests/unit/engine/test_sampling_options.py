"""Every option does what it says, by values computed here with numpy; and each check fails when the option is dropped.

A case is an option with values, and a check that runs whatever options it is given. The second test runs the same check
without the option: a check that passes then would prove nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pytest
import torch

from core.types import FinishReason, SamplingParams
from engine.engine import Engine, EngineConfig
from engine.grammar import Grammars
from engine.sampler import Sampled, sample
from engine.sequence import Sequence
from tests.support.engine_runs import make_sequence, run, teacher_forced
from tests.support.random_llama import RandomLlama

Options = dict[str, Any]
Array = np.ndarray[Any, np.dtype[Any]]

V = 101
PROMPT = [40, 41, 42, 41]
ANSWER = [50, 51, 50, 52, 50]
SCORES: Array = np.random.default_rng(5).normal(size=V).astype(np.float32) * 3
TINY = RandomLlama()


def sequence_of(options: Options, *, answer: list[int] = ANSWER, choice: int = 0) -> Sequence:
    sequence = make_sequence(PROMPT + answer, num_prompt_tokens=len(PROMPT), choice=choice, **options)
    if sequence.sampling.grammar:
        sequence.grammar = GRAMMARS.compile(sequence.sampling.grammar).start()
    return sequence


GRAMMARS = Grammars(TINY.tokenizer(), vocab_size=V, eos_token_ids=TINY.config.eos_token_ids)  # type: ignore[arg-type]


def draw(options: Options, scores: Array = SCORES, **how: Any) -> Sampled:
    return sample(torch.tensor(scores)[None], [sequence_of(options, **how)])[0]


def frequencies(options: Options, scores: Array, count: int = 6000) -> Array:
    """How often each token is drawn, over many seeds."""
    sequences = [sequence_of({"seed": seed, **options}) for seed in range(count)]
    drawn = [each.token_id for each in sample(torch.tensor(scores).expand(count, -1).clone(), sequences)]
    return np.bincount(drawn, minlength=len(scores)) / count


# -- the reference: definitions, one after another, in double precision -----------------------------------------------


def softmax(scores: Array) -> Array:
    weights = np.exp(scores.astype(np.float64) - scores.max())
    return weights / weights.sum()


def penalised(scores: Array, *, repetition: float = 1.0, frequency: float = 0.0, presence: float = 0.0) -> Array:
    result = scores.astype(np.float64).copy()
    for token in range(len(scores)):
        if token in PROMPT + ANSWER:
            result[token] = result[token] / repetition if result[token] > 0 else result[token] * repetition
        result[token] -= frequency * ANSWER.count(token) + presence * (token in ANSWER)
    return result


def without(scores: Array, forbidden: list[int]) -> Array:
    result = scores.copy()
    result[forbidden] = -np.inf
    return result


def gumbel_winner(scores: Array, *, seed: int, choice: int, position: int) -> int:
    """SplitMix64 and two 32-bit rounds in 64-bit integers, written from the module's description."""
    gamma = np.uint64(0x9E3779B97F4A7C15)

    def mix(value: Array) -> Array:
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return value ^ (value >> np.uint64(31))

    def round32(value: Array, shifts: tuple[int, int, int], factors: tuple[int, int]) -> Array:
        for shift, factor in zip(shifts, (*factors, 1), strict=True):
            value = ((value ^ (value >> np.uint64(shift))) * np.uint64(factor)) & np.uint64(0xFFFFFFFF)
        return value

    with np.errstate(over="ignore"):
        key = np.zeros(1, np.uint64)
        for part in (seed, choice, position):
            key = mix(key + gamma * np.uint64(part + 1))
        low, high, ids = key & np.uint64(0xFFFFFFFF), key >> np.uint64(32), np.arange(len(scores), dtype=np.uint64)
        bits = (ids * np.uint64(0x9E3779B1) + low) & np.uint64(0xFFFFFFFF)
        bits = round32(bits, (16, 15, 15), (0x21F0AAAD, 0x735A2D97))
        bits = round32((bits + high) & np.uint64(0xFFFFFFFF), (16, 13, 16), (0x85EBCA6B, 0xC2B2AE35)) >> np.uint64(9)
    noise = -np.log(-np.log((bits.astype(np.float64) + 0.5) / 2**23))
    return int((scores - scores.max() + noise).argmax())


# -- checks of one draw -----------------------------------------------------------------------------------------------


def favour(*tokens: int, by: float = 2.0) -> Array:
    """Scores whose best tokens are these, in this order."""
    scores = SCORES.copy()
    for rank, token in enumerate(tokens):
        scores[token] = SCORES.max() + by * (len(tokens) - rank)
    return scores


def distributed_as(expected: Callable[[Array], Array], scores: Array) -> Callable[[Options], None]:
    def check(options: Options) -> None:
        wanted = expected(scores)
        got = frequencies({"temperature": 1.0, **options}, scores)
        assert set(np.flatnonzero(got)) <= set(np.flatnonzero(wanted))
        assert np.abs(got - wanted).max() < 0.03

    return check


def chooses(expected: Callable[[Array], Array], scores: Array) -> Callable[[Options], None]:
    def check(options: Options) -> None:
        assert draw(options, scores).token_id == int(expected(scores).argmax())

    return check


FEW: Array = np.log(np.array([0.02, 0.36, 0.05, 0.24, 0.03, 0.16, 0.1, 0.04]))


def of_top_k(scores: Array) -> Array:
    return softmax(without(scores, list(scores.argsort()[:-3])))


def of_top_p(scores: Array) -> Array:
    order = scores.argsort()[::-1]
    mass = softmax(scores)[order].cumsum()
    return softmax(without(scores, list(order[int((mass < 0.7).sum()) + 1 :])))


def of_min_p(scores: Array) -> Array:
    weights = softmax(scores)
    return softmax(without(scores, list(np.flatnonzero(weights < 0.3 * weights.max()))))


def check_seed(options: Options) -> None:
    draws = [draw({"temperature": 1.0, **options}, choice=choice).token_id for choice in range(20)]
    position = len(PROMPT) + len(ANSWER)
    assert draws == [gumbel_winner(SCORES, seed=1234, choice=choice, position=position) for choice in range(20)]


def check_logprobs(options: Options) -> None:
    got = draw(options).logprobs
    assert got is not None
    expected = np.log(softmax(SCORES))
    order = expected.argsort()[::-1]
    assert got.logprob == pytest.approx(expected.max(), abs=1e-5)
    assert got.rank == 1
    assert [token for token, _ in got.top] == list(order[:4])
    assert [logprob for _, logprob in got.top] == pytest.approx(list(expected[order[:4]]), abs=1e-5)


def check_eos_held_down(options: Options) -> None:
    scores = favour(2, 77)
    assert draw({"eos_token_ids": (2,), **options}, scores).token_id == 77
    assert draw({"eos_token_ids": (2,), **options}, scores, answer=[*ANSWER, 53]).token_id == 2, "one token later"


# -- checks of whole answers ------------------------------------------------------------------------------------------


def answer_of(options: Options) -> tuple[list[int], FinishReason | None, Any]:
    engine = Engine(TINY, EngineConfig(num_blocks=40, block_size=4))  # type: ignore[arg-type]
    sequence = make_sequence(PROMPT, **{"max_tokens": 12, "temperature": 2.0, "seed": 1, **options})
    recorded = run(engine, sequence)
    outputs = recorded.outputs[sequence.key]
    return recorded.tokens[sequence.key], outputs[-1].finish_reason, outputs


FREE, _, _ = answer_of({})
STOP = next(token for index, token in enumerate(FREE) if index >= 3 and token not in FREE[:index])
STOP_AT = FREE.index(STOP) + 1
"""A token that first appears in the middle of the free answer."""


def check_stop_token(options: Options) -> None:
    tokens, reason, outputs = answer_of(options)
    assert (tokens, reason, outputs[-1].stop_token_id) == (FREE[:STOP_AT], "stop", STOP)


def check_eos_ends(options: Options) -> None:
    tokens, reason, _ = answer_of(options)
    assert (tokens, reason) == (FREE[:STOP_AT], "stop")


def check_eos_ignored(options: Options) -> None:
    tokens, reason, _ = answer_of({"eos_token_ids": (STOP,), **options})
    assert (tokens, reason) == (FREE, "length")


def check_max_tokens(options: Options) -> None:
    tokens, reason, _ = answer_of({"max_tokens": 16, **options})
    assert (tokens, reason) == (FREE[:7], "length")


def check_prompt_logprobs(options: Options) -> None:
    _, _, outputs = answer_of(options)
    engine = Engine(TINY, EngineConfig(num_blocks=40, block_size=4))  # type: ignore[arg-type]
    scores = teacher_forced(engine, PROMPT).numpy()
    told = outputs[0].prompt_logprobs
    assert [len(output.prompt_logprobs) for output in outputs] == [len(PROMPT) - 1] + [0] * (len(outputs) - 1)
    for position, one in enumerate(told):
        expected = np.log(softmax(scores[position]))
        order = expected.argsort()[::-1]
        token = PROMPT[position + 1]
        assert one.logprob == pytest.approx(expected[token], abs=1e-4)
        assert one.rank == int((expected > expected[token]).sum()) + 1
        assert [top for top, _ in one.top] == list(order[:3])
        assert [logprob for _, logprob in one.top] == pytest.approx(list(expected[order[:3]]), abs=1e-4)


def check_priority(options: Options) -> None:
    """One runs at a time: whoever is before the others is answered whole before they begin."""
    config = EngineConfig(num_blocks=40, block_size=4, max_sequences=1, policy="priority")
    engine = Engine(TINY, config)  # type: ignore[arg-type]
    others = [make_sequence(PROMPT, max_tokens=2, ignore_eos=True, priority=priority) for priority in (0, -1)]
    urgent = make_sequence(PROMPT, max_tokens=2, ignore_eos=True, **options)
    recorded = run(engine, *others, urgent)
    assert [key for key in recorded.outputs] == [urgent.key, others[1].key, others[0].key]


@dataclass(frozen=True)
class Case:
    options: Options
    check: Callable[[Options], None]


CASES: Mapping[str, Case] = {
    "temperature": Case({"temperature": 0.5}, distributed_as(lambda scores: softmax(scores / 0.5), FEW)),
    "top_k": Case({"top_k": 3}, distributed_as(of_top_k, FEW)),
    "top_p": Case({"top_p": 0.7}, distributed_as(of_top_p, FEW)),
    "min_p": Case({"min_p": 0.3}, distributed_as(of_min_p, FEW)),
    "repetition_penalty": Case(
        {"repetition_penalty": 3.0}, chooses(lambda scores: penalised(scores, repetition=3.0), favour(41, 50, 60))
    ),
    "frequency_penalty": Case(
        {"frequency_penalty": 1.5}, chooses(lambda scores: penalised(scores, frequency=1.5), favour(50, 52, 60))
    ),
    "presence_penalty": Case(
        {"presence_penalty": 2.5}, chooses(lambda scores: penalised(scores, presence=2.5), favour(50, 40, 51))
    ),
    "logit_bias": Case(
        {"logit_bias": ((33, 30.0), (34, 20.0), (35, -5.0))},
        chooses(lambda scores: scores + 30.0 * (np.arange(V) == 33) + 20.0 * (np.arange(V) == 34), favour(35)),
    ),
    "allowed_token_ids": Case(
        {"allowed_token_ids": (90, 91, 92)},
        chooses(lambda scores: without(scores, [token for token in range(V) if token not in (90, 91, 92)]), SCORES),
    ),
    "bad_words": Case(
        # One token; a word whose beginning was just generated; and one whose beginning was not.
        {"bad_words": ((60,), (52, 50, 61), (51, 50, 62))},
        chooses(lambda scores: without(scores, [60, 61]), favour(60, 61, 62)),
    ),
    "min_tokens": Case({"min_tokens": len(ANSWER) + 1}, check_eos_held_down),
    "seed": Case({"seed": 1234}, check_seed),
    "logprobs": Case({"logprobs": 4}, check_logprobs),
    "grammar": Case(
        {"grammar": '{"kind":"regex","source":"23242[AB]"}', "eos_token_ids": (2,)},
        chooses(lambda scores: without(scores, [token for token in range(V) if token not in (65, 66)]), favour(50, 66)),
    ),
    "stop_token_ids": Case({"stop_token_ids": (STOP,)}, check_stop_token),
    "eos_token_ids": Case({"eos_token_ids": (STOP,)}, check_eos_ends),
    "ignore_eos": Case({"ignore_eos": True}, check_eos_ignored),
    "max_tokens": Case({"max_tokens": 7}, check_max_tokens),
    "prompt_logprobs": Case({"prompt_logprobs": 3}, check_prompt_logprobs),
    "priority": Case({"priority": -2}, check_priority),
}


@pytest.mark.parametrize("option", CASES)
def test_an_option_has_its_effect(option: str) -> None:
    CASES[option].check(CASES[option].options)


@pytest.mark.parametrize("option", CASES)
def test_the_check_of_an_option_fails_when_it_is_dropped(option: str) -> None:
    options = {name: value for name, value in CASES[option].options.items() if name != option}
    with pytest.raises(AssertionError):
        CASES[option].check(options)


def test_no_option_is_forgotten() -> None:
    of_the_request = {"priority"}
    not_of_one_choice = {"n"}  # tests/unit/gateway/test_several.py and tests/integration/test_choices.py
    assert set(CASES) - of_the_request == {field.name for field in fields(SamplingParams)} - not_of_one_choice


def test_options_of_a_row_do_not_touch_the_others() -> None:
    """Law 3 in one step: each case alone, and all cases beside one another."""
    sequences = [
        sequence_of({"seed": 3, **case.options, "temperature": temperature}, answer=[50, 51, 50, 52])
        for case in CASES.values()
        for temperature in (0.0, 0.9)
        if not {"grammar", "priority"} & set(case.options)
    ]
    generator = np.random.default_rng(8)
    scores = torch.tensor(generator.normal(size=(len(sequences), V)).astype(np.float32))
    together = sample(scores.clone(), sequences)
    alone = [sample(scores[row : row + 1].clone(), [each])[0] for row, each in enumerate(sequences)]
    assert together == alone
