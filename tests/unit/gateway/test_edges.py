"""The edges of the gateway: bounds on bodies, pages of other origins, and how it takes its leave."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from core.errors import ConfigError
from gateway.json_body import MAX_DEPTH
from tests.support.asgi import Reply
from tests.unit.gateway.conftest import OpenSite, cluster_config

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
POSTS = [CHAT, TEXT, "/tokenize", "/detokenize"]


def text(**more: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": "say it", **more}


def error_of(reply: Reply) -> dict[str, Any]:
    """The error object; its four members are always there, and the answer has an id."""
    error: dict[str, Any] = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert reply.headers["x-request-id"]
    return error


# -- bodies -----------------------------------------------------------------------------------------------------------


def nested(levels: int, kind: str) -> bytes:
    opening, closing = ("[", "]") if kind == "list" else ('{"a":', "}")
    value = opening * (levels - 1) + "1" + closing * (levels - 1)
    return b'{"model":"m","prompt":"say it","unknown":' + value.encode() + b"}"


@pytest.mark.parametrize("kind", ["list", "object"])
@pytest.mark.parametrize("levels", [MAX_DEPTH, MAX_DEPTH + 1, 500])
async def test_a_body_is_nested_as_deep_as_allowed(open_site: OpenSite, kind: str, levels: int) -> None:
    async with open_site() as site:
        reply = await site.client.post(TEXT, nested(levels, kind))
    if levels == MAX_DEPTH:
        assert reply.status == 200
    else:
        assert (reply.status, error_of(reply)["code"]) == (400, "invalid_json")


async def test_many_brackets_are_not_deep(open_site: OpenSite) -> None:
    body = text(unknown=[[]] * (2 * MAX_DEPTH))
    async with open_site() as site:
        assert (await site.client.post(TEXT, body)).status == 200


@pytest.mark.parametrize("path", POSTS)
async def test_every_route_bounds_depth_and_size(open_site: OpenSite, path: str) -> None:
    async with open_site() as site:
        deep = await site.client.post(path, b'{"a":' + b"[" * 900 + b"]" * 900 + b"}")
        assert (deep.status, error_of(deep)["code"]) == (400, "invalid_json")
        large = await site.client.post(path, b" " * 5000, pieces=7)
        assert (large.status, error_of(large)["code"]) == (413, "request_too_large")
        assert large.headers["connection"] == "close"


NUMBERS = ("NaN", "Infinity", "-Infinity", "1e999", "-1e999")


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize(
    ("member", "param"),
    [
        ('"temperature":%s', "temperature"),
        ('"logit_bias":{"5":%s}', "logit_bias.5"),
        ('"stop":["a",%s]', "stop.1"),
        ('"structured_outputs":{"json":{"minimum":%s}}', "structured_outputs.json.minimum"),
    ],
)
async def test_what_is_no_finite_number_is_named(open_site: OpenSite, number: str, member: str, param: str) -> None:
    async with open_site() as site:
        reply = await site.client.post(TEXT, ('{"model":"m","prompt":"x",' + member % number + "}").encode())
    error = error_of(reply)
    assert (reply.status, error["param"], error["code"]) == (400, param, "invalid_value")
    json.loads(reply.body, parse_constant=lambda word: pytest.fail(f"{word} in the answer"))


# -- origins ----------------------------------------------------------------------------------------------------------

PAGE = "https://app.example.org"
PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os",
}


async def test_without_a_setting_no_other_origin_is_answered(open_site: OpenSite) -> None:
    async with open_site() as site:
        preflight = await site.client.start("OPTIONS", CHAT, headers=PREFLIGHT).end()
        reply = await site.client.post(TEXT, text(), headers={"origin": PAGE})
    assert preflight.status == 405
    assert not [name for one in (preflight, reply) for name in one.headers if name.startswith("access-control")]


@pytest.mark.parametrize(("origins", "is_named"), [([PAGE], True), (["*"], True), (["https://example.org"], False)])
async def test_a_named_origin_may_call(open_site: OpenSite, origins: list[str], is_named: bool) -> None:
    async with open_site(cors={"origins": origins}) as site:
        preflight = await site.client.start("OPTIONS", CHAT, headers=PREFLIGHT).end()
        good = await site.client.post(TEXT, text(), headers={"origin": PAGE})
        bad = await site.client.post(TEXT, {}, headers={"origin": PAGE})
        gone = await site.client.get("/nowhere", headers={"origin": PAGE})
        local = await site.client.post(TEXT, text())
    assert [good.status, bad.status, gone.status, local.status] == [200, 400, 404, 200]
    assert not [name for name in local.headers if name.startswith("access-control")]
    for reply in (preflight, good, bad, gone):
        assert reply.headers["x-request-id"]
        assert reply.headers.get("access-control-allow-origin") == (PAGE if is_named else None)
        assert reply.headers.get("vary") == ("origin" if is_named else None)
        assert "access-control-allow-credentials" not in reply.headers
    if is_named:
        assert (preflight.status, preflight.body) == (204, b"")
        assert preflight.headers["access-control-allow-headers"] == PREFLIGHT["access-control-request-headers"]
        assert "x-request-id" in good.headers["access-control-expose-headers"]
    else:
        assert preflight.status == 405


async def test_an_odd_list_of_headers_is_not_repeated(open_site: OpenSite) -> None:
    async with open_site(cors={"origins": ["*"]}) as site:
        odd = {**PREFLIGHT, "access-control-request-headers": "a\tb; c"}
        preflight = await site.client.start("OPTIONS", CHAT, headers=odd).end()
    assert preflight.headers["access-control-allow-headers"] == "authorization, content-type"


@pytest.mark.parametrize("origin", ["app.example.org", "https://app.example.org/", "ftp://a", "https://"])
def test_what_is_no_origin_is_refused_at_start(origin: str) -> None:
    with pytest.raises(ConfigError, match="SCHEME://HOST"):
        cluster_config(cors={"origins": [origin]})


# -- leaving ----------------------------------------------------------------------------------------------------------


async def test_while_a_load_balancer_is_told_requests_are_still_taken(open_site: OpenSite) -> None:
    async with open_site(limits={"drain_wait_s": 600, "drain_s": 600}) as site:
        drain = asyncio.ensure_future(site.gateway.drain())
        await asyncio.sleep(0)
        ready = await site.client.get("/ready")
        assert (ready.status, error_of(ready)["code"]) == (503, "draining")
        assert (await site.client.post(TEXT, text())).status == 200
        site.gateway.hurry()
        await drain
        refused = await site.client.post(TEXT, text())
        assert (refused.status, error_of(refused)["code"]) == (503, "draining")
        assert (refused.headers["connection"], refused.headers["retry-after"]) == ("close", "1")


async def test_a_drain_in_a_hurry_ends_what_runs(open_site: OpenSite) -> None:
    async with open_site(limits={"drain_s": 600}) as site:
        site.cluster.hold("token-4")
        call = site.client.start("POST", TEXT, text(stream=True))
        await site.cluster.until("token-4")
        drain = asyncio.ensure_future(site.gateway.drain())
        await asyncio.sleep(0)
        assert not call.task.done()
        site.gateway.hurry()
        await drain
        events = (await call.end()).events()
    assert (events[-2]["error"]["code"], events[-1]) == ("draining", "[DONE]")
