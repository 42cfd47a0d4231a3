"""Clients over awkward connections: closed before a call or under it, and slow to come about."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress

import pytest

from core import types as t
from core.config import parse_config
from core.errors import WorkerLost
from core.ids import GatewayId, Incarnation, RequestId, WorkerId
from router.service import RouterServer
from rpc.clients import DecodeClient, RouterClient
from tests.unit.router.builders import make_registration

ABORT = t.AbortRequest(request_id=RequestId("r"), attempt=1, reason="x")


@pytest.fixture
async def mute() -> AsyncIterator[DecodeClient]:
    """A client of somebody who accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        yield DecodeClient(t.WorkerAddress(worker_id=WorkerId("d"), incarnation=Incarnation(1), address=address))


@asynccontextmanager
async def serving_router() -> AsyncIterator[str]:
    section = {"listen": "127.0.0.1:0"}
    server = RouterServer(parse_config({"models": [{"name": "m", "path": "x"}], "router": section}))
    await server.start()
    try:
        yield server.address
    finally:
        await server.stop(0)


async def _call(client: DecodeClient, kind: str) -> object:
    if kind == "call":
        return await client.abort(ABORT)
    return await anext(aiter(client.outputs(GatewayId("g"), Incarnation(1))))


@pytest.mark.parametrize("kind", ["call", "stream"])
async def test_a_closed_client_is_a_lost_worker(mute: DecodeClient, kind: str) -> None:
    await mute.close()
    with pytest.raises(WorkerLost, match="closed here"):
        await _call(mute, kind)


@pytest.mark.parametrize("kind", ["call", "stream"])
async def test_closing_a_client_under_a_call_is_no_cancellation(mute: DecodeClient, kind: str) -> None:
    call = asyncio.create_task(_call(mute, kind))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await mute.close()
    with pytest.raises(WorkerLost, match="closed here"):
        await call


@pytest.mark.parametrize("kind", ["call", "stream"])
async def test_a_cancelled_caller_stays_cancelled(mute: DecodeClient, kind: str) -> None:
    call = asyncio.create_task(_call(mute, kind))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await mute.close()


async def test_a_connection_that_is_slow_to_come_about_is_waited_for() -> None:
    """A busy machine, or one lost SYN: that is no dead worker."""
    async with serving_router() as address:
        host, _, port = address.rpartition(":")

        async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with suppress(ConnectionError):
                while data := await reader.read(65536):
                    writer.write(data)
                    await writer.drain()
            writer.close()

        async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await asyncio.sleep(0.7)  # the delay itself, not a wait for something
            up_reader, up_writer = await asyncio.open_connection(host, int(port))
            await asyncio.gather(pipe(reader, up_writer), pipe(up_reader, writer))

        async with await asyncio.start_server(proxy, "127.0.0.1", 0) as slow:
            number = slow.sockets[0].getsockname()[1]
            async with RouterClient(f"127.0.0.1:{number}") as client:
                assert (await client.status()).workers == ()


async def test_the_stream_of_a_hung_peer_ends_long_before_the_deadline_of_a_request() -> None:
    """Its kernel goes on to acknowledge what we send, so only our own pings tell."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "baton.process", "router", "--set", "router.listen=127.0.0.1:0", stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        ready = await process.stdout.readline()
        address = json.loads(ready.partition(b"{")[1] + ready.partition(b"{")[2])["grpc"]
        async with RouterClient(address) as client, aclosing(client.watch_pools()) as sizes:
            await anext(sizes)
            process.send_signal(signal.SIGSTOP)
            async with asyncio.timeout(20):
                with pytest.raises(WorkerLost):
                    await anext(sizes)
    finally:
        process.kill()
        await process.wait()


async def test_a_stream_that_breaks_leaves_nobody_waiting_for_what_it_would_have_sent() -> None:
    """The task of grpc that reads our messages would be: it complained when it was collected."""
    before = asyncio.all_tasks()
    closed = asyncio.Event()

    async def messages() -> AsyncIterator[t.WorkerRegistration | t.WorkerLoad]:
        try:
            yield make_registration()
            await asyncio.Event().wait()
        finally:
            closed.set()

    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(serving_router())
        async with RouterClient(address) as client, aclosing(client.join(messages())) as commands:
            assert (await anext(commands)).kind is t.CommandKind.JOINED
            await stack.aclose()
            with pytest.raises(WorkerLost):
                async for _ in commands:
                    pass
            async with asyncio.timeout(5):
                await closed.wait()
    await asyncio.sleep(0)
    assert asyncio.all_tasks() <= before
