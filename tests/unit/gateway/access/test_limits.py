"""What a key allows, over HTTP: rates, requests at once, budgets; the headers; what is given back."""

from __future__ import annotations

import asyncio
import re
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest

from core.errors import NoWorker
from gateway.access.keys import KeyTerms
from tests.support.asgi import Reply
from tests.support.scripted import Fault, Script
from tests.support.tiny_tokenizer import ids_of
from tests.unit.gateway.access.conftest import OpenSite, Site

PROMPT = len(ids_of("say it"))
ANSWER = len(ids_of("hello world"))
HANG_S = 2
"""Long enough for a busy machine to open a database in."""
RATE_HEADERS = [
    f"x-ratelimit-{part}-{what}" for what in ("requests", "tokens") for part in ("limit", "remaining", "reset")
]


def code(reply: Reply) -> tuple[int, str]:
    return reply.status, reply.json()["error"]["code"]


def failures(site: Site, store: str, kind: str) -> float:
    name = "baton_gateway_access_store_failures_total"
    return site.telemetry.registry.get_sample_value(name, {"store": store, "kind": kind}) or 0


async def test_bug_071_a_refused_request_is_told_when_to_come_back(open_site: OpenSite) -> None:
    async with open_site() as site:
        headers = await site.key(requests_per_minute=2, tokens_per_minute=1000)
        site.calendar.now += 20
        replies = await asyncio.gather(*(site.ask(headers, max_tokens=20) for _ in range(5)))
        assert sorted(reply.status for reply in replies) == [200, 200, 429, 429, 429]
        for reply in replies:
            assert all(name in reply.headers for name in RATE_HEADERS)
            assert reply.headers["x-ratelimit-limit-requests"] == "2"
            assert reply.headers["x-ratelimit-reset-requests"] in ("1m0s", "40s")
        refused = next(reply for reply in replies if reply.status == 429)
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert code(refused) == (429, "rate_limit_exceeded")
        wait_s = int(refused.headers["retry-after"])
        assert 1 <= wait_s <= 60
        site.calendar.now += wait_s - 1.5
        assert (await site.ask(headers)).status == 429
        site.calendar.now += 1.5
        assert (await site.ask(headers)).status == 200


async def test_the_headers_are_on_every_answer(open_site: OpenSite) -> None:
    async with open_site() as site:
        headers = await site.key(requests_per_minute=20, tokens_per_minute=1000)
        replies = [
            await site.ask(headers),
            await site.ask(headers, stream=True),
            await site.ask(headers, temperature=9),
            await site.ask(headers, model="absent"),
            await site.client.post("/v1/completions", b"{", headers=headers),
            await site.client.post("/nothing", {}, headers=headers),
            await site.client.get("/v1/models", headers=headers),
            await site.client.post("/tokenize", {"prompt": "x"}, headers=headers),
        ]
        assert [reply.status for reply in replies] == [200, 200, 400, 404, 400, 404, 200, 200]
        for reply in replies:
            assert all(name in reply.headers for name in RATE_HEADERS)
        left = [int(reply.headers["x-ratelimit-remaining-requests"]) for reply in replies]
        assert left == [19, 18, 17, 16, 15, 14, 14, 13], "reading counts no request"
        without = await site.ask(await site.key())
        assert not any(name in without.headers for name in RATE_HEADERS)


@pytest.mark.parametrize("stream", [False, True])
async def test_bug_055_streams_are_charged_like_plain_answers(open_site: OpenSite, stream: bool) -> None:
    async with open_site() as site:
        headers = await site.key(tokens_per_minute=3 * (PROMPT + ANSWER) + 1)
        for number in range(1, 4):
            reply = await site.ask(headers, max_tokens=ANSWER, stream=stream)
            assert reply.status == 200
            assert b'"usage":{' not in reply.body or not stream
            assert reply.headers["x-ratelimit-remaining-tokens"] == str((3 - number) * (PROMPT + ANSWER) + 1)
        reply = await site.ask(headers, max_tokens=ANSWER, stream=stream)
        assert code(reply) == (429, "rate_limit_exceeded")
        assert int(reply.headers["retry-after"]) >= 1
        (row,) = await site.usage()
    assert (row.num_requests, row.num_prompt_tokens, row.num_completion_tokens) == (3, 3 * PROMPT, 3 * ANSWER)


async def test_bug_055_what_was_reserved_and_not_used_is_given_back(open_site: OpenSite) -> None:
    async with open_site() as site:
        headers = await site.key(tokens_per_minute=180)
        first = await site.ask(headers, max_tokens=150)
        assert first.headers["x-ratelimit-remaining-tokens"] == str(180 - 150 - PROMPT)
        await until_settled(site)
        models = await site.client.get("/v1/models", headers=headers)
        assert models.headers["x-ratelimit-remaining-tokens"] == str(180 - ANSWER - PROMPT)


async def test_bug_055_a_disconnect_half_way_costs_what_was_made(open_site: OpenSite) -> None:
    async with open_site() as site:
        headers = await site.key(tokens_per_minute=180, tokens_per_day=1000, max_streams=1)
        site.cluster.hold("token-4")
        call = site.client.start(
            "POST",
            "/v1/completions",
            {"model": "m", "prompt": "say it", "max_tokens": 100, "stream": True},
            headers=headers,
        )
        while "".join(re.findall(r'"text":"(.*?)"', call.reply.body.decode())) != "hell":
            await asyncio.sleep(0)
        call.leave()
        await call.end()
        await until_settled(site)
        (row,) = await site.usage()
        made = row.num_completion_tokens
        assert (row.num_requests, row.num_prompt_tokens, made) == (1, PROMPT, 4)
        models = await site.client.get("/v1/models", headers=headers)
        assert models.headers["x-ratelimit-remaining-tokens"] == str(180 - PROMPT - made)
        site.cluster.release("token-4")
        assert (await site.ask(headers)).status == 200, "it runs no more"


async def test_bug_055_an_error_of_ours_before_the_first_token_is_free(open_site: OpenSite) -> None:
    fault = Fault(on_place=NoWorker("scripted"))
    async with open_site(Script(steps=[[5]], faults={1: fault})) as site:
        headers = await site.key(tokens_per_minute=180, max_streams=1, tokens_per_day=1000)
        for _ in range(3):
            assert (await site.ask(headers)).status == 503
        await until_settled(site)
        models = await site.client.get("/v1/models", headers=headers)
        assert models.headers["x-ratelimit-remaining-tokens"] == "180"
        (row,) = await site.usage()
    assert (row.num_requests, row.num_prompt_tokens, row.num_completion_tokens) == (3, 0, 0)


async def test_every_choice_of_every_prompt_is_reserved(open_site: OpenSite) -> None:
    async with open_site() as site:
        headers = await site.key(tokens_per_minute=1000)
        reply = await site.ask(headers, prompt=["say it", "say it"], n=3, max_tokens=20)
        assert reply.status == 200
        assert reply.headers["x-ratelimit-remaining-tokens"] == str(1000 - 2 * PROMPT - 6 * 20)
        await until_settled(site)
        models = await site.client.get("/v1/models", headers=headers)
        assert models.headers["x-ratelimit-remaining-tokens"] == str(1000 - 2 * PROMPT - 6 * ANSWER)


async def test_more_than_a_key_ever_allows_is_told_and_not_retried(open_site: OpenSite) -> None:
    async with open_site() as site:
        headers = await site.key(tokens_per_minute=50, max_streams=1)
        for _ in range(2):
            reply = await site.ask(headers, max_tokens=100)
            assert code(reply) == (429, "rate_limit_exceeded")
            assert "max_tokens" in reply.json()["error"]["message"]
            assert reply.headers["x-should-retry"] == "false"
            assert "retry-after" not in reply.headers
        assert (await site.ask(headers)).status == 200


async def test_who_names_no_number_of_tokens_reserves_a_projection(open_site: OpenSite) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    async with open_site(projected_tokens=20) as site:
        headers = await site.key(tokens_per_minute=120)
        reply = await site.client.post("/v1/chat/completions", body, headers=headers)
        assert reply.status == 200
        taken = 120 - int(reply.headers["x-ratelimit-remaining-tokens"])
        assert taken == reply.json()["usage"]["prompt_tokens"] + 20


async def test_requests_at_once_are_bounded_and_a_place_is_free_again(open_site: OpenSite) -> None:
    async with open_site() as site:
        headers, others = await site.key(max_streams=2), await site.key("other", max_streams=1)
        site.cluster.hold("token-1")
        body = {"model": "m", "prompt": "say it", "max_tokens": 20, "stream": True}
        calls = [site.client.start("POST", "/v1/completions", body, headers=headers) for _ in range(2)]
        for call in calls:
            await call.until(b'"text"')
        third = await site.ask(headers)
        assert code(third) == (429, "rate_limit_exceeded")
        assert third.headers["retry-after"] == "1"
        other = site.client.start("POST", "/v1/completions", body, headers=others)
        await other.until(b'"text"')
        calls[0].leave()
        await calls[0].end()
        await until_settled(site)
        site.cluster.release("token-1")
        assert (await site.ask(headers)).status == 200
        assert [(await call.end()).status for call in (*calls, other)] == [200, 200, 200]


async def test_what_fails_before_its_run_begins_gives_its_place_back(
    open_site: OpenSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a mistake of ours; the place and the tokens are the caller's."""

    def break_down(*_: object) -> None:
        raise RuntimeError("a mistake")

    async with open_site() as site:
        headers = await site.key(max_streams=1)
        with monkeypatch.context() as patch:
            patch.setattr("gateway.generation.Generation._runs", break_down)
            assert (await site.ask(headers)).status == 500
        await until_settled(site)
        assert (await site.ask(headers)).status == 200


@pytest.mark.parametrize("period", ["day", "month"])
async def test_a_budget_ends_and_begins_anew_with_its_period(open_site: OpenSite, period: str) -> None:
    each = PROMPT + ANSWER
    async with open_site() as site:
        headers = await site.key(**{f"tokens_per_{period}": 2 * each})
        for _ in range(2):
            assert (await site.ask(headers, max_tokens=ANSWER)).status == 200
            await until_settled(site)
        reply = await site.ask(headers, max_tokens=ANSWER)
        assert code(reply) == (429, "insufficient_quota")
        assert reply.json()["error"]["type"] == "insufficient_quota"
        assert reply.headers["x-should-retry"] == "false"
        assert int(reply.headers["retry-after"]) == 12 * 3600
        site.calendar.now += 12 * 3600 - 1
        assert (await site.ask(headers, max_tokens=ANSWER)).status == 429
        site.calendar.now += 1
        assert (await site.ask(headers, max_tokens=ANSWER)).status == 200


async def test_a_budget_counts_what_other_gateways_wrote(open_site: OpenSite) -> None:
    async with open_site() as site:
        key, text = await site.store.create_key(KeyTerms(tenant="acme", tokens_per_month=100))
        async with open_site() as second:
            headers = {"authorization": f"Bearer {text}"}
            assert (await second.ask(headers, max_tokens=ANSWER)).status == 200
            assert await second.usage()
        reply = await site.ask(headers, max_tokens=100 - 2 * PROMPT - ANSWER + 1)
        assert code(reply) == (429, "insufficient_quota")
        assert (await site.ask(headers, max_tokens=100 - 2 * PROMPT - ANSWER)).status == 200
        assert {row.key_id for row in await site.usage()} == {key.key_id}


async def test_a_key_without_limits_needs_no_store(open_site: OpenSite) -> None:
    async with open_site(limits_store="redis://127.0.0.1:1/0", on_store_loss="closed") as site:
        free, limited = await site.key(), await site.key(requests_per_minute=5)
        for _ in range(3):
            assert (await site.ask(free)).status == 200
            assert code(await site.ask(limited)) == (503, "access_store_unavailable")
        assert failures(site, "limits", "error") >= 1
        assert failures(site, "database", "error") == 0


@pytest.mark.parametrize(("on_loss", "status"), [("open", 200), ("closed", 503)])
async def test_a_crowd_before_a_database_that_hangs_waits_once(
    open_site: OpenSite, tmp_path: Path, on_loss: str, status: int
) -> None:
    async with open_site(on_store_loss=on_loss, database_timeout_s=HANG_S, usage_flush_s=60) as site:
        first, second = await site.key(), await site.key(tokens_per_day=100_000)
        assert (await site.ask(first)).status == 200, "its usage waits to be written"
        assert (await site.client.get("/v1/models", headers=second)).status == 200
        blocker = sqlite3.connect(tmp_path / "keys.db", isolation_level=None)
        blocker.execute("BEGIN IMMEDIATE")
        began_at = time.monotonic()
        replies = await asyncio.gather(*(site.ask(second) for _ in range(100)))
        assert time.monotonic() - began_at < 100 * HANG_S / 4
        assert failures(site, "database", "error") + failures(site, "database", "timeout") >= 1
        blocker.close()
    assert {reply.status for reply in replies} == {status}
    assert all("retry-after" in reply.headers for reply in replies if status == 503)


async def test_a_request_that_leaves_while_it_reserves_leaves_nothing(open_site: OpenSite) -> None:
    async with open_site() as site:
        headers = await site.key(max_streams=1, tokens_per_minute=100, tokens_per_day=100)
        body = {"model": "m", "prompt": "say it", "max_tokens": 20}
        for _ in range(30):
            call = site.client.start("POST", "/v1/completions", body, headers=headers)
            call.leave()
            await call.end()
        await until_settled(site)
        reply = await site.ask(headers)
        assert reply.status == 200
        (row,) = await site.usage()
        models = await site.client.get("/v1/models", headers=headers)
        used = row.num_prompt_tokens + row.num_completion_tokens
        assert models.headers["x-ratelimit-remaining-tokens"] == str(100 - used)


async def test_a_tenant_reads_its_own_usage_and_no_other(open_site: OpenSite) -> None:
    async with open_site() as site:
        mine, theirs = await site.key("mine"), await site.key("theirs")
        for headers in (mine, mine, theirs):
            assert (await site.ask(headers)).status == 200
        for headers, tenant, number in ((mine, "mine", 2), (theirs, "theirs", 1)):
            value = (await site.client.get("/v1/usage", headers=headers)).json()
            assert {row["tenant"] for row in value["data"]} == {tenant}
            assert value["total"]["num_requests"] == number
            assert value["total"]["num_completion_tokens"] == number * ANSWER
        rows = (await site.client.get("/v1/usage", headers=theirs)).json()["data"]
        mine_again = await site.client.get(f"/v1/usage?key={rows[0]['key_id']}", headers=mine)
        assert mine_again.json()["data"] == []
        assert (await site.client.get("/v1/usage?tenant=theirs", headers=mine)).status == 400


async def until_settled(site: Any) -> None:
    """What ended is given back in tasks of its own: runs until they are done."""
    while any(task.get_name().startswith("reservations/") for task in asyncio.all_tasks()):
        await asyncio.sleep(0)
