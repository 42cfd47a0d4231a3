"""Sources that would take for ever: told by their look, tried in a process that is killed in time, refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from core.errors import InternalError, InvalidRequest
from core.grammar import GrammarKind, GrammarSource
from engine.grammar import Grammars
from engine.grammar_compiler import Compiler, is_cheap
from engine.grammar_trial import Trial
from tests.support.random_llama import RandomLlama

REAL_VOCAB_SIZE = 49_152
EOS = 2


def regex(text: str) -> GrammarSource:
    return GrammarSource(kind=GrammarKind.REGEX, source=text)


BOMB = regex("|".join(f"[^a]{{1,{index + 5}}}x{index}" for index in range(300)))
"""Half a minute of work, and gigabytes on a real vocabulary."""
HEAVY = regex("([A-Z]{1,100}-){1,100}")
"""Looks like one, and is none."""


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (regex("[a-z]{2,5}-[0-9]+"), True),
        (regex("(yes|no)"), True),
        (regex("[a-z]{1,500}"), False),
        (regex("((a{9}){9}){9}"), False),
        (regex("(((a{1,500}){1,500}){1,500})"), False),
        (regex("(a{,900})"), False),
        (regex("(a{900,})"), False),
        (regex("a{" + "9" * 5000 + "}"), False),
        (regex("a{0}b{,}"), True),
        (regex("|".join(f"[^{letter}]+" for letter in "abcdefghijklmnopqrstuvwxyz")), False),
        (GrammarSource(kind=GrammarKind.CHOICE, source='["{9999}", "no"]'), True),
        (GrammarSource(kind=GrammarKind.JSON_SCHEMA, source='{"type":"string","maxLength":9999}'), True),
        (GrammarSource(kind=GrammarKind.JSON_SCHEMA, source='{"type":"string","pattern":"(a{99}){99}"}'), False),
        (
            GrammarSource(
                kind=GrammarKind.JSON_SCHEMA, source='{"patternProperties":{"(a{99}){99}":{"type":"string"}}}'
            ),
            False,
        ),
        (GrammarSource(kind=GrammarKind.JSON_SCHEMA, source='{"enum":["' + "x" * 10_000 + '"]}'), False),
        (GrammarSource(kind=GrammarKind.EBNF, source="root ::= [a-z]{1,999}"), False),
    ],
    ids=str,
)
def test_what_is_sure_to_be_cheap(source: GrammarSource, expected: bool) -> None:
    assert is_cheap(source, REAL_VOCAB_SIZE) is expected


@pytest.fixture
def grammars(tiny_files: RandomLlama) -> Iterator[Grammars]:
    made = Grammars(tiny_files.tokenizer(), vocab_size=101, eos_token_ids=(EOS,), limit_s=1.0)  # type: ignore[arg-type]
    yield made
    made.close()


@pytest.mark.processes
def test_a_bomb_is_refused_in_time_and_the_next_source_is_tried_in_a_new_process(grammars: Grammars) -> None:
    assert not is_cheap(BOMB, 101)
    with pytest.raises(InvalidRequest, match="make it smaller") as refusal:
        grammars.compile(BOMB.encode())
    assert refusal.value.param == "structured_outputs"
    assert grammars._trial._process is None
    with pytest.raises(InvalidRequest, match="make it smaller"):
        grammars.submit(BOMB.encode())
    assert grammars._trial._process is None, "it is remembered"
    assert not is_cheap(HEAVY, 101)
    assert grammars.compile(HEAVY.encode()).num_bytes > 0
    with pytest.raises(InvalidRequest, match="cannot be compiled: Regex parsing error"):
        grammars.compile(regex("([A-Z]{1,100}-){1,100}(").encode())
    process = grammars._trial._process
    assert process is not None
    grammars.close()
    assert process.poll() is not None
    with pytest.raises(InternalError, match="stops"):
        grammars._trial.check(HEAVY.encode())


@pytest.mark.processes
def test_a_source_that_takes_too_much_memory_is_refused() -> None:
    vocabulary = [b""] * 32 + [bytes([index]) for index in range(32, 101)]
    compiler = Compiler(lambda: vocabulary, eos_token_ids=[EOS])
    trial = Trial(compiler, limit_s=60.0, max_bytes=10, memory_bytes=8 << 20)
    try:
        with pytest.raises(InvalidRequest, match="when compiled: make it smaller"):
            trial.check(HEAVY.encode())
        with pytest.raises(InvalidRequest, match="or 8 MB to compile: make it smaller"):
            trial.check(BOMB.encode())
    finally:
        trial.close()
