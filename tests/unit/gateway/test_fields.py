"""The table of members against the schemas, the official client's types and the gateway itself."""

from __future__ import annotations

import importlib
import inspect
import json
from dataclasses import replace
from typing import Any

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from core import types as t
from gateway.fields import ROUTES, Verdict, neutral_values
from gateway.responses.body import ResponsesBody
from gateway.schemas import Body, ChatBody, CompletionBody, DetokenizeBody, SamplingBody, TokenizeBody
from tests.support.asgi import Reply
from tests.support.scripted import Script
from tests.support.site import TEMPLATE
from tests.support.tiny_tokenizer import EOS_TEXT, START_TEXT, bos_tokenizer, ids_of, tiny_tokenizer
from tests.support.tool_templates import REASONING
from tests.unit.gateway.conftest import MAX_CONTEXT, OpenSite, served_model

SCHEMAS: dict[str, type[Body]] = {
    "chat": ChatBody,
    "completions": CompletionBody,
    "responses": ResponsesBody,
    "tokenize": TokenizeBody,
    "detokenize": DetokenizeBody,
}
PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "tokenize": "/tokenize",
    "detokenize": "/detokenize",
}
HI = [{"role": "user", "content": "hi"}]
BASES: dict[str, dict[str, Any]] = {
    "chat": {"model": "m", "messages": HI, "seed": 5, "max_tokens": 20},
    "completions": {"model": "m", "prompt": "say it", "seed": 5, "max_tokens": 20},
    "responses": {"model": "m", "input": "hi", "seed": 5, "max_output_tokens": 20},
    "tokenize": {"messages": HI},
    "detokenize": {"tokens": ids_of("hi")},
}
TOOLS = [{"type": "function", "function": {"name": "w"}}]
EOS = tiny_tokenizer().added_id(EOS_TEXT) or 0

GENERATION: dict[str, Any] = {
    "model": "nobody",
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 7,
    "min_p": 0.5,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "repetition_penalty": 1.5,
    "logit_bias": {"5": 1},
    "allowed_token_ids": [5],
    "bad_words": ["x"],
    "n": 2,
    "seed": 6,
    "stop": "lo",
    "stop_token_ids": [9],
    "min_tokens": 3,
    "ignore_eos": True,
    "priority": -1,
    "cache_salt": "mine",
    "include_stop_str_in_output": (True, {"stop": "lo"}),
    "skip_special_tokens": False,
    "stream": True,
    "stream_options": ({"include_usage": True}, {"stream": True}),
    "return_token_ids": True,
    "prompt_logprobs": 1,
    "truncate_prompt_tokens": 2,
    "truncation_side": ("right", {"truncate_prompt_tokens": 2}),
    "response_format": {"type": "json_object"},
    "structured_outputs": {"choice": ["a"]},
    "guided_json": {"type": "object"},
    "guided_regex": "a",
    "guided_choice": ["a"],
    "guided_grammar": 'root ::= "a"',
    "add_special_tokens": True,
}
CASES: dict[str, dict[str, Any]] = {
    "chat": {
        **GENERATION,
        "messages": [{"role": "user", "content": "ho"}],
        "max_tokens": 9,
        "max_completion_tokens": 9,
        "logprobs": True,
        "top_logprobs": (1, {"logprobs": True}),
        "return_tokens_as_token_ids": (True, {"logprobs": True}),
        "add_generation_prompt": False,
        "continue_final_message": True,
        "chat_template_kwargs": {"signature": "yours"},
        "tools": TOOLS,
        "tool_choice": ("required", {"tools": TOOLS}),
        "parallel_tool_calls": (False, {"tools": TOOLS, "tool_choice": "required"}),
        "reasoning_effort": "high",
        "include_reasoning": False,
    },
    "completions": {
        **GENERATION,
        "prompt": "say more",
        "max_tokens": 9,
        "logprobs": 0,
        "return_tokens_as_token_ids": (True, {"logprobs": 1}),
        "echo": True,
        "best_of": 3,
        "add_special_tokens": False,
    },
    "responses": {
        **{name: value for name, value in GENERATION.items() if name in SamplingBody.model_fields},
        "input": "ho",
        "instructions": "Be brief.",
        "max_output_tokens": 9,
        "max_tool_calls": 3,
        "text": {"format": {"type": "json_object"}},
        "reasoning": {"effort": "low"},
        "top_logprobs": (1, {"include": ["message.output_text.logprobs"]}),
        "include": ["message.output_text.logprobs"],
        "metadata": {"a": "b"},
        "stream_options": {"include_obfuscation": False},
        "chat_template_kwargs": {"signature": "yours"},
        "tools": [{"type": "function", "name": "f"}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "user": "u",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
    },
    "tokenize": {
        "model": "nobody",
        "prompt": ("a", {"messages": None}),
        "messages": [{"role": "user", "content": "ho"}],
        "add_special_tokens": True,
        "add_generation_prompt": False,
        "continue_final_message": True,
        "chat_template_kwargs": {"signature": "yours"},
        "tools": TOOLS,
        "tool_choice": ("none", {"tools": TOOLS}),
        "parallel_tool_calls": (False, {"tools": TOOLS}),
        "reasoning_effort": "high",
        "return_token_strs": True,
    },
    "detokenize": {"model": "nobody", "tokens": ids_of("ho")},
}
"""A value that makes a difference; with what else it needs to make it."""


@pytest.mark.parametrize("route", ROUTES)
def test_the_table_says_what_the_schemas_know(route: str) -> None:
    rules = ROUTES[route]
    honoured = {name for name, rule in rules.items() if rule.verdict is Verdict.HONOURED}
    assert honoured == {field.alias or name for name, field in SCHEMAS[route].model_fields.items()}
    assert SCHEMAS[route].not_built == neutral_values(route)
    assert honoured == set(CASES[route]), "each has a case"
    module, function, parameters = "", "", set()
    for name in honoured:
        path, _, test = rules[name].test_of(route).partition("::")
        module, (function, _, parameter) = path.removesuffix(".py").replace("/", "."), test.partition("[")
        parameters.add(parameter.removesuffix("]"))
    assert inspect.isfunction(getattr(importlib.import_module(module), function))
    assert parameters == {f"{route}-{name}" for name in honoured}


@pytest.mark.parametrize(
    ("route", "params"),
    [
        ("chat", chat_create_params.CompletionCreateParamsStreaming),
        ("completions", completion_create_params.CompletionCreateParamsStreaming),
        ("responses", response_create_params.ResponseCreateParamsStreaming),
    ],
)
def test_every_member_of_the_official_client_has_a_rule(route: str, params: Any) -> None:
    members = {name for cls in (params, *params.__orig_bases__) for name in cls.__annotations__}
    assert members - set(ROUTES[route]) == set()


def _events(reply: Reply, route: str) -> list[Any]:
    if route != "responses":
        return reply.events()
    return [json.loads(frame.partition("\ndata: ")[2]) for frame in reply.body.decode().split("\n\n")[:-1]]


async def outcome(open_site: OpenSite, route: str, body: dict[str, Any]) -> Any:
    """What reaches the workers and what comes back, without what differs between any two requests."""
    said = [*ids_of("hello world"), EOS]
    script = Script(
        steps=[[one] for one in said],
        finish_reason=t.FinishReason.STOP,
        stop_token_id=EOS,
        logprobs=lambda token_id: t.TokenLogprobs(logprob=-1.0, rank=2, top=((40, -0.5), (41, -1.5))),
    )
    if "skip_special_tokens" in body:  # a special token within the text
        script.steps = [[tiny_tokenizer().added_id(START_TEXT) or 0], *script.steps]
    if "include_reasoning" in body:
        script.steps = [ids_of("<think>hm</think>hi")]
    model = served_model(
        bos_tokenizer() if "add_special_tokens" in body else None,
        template=REASONING if "include_reasoning" in body else TEMPLATE,
        max_context=4000 if "tools" in body else MAX_CONTEXT,
    )
    async with open_site(script, model=model) as site:
        reply = await site.client.post(PATHS[route], body)
        sent = [replace(one, request_id="", traceparent="", age_s=0, deadline_s=0) for one in site.cluster.requests]
    is_stream = body.get("stream") and reply.status == 200
    events = _events(reply, route) if is_stream else [reply.json()]
    for event in events:
        if isinstance(event, dict):
            event.pop("id", None), event.pop("created", None), event.pop("created_at", None)
            if event.get("error"):
                event["error"].pop("message")
    return reply.status, sent, json.dumps(events).replace(reply.headers["x-request-id"], "")


@pytest.mark.parametrize(
    ("route", "name"), [pytest.param(r, name, id=f"{r}-{name}") for r, cases in CASES.items() for name in cases]
)
async def test_a_member_that_is_dropped_is_missed(open_site: OpenSite, route: str, name: str) -> None:
    case = CASES[route][name]
    value, needs = case if isinstance(case, tuple) else (case, {})
    without = {**BASES[route], **needs}
    with_it = {**without, name: value}
    if isinstance(value, bool) and name in ("skip_special_tokens", "add_special_tokens", "include_reasoning"):
        without[name] = not value  # the tokenizer or the tokens of the case are special
    changed, unchanged = await outcome(open_site, route, with_it), await outcome(open_site, route, without)
    assert changed != unchanged
    assert changed[0] in (200, 400, 404)


@pytest.mark.parametrize(
    ("route", "name"),
    [
        pytest.param(route, rule.name, id=f"{route}-{rule.name}")
        for route, rules in ROUTES.items()
        for rule in rules.values()
        if rule.verdict is Verdict.REFUSED
    ],
)
async def test_what_is_not_built_is_refused_by_name_unless_it_asks_for_nothing(
    open_site: OpenSite, route: str, name: str
) -> None:
    async with open_site() as site:
        body = {**BASES[route], name: {"some": ["thing"]}}
        reply = await site.client.post(PATHS[route], body)
        assert (reply.status, reply.json()["error"]["param"]) == (400, name)
        assert reply.json()["error"]["code"] == "unsupported_parameter"
        for neutral in (None, *neutral_values(route)[name]):
            assert (await site.client.post(PATHS[route], {**body, name: neutral})).status == 200


@pytest.mark.parametrize("refuse", [False, True])
async def test_unknown_members_are_counted_and_refused_if_the_operator_says_so(
    open_site: OpenSite, refuse: bool
) -> None:
    settings = {"unknown_fields": "refuse"} if refuse else {}
    async with open_site(**settings) as site:
        for route, path in PATHS.items():
            reply = await site.client.post(path, {**BASES[route], "surprise": 1, "user": "u"})
            assert reply.status == (400 if refuse and "user" in ROUTES[route] else reply.status)
            if refuse:
                assert (reply.status, reply.json()["error"]["param"]) == (400, "surprise")
            else:
                assert reply.status == 200
        count = site.telemetry.registry.get_sample_value("baton_gateway_unknown_fields_total", {"route": "chat"})
    assert count == 1
