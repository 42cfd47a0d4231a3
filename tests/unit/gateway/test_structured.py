"""`response_format`, `structured_outputs`, `guided_*`: one source reaches the workers, or a 400 comes back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from core.errors import InvalidRequest
from core.types import TokenLogprobs
from gateway.answers import Answer
from gateway.schemas import ChatBody, parse_body
from gateway.structured import grammar_of
from tests.unit.gateway.conftest import OpenSite

HI = [{"role": "user", "content": "hi"}]
OBJECT = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "null"}}, "required": ["b"]}
CLOSED = {**OBJECT, "additionalProperties": False}


def schema_format(schema: object, **more: object) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, **more}}


@pytest.mark.parametrize(
    ("body", "kind", "source"),
    [
        ({"response_format": schema_format(OBJECT)}, "json_schema", CLOSED),
        ({"response_format": schema_format(OBJECT, strict=True, description="d")}, "json_schema", CLOSED),
        ({"response_format": {"type": "json_object"}}, "json_schema", {"type": "object", "additionalProperties": True}),
        ({"structured_outputs": {"json": OBJECT}}, "json_schema", CLOSED),
        ({"structured_outputs": {"json": json.dumps(OBJECT)}}, "json_schema", CLOSED),
        ({"guided_json": OBJECT}, "json_schema", CLOSED),
        ({"guided_json": json.dumps(OBJECT)}, "json_schema", CLOSED),
        ({"structured_outputs": {"choice": ["a", "b", "a"]}}, "choice", ["a", "b"]),
        ({"guided_choice": ["a"]}, "choice", ["a"]),
        ({"structured_outputs": {"regex": "[a-z]"}}, "regex", "[a-z]"),
        ({"guided_regex": "[a-z]"}, "regex", "[a-z]"),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "ebnf", 'root ::= "a"'),
        ({"guided_grammar": 'root ::= "a"'}, "ebnf", 'root ::= "a"'),
        (
            {
                "structured_outputs": {
                    "structural_tag": {
                        "type": "structural_tag",
                        "format": {"type": "json_schema", "json_schema": OBJECT},
                    }
                }
            },
            "structural_tag",
            {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": CLOSED}},
        ),
        (
            {"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}},
            "structural_tag",
            {"type": "structural_tag", "format": {"type": "any_text"}},
        ),
    ],
    ids=str,
)
async def test_every_way_to_ask_becomes_one_source(
    open_site: OpenSite, body: dict[str, Any], kind: str, source: object
) -> None:
    async with open_site() as site:
        for path, prompt in (("/v1/chat/completions", {"messages": HI}), ("/v1/completions", {"prompt": "hi"})):
            assert (await site.client.post(path, {"model": "m", **prompt, **body})).status == 200
        chat, text = (json.loads(request.sampling.grammar) for request in site.cluster.requests)
    assert chat == text
    assert chat.pop("kind") == kind
    assert list(chat) == ["source"]
    assert (chat["source"] if isinstance(source, str) else json.loads(chat["source"])) == source


async def test_properties_keep_their_order_and_white_space_is_a_switch(open_site: OpenSite) -> None:
    async with open_site() as site:
        for more in ({}, {"disable_any_whitespace": True}, {"disable_any_whitespace": False}):
            body = {"model": "m", "messages": HI, "structured_outputs": {"json": OBJECT, **more}}
            assert (await site.client.post("/v1/chat/completions", body)).status == 200
        sources = [request.sampling.grammar for request in site.cluster.requests]
    assert sources[0] == sources[1] != sources[2]
    assert sources[0].index('\\"b\\"') < sources[0].index('\\"a\\"')


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "no"}}, "response_format.type"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "response_format.json_schema.name"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "s"}}}, "response_format.json_schema.schema"),
    ({"response_format": schema_format({}, name="a b")}, "response_format.json_schema.name"),
    ({"response_format": schema_format({}, name="a" * 65)}, "response_format.json_schema.name"),
    ({"response_format": schema_format({"type": "strng"})}, "response_format.json_schema.schema"),
    ({"response_format": schema_format("text")}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "structural_tag"}}, "response_format.format"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": []}, "structured_outputs"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": "5"}}, "structured_outputs.json"),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": [5]}}, "structured_outputs.choice.0"),
    ({"structured_outputs": {"structural_tag": {"structures": []}}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ({"guided_choice": ["a"], "ignore_eos": True}, "ignore_eos"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": True}, "prompt_logprobs"),
]


@pytest.mark.parametrize(("body", "param"), REFUSED, ids=lambda value: str(value)[:70])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_is_a_400_before_any_event(
    open_site: OpenSite, body: dict[str, Any], param: str, stream: bool
) -> None:
    async with open_site() as site:
        reply = await site.client.post("/v1/chat/completions", {"model": "m", "messages": HI, "stream": stream, **body})
        assert reply.status == 400
        assert reply.json()["error"]["param"] == param
        assert site.cluster.places == []


def test_the_size_of_a_source_is_bounded() -> None:
    body = parse_body(ChatBody, json.dumps({"model": "m", "messages": HI, "guided_regex": "x" * 70_000}).encode())
    with pytest.raises(InvalidRequest, match="too large"):
        grammar_of(body)


async def test_prompt_logprobs_are_not_for_streams(open_site: OpenSite) -> None:
    async with open_site() as site:
        body = {"model": "m", "messages": HI, "stream": True}
        reply = await site.client.post("/v1/chat/completions", {**body, "prompt_logprobs": 2})
        assert (reply.status, reply.json()["error"]["param"]) == (400, "prompt_logprobs")
        assert (await site.client.post("/v1/chat/completions", {**body, "prompt_logprobs": 0})).status == 200


def test_scores_name_each_token_once() -> None:
    class Texts:
        def token_text(self, token_id: int) -> str:
            return f"t{token_id}"

    answer = Answer.__new__(Answer)
    answer._tokenizer = Texts()  # type: ignore[assignment]
    inside = answer._scored(5, TokenLogprobs(logprob=-1.0, rank=2, top=((4, -0.5), (5, -1.0))))
    beyond = answer._scored(9, TokenLogprobs(logprob=float("-inf"), rank=7, top=((4, -0.5),)))
    assert inside == {
        "4": {"logprob": -0.5, "rank": 1, "decoded_token": "t4"},
        "5": {"logprob": -1.0, "rank": 2, "decoded_token": "t5"},
    }
    assert beyond["9"] == {"logprob": -9999.0, "rank": 7, "decoded_token": "t9"}
