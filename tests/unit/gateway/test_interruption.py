"""Work that ends for a reason of somebody else's: by itself, and in requests over a real socket."""

from __future__ import annotations

import asyncio
import json

import pytest

from core import types as t
from core.errors import QueueFull
from gateway.http import ClientGone, Interruption
from tests.support.scripted import Script
from tests.support.site import Site, cluster_config, open_site, serve
from tests.support.tiny_tokenizer import ids_of


async def forever() -> None:
    await asyncio.Event().wait()


async def test_the_first_reason_is_raised_in_place_of_the_cancellation() -> None:
    interruption = Interruption()
    loop = asyncio.get_running_loop()
    loop.call_soon(interruption.end, ClientGone())
    loop.call_soon(interruption.end, QueueFull("too late"))
    with pytest.raises(ClientGone):
        await interruption.guard(forever())
    task = asyncio.current_task()
    assert task is not None and task.cancelling() == 0
    async with asyncio.timeout(5):
        await asyncio.sleep(0)  # the task goes on as if nothing had been


async def test_work_that_is_over_cannot_be_interrupted() -> None:
    interruption = Interruption()
    assert await interruption.guard(asyncio.sleep(0, "done")) == "done"
    interruption.end(ClientGone())
    await asyncio.sleep(0)


async def test_a_task_that_is_cancelled_by_others_stays_cancelled() -> None:
    made: list[Interruption] = []

    async def work() -> None:
        made.append(Interruption())
        await made[0].guard(forever())

    for is_interrupted_too in (False, True):
        made.clear()
        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        task.cancel()
        if is_interrupted_too:
            made[0].end(ClientGone())
        with pytest.raises(asyncio.CancelledError):
            await task


async def ask(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A plain chat, sent."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    content = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 20}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
    return reader, writer


async def until_running(site: Site) -> None:
    await site.cluster.until("token-3")


def held(site: Site) -> None:
    site.cluster.hold("token-3")


SCRIPT = Script(steps=[[one] for one in ids_of("hello world")], mode=t.Mode.LOCAL)


async def test_a_client_that_leaves_a_plain_request_ends_it() -> None:
    async with open_site(SCRIPT) as site, serve(site.gateway, cluster_config().gateway) as address:
        held(site)
        _, writer = await ask(address)
        await until_running(site)
        writer.transport.abort()
        async with asyncio.timeout(10):
            while not site.cluster.aborts:
                await asyncio.sleep(0.01)
        assert site.cluster.aborts[0][2] == "cancelled"
        assert site.telemetry.registry.get_sample_value("baton_gateway_client_aborts_total", {"reason": "client_gone"})


async def test_a_gateway_that_must_stop_now_tells_those_who_wait() -> None:
    async with open_site(SCRIPT) as site, serve(site.gateway, cluster_config().gateway) as address:
        held(site)
        reader, writer = await ask(address)
        await until_running(site)
        site.gateway.hurry()
        async with asyncio.timeout(10):
            answer = await reader.readuntil(b"}}")
        assert answer.startswith(b"HTTP/1.1 503")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "draining"
        writer.close()
