"""Clients over awkward connections: closed before a call or under it, and slow to come about."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from typing import Any

import pytest

from core import types as t
from core.config import parse_config
from core.errors import DeadlineExceeded, QueueFull, StaleIncarnation, WorkerLost
from core.handoff import PairCheck
from core.ids import GatewayId, HandoffId, Incarnation, RequestId, WorkerId
from router.service import RouterServer
from rpc.clients import DecodeClient, RouterClient
from rpc.server import RpcServer
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
            async with asyncio.timeout(60):
                with pytest.raises(WorkerLost):
                    await anext(sizes)
    finally:
        process.kill()
        await process.wait()


async def test_a_stream_that_breaks_leaves_nobody_waiting_for_what_it_would_have_sent() -> None:
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
            async with asyncio.timeout(60):
                await closed.wait()
    await asyncio.sleep(0)
    assert asyncio.all_tasks() <= before


class Decoder:
    """A decode worker whose answers are as long as the asked request, or never come."""

    def __init__(self) -> None:
        self.num_waiting = 0
        self.is_cancelled = asyncio.Event()

    async def admit(self, request: t.AdmitRequest) -> t.AdmitReply:
        raise QueueFull("x" * len(request.ticket), worker_id=request.handoff_id)

    async def abort_decode(self, request: t.AbortRequest) -> t.AbortReply:
        self.num_waiting += 1
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.is_cancelled.set()
            raise
        raise AssertionError

    async def outputs(self, gateway_id: str, gateway_incarnation: int, worker_incarnation: int) -> Any:
        yield t.StepOutputs()
        chunk = t.TokenChunk(request_id=RequestId("r"), choice=0, attempt=1, first_index=0, token_ids=(7,) * 3_000_000)
        yield t.StepOutputs(chunks=(chunk,))

    async def check_pair(self, prefill: t.WorkerAddress, worker_incarnation: Incarnation) -> PairCheck:
        return PairCheck(prefill=prefill.worker_id, decode="d", circuit="", circuit_why="", reason="", links=())


@asynccontextmanager
async def serving_decoder(listen: str = "127.0.0.1:0") -> AsyncIterator[tuple[Decoder, RpcServer]]:
    decoder, server = Decoder(), RpcServer()
    server.add_decode(decoder)
    await server.start(listen)
    try:
        yield decoder, server
    finally:
        await server.stop(0)


def decode_client(address: str) -> DecodeClient:
    return DecodeClient(t.WorkerAddress(worker_id=WorkerId("d"), incarnation=Incarnation(1), address=address))


def admission(num_bytes: int) -> t.AdmitRequest:
    request = t.GenerateRequest(
        request_id=RequestId("r"),
        model="m",
        prompt_token_ids=tuple(range(100_000)),
        sampling=t.SamplingParams(max_tokens=1),
        gateway_id=GatewayId("g"),
        gateway_incarnation=Incarnation(1),
        deadline_s=30,
    )
    return t.AdmitRequest(
        request=request,
        handoff_id=HandoffId("größer"),
        mode=t.Mode.LOCAL,
        worker_incarnation=Incarnation(1),
        ticket=bytes(num_bytes),
    )


async def test_messages_of_megabytes_pass_in_both_directions() -> None:
    async with serving_decoder() as (_, server), decode_client(server.address) as client:
        with pytest.raises(QueueFull) as caught:
            await client.admit(admission(5_000_000))
        assert len(caught.value.message) == 2000, "metadata is cut"
        assert caught.value.worker_id == "größer"
        outputs = client.outputs(GatewayId("g"), Incarnation(1))
        await anext(outputs)
        assert len((await anext(outputs)).chunks[0].token_ids) == 3_000_000
        with pytest.raises(StaleIncarnation):
            await anext(outputs)


async def test_messages_that_are_followed_come_in_order_and_the_end_is_typed() -> None:
    async with serving_decoder() as (_, server), decode_client(server.address) as client:
        taken: list[t.StepOutputs] = []
        with pytest.raises(StaleIncarnation):
            await client.follow_outputs(GatewayId("g"), Incarnation(1), taken.append)
        assert [len(one.chunks) for one in taken] == [0, 1]
        assert len(taken[1].chunks[0].token_ids) == 3_000_000

        def refuse(message: t.StepOutputs) -> None:
            raise QueueFull("not this one")

        with pytest.raises(QueueFull, match="not this one"):
            await client.follow_outputs(GatewayId("g"), Incarnation(1), refuse)
        with pytest.raises(QueueFull, match="xx"):
            await client.admit(admission(1000))  # the connection is whole


async def test_a_cancelled_call_and_one_past_its_deadline_end_at_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving_decoder() as (decoder, server), decode_client(server.address) as client:
        call = asyncio.create_task(client.abort(ABORT))
        async with asyncio.timeout(60):
            while not decoder.num_waiting:
                await asyncio.sleep(0.01)
            call.cancel()
            await decoder.is_cancelled.wait()
            decoder.is_cancelled.clear()
            monkeypatch.setattr("rpc.clients.ABORT_TIMEOUT_S", 0.05)
            with pytest.raises(DeadlineExceeded):
                await client.abort(ABORT)
            await decoder.is_cancelled.wait()


async def test_a_peer_that_comes_back_at_its_address_is_found_again() -> None:
    peer = t.WorkerAddress(worker_id=WorkerId("p"), incarnation=Incarnation(1), address="x:1")
    async with AsyncExitStack() as first:
        _, server = await first.enter_async_context(serving_decoder())
        async with decode_client(server.address) as client:
            assert (await client.check_pair(peer)).prefill == "p"
            await first.aclose()
            with pytest.raises(WorkerLost):
                await client.check_pair(peer)
            async with serving_decoder(server.address):
                results = await asyncio.gather(*[client.check_pair(peer) for _ in range(20)])
                assert [one.prefill for one in results] == ["p"] * 20
