"""A client whose channel was closed, before a call or under it: a typed error, never a cancellation of the caller."""

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from core import types as t
from core.errors import WorkerLost
from core.ids import GatewayId, Incarnation, RequestId, WorkerId
from rpc.clients import DecodeClient

ABORT = t.AbortRequest(request_id=RequestId("r"), attempt=1, reason="x")


@pytest.fixture
async def mute() -> AsyncIterator[DecodeClient]:
    """A client of somebody who accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        yield DecodeClient(t.WorkerAddress(worker_id=WorkerId("d"), incarnation=Incarnation(1), address=address))


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
