"""Grammars on a tiny vocabulary (a token is an ASCII character): compiled, bounded, remembered, followed."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from core.errors import InternalError, InvalidRequest, QueueFull
from core.grammar import GrammarKind, GrammarSource
from core.types import SamplingParams
from engine.engine import Engine, EngineConfig
from engine.grammar import Grammars, GrammarState
from engine.grammar_compiler import tightened
from engine.sequence import Sequence
from tests.support.engine_runs import assert_same_bits, make_sequence, run
from tests.support.random_llama import RandomLlama
from worker.context import WorkerContext

EOS = 2
V = 101


def source(kind: str, text: str, **options: Any) -> str:
    return GrammarSource(kind=GrammarKind(kind), source=text, **options).encode()


def regex(text: str) -> str:
    return source("regex", text)


@pytest.fixture(scope="module")
def grammars(tiny_files: RandomLlama) -> Grammars:
    return Grammars(tiny_files.tokenizer(), vocab_size=V, eos_token_ids=(EOS,))  # type: ignore[arg-type]


@pytest.fixture
def engine(tiny_files: RandomLlama) -> Engine:
    return Engine(tiny_files, EngineConfig(num_blocks=60, block_size=4))  # type: ignore[arg-type]


def allowed(state: GrammarState) -> set[str]:
    bits = np.zeros((1, -(-V // 32)), np.int32)
    state.fill(bits, 0)
    ids = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
    return {"end" if one == EOS else chr(one) for one in ids}


def after(grammars: Grammars, grammar: str, text: str) -> set[str]:
    """What may follow a text, in a state that is built from its tokens at once."""
    state = grammars.compile(grammar).start()
    state.follow(list(text.encode()), 0)
    return allowed(state)


def sequence(engine: Engine, grammar: str, **options: Any) -> Sequence:
    made = make_sequence([40, 41, 42], **{"grammar": grammar, "eos_token_ids": (EOS,), "max_tokens": 20, **options})
    made.grammar = engine.grammars.compile(grammar).start()
    return made


def text_of(tokens: list[int]) -> str:
    return "".join("|" if token == EOS else chr(token) for token in tokens)


@pytest.mark.parametrize(
    ("grammar", "text", "expected"),
    [
        (regex("[0-9]{2}A?"), "", set("0123456789")),
        (regex("[0-9]{2}A?"), "12", {"A", "end"}),
        (source("choice", '["AB", "AC\\"", "Z"]'), "A", {"B", "C"}),
        (source("choice", '["AB", "AC\\"", "Z"]'), "AC", {'"'}),
        (source("ebnf", 'root ::= "(" root ")" | "1"'), "((1", {")"}),
        (source("json_schema", '{"enum": [12, "A"]}'), "", {"1", '"'}),
        (source("json_schema", '{"type": "integer"}'), "1" * 19, {"end"}),
        (source("json_schema", '{"type": "number"}'), "0." + "1" * 17, {"E", "end"}),  # "e" is not in the vocabulary
        (source("json_schema", '{"type": "number"}'), "1E33", {"end"}),
        (source("json_schema", '{"$ref": "#/$defs/n", "$defs": {"n": {"type": "integer"}}}'), "1" * 19, {"end"}),
        (
            source("json_schema", '{"$ref": "#/$defs/n", "$defs": {"n": {"type": "number"}}}'),
            "0." + "1" * 17,
            {"E", "end"},
        ),
        (source("json_schema", '{"$ref": "#/$defs/n", "$defs": {"n": {"type": "number"}}}'), "1E33", {"end"}),
        (source("json_schema", '{"type": "array", "items": {"const": 1}}'), "[1,", {" "}),
        (source("json_schema", '{"type": "array", "items": {"const": 1}}'), "[1, ", {"1"}),
        (
            source("json_schema", '{"type": "array", "items": {"const": 1}}', free_whitespace=True),
            "[" + " " * 20,
            {"1", "]"},
        ),
        (
            source("structural_tag", '{"type":"structural_tag","format":{"type":"const_string","value":"AB"}}'),
            "A",
            {"B"},
        ),
    ],
)
def test_what_may_follow(grammars: Grammars, grammar: str, text: str, expected: set[str]) -> None:
    assert after(grammars, grammar, text) == expected


@pytest.mark.parametrize(
    "grammar",
    [
        regex("(A"),
        regex("(?=A)B"),
        source("ebnf", "root ::= missing"),
        source("ebnf", "nonsense"),
        source("json_schema", '{"$ref": "#/$defs/missing"}'),
        source("json_schema", '{"$ref": "#"}'),
        source("json_schema", '{"type": "strng"}'),
        source("json_schema", "{"),
        source("json_schema", '{"enum": []}'),
        source("choice", '"AB"'),
        source("structural_tag", '{"type": "structural_tag", "format": {"type": "no"}}'),
        "root ::= x",
        "{}",
        '{"kind": "no", "source": "A"}',
        "[" * 100_000,
    ],
    ids=lambda text: text[:60],
)
def test_what_is_no_grammar_is_the_callers_mistake(grammars: Grammars, grammar: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        grammars.compile(grammar)
    assert ".cc:" not in refusal.value.message
    assert "\n" not in refusal.value.message
    assert len(refusal.value.message) < 500


def test_a_state_is_a_function_of_the_tokens(grammars: Grammars) -> None:
    grammar = source("json_schema", '{"type": "array", "items": {"type": "integer"}, "maxItems": 3}')
    tokens = [40, 40, *b"[12, -4, 0]"]
    walking = grammars.compile(grammar).start()
    for length in range(2, len(tokens) + 1):
        walking.follow(tokens[:length], 2)
        rebuilt = grammars.compile(grammar).start()
        rebuilt.follow(tokens[:length], 2)
        assert allowed(walking) == allowed(rebuilt)
        assert walking.is_complete == rebuilt.is_complete == (length == len(tokens))


def test_a_token_outside_the_grammar_is_an_error(grammars: Grammars) -> None:
    state = grammars.compile(regex("AB")).start()
    with pytest.raises(InternalError, match="token 1 of the answer"):
        state.follow(list(b"AA"), 0)


def test_characters_beyond_ascii_survive_the_rewriting() -> None:
    assert tightened(r'root ::= (("\xefc\\x41"))') == r'root ::= (("\u00efc\\x41"))'


def test_texts_that_look_like_white_space_rules_are_left_alone() -> None:
    rule = 'root ::= (("[ \\\\n\\\\r\\\\t]*" [a\\]"]* [ \\n\\r\\t]* "x")) (=([ \\n\\r\\t]* "y"))'
    assert tightened(rule) == rule.replace('[ \\n\\r\\t]* "x"', '[ \\n\\r\\t]{0,20} "x"')


def test_equal_sources_are_compiled_once(grammars: Grammars) -> None:
    first = grammars.submit(regex("[A-Z]{3}")).result(20)
    assert grammars.submit(regex("[A-Z]{3}")).result(20) is first
    assert grammars.find(regex("[A-Z]{3}")) is first


def test_the_memory_of_grammars_is_bounded(tiny_files: RandomLlama) -> None:
    small = Grammars(tiny_files.tokenizer(), vocab_size=V, eos_token_ids=(EOS,), cache_bytes=5000)  # type: ignore[arg-type]
    for index in range(20):
        small.compile(regex(f"A{{{index + 1}}}"))
    kept = [index for index in range(20) if small.find(regex(f"A{{{index + 1}}}")) is not None]
    assert 19 in kept, "the newest stays"
    assert 0 not in kept


def test_nobody_waits_for_a_source_that_is_tried(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(grammars._trial, "check", lambda source: release.wait(60))
    tried = grammars.submit(regex("([A-Z]{1,100}-){1,100}"))
    try:
        assert after(grammars, regex("AB"), "A") == {"B"}
        assert not tried.done()
    finally:
        release.set()


async def test_who_waits_too_long_may_try_again(tiny_files: RandomLlama, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    slow = Grammars(tiny_files.tokenizer(), vocab_size=V, eos_token_ids=(EOS,), wait_limit_s=0.05)  # type: ignore[arg-type]
    monkeypatch.setattr(slow._compiler, "compile", lambda source: release.wait(60))
    worker: Any = SimpleNamespace(engine=SimpleNamespace(grammars=slow))
    try:
        with pytest.raises(QueueFull):
            await WorkerContext.compile_grammar(worker, SamplingParams(grammar=regex("A")))
    finally:
        release.set()
        slow.close()


# -- on the engine ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"temperature": 1.5, "seed": 4}, {"logprobs": 2}], ids=str)
def test_answers_are_sentences_of_their_grammar(engine: Engine, options: dict[str, Any]) -> None:
    made = {
        "[0-9]{3}-[A-Z]{2}": sequence(engine, regex("[0-9]{3}-[A-Z]{2}"), **options),
        "choice": sequence(engine, source("choice", '["YES", "NO"]'), **options),
        "free": make_sequence([40, 41, 42], **options),
    }
    recorded = run(engine, *made.values())
    last = {name: recorded.outputs[one.key][-1] for name, one in made.items()}
    texts = {name: text_of(recorded.tokens[one.key]) for name, one in made.items()}
    assert [last[name].finish_reason for name in made] == ["stop", "stop", "length"]
    assert texts["choice"] in ("YES|", "NO|")
    assert len(texts["[0-9]{3}-[A-Z]{2}"]) == 7
    if "logprobs" in options:
        for output in recorded.outputs[made["choice"].key]:
            assert output.logprobs is not None
            assert output.logprobs.rank >= 1
            assert all(np.isfinite(logprob) for _, logprob in output.logprobs.top), "raw scores, not masked ones"


def test_a_grammar_does_not_change_its_neighbours(engine: Engine, tiny_files: RandomLlama) -> None:
    others = [make_sequence([50, 51, 52 + index], temperature=index % 2, seed=index) for index in range(4)]
    alone = [
        run(engine, make_sequence(one.tokens, temperature=index % 2, seed=index)) for index, one in enumerate(others)
    ]
    together = run(engine, sequence(engine, regex("[A-Z]{9}")), *others, sequence(engine, regex("[0-9]{9}")))
    for one, expected in zip(others, alone, strict=True):
        assert together.tokens[one.key] == next(iter(expected.tokens.values()))
        assert_same_bits(together.scores[one.key], next(iter(expected.scores.values())))


def test_a_grammar_without_a_way_on_fails_its_own_sequence(engine: Engine) -> None:
    dead = sequence(engine, regex("A[A-Z]"), allowed_token_ids=tuple(range(65, 66)))
    stuck = sequence(engine, regex("1[e-g]"))  # nothing of the vocabulary can follow
    fine = make_sequence([40, 41, 42])
    recorded = run(engine, dead, stuck, fine)
    assert text_of(recorded.tokens[dead.key]) == "AA|", (
        "the end may come where the sentence is whole, whatever is allowed"
    )
    assert recorded.outputs[dead.key][-1].finish_reason == "stop"
    assert isinstance(recorded.outputs[stuck.key][-1].error, InvalidRequest)
    assert len(recorded.tokens[fine.key]) == 8


def test_the_minimum_length_holds_only_where_the_grammar_can_go_on(engine: Engine) -> None:
    short = sequence(engine, regex("[0-9]{2}"), min_tokens=10)
    longer = sequence(engine, regex("[0-9]+"), min_tokens=10)
    recorded = run(engine, short, longer)
    assert len(recorded.tokens[short.key]) == 3
    assert recorded.outputs[short.key][-1].finish_reason == "stop"
    assert len(recorded.tokens[longer.key]) > 10


def test_the_end_is_legal_only_where_the_sentence_is_whole(engine: Engine) -> None:
    cut = sequence(engine, regex("[0-9]{30}"), max_tokens=5, logit_bias=((EOS, 100.0),))
    recorded = run(engine, cut)
    assert recorded.outputs[cut.key][-1].finish_reason == "length"
    assert text_of(recorded.tokens[cut.key]).isdigit()


def test_stop_tokens_end_an_answer_in_the_middle(engine: Engine) -> None:
    stopped = sequence(engine, regex("AAAABBBB"), stop_token_ids=(66,))
    recorded = run(engine, stopped)
    assert text_of(recorded.tokens[stopped.key]) == "AAAAB"


def test_preemption_and_arrival_behind_the_first_token_change_nothing(tiny_files: RandomLlama) -> None:
    grammar = source("json_schema", json.dumps({"type": "array", "items": {"type": "integer"}, "minItems": 4}))
    options = {"temperature": 0.8, "max_tokens": 16}
    roomy = Engine(tiny_files, EngineConfig(num_blocks=60, block_size=4))  # type: ignore[arg-type]
    expected = run(roomy, *(first := [sequence(roomy, grammar, seed=seed, **options) for seed in range(4)]))
    tight = Engine(
        tiny_files,  # type: ignore[arg-type]
        EngineConfig(num_blocks=9, block_size=4, max_context=32, projected_tokens=1),
        model=roomy.model,
    )
    preempted = run(tight, *(second := [sequence(tight, grammar, seed=seed, **options) for seed in range(4)]))
    assert sum(one.num_preemptions for one in second) > 0
    for one, other in zip(first, second, strict=True):
        answer = expected.tokens[one.key]
        assert preempted.tokens[other.key] == answer
        late = sequence(roomy, grammar, seed=first.index(one), **options)
        late.tokens += answer[:3]
        assert run(roomy, late).tokens[late.key] == answer[3:]
