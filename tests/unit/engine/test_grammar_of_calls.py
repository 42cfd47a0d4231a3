"""The sources that the gateway writes for tools and reasoning mean to a worker what they should."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from core.grammar import GrammarKind, GrammarSource
from engine.grammar_compiler import _grammar_of
from gateway.tools.dialect import Dialect, ToolFormat
from gateway.tools.forced import ChosenCalls, behind_reasoning, call_list
from modelfiles import ChatTool

TREE: dict[str, Any] = {
    "type": "object",
    "properties": {"node": {"$ref": "#/$defs/node"}, "count": {"$ref": "#/$defs/count"}},
    "required": ["node"],
    "$defs": {
        "node": {"type": "object", "properties": {"k": {"type": "array", "items": {"$ref": "#/$defs/node"}}}},
        "count": {"type": "integer"},
    },
}
TOOLS = [
    ChatTool(name="tree", description=None, parameters=TREE),
    ChatTool(name="none", description=None, parameters=None),
    ChatTool(name="any", description=None, parameters={}),
]
PLACES = [f"tools.{index}" for index in range(len(TOOLS))]


def accepts(source: GrammarSource, text: str) -> bool:
    from xgrammar.testing import _is_grammar_accept_string

    return bool(_is_grammar_accept_string(_grammar_of(source), text))


def call(name: str, arguments: object) -> dict[str, object]:
    return {"name": name, "arguments": arguments}


@pytest.mark.parametrize(
    ("calls", "is_accepted"),
    [
        ([call("none", {})], True),
        ([call("tree", {"node": {"k": [{}, {"k": []}]}, "count": 3}), call("any", {"x": [1]})], True),
        ([], False),
        ([call("none", {"a": 1})], False),
        ([call("tree", {"count": 3})], False),
        ([call("tree", {"node": {"k": [1]}})], False),
        ([call("nobody", {})], False),
        ([call("none", {})] * 3, False),
    ],
    ids=str,
)
def test_a_list_of_calls_follows_each_tools_own_schema(calls: list[dict[str, object]], is_accepted: bool) -> None:
    source = call_list(TOOLS, PLACES, max_calls=2)
    assert accepts(source, json.dumps(calls)) is is_accepted
    if is_accepted:
        schemas = {tool.name: tool.parameters or {} for tool in TOOLS}
        for one in calls:
            jsonschema.validate(one["arguments"], schemas[str(one["name"])])


def test_numbers_behind_references_are_bounded() -> None:
    source = call_list(TOOLS, PLACES, max_calls=1)
    texts = [json.dumps([call("tree", {"node": {}, "count": int("1" * size)})]) for size in (19, 20)]
    assert [accepts(source, text) for text in texts] == [True, False]


def chosen(is_strict: list[bool], *, parallel: bool = True, form: ToolFormat = ToolFormat.HERMES) -> ChosenCalls:
    return ChosenCalls(tools=TOOLS, places=PLACES, is_strict=is_strict, dialect=Dialect(format=form), parallel=parallel)


@pytest.mark.parametrize(
    ("text", "is_accepted"),
    [
        ("no call at all", True),
        ('I look.\n<tool_call>\n{"name": "tree", "arguments": {"node": {}}}\n</tool_call>', True),
        ('<tool_call>\n{"name": "tree", "arguments": {}}\n</tool_call>', False),
        ('<tool_call>\n{"name": "any", "arguments": {"free": 1}}\n</tool_call>\n', True),
        ('<tool_call>\n{"name": "nobody", "arguments": {}}\n</tool_call>', False),
    ],
)
@pytest.mark.parametrize("parallel", [True, False])
def test_strict_calls_are_bound_inside_free_text(text: str, is_accepted: bool, parallel: bool) -> None:
    source = chosen([True, False, False], parallel=parallel).in_text()
    assert source is not None
    assert accepts(source, text.rstrip() if not parallel else text) is is_accepted
    twice = f"{text.rstrip()}\n{text.rstrip()}"
    if is_accepted and "<tool_call>" in text:
        assert accepts(source, twice) is parallel


@pytest.mark.parametrize(
    ("form", "one"),
    [
        (ToolFormat.HERMES, '<tool_call>\n{"name": "any", "arguments": {"x": 1}}\n</tool_call>'),
        (ToolFormat.LLAMA3, '{"name": "any", "parameters": {"x": 1}}'),
    ],
)
def test_calls_stand_beside_an_answer_of_its_own_form(form: ToolFormat, one: str) -> None:
    number = GrammarSource(kind=GrammarKind.JSON_SCHEMA, source='{"type": "integer"}')
    separator = "; " if form is ToolFormat.LLAMA3 else "\n"
    several = chosen([False] * 3, form=form).or_answer(number)
    texts = [one, one + separator + one, "5", "", "no number", one + "5", "5" + one, one.replace("any", "nobody")]
    assert [accepts(several, text) for text in texts] == [True, True, True, *[False] * 5]
    single = chosen([False] * 3, form=form, parallel=False).or_answer(number)
    assert [accepts(single, text) for text in texts[:3]] == [True, False, True]


@pytest.mark.parametrize(
    ("text", "with_open", "without_open"),
    [
        ("[1]", False, True),
        ("<think>\nhm < b</thin\n</think>\n\n[1]", True, True),
        ("hm</think>[1]", True, False),
        ("<think>hm</think>1", False, False),
        ("<think>hm", False, False),
    ],
)
def test_what_follows_reasoning_follows_the_grammar(text: str, with_open: bool, without_open: bool) -> None:
    """Where the prompt has opened the block the answer may say `<think>` again: that is a thought."""
    source = GrammarSource(
        kind=GrammarKind.JSON_SCHEMA, source='{"type": "array", "items": {"const": 1}, "minItems": 1}'
    )
    assert accepts(behind_reasoning(source, is_open=True), text) is with_open
    assert accepts(behind_reasoning(source, is_open=False), text) is without_open
