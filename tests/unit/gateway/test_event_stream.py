"""Event streams over a real socket and before readers that do not read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from core import types as t
from tests.support.scripted import Script
from tests.support.site import Site, cluster_config, serve
from tests.support.site import open_site as open_scripted
from tests.support.tiny_tokenizer import ids_of
from tests.unit.gateway.conftest import OpenSite

TEXT = "/v1/completions"
SAID = "hello world, and all who live in it"


def body(**more: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": "x", "stream": True, "max_tokens": 60, **more}


def script() -> Script:
    return Script(steps=[[one] for one in ids_of(SAID)], mode=t.Mode.LOCAL)


@dataclass
class Served:
    site: Site
    host: str
    port: int

    async def ask(self, **more: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A request over a connection of its own, sent."""
        reader, writer = await asyncio.open_connection(self.host, self.port)
        content = json.dumps(body(**more)).encode()
        head = f"POST {TEXT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
        writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        return reader, writer


@asynccontextmanager
async def served_site() -> AsyncIterator[Served]:
    async with open_scripted(script()) as site, serve(site.gateway, cluster_config().gateway) as address:
        host, _, port = address.rpartition(":")
        yield Served(site, host, int(port))


def texts(events: list[Any]) -> list[str]:
    return [event["choices"][0]["text"] for event in events if event != "[DONE]"]


async def test_a_reader_that_is_behind_gets_what_it_missed_as_one_event(open_site: OpenSite) -> None:
    async with open_site(script()) as site:
        site.cluster.hold("token-3")
        call = site.client.start("POST", TEXT, body())
        await call.until(b'l",')
        call.stop_reading()
        site.cluster.release("token-3")
        await site.cluster.until(f"token-{len(SAID) - 1}")
        call.read_on()
        events = (await call.end()).events()
    assert "".join(texts(events)) == SAID
    assert len(texts(events)) < 12, "most of it came in one piece"


async def test_a_reader_that_never_reads_is_given_up_with_its_reason(open_site: OpenSite) -> None:
    async with open_site(script(), limits={"slow_reader_s": 0.05}) as site:
        site.cluster.hold("token-9")
        call = site.client.start("POST", TEXT, body())
        await call.until(b'"text":"h')
        call.stop_reading()
        site.cluster.release("token-9")
        await call.end()
        registry = site.telemetry.registry
        assert registry.get_sample_value("baton_gateway_client_aborts_total", {"reason": "slow_reader"}) == 1
        assert registry.get_sample_value("baton_gateway_num_requests_running") == 0


async def test_over_a_socket_each_token_is_an_event_as_soon_as_it_is_there() -> None:
    async with served_site() as served:
        cluster = served.site.cluster
        for index in range(len(SAID)):
            cluster.hold(f"token-{index}")
        reader, writer = await served.ask()
        await cluster.until("token-0")
        for index, character in enumerate(SAID):
            cluster.release(f"token-{index}")
            received = b""
            while f'"text":{json.dumps(character)},'.encode() not in received:
                received += await asyncio.wait_for(reader.read(4096), 10)
            assert received.count(b'"text":') <= 2  # the last one comes with its end
        while b"[DONE]" not in received:
            received += await asyncio.wait_for(reader.read(4096), 10)
        assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        writer.close()


async def test_a_client_that_leaves_in_mid_stream_over_a_socket_ends_its_request() -> None:
    async with served_site() as served:
        cluster = served.site.cluster
        cluster.hold("token-5")
        reader, writer = await served.ask()
        await cluster.until("token-5")
        await reader.read(4096)
        writer.transport.abort()
        async with asyncio.timeout(10):
            while not cluster.aborts:
                await asyncio.sleep(0.01)
        assert cluster.aborts[0][2] == "cancelled"


@pytest.mark.parametrize("n", [1, 2])
async def test_a_stream_over_a_socket_equals_the_one_without(open_site: OpenSite, n: int) -> None:
    async with open_site(script()) as site:
        plain = (await site.client.post(TEXT, body(n=n))).events()
    async with served_site() as served:
        reader, writer = await served.ask(n=n)
        received = (await asyncio.wait_for(reader.read(), 20)).partition(b"\r\n\r\n")[2]
        writer.close()
    pieces = b""
    while received:
        size, _, received = received.partition(b"\r\n")
        pieces += received[: int(size, 16)]
        received = received[int(size, 16) + 2 :]
    events = [json.loads(line[6:]) for line in pieces.decode().split("\n\n") if line and not line.endswith("[DONE]")]
    for index in range(n):
        parts = [one for event in events for one in event["choices"] if one["index"] == index]
        assert "".join(one["text"] for one in parts) == SAID
        assert [one["finish_reason"] for one in parts][-1] == "length"
    assert texts(plain)


async def test_a_stream_that_waits_says_that_it_is_alive(open_site: OpenSite) -> None:
    """Before the first token and in a pause; what the client reads of the answer is the same."""
    async with open_site(script(), limits={"stream_keep_alive_s": 0.02}) as site:
        for name in ("admit", "token-3"):
            site.cluster.hold(name)
        call = site.client.start("POST", TEXT, body())
        await call.until(b": keep-alive\n\n: keep-alive\n\n")
        assert (call.reply.status, call.reply.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        site.cluster.release("admit")
        await call.until(b'"finish_reason":null}]}\n\n: keep-alive')
        site.cluster.release("token-3")
        reply = await call.end()
    reply.body = reply.body.replace(b": keep-alive\n\n", b"")
    assert "".join(texts(reply.events())) == SAID


async def test_an_error_after_a_sign_of_life_is_told_in_the_stream(open_site: OpenSite) -> None:
    limits = {"stream_keep_alive_s": 0.02, "request_timeout_s": 0.3}
    async with open_site(script(), limits=limits) as site:
        site.cluster.hold("admit")
        reply = await site.client.start("POST", TEXT, body()).end()
    assert reply.status == 200
    reply.body = reply.body.replace(b": keep-alive\n\n", b"")
    failure, done = reply.events()
    assert failure["error"]["type"] == "timeout_error"
    assert done == "[DONE]"
