"""A client leaves, in every state of a request: both legs stop, every block comes back, and the next request works."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from core.types import WorkerState
from engine.engine import Engine
from kvtransfer.backends.nixl import NixlBackend
from tests.support.asgi import Client
from tests.support.local_cluster import MODEL, LocalCluster

pytestmark = pytest.mark.timeout(300)

PREFILL_POINTS = ("prefill.queued", "prefill.computing", "prefill.seal", "prefill.sealed")
DECODE_POINTS = ("decode.admit", "decode.reserved", "decode.opened", "decode.granted", "decode.fetched")
STATES = [("prefill-0", point) for point in PREFILL_POINTS] + [("decode-0", point) for point in DECODE_POINTS]
BODY = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 100, "temperature": 0, "ignore_eos": True}


@pytest.fixture
async def cluster(engines: dict[str, Engine]) -> AsyncIterator[LocalCluster]:
    async with LocalCluster(
        lambda worker_id: NixlBackend(), "transfer.lease_s=4", "transfer.renew_s=1", engines=engines
    ) as it:
        yield it
        await _until_idle(it)


async def _until_idle(cluster: LocalCluster) -> None:
    """Law 2, well before any lease time could have cleaned up."""
    async with asyncio.timeout(3):
        while not (_are_idle(cluster) and (await cluster.router.status()).num_placements == 0):
            await asyncio.sleep(0.01)
    status = await cluster.router.status()
    assert status.num_waiting == 0
    assert all(worker.state is WorkerState.READY for worker in status.workers)


def _are_idle(cluster: LocalCluster) -> bool:
    workers = cluster.workers.values()
    return all(worker.role.is_idle() and worker.context.engine.pool.counts().is_idle() for worker in workers)


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize(("worker", "point"), STATES, ids=[point for _, point in STATES])
async def test_leaving_at(cluster: LocalCluster, worker: str, point: str, stream: bool) -> None:
    failpoints = cluster.workers[worker].context.failpoints
    failpoints.set(point, "pause:60")
    call = Client(cluster.gateway.asgi).start("POST", "/v1/completions", {**BODY, "stream": stream})
    async with asyncio.timeout(60):
        while failpoints.num_hits(point) == 0:
            await asyncio.sleep(0.005)
    failpoints.set(point, "")
    call.leave()
    await call.end()
    await _until_idle(cluster)
    answer = await cluster.complete("The capital of France is", max_tokens=3)
    assert len(answer["choices"][0]["token_ids"]) == 3


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
async def test_leaving_while_tokens_flow(cluster: LocalCluster, stream: bool) -> None:
    call = Client(cluster.gateway.asgi).start("POST", "/v1/completions", {**BODY, "stream": stream})
    decode = cluster.workers["decode-0"].context.engine
    start = decode.counters().tokens_generated
    async with asyncio.timeout(60):
        while decode.counters().tokens_generated < start + 5:
            await asyncio.sleep(0.01)
    call.leave()
    await call.end()
    await _until_idle(cluster)
    assert decode.counters().tokens_generated < start + 60, "it did not run on"
