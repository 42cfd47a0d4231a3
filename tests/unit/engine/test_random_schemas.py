"""Random JSON schemas on the real default model: what ends is valid, what is cut is a legal beginning."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest

from core.grammar import GrammarKind, GrammarSource
from engine.engine import Engine, EngineConfig
from engine.sequence import Sequence
from gateway.json_schema import narrowed
from modelfiles.model import ModelFiles
from tests.support.engine_runs import make_sequence, run
from tests.support.random_schemas import CORNER_CASES, random_schemas

NUM_RANDOM, SEED = 200, 2026
NUM_SAMPLED = 24
MAX_TOKENS = 48
PROMPT = "<|im_start|>user\nGive an example as JSON.<|im_end|>\n<|im_start|>assistant\n"
_PARTIAL = re.compile(r"(-?\d*\.?\d*([eE][+-]?\d*)?|t(r(ue?)?)?|f(a(l(se?)?)?)?|n(u(ll?)?)?)$")


def is_legal_beginning(text: str) -> bool:
    """Whether something can follow that makes it JSON: the parser finds nothing wrong before the text's end."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg.startswith("Unterminated string"):
            return True
        if error.msg.startswith("Invalid \\"):  # an escape is cut
            return error.pos >= len(text) - 5
        partial = _PARTIAL.search(text)
        assert partial is not None
        if not partial[0]:
            return error.pos >= len(text.rstrip())
        whole = text[: partial.start()] + "0"  # any value will do where one was begun
        try:
            json.loads(whole)
        except json.JSONDecodeError as later:
            return later.pos >= len(whole)
    return True


def answer_all(real_engine: Engine, files: ModelFiles, schemas: list[Any]) -> tuple[int, int]:
    """All at once, half of them greedy. Returns how many ended and how many were cut."""
    engine = Engine(files, EngineConfig(num_blocks=600, max_sequences=64), model=real_engine.model)
    eos = files.config.eos_token_ids
    tokenizer = files.tokenizer()
    prompt = tokenizer.encode(PROMPT, parse_special=True)
    sequences: list[Sequence] = []
    for index, schema in enumerate(schemas):
        text = json.dumps(narrowed(schema, "schema"), ensure_ascii=False)
        source = GrammarSource(kind=GrammarKind.JSON_SCHEMA, source=text).encode()
        options = {"temperature": index % 2, "seed": index, "max_tokens": MAX_TOKENS, "eos_token_ids": eos}
        sequence = make_sequence(prompt, grammar=source, **options)
        sequence.grammar = engine.grammars.compile(source).start()
        sequences.append(sequence)
    engine.grammars.close()
    recorded = run(engine, *sequences)
    num_ended = 0
    for schema, sequence in zip(schemas, sequences, strict=True):
        last = recorded.outputs[sequence.key][-1]
        assert last.error is None, (schema, last.error)
        tokens = [token for token in recorded.tokens[sequence.key] if token not in eos]
        text = tokenizer.decode(tokens, skip_special_tokens=False)
        if last.finish_reason == "stop":
            num_ended += 1
            jsonschema.validate(json.loads(text), schema)
        else:
            assert is_legal_beginning(text.rstrip("\ufffd")), (schema, text)
    return num_ended, len(schemas) - num_ended


@pytest.mark.timeout(300)
def test_corner_cases_and_a_sample_of_the_random_ones(real_engine: Engine, real_files: ModelFiles) -> None:
    schemas = [*CORNER_CASES, *random_schemas(NUM_RANDOM, SEED)[:NUM_SAMPLED]]
    num_ended, num_cut = answer_all(real_engine, real_files, schemas)
    print(f"{num_ended} valid, {num_cut} cut at {MAX_TOKENS} tokens")
    assert num_ended > num_cut, "most of these schemas are small"


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_all_random_schemas(real_engine: Engine, real_files: ModelFiles) -> None:
    num_ended, num_cut = answer_all(real_engine, real_files, random_schemas(NUM_RANDOM, SEED))
    print(f"{num_ended} valid, {num_cut} cut at {MAX_TOKENS} tokens")
    assert num_ended > num_cut


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *(
            (text, True)
            for text in ('{"a": [1, tr', '"abc', '"ab\\', '"ab\\u00', "", "-", "1.", "1e", '{"a"', "[1,", "{")
        ),
        *((text, False) for text in ("}", "[,", '{"a": ]', "[1 2", "{'a", "tru]", '"a\x01"', "[1, trx", '{"a": 1,, ')),
    ],
)
def test_the_test_knows_a_legal_beginning(text: str, expected: bool) -> None:
    assert is_legal_beginning(text) == expected
