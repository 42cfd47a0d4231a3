"""Reports of users of other servers, as cases: ways round the key check, streams that cost nothing, refusals that do
not say when to come back.

Through a real socket, before a scripted engine, with a wall clock that the test moves.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from core.config import GatewayConfig
from tests.support.caller import Caller, error_of
from tests.support.site import serve
from tests.support.tiny_tokenizer import ids_of
from tests.unit.gateway.access.conftest import OpenSite, Site, open_site

__all__ = ["open_site"]

ANSWER = len(ids_of("hello world"))
RATE_HEADERS = [
    f"x-ratelimit-{part}-{what}" for part in ("limit", "remaining", "reset") for what in ("requests", "tokens")
]
ROUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20}),
    "two choices": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20, "n": 2},
    ),
    "completions": ("/v1/completions", {"prompt": "hi", "max_tokens": 20}),
    "responses": ("/v1/responses", {"input": "hi", "max_output_tokens": 20}),
}


@asynccontextmanager
async def served(site: Site) -> AsyncIterator[tuple[Caller, str]]:
    async with (
        serve(site.gateway, GatewayConfig()) as address,
        httpx.AsyncClient(base_url=f"http://{address}", trust_env=False) as http,
    ):
        yield Caller(http), address


# -- keys -------------------------------------------------------------------------------------------------------------

UPGRADE = "connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-key: eA==\r\nsec-websocket-version: 13\r\n"
TARGETS = [
    "POST //v1/chat/completions",
    "POST /v1/chat/completions",
    "GET /v1/../v1/models",
    "GET /v1/%2e%2e/health",
    "GET /health/../v1/models",
    "GET /health%2f..%2fv1/models",
    "GET /V1/models",
    "GET /v1/models/",
    "GET /v1/models;a=b",
    "GET /v1/models?key=sk-baton-x-y&api_key=z",
    "GET http://x/v1/models",
    "GET http://x/health/../v1/models",
    "POST /tokenize",
    "POST /detokenize",
    "POST /v1/responses",
    "GET /metrics",
    "GET /docs",
    "GET /openapi.json",
    "GET /v1/usage",
    "GET /admin/keys",
    "HEAD /v1/models",
    "OPTIONS /v1/chat/completions",
    "PUT /health",
    "GET /%0a",
    "GET /nothing",
]


async def status_of(address: str, target: str, more: str = "") -> int:
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(f"{target} HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n{more}\r\n".encode())
        async with asyncio.timeout(60):
            return int((await reader.readline()).split()[1])
    finally:
        writer.close()


async def test_bug_068_no_way_of_writing_a_path_leads_round_the_key(open_site: OpenSite) -> None:
    async with open_site() as site, served(site) as (caller, address):
        for target in TARGETS:
            assert await status_of(address, target) == 401, target
        assert await status_of(address, "GET /v1/chat/completions", UPGRADE) == 401
        for bad in ("Bearer", "Bearer x", "Basic eDp5", "bearer sk-baton-000000000000-x", "Bearer " + "x" * 5000):
            assert await status_of(address, "GET /v1/models", f"authorization: {bad}\r\n") == 401
        answer = await caller.http.get("/v1/models")
        assert error_of(answer)["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"
        for open_route in ("GET /health", "HEAD /health", "GET /ready"):
            assert await status_of(address, open_route) in (200, 503)
        key = await site.key()
        assert (await caller.http.get("/v1/models", headers=key)).status_code == 200
        assert (await caller.http.get("/nothing", headers=key)).status_code == 404


# -- accounts ---------------------------------------------------------------------------------------------------------


async def until_refused(caller: Caller, key: dict[str, str], path: str, body: dict[str, Any]) -> int:
    """How many requests a key may make before it is told that its tokens are used up."""
    for number in range(100):
        answer = await caller.post(path, {"model": "m", **body}, headers=key)
        if answer.status_code == 429:
            assert error_of(answer)["type"] == "rate_limit_error"
            return number
        assert answer.status_code == 200, answer.text
        if body.get("stream"):
            assert '"prompt_tokens"' not in answer.text, "nobody asked for usage"
    raise AssertionError("never refused")


@pytest.mark.parametrize("route", list(ROUTES))
async def test_bug_055_a_stream_costs_what_the_plain_answer_costs(open_site: OpenSite, route: str) -> None:
    path, body = ROUTES[route]
    async with open_site() as site, served(site) as (caller, _):
        plain, streamed = [await site.key(tenant, tokens_per_minute=400) for tenant in ("plain", "streamed")]
        num_plain = await until_refused(caller, plain, path, body)
        assert num_plain > 1
        assert await until_refused(caller, streamed, path, {**body, "stream": True}) == num_plain
        [row], [other] = [await site.usage(tenant) for tenant in ("plain", "streamed")]
        per_request = ANSWER * body.get("n", 1)
        assert row.num_completion_tokens == other.num_completion_tokens == num_plain * per_request
        assert row.num_prompt_tokens == other.num_prompt_tokens


async def test_bug_055_a_stream_left_half_way_costs_what_was_made(open_site: OpenSite) -> None:
    async with open_site() as site, served(site) as (caller, _):
        key = await site.key(tokens_per_minute=1000)
        site.cluster.hold("token-4")
        body = {"model": "m", "prompt": "say it", "max_tokens": 100, "stream": True}
        async with caller.http.stream("POST", "/v1/completions", json=body, headers=key) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                if line:
                    break
            await site.cluster.until("token-4")
        async with asyncio.timeout(60):
            await site.cluster.until("abort-decode")
            while not (rows := await site.usage()):
                await asyncio.sleep(0.01)
        site.cluster.release("token-4")
        assert 0 < rows[0].num_completion_tokens <= 4
        remaining = (await caller.http.get("/v1/models", headers=key)).headers["x-ratelimit-remaining-tokens"]
        assert int(remaining) == 1000 - rows[0].num_prompt_tokens - rows[0].num_completion_tokens


# -- rates ------------------------------------------------------------------------------------------------------------


async def test_bug_071_a_refusal_says_when_to_come_back_and_it_is_true(open_site: OpenSite) -> None:
    body = {"model": "m", "prompt": "say it", "max_tokens": 20}
    async with open_site() as site, served(site) as (caller, _):
        key = await site.key(requests_per_minute=2, tokens_per_minute=10_000)
        answers = await asyncio.gather(*(caller.post("/v1/completions", body, headers=key) for _ in range(5)))
        assert sorted(answer.status_code for answer in answers) == [200, 200, 429, 429, 429]
        assert all(name in answer.headers for answer in answers for name in RATE_HEADERS)
        refused = [answer for answer in answers if answer.status_code == 429]
        waits = [int(answer.headers["retry-after"]) for answer in refused]
        assert all(error_of(answer)["code"] == "rate_limit_exceeded" for answer in refused)
        assert min(waits) >= 1
        site.calendar.now += waits[0]
        assert (await caller.post("/v1/completions", body, headers=key)).status_code == 200
