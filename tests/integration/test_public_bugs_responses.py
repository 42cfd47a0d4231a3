"""Reports of users of other servers, as cases: event streams of the responses route that clients could not read.

Through a real socket and the official client, before a scripted engine.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from core import types as t
from core.errors import WorkerLost
from tests.support.scripted import Fault, Script
from tests.support.site import Site, cluster_config, open_site, serve, served_model
from tests.support.tiny_tokenizer import EOS_TEXT, ids_of, tiny_tokenizer
from tests.support.tool_templates import HERMES

ANSWER = "hello \U0001f5fc world"
EOS = tiny_tokenizer().added_id(EOS_TEXT) or 0
EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
INPUT: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]
OPENED = ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"]
CLOSED = ["response.output_text.done", "response.content_part.done", "response.output_item.done"]


def script(**more: Any) -> Script:
    ended = {"finish_reason": t.FinishReason.STOP, "stop_token_id": EOS}
    return Script(steps=[*([one] for one in ids_of(ANSWER)), [EOS]], **{**ended, **more})


@asynccontextmanager
async def client_of(told: Script) -> AsyncIterator[tuple[openai.AsyncOpenAI, Site]]:
    async with (
        open_site(told, model=served_model(template=HERMES, max_context=4000)) as site,
        serve(site.gateway, cluster_config().gateway) as address,
        openai.AsyncOpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client, site


async def raw_events(client: openai.AsyncOpenAI, **body: Any) -> list[dict[str, Any]]:
    """The events as they are on the wire: each is checked against the official types, names and numbers too."""
    async with httpx.AsyncClient() as http:
        url = f"{client.base_url}responses"
        answer = await http.post(url, json={"model": "m", "input": INPUT, "stream": True, **body})
    assert answer.status_code == 200, answer.text
    events = []
    for number, frame in enumerate(answer.content.decode().removesuffix("\n\n").split("\n\n")):
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        EVENT.validate_python(event, strict=True)
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        events.append(event)
    return events


async def test_bug_064_the_first_event_is_that_there_is_a_response() -> None:
    async with client_of(script()) as (client, _):
        kinds: list[str] = []
        async with client.responses.stream(model="m", input="hi", max_output_tokens=60) as stream:
            async for event in stream:
                kinds.append(event.type)  # noqa: PERF401  # the helper raises when the order is wrong
            final = await stream.get_final_response()
        plain = await client.responses.create(model="m", input="hi", max_output_tokens=60)
    assert kinds[:4] == OPENED
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert kinds[-4:] == [*CLOSED, "response.completed"]
    assert final.output_text == plain.output_text == ANSWER
    assert final.usage == plain.usage
    assert (final.status, plain.status) == ("completed", "completed")


async def test_bug_064_a_response_cut_by_its_limit_says_so() -> None:
    async with client_of(script(finish_reason=t.FinishReason.LENGTH, stop_token_id=None)) as (client, _):
        events = [event async for event in await client.responses.create(model="m", input="hi", stream=True)]
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.incomplete_details is not None
    assert last.response.incomplete_details.reason == "max_output_tokens"


async def test_bug_065_every_event_is_whole_and_every_beginning_has_its_end() -> None:
    async with client_of(script()) as (client, _):
        events = await raw_events(client)
    assert [event["type"] for event in events if "delta" not in event["type"]] == [
        *OPENED,
        *CLOSED,
        "response.completed",
    ]
    by_kind = {event["type"]: event for event in events}
    text = "".join(event["delta"] for event in events if "delta" in event)
    item = by_kind["response.output_item.done"]["item"]
    assert text == by_kind["response.output_text.done"]["text"] == by_kind["response.content_part.done"]["part"]["text"]
    assert text == item["content"][0]["text"] == ANSWER
    assert by_kind["response.completed"]["response"]["output"] == [item]
    assert all(
        isinstance(event["logprobs"], list) for event in events if event["type"].startswith("response.output_text")
    )


TOOLS: list[Any] = [
    {"type": "function", "name": "w", "strict": None, "parameters": {"type": "object", "properties": {"city": {}}}}
]


async def test_bug_065_a_forced_call_is_told_as_a_whole_item() -> None:
    arguments = '{"city": "Rome \U0001f999"}'
    forced = ids_of(f'[{{"name": "w", "arguments": {arguments}}}]')
    told = Script(steps=[*([one] for one in forced), [EOS]], finish_reason=t.FinishReason.STOP, stop_token_id=EOS)
    async with client_of(told) as (client, _):
        events = await raw_events(client, tools=TOOLS, tool_choice="required")
        async with client.responses.stream(model="m", input="hi", tools=TOOLS, tool_choice="required") as stream:
            deltas = [event async for event in stream if event.type == "response.function_call_arguments.delta"]
            final = await stream.get_final_response()
        plain = await client.responses.create(model="m", input="hi", tools=TOOLS, tool_choice="required")
    kinds = list(dict.fromkeys(event["type"] for event in events))
    call = "response.function_call_arguments"
    closed = [f"{call}.delta", f"{call}.done", "response.output_item.done", "response.completed"]
    assert kinds == [*OPENED[:3], *closed]
    assert deltas[-1].snapshot == arguments
    for response in (final, plain):
        [item] = response.output
        assert item.type == "function_call" and item.call_id
        assert (item.name, item.arguments, item.status) == ("w", arguments, "completed")


async def test_bug_065_what_breaks_half_way_is_closed_and_failed() -> None:
    faults = {attempt: Fault(fail_at=4, error=WorkerLost("scripted")) for attempt in range(1, 9)}
    async with client_of(script(faults=faults)) as (client, _):
        events = await raw_events(client)
        kinds = [event.type async for event in await client.responses.create(model="m", input="hi", stream=True)]
    assert [event["type"] for event in events][-4:] == [*CLOSED, "response.failed"]
    assert kinds == [event["type"] for event in events]
    assert events[-1]["response"]["output"][0]["status"] == "incomplete"


async def test_bug_065_a_client_that_leaves_half_way_leaves_nothing_behind() -> None:
    async with client_of(script()) as (client, site):
        site.cluster.hold("token-4")
        stream = await client.responses.create(model="m", input="hi", stream=True)
        async for event in stream:
            if event.type == "response.output_text.delta":
                break
        await stream.close()
        async with asyncio.timeout(60):
            await site.cluster.until("abort-decode")
        site.cluster.release("token-4")
        assert (await client.responses.create(model="m", input="hi")).output_text == ANSWER
