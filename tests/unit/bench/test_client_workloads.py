"""What `baton bench` asks: traces, shapes, arrivals and the words of prompts."""

from __future__ import annotations

import gzip
import itertools
import statistics
from pathlib import Path

import pytest

from bench.client.prompts import Ids, Words, single_token_words
from bench.client.scripts import Line, Part, Script, rescaled
from bench.client.shapes import SHAPES, Shape, gamma_arrivals
from bench.client.traces import clipped, read_trace, window
from bench.workloads import Lengths
from core.errors import ConfigError

MOONCAKE = (
    '{"timestamp": 1000, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]}\n'
    '{"timestamp": 500, "input_length": 700, "output_length": 3, "hash_ids": [7, 8]}\n'
    '{"timestamp": 900, "input_length": 700, "output_length": 0, "hash_ids": [7, 8]}\n'
)
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:59.9799600,4808,10\n2023-11-16 18:18:00.2299600,3180,8\n"
)
BURST = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,Conversation log\n45,ChatGPT,1087,0,1087,Conversation log\n118,GPT-4,417,276,693,API log\n"
)


def lengths(scripts: list[Script]) -> list[tuple[float, int, int]]:
    return [(s.at_s, s.lines[0].num_tokens, s.lines[0].max_tokens) for s in scripts]


def write(folder: Path, text: str, name: str = "trace") -> Path:
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_mooncake_prompts_share_the_words_of_equal_hashes(tmp_path: Path, name: str) -> None:
    scripts = read_trace(write(tmp_path, MOONCAKE, name))
    assert lengths(scripts) == [(0.0, 700, 3), (0.5, 1100, 5)], "by time, without the one that has no answer"
    short, long = (Words().text(script.lines[0].parts) for script in scripts)
    assert long.startswith(short) and len(long.split()) == 1100


def test_azure_and_burstgpt_tables_are_known_by_their_columns(tmp_path: Path) -> None:
    azure = lengths(read_trace(write(tmp_path, AZURE)))
    assert azure[0] == (0.0, 4808, 10) and azure[1] == (pytest.approx(0.25, abs=1e-6), 3180, 8)
    assert lengths(read_trace(write(tmp_path, "\ufeff" + BURST))) == [(0.0, 472, 18), (113.0, 417, 276)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a,b,c\n1,2,3\n", "neither a JSON object"),
        (AZURE + "2023-11-16 18:18:01.0,many,8\n", "line 4"),
        ('{"timestamp": 0, "input_length": 4}\n', "line 1"),
        (MOONCAKE + "{\n", "line 4"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no request"),
    ],
)
def test_what_is_no_trace_is_named_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_trace(write(tmp_path, text))


def test_a_missing_trace_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the trace"):
        read_trace(tmp_path / "none")


def test_a_window_begins_at_zero_and_a_clip_keeps_the_beginning(tmp_path: Path) -> None:
    scripts = read_trace(write(tmp_path, MOONCAKE))
    assert lengths(window(scripts, from_s=0.4, duration_s=1.0)) == [(pytest.approx(0.1), 1100, 5)]
    (short, _) = clipped(scripts, longest=600)
    assert short.lines[0].num_tokens + short.lines[0].max_tokens == 600
    assert Words().text(scripts[0].lines[0].parts).startswith(Words().text(short.lines[0].parts))


def test_a_rate_stretches_the_arrivals() -> None:
    line = (Line(parts=(Part(key="a", num_tokens=1),), max_tokens=1),)
    scripts = [Script(lines=line, at_s=at_s) for at_s in (1.0, 2.0, 8.0)]
    assert [s.at_s for s in rescaled(scripts, rate=6.0)] == [0.0625, 0.125, 0.5]
    at_once = [Script(lines=line)] * 2
    assert rescaled(at_once, rate=2.0) == at_once and rescaled([], rate=1.0) == []


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_are_functions_of_the_seed(name: str) -> None:
    shape = Shape(prompt=Lengths(median=20, sigma=0.5), answer=Lengths(median=5), seed=3)
    first, again = (list(itertools.islice(SHAPES[name](shape), 30)) for _ in range(2))
    other = list(itertools.islice(SHAPES[name](Shape(prompt=shape.prompt, answer=shape.answer, seed=4)), 30))
    assert first == again and first != other
    texts = [Words().text(script.lines[0].parts) for script in first]
    assert len(set(texts)) == len(texts), "what a user says is said by nobody else"


def test_shared_prefixes_are_shared_and_chats_have_turns() -> None:
    shape = Shape(num_shared=3, turns=(2, 4))
    shared = list(itertools.islice(SHAPES["shared-prefix"](shape), 60))
    systems = [script.system[0].key for script in shared]
    assert len(set(systems)) == 3 and systems.count(min(systems)) > 20, "the first is the most popular"
    assert {len(script.lines) for script in itertools.islice(SHAPES["chat"](shape), 60)} == {2, 3, 4}


def test_mixed_has_as_many_long_prompts_as_it_says() -> None:
    scripts = list(itertools.islice(SHAPES["mixed"](Shape(long_share=0.25)), 400))
    long = [script.lines[0].num_tokens for script in scripts if script.label == "long"]
    assert 70 <= len(long) <= 130 and statistics.median(long) > 3000


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (float("inf"), 0.0)])
def test_arrivals_have_their_rate_and_burstiness(burstiness: float, variation: float) -> None:
    times = list(itertools.islice(gamma_arrivals(rate=10.0, burstiness=burstiness, seed=1), 20_000))
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert statistics.fmean(gaps) == pytest.approx(0.1, rel=0.05)
    assert statistics.pstdev(gaps) / statistics.fmean(gaps) == pytest.approx(variation, rel=0.05, abs=1e-6)
    assert list(itertools.islice(gamma_arrivals(rate=float("inf")), 3)) == [0.0, 0.0, 0.0]


def test_a_shorter_part_has_the_first_words_of_a_longer_one_with_its_key() -> None:
    for maker in (Words().text, Ids().ids):
        short, long = maker([Part(key="k", num_tokens=5)]), maker([Part(key="k", num_tokens=9)])
        assert long[: len(short)] == short and len(long) > len(short)
    assert len(Ids().ids([Part(key="a", num_tokens=3), Part(key="b", num_tokens=4)])) == 7


def test_words_of_a_vocabulary_are_plain_ones_behind_a_space() -> None:
    texts = [f" word{chr(97 + i // 26)}{chr(97 + i % 26)}" for i in range(120)] + ["bare", " x1y", " é", " a"]
    words = single_token_words(texts)
    assert len(words) == 120 and all(word.startswith("word") for word in words)
    assert single_token_words(texts[:50]) == [], "too few to make prompts of"
