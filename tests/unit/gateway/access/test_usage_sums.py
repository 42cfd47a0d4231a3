"""Every token is accounted for once: 500 mixed requests with random disconnects, to the token."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

from tests.support.asgi import Call, Reply
from tests.support.scripted import Script
from tests.support.tiny_tokenizer import ids_of
from tests.unit.gateway.access.conftest import OpenSite, Site
from tests.unit.gateway.access.test_limits import until_settled

NUM_REQUESTS = 500
ANSWER = "hello \U0001f5fc world, and more"


def body_of(draw: random.Random) -> tuple[str, dict[str, Any]]:
    body: dict[str, Any] = {"model": draw.choice(("m", "n")), "max_tokens": 60, "stream": draw.random() < 0.6}
    if body["stream"] and draw.random() < 0.5:
        body["stream_options"] = {"include_usage": True}
    if draw.random() < 0.2:
        body["stop"] = "world"
    if draw.random() < 0.5:
        return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": draw.choice(("hi", "hello"))}]}
    return "/v1/completions", {**body, "prompt": draw.choice(("say it", "world", "x"))}


def told_usage(reply: Reply, *, is_stream: bool) -> dict[str, Any] | None:
    """The usage that the client was told."""
    if reply.status != 200 or not reply.is_complete:
        return None
    if not is_stream:
        usage: dict[str, Any] = reply.json()["usage"]
        return usage
    chunks = [event for event in reply.events() if event != "[DONE]"]
    return chunks[-1].get("usage")


async def one_request(site: Site, draw: random.Random, headers: dict[str, str], told: Counter[str]) -> None:
    path, body = body_of(draw)
    call: Call = site.client.start("POST", path, body, headers=headers)
    if draw.random() < 0.4:
        for _ in range(draw.randrange(60)):  # some turns of the loop later the client is gone, wherever that finds it
            await asyncio.sleep(0)
        call.leave()
    reply = await call.end()
    usage = told_usage(reply, is_stream=body["stream"])
    if usage is not None:
        told["answered"] += 1
        told["prompt"] += usage["prompt_tokens"]
        told["completion"] += usage["completion_tokens"]
    told["left" if not reply.is_complete else "complete"] += 1


async def test_the_sums_of_500_mixed_requests_match_to_the_token(open_site: OpenSite) -> None:
    draw = random.Random(5)
    async with open_site(Script(steps=[[one] for one in ids_of(ANSWER)]), names=("m", "n")) as site:
        amounts = {"tokens_per_minute": 10_000_000, "tokens_per_day": 10_000_000, "max_streams": 100}
        keys = [await site.key("a", **amounts), await site.key("a"), await site.key("b", **amounts)]
        told: Counter[str] = Counter()
        for _ in range(NUM_REQUESTS // 10):
            await asyncio.gather(*(one_request(site, draw, draw.choice(keys), told) for _ in range(10)))
        await until_settled(site)
        rows = [*await site.usage("a"), *await site.usage("b")]
        for _ in range(NUM_REQUESTS // 50):  # a report takes a hundred of them
            await site.gateway.reporter.report()
        records = [record for report in site.cluster.reports for record in report.records]
        left_over = [await site.client.get("/v1/models", headers=headers) for headers in (keys[0], keys[2])]
    assert told["left"] > 50, told
    assert told["answered"] > 100, told
    completion = sum(row.num_completion_tokens for row in rows)
    prompt = sum(row.num_prompt_tokens for row in rows)
    # Of every run, as the router is told of it: what was accepted, whoever left.
    assert completion == sum(record.num_completion_tokens for record in records)
    charged = [record for record in records if record.num_completion_tokens or record.decode_worker]
    assert prompt == sum(record.num_prompt_tokens for record in charged)
    assert completion >= told["completion"]
    assert len({(row.key_id, row.model) for row in rows}) == 6
    # The rates have what was used and no reservation.
    used = Counter[str]()
    for row in rows:
        used[row.key_id] += row.num_prompt_tokens + row.num_completion_tokens
    for headers, reply in zip((keys[0], keys[2]), left_over, strict=True):
        key_id = headers["authorization"].split("-")[2]
        assert int(reply.headers["x-ratelimit-remaining-tokens"]) == 10_000_000 - used[key_id]
