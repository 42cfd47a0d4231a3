"""The console's door, its files and its feed, over a scripted router."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator

import orjson
import pytest

from core import types as t
from core.errors import WorkerLost
from core.ids import Incarnation
from gateway.console import routes as console_routes
from gateway.console.pages import ASSETS
from gateway.console.sessions import COOKIE, SESSION_S, Sessions, cookie, session_of
from tests.support.asgi import Reply
from tests.support.site import open_site

STATUS = t.ClusterStatus(
    router_incarnation=Incarnation(2**63 + 1),
    router_pid=1,
    router_http_address="r:1",
    pools=(),
    workers=(),
    gateways=(),
    models=(),
    num_placements=3,
    num_waiting=0,
)


def frames(reply: Reply) -> list[tuple[str, dict[str, object]]]:
    """(event, data) of what has come so far."""
    found = re.findall(rb"event: (\w+)\ndata: (.+)\n\n", reply.body)
    return [(name.decode(), orjson.loads(data)) for name, data in found]


# -- sessions ---------------------------------------------------------------------------------------------------------


def test_a_session_holds_for_its_time_for_every_gateway_of_the_key_and_for_no_other() -> None:
    now = 1000.0
    one, other = Sessions("an admin key of ours", lambda: now), Sessions("an admin key of ours", lambda: now)
    value = one.issue()
    assert other.holds(value)
    assert one.issue() != value
    assert not Sessions("the key that came after", lambda: now).holds(value)
    now += SESSION_S
    assert not other.holds(value)


@pytest.mark.parametrize("spoilt", ["", ".", "..", "1.2.3", "99999999999.aa.", "é.é.é", "9" * 400])
def test_what_is_no_session_opens_nothing(spoilt: str) -> None:
    sessions = Sessions("an admin key of ours", lambda: 0.0)
    assert not sessions.holds(spoilt)
    until, nonce, signature = sessions.issue().split(".")
    assert not sessions.holds(f"{int(until) + 1}.{nonce}.{signature}")


def test_the_cookie_is_out_of_reach_of_scripts_and_of_other_sites() -> None:
    text = cookie("v", is_secure=True).decode()
    assert {"HttpOnly", "SameSite=Strict", "Secure", "Path=/console"} <= set(text.split("; "))
    assert "Max-Age=0" in cookie("", is_secure=False).decode()
    assert session_of(f"a=b; {COOKIE}=v.w; c=d") == "v.w"
    assert session_of("a=b") == session_of("") == session_of("=;;\x00") == ""


# -- files ------------------------------------------------------------------------------------------------------------


async def test_the_page_and_all_that_it_names_are_served_and_nothing_of_it_comes_from_elsewhere() -> None:
    async with open_site() as site:
        page = await site.client.get("/console")
        assert page.status == 200
        assert page.headers["content-type"].startswith("text/html")
        assert "frame-ancestors 'none'" in page.headers["content-security-policy"]
        seen, waiting = {"/console"}, [page.body.decode()]
        while waiting:
            text = waiting.pop()
            assert not re.search(r"""(src|href|url\(|import|fetch\()["'\s(]*https?:""", text)
            named = re.findall(r'(?:src|href)="(/console/[^"]+)"', text)
            named += [f"/console/{name}" for name in re.findall(r'from "\./([\w.]+)"', text)]
            for path in set(named) - seen:
                seen.add(path)
                answer = await site.client.get(path)
                assert answer.status == 200, path
                waiting.append(answer.body.decode())
        assert len(seen) == len(list(ASSETS.iterdir())), "a file that nothing names"
        assert (await site.client.get("/console/../app.py")).status == 404
        again = await site.client.get("/console", headers={"if-none-match": page.headers["etag"]})
        assert (again.status, again.body) == (304, b"")


def test_the_pages_make_no_markup_of_what_they_are_told() -> None:
    for path in ASSETS.glob("*.js"):
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", path.read_text()), path


# -- the feed ---------------------------------------------------------------------------------------------------------


async def test_the_feed_tells_news_and_a_router_that_is_away_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console_routes, "AGAIN_S", 0.0)
    is_over = asyncio.Event()
    num_watches = 0

    async def watch(interval_s: float) -> AsyncGenerator[t.ClusterNews, None]:
        nonlocal num_watches
        num_watches += 1
        yield t.ClusterNews(status=STATUS)
        if num_watches == 1:
            raise WorkerLost("the router is gone", worker_id="router")
        yield t.ClusterNews(status=STATUS)
        await is_over.wait()

    async with open_site() as site:
        site.cluster.watch = watch  # type: ignore[attr-defined]
        call = site.client.start("GET", "/console/feed")
        await call.until(b'"is_first":false')
        assert [(name, data.get("is_first", data.get("reason"))) for name, data in frames(call.reply)] == [
            ("news", True),
            ("away", "the router is gone"),
            ("news", True),
            ("news", False),
        ]
        news = frames(call.reply)[0][1]
        assert news["router"] == {"incarnation": "8000000000000001", "pid": 1, "http_address": "r:1"}
        call.leave()
        await call.task


async def test_feeds_are_few_and_end_when_the_gateway_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console_routes, "MAX_VIEWERS", 1)

    async def watch(interval_s: float) -> AsyncGenerator[t.ClusterNews, None]:
        yield t.ClusterNews(status=STATUS)
        await asyncio.Event().wait()

    async with open_site() as site:
        site.cluster.watch = watch  # type: ignore[attr-defined]
        call = site.client.start("GET", "/console/feed")
        await call.until(b"event: news")
        refused = await site.client.get("/console/feed")
        assert refused.status in (429, 503)
        await site.gateway.drain()
        await call.task
        assert call.reply.is_complete


async def test_a_request_that_nobody_remembers_is_a_404_that_says_so() -> None:
    async with open_site() as site:

        async def find_records(request_id: str, limit: int) -> t.RequestRecords:
            return t.RequestRecords(max_kept=7)

        site.cluster.find_records = find_records  # type: ignore[attr-defined]
        answer = await site.client.get("/console/requests/r0")
        assert answer.status == 404
        assert "keeps the last 7" in answer.json()["error"]["message"]
