"""Nothing is answered without a key but the probes, however the path is spelt; a tenant sees what is its own."""

from __future__ import annotations

import json
from typing import Any

import pytest

from core.types import ModelRecord
from gateway.access.keys import KeyTerms, PriorityClass
from tests.unit.gateway.access.conftest import ADMIN, NOON, OpenSite

AS_ADMIN = {"authorization": f"Bearer {ADMIN}"}
CLOSED = [
    ("POST", "/v1/chat/completions"),
    ("POST", "//v1/chat/completions"),
    ("GET", "/v1/../v1/models"),
    ("GET", "/V1/models"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/"),
    ("GET", "/v1/models/m"),
    ("HEAD", "/v1/models"),
    ("OPTIONS", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/metrics"),
    ("GET", "/docs"),
    ("GET", "/openapi.json"),
    ("GET", "/v1/usage"),
    ("GET", "/admin/keys"),
    ("POST", "/admin/keys"),
    ("DELETE", "/admin/keys/0123456789ab"),
    ("GET", "/admin/usage"),
    ("POST", "/health"),
    ("GET", "/health/"),
    ("GET", "/health/../v1/models"),
    ("GET", "/nothing"),
    ("GET", "/no\nthing"),
    ("GET", "/v1/models/a\nb"),
    ("GET", ""),
]


async def test_bug_068_no_path_leads_round_the_key_check(open_site: OpenSite) -> None:
    async with open_site() as site:
        for method, path in CLOSED:
            reply = await site.client.start(method, path, {"model": "m"}).end()
            assert reply.status == 401, (method, path)
            assert reply.headers["www-authenticate"] == "Bearer"
            assert reply.headers["x-request-id"]
            error = reply.json()["error"]
            assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")


async def test_bug_068_every_route_has_a_door(open_site: OpenSite) -> None:
    """Whatever route is added: without a key it answers 401, unless it is one of the open two."""
    async with open_site() as site:
        for route in site.gateway.paths:
            path = route.replace("{name:path}", "m").replace("{key_id}", "0")
            for method in ("GET", "POST", "PUT", "DELETE", "PATCH"):
                reply = await site.client.start(method, path, {}).end()
                is_open = method == "GET" and path in ("/health", "/ready")
                assert is_open == (reply.status != 401), (method, path, reply.status)


CONSOLE = ("/console/feed", "/console/requests/r", "/console/session")


async def test_the_console_is_opened_by_the_admin_key_and_then_by_its_cookie(open_site: OpenSite) -> None:
    async with open_site() as site:
        for path in CONSOLE:
            for method in ("GET", "POST", "PUT", "HEAD"):
                assert (await site.client.start(method, path, {}).end()).status == 401, (method, path)
        tenant = await site.key()
        assert (await site.client.start("POST", "/console/session", headers=tenant).end()).status == 403
        made = await site.client.start("POST", "/console/session", headers=AS_ADMIN).end()
        assert made.status == 204
        cookie = {"cookie": made.headers["set-cookie"].partition(";")[0]}
        assert (await site.client.get("/console/session", headers=cookie)).json() == {"needs_key": True}
        # It opens what is read there and nothing else: no API of the admin, and no new session.
        for method, path in (("GET", "/admin/keys"), ("GET", "/v1/models"), ("POST", "/console/session")):
            assert (await site.client.start(method, path, headers=cookie).end()).status == 401, (method, path)


async def test_the_probes_are_open(open_site: OpenSite) -> None:
    async with open_site() as site:
        await site.gateway.reporter.report()
        assert (await site.client.get("/health")).status == 200
        assert (await site.client.get("/ready")).status == 200


NO_KEYS = [
    "",
    "Bearer",
    "Bearer ",
    "Bearer sk-baton-",
    "Basic {key}",
    "{key}",
    "Bearer {key}x",
    "Bearer {key} {key}",
    "Bearer \xff\xfe",
    "Bearer sk-baton-000000000000-" + 43 * "A",
    "Bearer {other}",
]


async def test_what_is_no_key_is_refused_alike(open_site: OpenSite) -> None:
    async with open_site() as site:
        good = (await site.key())["authorization"].removeprefix("Bearer ")
        other = good[:-1] + ("A" if good[-1] != "A" else "B")
        for authorization in NO_KEYS:
            text = authorization.replace("{key}", good).replace("{other}", other)
            reply = await site.client.get("/v1/models", headers={"authorization": text} if text else {})
            assert reply.status == 401, authorization
            assert good not in reply.body.decode()
        assert (await site.client.get("/v1/models", headers={"authorization": f"bearer {good}"})).status == 200


async def test_a_key_in_the_query_string_or_the_body_is_none(open_site: OpenSite) -> None:
    async with open_site() as site:
        key = (await site.key())["authorization"].removeprefix("Bearer ")
        reply = await site.client.get(f"/v1/models?api_key={key}")
        assert reply.status == 401
        assert (await site.ask({"x-api-key": key}, api_key=key)).status == 401


async def test_a_revoked_key_is_refused_within_the_stated_time(open_site: OpenSite) -> None:
    async with open_site(key_cache_s=5) as site:
        record, text = await site.store.create_key(KeyTerms(tenant="acme"))
        headers = {"authorization": f"Bearer {text}"}
        assert (await site.ask(headers)).status == 200
        await site.store.revoke_key(record.key_id)
        site.clock.advance(5.01)
        reply = await site.ask(headers)
    assert reply.status == 401
    assert "revoked" in reply.json()["error"]["message"]


async def test_a_key_expires_at_its_second(open_site: OpenSite) -> None:
    async with open_site() as site:
        _, text = await site.store.create_key(KeyTerms(tenant="acme"), expires_at=int(NOON) + 60)
        headers = {"authorization": f"Bearer {text}"}
        site.calendar.now += 59.9
        assert (await site.ask(headers)).status == 200
        site.calendar.now += 0.1
        reply = await site.ask(headers)
    assert reply.status == 401
    assert "expired" in reply.json()["error"]["message"]


async def test_a_tenant_sees_no_model_that_is_not_its_own(open_site: OpenSite) -> None:
    async with open_site(names=("m", "secret")) as site:
        headers = await site.key(models=("m",))
        both = await site.key("other", models=("m", "secret"))
        listed = (await site.client.get("/v1/models", headers=headers)).json()["data"]
        assert [model["id"] for model in listed] == ["m"]
        assert len((await site.client.get("/v1/models", headers=both)).json()["data"]) == 2
        body: dict[str, Any] = {"model": "secret", "prompt": "x", "messages": [{"role": "user", "content": "x"}]}
        replies = [
            await site.client.get("/v1/models/secret", headers=headers),
            await site.client.post("/v1/completions", body, headers=headers),
            await site.client.post("/v1/chat/completions", body, headers=headers),
            await site.client.post("/tokenize", {"model": "secret", "prompt": "x"}, headers=headers),
            await site.client.post("/detokenize", {"model": "secret", "tokens": [5]}, headers=headers),
        ]
        absent = await site.client.post("/v1/completions", {**body, "model": "absent"}, headers=headers)
        nothing = await site.key("third", models=("gone",))
        assert (await site.client.post("/tokenize", {"prompt": "x"}, headers=nothing)).status == 404
    for reply in replies:
        assert (reply.status, reply.json()["error"]["code"]) == (404, "model_not_found")
        assert reply.json() == absent.json()
        assert "secret" not in reply.body.decode()


async def test_tenants_have_salts_and_priorities_of_their_own(open_site: OpenSite) -> None:
    async with open_site() as site:
        site.cluster.models = (ModelRecord(name="m", format_hash="f", block_size=2, max_context=64, vocab_size=512),)
        await site.gateway.reporter.report()
        for tenant, more in (("a", {}), ("a", {}), ("b", {}), ("b", {"cache_salt": "x"}), ("a", {"cache_salt": "b"})):
            headers = await site.key(tenant, priority=PriorityClass.LOW if tenant == "b" else PriorityClass.NORMAL)
            assert (await site.ask(headers, **more)).status == 200
        requests = site.cluster.requests
        firsts = [place.block_hashes[0] for place in site.cluster.places]
    assert [request.cache_salt for request in requests] == ["a/", "a/", "b/", "b/x", "a/b"]
    assert firsts[0] == firsts[1] and len(set(firsts)) == 4, "the router too tells the tenants' prompts apart"
    assert [request.tenant for request in requests] == ["a", "a", "b", "b", "a"]
    assert [request.priority for request in requests] == [0, 0, 1 << 30, 1 << 30, 0]


async def test_metrics_are_the_operators_unless_a_setting_says_otherwise(open_site: OpenSite) -> None:
    async with open_site() as site:
        mine = await site.client.get("/metrics", headers=await site.key())
        assert (mine.status, mine.json()["error"]["code"]) == (403, "not_allowed")
        reply = await site.client.get("/metrics", headers=AS_ADMIN)
        assert reply.status == 200
        assert b'baton_gateway_access_refusals_total{reason="not_admin"} 1.0' in reply.body
    async with open_site(open_metrics=True) as site:
        assert (await site.client.get("/metrics")).status == 200


async def test_the_operator_makes_and_ends_keys_over_http(open_site: OpenSite) -> None:
    async with open_site(names=("m", "n")) as site:
        terms = {"tenant": "acme", "name": "ci", "models": ["m"], "priority": "high", "requests_per_minute": 3}
        made = await site.client.post("/admin/keys", {**terms, "expires_in_days": 1}, headers=AS_ADMIN)
        assert (made.status, made.headers["cache-control"]) == (201, "no-store")
        key, headers = made.json(), {"authorization": f"Bearer {made.json()['key']}"}
        assert terms.items() <= key.items()
        assert [one["id"] for one in (await site.client.get("/v1/models", headers=headers)).json()["data"]] == ["m"]
        listed = await site.client.get("/admin/keys?tenant=acme", headers=AS_ADMIN)
        assert [one["id"] for one in listed.json()["data"]] == [key["id"]]
        assert key["key"] not in listed.body.decode()
        assert (await site.client.get("/admin/keys?tenant=other", headers=AS_ADMIN)).json()["data"] == []
        path = f"/admin/keys/{key['id']}"
        assert (await site.client.get(path, headers=AS_ADMIN)).json()["revoked_at"] is None
        assert (await site.client.start("DELETE", path, headers=AS_ADMIN).end()).json()["revoked_at"]
        site.clock.advance(6)
        assert (await site.client.get("/v1/models", headers=headers)).status == 401
        for key_id in ("nope", "0123456789ab", "%00", "0123456789AB", "x" * 500):
            assert (await site.client.start("DELETE", f"/admin/keys/{key_id}", headers=AS_ADMIN).end()).status == 404
        for door in ("/admin/keys", "/admin/usage", path):
            assert (await site.client.get(door, headers=await site.key())).status == 403


BAD_TERMS: list[tuple[dict[str, Any], str]] = [
    ({}, "tenant"),
    ({"tenant": ""}, "tenant"),
    ({"tenant": "a/b"}, "tenant"),
    ({"tenant": "a", "models": []}, ""),
    ({"tenant": "a", "models": "m"}, "models"),
    ({"tenant": "a", "tokens_per_day": 0}, "tokens_per_day"),
    ({"tenant": "a", "tokens_per_day": "5"}, "tokens_per_day"),
    ({"tenant": "a", "priority": "urgent"}, "priority"),
    ({"tenant": "a", "expires_in_days": -1}, "expires_in_days"),
    ({"tenant": "a", "rate": 5}, "rate"),
    ({"tenant": "a", "name": "x\0"}, "name"),
    ({"tenant": "a", "models": ["x\n"]}, "models.0"),
]


async def test_bad_terms_are_refused_by_name(open_site: OpenSite) -> None:
    async with open_site() as site:
        for body, param in BAD_TERMS:
            reply = await site.client.post("/admin/keys", body, headers=AS_ADMIN)
            assert (reply.status, reply.json()["error"]["param"]) == (400, param), body
        assert await site.store.list_keys() == []


async def test_a_bad_query_is_refused_by_name(open_site: OpenSite) -> None:
    async with open_site() as site:
        for query in (
            *("since=today", "until=2026-13-01", "tenat=a", "since=2026-11-30&x=1"),
            *("key=%00", "tenant=%00", "key=%ff", "tenant=a/b", "key=5"),
        ):
            reply = await site.client.get(f"/admin/usage?{query}", headers=AS_ADMIN)
            assert reply.status == 400
            assert reply.json()["error"]["param"] in query


async def test_without_an_admin_key_there_is_no_admin_api(open_site: OpenSite) -> None:
    async with open_site(has_admin=False) as site:
        headers = await site.key()
        for path in ("/admin/keys", "/admin/usage"):
            assert (await site.client.get(path, headers=headers)).status == 404
        assert (await site.client.get("/metrics", headers=headers)).status == 403


async def test_no_secret_is_logged(open_site: OpenSite, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    async with open_site() as site:
        key = (await site.client.post("/admin/keys", {"tenant": "acme"}, headers=AS_ADMIN)).json()["key"]
        await site.ask({"authorization": f"Bearer {key}"})
        await site.ask({"authorization": f"Bearer {key[:-1]}"})
    told = json.dumps([vars(record) for record in caplog.records], default=str)
    assert "acme" in told
    assert key not in told
    assert key.rsplit("-", 1)[1] not in told
    assert ADMIN not in told
