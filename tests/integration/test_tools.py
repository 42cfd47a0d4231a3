"""Tools through the official client: the formats of models on a scripted engine, forced calls on the real model."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import jsonschema
import openai
import pytest
import pytest_asyncio
from pydantic import BaseModel

from core import types as t
from engine.engine import Engine
from kvtransfer.backends.nixl import NixlBackend
from tests.support import tool_templates as templates
from tests.support.local_cluster import MODEL, LocalCluster
from tests.support.scripted import Script
from tests.support.site import cluster_config, open_site, serve, served_model
from tests.support.tiny_tokenizer import ids_of

ASK: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in Rome?"}]
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"$ref": "#/$defs/days"},
    },
    "required": ["city", "unit", "days"],
    "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
}
TIME: dict[str, Any] = {"type": "object", "properties": {"zone": {"enum": ["UTC", "CET"]}}, "required": ["zone"]}
SCHEMAS = {"weather": WEATHER, "time": TIME}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": f"The {name}", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}


# -- a scripted engine ------------------------------------------------------------------------------------------------

CALLS = (
    'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome \U0001f999"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {"zone": "CET"}}\n</tool_call>'
)


@asynccontextmanager
async def scripted(text: str, size: int = 3) -> AsyncIterator[tuple[openai.AsyncOpenAI, Any]]:
    ids = ids_of(text)
    steps = [ids[at : at + size] for at in range(0, len(ids), size)]
    script = Script(steps=steps, finish_reason=t.FinishReason.STOP)
    model = served_model(template=templates.HERMES, max_context=4000)
    limits = {"max_body_bytes": 1 << 20}
    async with (
        open_site(script, model=model, limits=limits) as site,
        serve(site.gateway, cluster_config().gateway) as address,
        openai.AsyncOpenAI(base_url=f"http://{address}/v1", api_key="unused", max_retries=0) as client,
    ):
        yield client, site


async def test_bug_047_the_official_stream_helper_keeps_parallel_calls_apart() -> None:
    async with scripted(CALLS) as (client, _):
        plain = await client.chat.completions.create(model="m", messages=ASK, tools=TOOLS)  # type: ignore[arg-type]
        async with client.chat.completions.stream(model="m", messages=ASK, tools=TOOLS) as stream:  # type: ignore[arg-type]
            done = [
                (event.index, event.name, event.arguments)
                async for event in stream
                if event.type == "tool_calls.function.arguments.done"
            ]
            final = await stream.get_final_completion()
    assert done == [(0, "weather", '{"city": "Rome \U0001f999"}'), (1, "time", '{"zone": "CET"}')]
    assert final.choices[0].finish_reason == plain.choices[0].finish_reason == "tool_calls"
    assert final.choices[0].message.content == plain.choices[0].message.content == "I look."
    for calls in (final.choices[0].message.tool_calls, plain.choices[0].message.tool_calls):
        assert calls is not None
        assert [(call.function.name, call.function.arguments) for call in calls] == [one[1:] for one in done]
        assert len({call.id for call in calls}) == 2


async def test_the_official_parse_helper_reads_arguments() -> None:
    class Weather(BaseModel):
        city: str

    text = 'I look.<tool_call>\n{"name": "Weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    async with scripted(text) as (client, site):
        answer = await client.chat.completions.parse(
            model="m",
            messages=ASK,  # type: ignore[arg-type]
            tools=[openai.pydantic_function_tool(Weather)],
        )
        # The helper says `strict`: the schema binds what the model writes.
        assert json.loads(site.cluster.requests[0].sampling.grammar)["kind"] == "structural_tag"
    calls = answer.choices[0].message.tool_calls
    assert calls is not None
    assert calls[0].function.parsed_arguments == Weather(city="Rome")


async def test_a_conversation_goes_on_with_what_the_client_keeps() -> None:
    async with scripted(CALLS) as (client, site):
        first = await client.chat.completions.create(model="m", messages=ASK, tools=TOOLS)  # type: ignore[arg-type]
        told = first.choices[0].message
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": f"result {index}"}
            for index, call in enumerate(told.tool_calls or [])
        ]
        await client.chat.completions.create(model="m", messages=[*ASK, told, *results], tools=TOOLS)  # type: ignore[list-item]
        ids = site.cluster.requests[-1].prompt_token_ids
        prompt = served_model().tokenizer.decode(ids, skip_special_tokens=False)
    assert all(block in prompt for block in CALLS.partition("\n")[2].split("\n<"))
    assert "<tool_response>\nresult 0\n</tool_response>" in prompt
    assert prompt.index("result 0") < prompt.index("result 1")


# -- the real model ---------------------------------------------------------------------------------------------------


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(loaded_engines: dict[str, Engine]) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        LocalCluster(lambda worker_id: NixlBackend(), engines=loaded_engines) as cluster,
        serve(cluster.gateway, cluster.config.gateway) as address,
        openai.AsyncOpenAI(base_url=f"http://{address}/v1", api_key="unused", max_retries=0) as client,
    ):
        yield client


def checked(calls: Any) -> list[tuple[str, str]]:
    """(name, arguments) of the one call, which follows its schema."""
    assert calls is not None and len(calls) == 1
    for call in calls:
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    return [(call.function.name, call.function.arguments) for call in calls]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("choice", "parallel", "reason"), [("required", False, "tool_calls"), (NAMED, True, "stop")])
async def test_forced_calls_of_the_real_model_follow_their_schemas(
    client: openai.AsyncOpenAI, choice: Any, parallel: bool, reason: str
) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": ASK,
        "tools": TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": parallel,
        "temperature": 0,
        "max_tokens": 100,
    }
    plain = await client.chat.completions.create(**asked)
    async with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
        final = await stream.get_final_completion()
    for answer in (plain, final):
        assert answer.choices[0].finish_reason == reason
    message = plain.choices[0].message
    assert message.content is None
    calls = checked(message.tool_calls)
    assert checked(final.choices[0].message.tool_calls) == calls
    assert final.usage is not None and plain.usage is not None
    assert final.usage.completion_tokens == plain.usage.completion_tokens > 10
    assert final.usage.prompt_tokens == plain.usage.prompt_tokens


@pytest.mark.asyncio(loop_scope="module")
async def test_bug_046_the_real_model_cut_in_a_call_says_length(client: openai.AsyncOpenAI) -> None:
    city = {"type": "object", "properties": {"city": {"type": "string", "minLength": 30}}, "required": ["city"]}
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Weather in Rome"}],
        "tools": [{"type": "function", "function": {"name": "w", "parameters": city}}],
        "tool_choice": "required",
        "max_tokens": 20,
        "temperature": 0,
    }
    plain = await client.chat.completions.create(**asked)
    stream = await client.chat.completions.create(**asked, stream=True)
    arguments, reasons = "", []
    async for chunk in stream:
        arguments += "".join(call.function.arguments for call in chunk.choices[0].delta.tool_calls or ())
        reasons += [chunk.choices[0].finish_reason] if chunk.choices[0].finish_reason else []
    (call,) = plain.choices[0].message.tool_calls or ()
    assert (plain.choices[0].finish_reason, reasons) == ("length", ["length"])
    assert arguments == call.function.arguments and arguments.startswith('{"city": "')


@pytest.mark.asyncio(loop_scope="module")
async def test_the_real_model_answers_results_and_plain_questions(client: openai.AsyncOpenAI) -> None:
    """Its template knows no tools: ours is what it is told, and its text is content."""
    first = await client.chat.completions.create(
        model=MODEL,
        messages=ASK,
        tools=TOOLS,
        tool_choice=NAMED,
        temperature=0,
        max_tokens=100,  # type: ignore[arg-type]
    )
    told = first.choices[0].message
    (call,) = told.tool_calls or ()
    result = {"role": "tool", "tool_call_id": call.id, "content": "It is 31 degrees and sunny in Rome."}
    second = await client.chat.completions.create(
        model=MODEL,
        messages=[*ASK, told, result],  # type: ignore[list-item]
        tools=TOOLS,
        tool_choice="none",
        temperature=0,
        max_tokens=30,
    )
    assert "Rome" in (second.choices[0].message.content or "")
    assert second.choices[0].message.tool_calls is None
