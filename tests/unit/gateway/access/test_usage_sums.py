"""Every token is accounted for once: 500 mixed requests with random disconnects, to the token."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest

from core.config import GatewayConfig
from tests.support.asgi import Reply
from tests.support.scripted import Script
from tests.support.site import serve
from tests.support.tiny_tokenizer import ids_of
from tests.unit.gateway.access.conftest import OpenSite, Site
from tests.unit.gateway.access.test_limits import until_settled

ANSWERS = (
    'yes <tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>',
    "hello \U0001f5fc world",
    '{"a": [1, 2, 3]}',
)
"""Of the choices, in turn."""
STOP = "world"
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
MESSAGES = [{"role": "user", "content": "hi"}]


def draw_request(draw: random.Random) -> tuple[str, dict[str, Any]]:
    body: dict[str, Any] = {"model": draw.choice(("m", "n")), "stream": draw.random() < 0.6}
    match draw.choice(("chat", "tools", "structured", "text", "prompts", "responses")):
        case "responses":
            return "/v1/responses", {**body, "input": "hi", "max_output_tokens": 90}
        case "text":
            path, more = "/v1/completions", {"prompt": "say it"}
        case "prompts":
            path, more = "/v1/completions", {"prompt": ["a", "bc", "def"]}
        case "tools":
            path, more = "/v1/chat/completions", {"messages": MESSAGES, "tools": TOOLS}
        case "structured":
            path, more = "/v1/chat/completions", {"messages": MESSAGES, "response_format": SCHEMA}
        case _:
            path, more = "/v1/chat/completions", {"messages": MESSAGES}
    body |= more | {"max_tokens": 90, "n": draw.choice((1, 1, 2, 3)), "temperature": 1}
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    if draw.random() < 0.2:
        body["stop"] = STOP
    return path, body


def num_made(body: dict[str, Any]) -> int:
    """Tokens that the script makes for a request that nobody cuts off."""
    texts = [text.partition(STOP)[0] + STOP if STOP in text and "stop" in body else text for text in ANSWERS]
    num_prompts = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1
    return num_prompts * sum(len(ids_of(text)) for text in texts[: body.get("n", 1)])


def told_usage(reply: Reply, path: str, *, is_stream: bool) -> tuple[int, int]:
    """Prompt and completion tokens that the client was told."""
    if path == "/v1/responses":
        usage = reply.json()["usage"] if not is_stream else last_event(reply)["response"]["usage"]
        return usage["input_tokens"], usage["output_tokens"]
    usage = reply.json()["usage"] if not is_stream else reply.events()[-2]["usage"]
    return usage["prompt_tokens"], usage["completion_tokens"]


def last_event(reply: Reply) -> dict[str, Any]:
    lines = [line for line in reply.body.decode().split("\n") if line.startswith("data: ")]
    event: dict[str, Any] = json.loads(lines[-1].removeprefix("data: "))
    return event


Ask = Callable[[str, dict[str, Any], dict[str, str], bool], Awaitable[Reply]]
"""One request: path, body, headers, and whether its client leaves before the answer is whole, at a time that is
drawn."""


def ask_directly(site: Site, draw: random.Random) -> Ask:
    async def ask(path: str, body: dict[str, Any], headers: dict[str, str], leaves: bool) -> Reply:
        call = site.client.start("POST", path, body, headers=headers)
        if leaves:
            for _ in range(draw.randrange(50)):  # some turns of the loop later, wherever that finds the request
                await asyncio.sleep(0)
            call.leave()
        return await call.end()

    return ask


def ask_over_a_socket(http: httpx.AsyncClient, draw: random.Random) -> Ask:
    async def ask(path: str, body: dict[str, Any], headers: dict[str, str], leaves: bool) -> Reply:
        reply = Reply()
        async with http.stream("POST", path, json=body, headers=headers | {"connection": "close"}) as answer:
            reply.status = answer.status_code
            wanted = draw.randrange(2000) if leaves else sys.maxsize
            async for piece in answer.aiter_bytes():
                reply.body += piece
                if len(reply.body) > wanted:
                    return reply
        reply.is_complete = True
        return reply

    return ask


async def one_request(ask: Ask, draw: random.Random, headers: dict[str, str], told: Counter[str]) -> None:
    path, body = draw_request(draw)
    reply = await ask(path, body, headers, draw.random() < 0.4)
    if not reply.is_complete:
        told["left"] += 1
        return
    assert reply.status == 200, reply.body
    prompt, completion = told_usage(reply, path, is_stream=body["stream"])
    assert completion == num_made(body), (path, body)
    told.update(answered=1, prompt=prompt, completion=completion)


@pytest.mark.parametrize(("way", "num_requests"), [("direct", 200), ("socket", 500)])
async def test_the_sums_of_mixed_requests_match_to_the_token(open_site: OpenSite, way: str, num_requests: int) -> None:
    draw = random.Random(5)
    first, *others = ([[one] for one in ids_of(text)] for text in ANSWERS)
    async with open_site(Script(steps=first, others=others), names=("m", "n"), max_context=4000) as site:
        amounts = {"tokens_per_minute": 10_000_000, "tokens_per_day": 10_000_000, "max_streams": 100}
        keys = [await site.key("a", **amounts), await site.key("a"), await site.key("b", **amounts)]
        told: Counter[str] = Counter()
        async with AsyncExitStack() as stack:
            ask = ask_directly(site, draw)
            if way == "socket":
                address = await stack.enter_async_context(serve(site.gateway, GatewayConfig()))
                client = httpx.AsyncClient(base_url=f"http://{address}", timeout=60, trust_env=False)
                ask = ask_over_a_socket(await stack.enter_async_context(client), draw)
            for _ in range(num_requests // 10):
                await asyncio.gather(*(one_request(ask, draw, draw.choice(keys), told) for _ in range(10)))
            while site.gateway.reporter.num_requests:
                await asyncio.sleep(0)
        await until_settled(site)
        rows = [*await site.usage("a"), *await site.usage("b")]
        for _ in range(num_requests // 20):  # a report takes a hundred of them; a request may be several
            await site.gateway.reporter.report()
        records = [record for report in site.cluster.reports for record in report.records]
        left_over = [await site.client.get("/v1/models", headers=headers) for headers in (keys[0], keys[2])]
    assert told["left"] > 5, told
    assert told["answered"] > 5, told
    completion = sum(row.num_completion_tokens for row in rows)
    prompt = sum(row.num_prompt_tokens for row in rows)
    # The router is told of every run: what was accepted of it, whoever left.
    assert completion == sum(record.num_completion_tokens for record in records)
    placed = [record for record in records if record.num_completion_tokens or record.decode_worker]
    assert prompt == sum(record.num_prompt_tokens for record in placed)
    assert completion > told["completion"], "some left when tokens had been made"
    assert prompt > told["prompt"]
    assert len({(row.key_id, row.model) for row in rows}) == 6
    # The rates have what was used and no reservation.
    used = Counter[str]()
    for row in rows:
        used[row.key_id] += row.num_prompt_tokens + row.num_completion_tokens
    for headers, reply in zip((keys[0], keys[2]), left_over, strict=True):
        key_id = headers["authorization"].split("-")[2]
        assert int(reply.headers["x-ratelimit-remaining-tokens"]) == 10_000_000 - used[key_id]
