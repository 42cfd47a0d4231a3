"""What a request says of tools is honoured or refused by the name of the member, and of the tool."""

from __future__ import annotations

import json
from typing import Any

import pytest

from core.config import LimitsConfig
from core.errors import InvalidRequest
from core.grammar import GrammarKind, GrammarSource
from gateway.parse import chat_job
from gateway.schemas import ChatBody, parse_body
from tests.support import tool_templates as templates
from tests.support.marked_tokenizer import marked_tokenizer
from tests.support.site import served_model
from tests.unit.gateway.conftest import OpenSite

HI = {"role": "user", "content": "hi"}
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 9}}, "required": ["city"]}
CALL = {"id": "call_1", "type": "function", "function": {"name": "w", "arguments": "{}"}}
REQUIRED = {"tool_choice": "required"}
LIMITS = LimitsConfig(max_tools=4)


def tool(name: object = "w", **more: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": CITY, **more}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def grammar(template: str = templates.HERMES, marks: tuple[str, ...] = (), **more: Any) -> GrammarSource | None:
    model = served_model(marked_tokenizer(*marks, special=True), template=template, max_context=200_000)
    raw = json.dumps({"model": "m", "messages": [HI], **more}).encode()
    source = chat_job(parse_body(ChatBody, raw), model, LIMITS).sampling.grammar
    return GrammarSource.decode(source) if source else None


@pytest.mark.parametrize(
    ("body", "param", "word"),
    [
        ({"tools": 5}, "tools", ""),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools.0.type", ""),
        ({"tools": [{"type": "function"}]}, "tools.0.function", "required"),
        ({"tools": [tool("")]}, "tools.0.function.name", ""),
        ({"tools": [tool("a b")]}, "tools.0.function.name", ""),
        ({"tools": [tool("x" * 65)]}, "tools.0.function.name", ""),
        ({"tools": [tool("<|im_end|>")]}, "tools.0.function.name", ""),
        ({"tools": [tool(), tool()]}, "tools.1.function.name", "'w'"),
        ({"tools": [tool(str(index)) for index in range(5)]}, "tools", "at most 4"),
        ({"tools": [tool(parameters=[])]}, "tools.0.function.parameters", ""),
        ({"tools": [tool(parameters={"type": "array"})]}, "tools.0.function.parameters", "tool 'w'"),
        ({"tools": [tool("deep", parameters=nested(20))]}, "tools.0.function.parameters", "tool 'deep'"),
        ({"tools": [tool("deep", parameters=nested(15))], **REQUIRED}, None, ""),
        ({"tools": [tool(parameters={"not": {}})], **REQUIRED}, "tools.0.function.parameters", "tool 'w'"),
        ({"tools": [tool(parameters={"not": {}})]}, None, ""),
        (
            {"tools": [tool(parameters={"$ref": "#/x", "type": "object"})], **REQUIRED},
            "tools.0.function.parameters",
            "",
        ),
        ({"tools": [tool()], "tool_choice": "any"}, "tool_choice.type", ""),
        ({"tools": [tool()], "tool_choice": 5}, "tool_choice", ""),
        ({"tools": [tool()], "tool_choice": {"type": "function"}}, "tool_choice.function", "required"),
        ({"tools": [tool()], "tool_choice": named("v")}, "tool_choice", "not in 'tools'"),
        ({"tool_choice": "required"}, "tool_choice", "needs 'tools'"),
        ({"tools": [], "tool_choice": named("w")}, "tool_choice", "needs 'tools'"),
        ({"tool_choice": "auto"}, None, ""),
        ({"tools": [tool()], "parallel_tool_calls": "no"}, "parallel_tool_calls", ""),
        ({"tools": [tool()], "response_format": {"type": "json_object"}}, None, ""),
        ({"tools": [tool()], "response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos", ""),
        ({"tools": [tool()], "tool_choice": "none", "response_format": {"type": "json_object"}}, None, ""),
        ({"tools": [tool()], **REQUIRED, "structured_outputs": {"regex": "a"}}, "tool_choice", "format"),
        ({"tools": [tool()], **REQUIRED, "ignore_eos": True}, "ignore_eos", "grammar"),
        ({"functions": [{"name": "w"}]}, "functions", "use 'tools'"),
        ({"function_call": {"name": "w"}}, "function_call", "use 'tool_choice'"),
        ({"messages": [{"role": "function", "name": "w", "content": "x"}]}, "messages.0.role", "'tool'"),
        ({"messages": [HI, {"role": "assistant", "function_call": {}}]}, "messages.1.function_call", "use"),
        ({"messages": [HI, {"role": "assistant", "content": None}]}, "messages.1.content", "required"),
        ({"messages": [HI, {"role": "assistant", "content": None, "tool_calls": []}]}, "messages.1.content", ""),
        ({"messages": [{**HI, "tool_calls": [CALL]}]}, "messages.0.tool_calls", "assistant"),
        ({"messages": [HI, {"role": "tool", "content": "x"}]}, "messages.1.tool_call_id", "required"),
        ({"messages": [HI, {"role": "tool", "content": "x", "tool_call_id": "call_9"}]}, "messages.1.tool_call_id", ""),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "tools"),
        ({"chat_template_kwargs": nested(20)}, "chat_template_kwargs", "deeply"),
        ({"reasoning_effort": "enormous"}, "reasoning_effort", ""),
        ({"reasoning_effort": "high"}, "reasoning_effort", "does not reason"),
        ({"reasoning_effort": "none"}, None, ""),
        ({"thinking_token_budget": 5}, "thinking_token_budget", ""),
    ],
    ids=lambda value: json.dumps(value)[:90] if isinstance(value, dict) else None,
)
def test_what_cannot_be_honoured_is_refused_by_name(body: dict[str, Any], param: str | None, word: str) -> None:
    if param is None:
        grammar(**body)
        return
    with pytest.raises(InvalidRequest) as refusal:
        grammar(**body)
    assert refusal.value.param == param
    assert word in refusal.value.message


@pytest.mark.parametrize(
    "call",
    [
        {**CALL, "function": {"name": "w", "arguments": "{"}},
        {**CALL, "function": {"name": "w", "arguments": "[]"}},
        {**CALL, "function": {"name": "w", "arguments": '{"a": ' * 40 + "1" + "}" * 40}},
        {**CALL, "function": {"name": "w", "arguments": {"a": 1}}},
        {**CALL, "function": {"name": "a b", "arguments": "{}"}},
        {**CALL, "function": {"name": "w"}},
        {**CALL, "type": "custom"},
        {**CALL, "id": ""},
        {**CALL, "id": 5},
    ],
    ids=str,
)
def test_calls_in_messages_are_checked(call: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        grammar(messages=[HI, {"role": "assistant", "tool_calls": [call]}])
    assert (refusal.value.param or "").startswith("messages.1.tool_calls.0.")


def test_an_answer_of_ours_can_be_sent_back_as_it_came() -> None:
    """With the null members that typed clients add."""
    told = {"role": "assistant", "content": None, "refusal": None, "audio": None, "function_call": None}
    call = {**CALL, "function": {"name": "w", "arguments": ""}}
    answer = {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "sunny"}], "name": None}
    assert grammar(messages=[HI, {**told, "tool_calls": [call]}, answer]) is None
    assert grammar(messages=[HI, {**told, "content": "x", "tool_calls": None, "reasoning_content": "hm"}]) is None


# -- grammars ---------------------------------------------------------------------------------------------------------


def test_silence_and_auto_force_nothing() -> None:
    assert grammar(tools=[tool()]) is None
    assert grammar(tools=[tool()], tool_choice="auto", parallel_tool_calls=False) is None


@pytest.mark.parametrize(("parallel", "most"), [(True, 16), (False, 1)])
def test_required_admits_any_tool_and_named_only_its_own(parallel: bool, most: int) -> None:
    offered = [tool("w"), tool("v", parameters=None)]
    required = grammar(tools=offered, tool_choice="required", parallel_tool_calls=parallel)
    one = grammar(tools=offered, tool_choice=named("v"))
    assert required is not None and one is not None
    assert required.kind is one.kind is GrammarKind.JSON_SCHEMA
    schema = json.loads(required.source)
    assert (schema["minItems"], schema["maxItems"]) == (1, most)
    assert [item["properties"]["name"]["enum"] for item in schema["items"]["anyOf"]] == [["w"], ["v"]]
    schema = json.loads(one.source)
    assert (schema["minItems"], schema["maxItems"]) == (1, 1)
    assert schema["items"]["properties"]["name"] == {"enum": ["v"]}
    assert schema["$defs"]["t0"] == {"type": "object", "additionalProperties": False}


def test_references_of_a_tool_stay_inside_its_own_schema() -> None:
    tree = {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}, "me": {"$ref": "#"}}, "$defs": {"n": {}}}
    source = grammar(tools=[tool("w"), tool("v", parameters=tree)], **REQUIRED)
    assert source is not None
    moved = json.loads(source.source)["$defs"]["t1"]
    assert moved["properties"] == {"n": {"$ref": "#/$defs/t1/$defs/n"}, "me": {"$ref": "#/$defs/t1"}}
    values = {"type": "object", "properties": {"a": {"enum": [{"$ref": "#"}]}}}
    source = grammar(tools=[tool(parameters=values)], **REQUIRED)
    assert source is not None
    assert json.loads(source.source)["$defs"]["t0"]["properties"]["a"] == {"enum": [{"$ref": "#"}]}


def test_strict_tools_bind_calls_that_the_model_chooses_to_make() -> None:
    source = grammar(tools=[tool("w", strict=True), tool("v")])
    assert source is not None and source.kind is GrammarKind.STRUCTURAL_TAG
    form = json.loads(source.source)["format"]
    assert form["triggers"] == ["<tool_call>"]
    schemas = [one["content"]["json_schema"] for one in form["tags"]]
    assert schemas == [{**CITY, "additionalProperties": False}, {"type": "object", "additionalProperties": True}]
    with pytest.raises(InvalidRequest, match="tool 'w': 'strict'"):
        grammar(templates.MISTRAL, ("[TOOL_CALLS]",), tools=[tool("w", strict=True)])
    # Llama's calls need no mark, and the marks of reasoning are in nobody's way.
    unmarked = grammar(templates.LLAMA3, ("<|python_tag|>",), tools=[tool("w", strict=True)])
    assert unmarked is not None
    assert json.loads(unmarked.source)["format"]["triggers"] == ['{"name": ']
    offered = [tool("w", strict=True), tool("v")]
    assert grammar(templates.REASONING, ("<think>", "</think>"), tools=offered) == source


def test_an_answer_is_calls_or_follows_its_format() -> None:
    source = grammar(tools=[tool("w", strict=True), tool("v")], response_format={"type": "json_object"})
    assert source is not None
    calls, answer = json.loads(source.source)["format"]["elements"]
    assert (calls["type"], calls["at_least_one"], answer["type"]) == ("tags_with_separator", True, "json_schema")
    with pytest.raises(InvalidRequest, match="cannot stand beside a format") as refusal:
        grammar(templates.MISTRAL, ("[TOOL_CALLS]",), tools=[tool()], response_format={"type": "json_object"})
    assert refusal.value.param == "tools"


def test_schemas_that_are_too_large_together_are_refused() -> None:
    wide = {"type": "object", "properties": {f"p{index}": {"enum": ["x" * 3000]} for index in range(24)}}
    with pytest.raises(InvalidRequest, match="too large together") as refusal:
        grammar(tools=[tool(parameters=wide)], **REQUIRED)
    assert refusal.value.param == "tools"
    assert grammar(tools=[tool(parameters={"type": "object"})], **REQUIRED) is not None


@pytest.mark.parametrize(
    ("more", "kind"),
    [
        ({"tools": [tool()], **REQUIRED}, "json_schema"),
        ({"response_format": {"type": "json_object"}}, "json_schema"),
        ({"structured_outputs": {"regex": "[a-z]"}}, "regex"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "or"),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "grammar"),
    ],
    ids=str,
)
def test_a_grammar_begins_behind_the_reasoning(more: dict[str, Any], kind: str) -> None:
    source = grammar(templates.REASONING, **more)
    assert source is not None and source.kind is GrammarKind.STRUCTURAL_TAG
    reasoned, bare = json.loads(source.source)["format"]["elements"]
    assert [one["type"] for one in reasoned["elements"]] == ["tag", "regex", kind]
    assert (reasoned["elements"][0]["begin"], bare["type"]) == ("<think>", kind)
    without = grammar(templates.REASONING, **more, reasoning_effort="none")
    assert without is not None and without.kind is not GrammarKind.STRUCTURAL_TAG


def test_reasoning_that_a_grammar_cannot_end_is_refused_by_name() -> None:
    marks = ("<think>", "</think>")
    with pytest.raises(InvalidRequest, match="turn it off") as refusal:
        grammar(templates.OPENED_REASONING, marks, response_format={"type": "json_object"})
    assert refusal.value.param == "response_format"
    # Where the prompt does not open the block the grammar simply leaves it out.
    source = grammar(templates.REASONING, marks, response_format={"type": "json_object"})
    assert source is not None and source.kind is GrammarKind.JSON_SCHEMA


async def test_bug_049_a_tool_whose_schema_is_no_schema_is_a_400_that_names_it(open_site: OpenSite) -> None:
    body = {"model": "m", "messages": [HI], "tools": [tool("w", parameters={"type": "object", "properties": 5})]}
    async with open_site(model=served_model(template=templates.HERMES)) as site:
        reply = await site.client.post("/v1/chat/completions", body | REQUIRED)
    assert reply.status == 400
    error = reply.json()["error"]
    assert (error["param"], error["code"]) == ("tools.0.function.parameters", "invalid_json_schema")
    assert "tool 'w'" in error["message"]
