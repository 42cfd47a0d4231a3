"""The laws of the parsers of calls: any text in any pieces, nothing lost, nothing sent that has to be taken back."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.tools.parsers import HermesParser, ListParser, LlamaParser, MistralParser
from gateway.tools.pieces import CallArguments, CallBegun, CallEnded, Content, Piece, Reasoning, Syntax
from gateway.tools.reasoning import ReasoningParser
from gateway.tools.text_reader import TextReader
from gateway.tools.writer import PieceWriter
from gateway.tools.xml_parser import XmlParser
from tests.support.call_texts import any_text

NAMES = ("w", "get_time", "\u6f22")
ARGUMENTS = {"city": "string", "num": "integer", "is_ok": "boolean", "list": "array", "either": ["string", "null"]}
SCHEMA = {"properties": {name: {"type": kind} for name, kind in ARGUMENTS.items()}}
TOOLS = {name: SCHEMA for name in NAMES}
ROME = {"city": 'Ro"me\\ \u6f22\U0001f999', "days": [1, -2.5e3, None, True], "deep": {"a": {}, "b": [[]]}}


def hermes(writer: PieceWriter) -> TextReader:
    return HermesParser(writer)


def reasoning_hermes(writer: PieceWriter) -> TextReader:
    return ReasoningParser(writer, HermesParser(writer), is_open=False)


def open_llama(writer: PieceWriter) -> TextReader:
    return ReasoningParser(writer, LlamaParser(writer), is_open=True)


Build = Callable[[PieceWriter], TextReader]
PARSERS: dict[str, Build] = {
    "hermes": hermes,
    "llama3": LlamaParser,
    "mistral": MistralParser,
    "list": ListParser,
    "qwen3_coder": XmlParser,
    "reasoning+hermes": reasoning_hermes,
    "open reasoning+llama3": open_llama,
}
each_parser = pytest.mark.parametrize("build", PARSERS.values(), ids=PARSERS)


def parse(build: Build, pieces: Sequence[str]) -> list[Piece]:
    writer = PieceWriter(TOOLS, max_calls=99)
    parser = build(writer)
    parts: list[Piece] = []
    for piece in pieces:
        parser.feed(piece)
        parts += writer.take()
    parser.finish()
    return parts + writer.take()


def split(text: str, cuts: Sequence[int]) -> list[str]:
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[start:end] for start, end in pairwise(edges)]


def merged(parts: Sequence[Piece]) -> list[tuple[object, ...]]:
    """What a caller ends up with, ids and the sizes of pieces aside."""
    seen: list[tuple[object, ...]] = []
    for part in parts:
        match part:
            case Content(text) | Reasoning(text):
                key: tuple[object, ...] = (type(part),)
            case CallArguments(index, text):
                key = (type(part), index)
            case CallBegun(index, _, name):
                key, text = (type(part), index, name), ""
            case CallEnded(index, is_complete):
                key, text = (type(part), index, is_complete), ""
            case Syntax():
                continue
        if seen and seen[-1][:-1] == key and text:
            seen[-1] = (*key, f"{seen[-1][-1]}{text}")
        else:
            seen.append((*key, text))
    return seen


def calls(parts: Sequence[Piece]) -> list[tuple[str, str]]:
    names = [part.name for part in parts if isinstance(part, CallBegun)]
    joined = ["" for _ in names]
    for part in parts:
        if isinstance(part, CallArguments):
            joined[part.index] += part.text
    return list(zip(names, joined, strict=True))


def content(parts: Sequence[Piece]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Content))


def reasoning(parts: Sequence[Piece]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Reasoning))


# -- any text ---------------------------------------------------------------------------------------------------------

any_cuts = st.lists(st.integers(0, 400), max_size=12)


@each_parser
@settings(max_examples=50, deadline=None)
@given(text=any_text, cuts=any_cuts)
def test_any_split_of_any_text_gives_what_the_whole_gives(build: Build, text: str, cuts: list[int]) -> None:
    whole = parse(build, [text])
    assert merged(parse(build, split(text, cuts))) == merged(whole)
    assert merged(parse(build, list(text))) == merged(whole)


@each_parser
@settings(max_examples=50, deadline=None)
@given(text=any_text, cuts=any_cuts)
def test_no_character_of_any_text_is_lost_or_made_up(build: Build, text: str, cuts: list[int]) -> None:
    """But for arguments that were told as a string, or not at all: those are read, not copied."""
    parts = parse(build, split(text, cuts))
    copied = Counter[str]()
    for part in parts:
        if isinstance(part, Content | Reasoning | Syntax | CallArguments):
            copied.update(part.text)
            assert part.text.encode(), "not empty, and no half of a character"
    read = Counter[str]("{}" * sum(name != "" for name, _ in calls(parts)))
    lost = Counter(text) - copied
    assert not lost
    if '"{}"' not in text and build is not XmlParser:
        assert not copied - Counter(text) - read


@each_parser
@settings(max_examples=40, deadline=None)
@given(text=any_text, cuts=any_cuts)
def test_calls_are_well_formed_whatever_the_text(build: Build, text: str, cuts: list[int]) -> None:
    parts = parse(build, split(text, cuts))
    begun = [part for part in parts if isinstance(part, CallBegun)]
    ended = [part for part in parts if isinstance(part, CallEnded)]
    assert [part.index for part in begun] == [part.index for part in ended] == list(range(len(begun)))
    assert all(part.name in NAMES for part in begun)
    assert len({part.call_id for part in begun}) == len(begun)
    for (_, arguments), end in zip(calls(parts), ended, strict=True):
        assert not end.is_complete or isinstance(json.loads(arguments), dict)
    running: int | None = None
    for part in parts:
        match part:
            case CallBegun(index):
                assert running is None
                running = index
            case CallArguments(index):
                assert running == index
            case CallEnded(index):
                assert running == index
                running = None
            case Content():
                assert running is None


# -- calls as models write them ---------------------------------------------------------------------------------------

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
some_calls = st.lists(
    st.tuples(st.sampled_from(NAMES[:2]), st.dictionaries(st.text(max_size=5), json_values, max_size=3), st.booleans()),
    min_size=1,
    max_size=3,
)


def written(arguments: object, is_plain: bool) -> str:
    return json.dumps(arguments, ensure_ascii=not is_plain, indent=None if is_plain else 1)


def call_object(name: str, arguments: str, key: str = "arguments", *, name_first: bool = True) -> str:
    members = [f'"name": "{name}"', f'"{key}": {arguments}']
    return "{" + ", ".join(members if name_first else members[::-1]) + "}"


@settings(max_examples=20, deadline=None)
@given(given_calls=some_calls, cuts=any_cuts, name_first=st.booleans())
@pytest.mark.parametrize("form", ["hermes", "llama3", "python_tag", "list", "mistral list", "mistral marks"])
def test_joined_arguments_are_the_text_that_the_model_wrote(
    form: str, given_calls: list[tuple[str, dict[str, object], bool]], cuts: list[int], name_first: bool
) -> None:
    expected = [(name, written(arguments, is_plain)) for name, arguments, is_plain in given_calls]
    objects = [call_object(name, arguments, name_first=name_first) for name, arguments in expected]
    parameters = [call_object(name, arguments, "parameters", name_first=name_first) for name, arguments in expected]
    texts: dict[str, tuple[Build, str]] = {
        "hermes": (hermes, "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects)),
        "llama3": (LlamaParser, "; ".join(parameters)),
        "python_tag": (LlamaParser, "<|python_tag|>" + ";".join(parameters)),
        "list": (ListParser, f"[{', '.join(objects)}]"),
        "mistral list": (MistralParser, f"[TOOL_CALLS] [{', '.join(objects)}]"),
        "mistral marks": (MistralParser, "".join(f"[TOOL_CALLS]{name}[ARGS]{text}" for name, text in expected)),
    }
    build, text = texts[form]
    parts = parse(build, split(text, cuts))
    assert calls(parts) == expected
    assert content(parts) == ""
    assert all(part.is_complete for part in parts if isinstance(part, CallEnded))


@pytest.mark.parametrize(
    ("build", "text", "before", "behind"),
    [
        (hermes, 'Let me see.\n\n<tool_call>{"name": "w"}</tool_call>\n', "Let me see.", ""),
        (hermes, '<tool_call>{"name": "w"}</tool_call>\n\nDone.', "", "\n\nDone."),
        (hermes, 'a <b> <tool_call>{"name":"w"}\n{"name":"w"}</tool_call>', "a <b>", ""),
        (hermes, 'a<tool_call>\n{"name": "w"}', "a", ""),
        (hermes, 'a<tool_call>\n{"name": "w"}\n</tool_', "a", ""),
        (LlamaParser, 'I see. <|python_tag|>{"name": "w"}', "I see.", ""),
        (MistralParser, 'I see. [TOOL_CALLS][{"name": "w"}] ok', "I see.", " ok"),
        (MistralParser, "I see.[TOOL_CALLS]w[CALL_ID]123456789[ARGS]{}", "I see.", ""),
        (MistralParser, "I see.[TOOL_CALLS]w{}", "I see.", ""),
        (ListParser, '[{"name": "w", "arguments": {}}]', "", ""),
    ],
    ids=str,
)
def test_text_beside_calls_is_content(build: Build, text: str, before: str, behind: str) -> None:
    parts = parse(build, list(text))
    assert {call for call in calls(parts)} == {("w", "{}")}
    first = next(index for index, part in enumerate(parts) if isinstance(part, CallBegun))
    assert (content(parts[:first]), content(parts[first:])) == (before, behind)


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (hermes, "<tool_call>"),
        (hermes, '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>'),
        (hermes, '<tool_call>{"name": 5}</tool_call>'),
        (hermes, '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
        (hermes, "<tool_call>w(city='Rome')</tool_call>"),
        (hermes, "<tool_call>{}</tool_call>"),
        (hermes, '<tool_call>{"name" "w"}</tool_call>'),
        (hermes, "a < b and <tool_calls>"),
        (LlamaParser, '{"colour": "red", "name": "w"}'),
        (LlamaParser, '<|python_tag|>brave_search.call(query="x")'),
        (LlamaParser, 'Here: {"name": "w", "parameters": {}}'),
        (MistralParser, "[TOOL_CALLS]"),
        (MistralParser, "[TOOL_CALLS][]"),
        (MistralParser, "[TOOL_CALLS]nobody[ARGS]{}"),
        (MistralParser, "[TOOL_CALLS]w and so on"),
        (ListParser, "no list"),
        (ListParser, "[1, 2]"),
    ],
    ids=str,
)
def test_what_is_no_call_is_content_as_it_stands(build: Build, text: str) -> None:
    parts = parse(build, list(text))
    assert (content(parts), calls(parts)) == (text, [])


@pytest.mark.parametrize(
    ("build", "text", "arguments", "rest"),
    [
        (hermes, '<tool_call>{"name": "w", "arguments": {"a": 1 2}}</tool_call>', '{"a": 1 ', "2}}</tool_call>"),
        (hermes, '<tool_call>{"name": "w", "arguments": {"a": "x', '{"a": "x', ""),
        (hermes, '<tool_call>{"name": "w", "arguments": {"a": "x\n"}}', '{"a": "x', '\n"}}'),
        (hermes, '<tool_call>{"name": "w", "arguments": [1]}', "", "}"),
        (hermes, '<tool_call>{"name": "w", "arguments": {}, "arguments": {}}', "{}", "{}}"),
        (LlamaParser, '{"name": "w", "parameters": {"a": nul}}', '{"a": nul', "}}"),
        (MistralParser, '[TOOL_CALLS]w[ARGS]{"a": 01}', '{"a": 01', "}"),
    ],
    ids=str,
)
def test_a_call_that_goes_wrong_is_incomplete_and_the_rest_is_content(
    build: Build, text: str, arguments: str, rest: str
) -> None:
    parts = parse(build, list(text))
    assert calls(parts) == [("w", arguments)]
    assert content(parts) == rest
    assert [part.is_complete for part in parts if isinstance(part, CallEnded)] == [False]


def test_arguments_are_passed_on_as_they_are_written() -> None:
    writer = PieceWriter(TOOLS, max_calls=99)
    parser = HermesParser(writer)
    text = call_object("w", written(ROME, True))
    parser.feed("<tool_call>")
    assert writer.take() == []
    sent = ""
    for end, character in enumerate(text, 1):
        parser.feed(character)
        sent += "".join(part.text for part in writer.take() if isinstance(part, CallArguments))
        begun = text[:end].partition('"arguments": ')[2]
        assert sent == begun.removesuffix("}") if end == len(text) else sent == begun


def test_content_waits_only_while_it_could_begin_a_call() -> None:
    writer = PieceWriter(TOOLS, max_calls=99)
    parser = HermesParser(writer)
    seen = []
    for piece in ("Hello", " <", "b", "> ", "world\n", "<tool_call", "s>"):
        parser.feed(piece)
        seen.append(content(writer.take()))
    assert seen == ["Hello", "", " <b", ">", " world", "", "\n<tool_calls>"]


@pytest.mark.parametrize("arguments", ['"{\\"city\\": \\"Rome\\"}"', '{"city": "Rome"}'])
@pytest.mark.parametrize("name_first", [True, False])
def test_arguments_may_be_told_as_a_string(arguments: str, name_first: bool) -> None:
    text = f"<tool_call>{call_object('w', arguments, name_first=name_first)}</tool_call>"
    assert calls(parse(hermes, list(text))) == [("w", '{"city": "Rome"}')]


def xml(name: str, values: dict[str, str]) -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, {}),
        ({"city": "Rome"}, {"city": "Rome"}),
        ({"city": ' a "b"\n\n<c> \\ \u6f22\U0001f999 </parameter\n'}, None),
        ({"city": "5", "num": "5", "unknown": "5"}, {"city": "5", "num": 5, "unknown": "5"}),
        ({"is_ok": "True", "list": '[1, {"a": null}]'}, {"is_ok": True, "list": [1, {"a": None}]}),
        ({"either": "null"}, {"either": None}),
        ({"either": "some text"}, {"either": "some text"}),
        ({"num": "not a number"}, {"num": "not a number"}),
        ({"city": ""}, {"city": ""}),
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_marked_arguments_become_the_object_that_they_mean(
    values: dict[str, str], expected: dict[str, object] | None, size: int
) -> None:
    text = f"I look.\n{xml('w', values)}\n{xml('get_time', {})}"
    parts = parse(XmlParser, [text[at : at + size] for at in range(0, len(text), size)])
    (name, arguments), second = calls(parts)
    assert (name, json.loads(arguments)) == ("w", values if expected is None else expected)
    assert second == ("get_time", "{}")
    assert content(parts) == "I look."


def test_a_marked_text_is_passed_on_while_it_is_written() -> None:
    writer = PieceWriter(TOOLS, max_calls=1)
    parser = XmlParser(writer)
    sent = []
    for piece in (
        "<tool_call><function=w><parameter=city>",
        "\nline 1",
        "\nline",
        " 2\n",
        "</para",
        "meter></function>",
    ):
        parser.feed(piece)
        sent.append("".join(part.text for part in writer.take() if isinstance(part, CallArguments)))
    assert sent == ['{"city": "', "line 1", "\\nline", " 2", "", '"}']


@pytest.mark.parametrize(
    ("text", "arguments", "rest"),
    [
        ("<tool_call><function=nobody></function></tool_call>", None, None),
        ("<tool_call>w()</tool_call>", None, None),
        ("<tool_call><function=w", None, None),
        ("<tool_call><function=w><b></function>", "{", "<b></function>"),
        ("<tool_call><function=w><parameter=num>5</parameter><parameter=num>6", '{"num": 5', "6"),
        ("<tool_call><function=w><parameter=city>Ro", '{"city": "Ro', ""),
        ("<tool_call><function=w><parameter=num>12", '{"num": 12', ""),
    ],
)
def test_marked_calls_that_go_wrong(text: str, arguments: str | None, rest: str | None) -> None:
    parts = parse(XmlParser, list(text))
    assert calls(parts) == ([] if arguments is None else [("w", arguments)])
    assert content(parts) == (text if rest is None else rest)


def test_half_a_character_in_told_arguments_is_no_object() -> None:
    text = '<tool_call>{"arguments": "{\\"a\\": \\"\\ud800\\"}", "name": "w"}</tool_call>'
    parts = parse(hermes, list(text))
    assert (content(parts), calls(parts)) == (text, [])


# -- reasoning --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize(
    ("text", "thought", "answer", "is_open"),
    [
        ("<think>\nHm <b> </thin\n</think>\n\nYes.", "Hm <b> </thin", "Yes.", False),
        ("\n<think>Hm</think>Yes.", "Hm", "Yes.", False),
        ("\nHm\n</think>\n\nYes.\n", "Hm", "Yes.\n", True),
        ("<think>\n\n</think>\n\nYes.", "", "Yes.", False),
        (" Yes. <think>no</think>", "", " Yes. <think>no</think>", False),
        ("<think>never ends </thi", "never ends </thi", "", False),
        ("<thin", "", "<thin", False),
        ("Hm</think>Yes</think>", "Hm", "Yes</think>", True),
    ],
    ids=str,
)
def test_reasoning_is_told_from_the_answer(text: str, thought: str, answer: str, is_open: bool, size: int) -> None:
    def build(writer: PieceWriter) -> TextReader:
        return ReasoningParser(writer, TextReader(writer), is_open=is_open)

    parts = parse(build, [text[at : at + size] for at in range(0, len(text), size)])
    assert (reasoning(parts), content(parts)) == (thought, answer)


def test_a_call_behind_reasoning_is_found_and_one_inside_is_not() -> None:
    call = '<tool_call>{"name": "w", "arguments": {}}</tool_call>'
    parts = parse(reasoning_hermes, list(f"<think>{call}</think>\n\n{call}"))
    assert reasoning(parts) == call
    assert (calls(parts), content(parts)) == ([("w", "{}")], "")
