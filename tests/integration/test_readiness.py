"""A worker is ready when a canary hand-off with a live peer has succeeded, and its probe says why it is not."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from core.types import ClusterStatus, WorkerState
from engine.engine import Engine
from kvtransfer.backends.base import Backend
from kvtransfer.backends.nixl import NixlBackend
from tests.support.local_cluster import LocalCluster

pytestmark = pytest.mark.timeout(300)


def states(status: ClusterStatus) -> dict[str, WorkerState]:
    return {worker.registration.worker_id: worker.state for worker in status.workers}


async def until(cluster: LocalCluster, wanted: dict[str, WorkerState]) -> None:
    async with asyncio.timeout(120):
        while states(await cluster.router.status()) != wanted:
            await asyncio.sleep(0.02)


async def probe(cluster: LocalCluster, worker_id: str) -> httpx.Response:
    async with httpx.AsyncClient() as http:
        return await http.get(f"http://{cluster.workers[worker_id].http_address}/ready")


async def test_memory_that_cannot_be_read_keeps_both_sides_from_being_ready(engines: dict[str, Engine]) -> None:
    def backend(worker_id: str) -> Backend:
        if worker_id == "decode-0":  # the prefill worker is there, and nobody has read its canary yet
            cluster.workers["prefill-0"]._memory.canary.spoil()
        return NixlBackend()

    cluster = LocalCluster(backend, engines=engines)
    async with cluster:
        prefill, decode = cluster.workers["prefill-0"], cluster.workers["decode-0"]
        async with asyncio.timeout(120):
            while "announced" not in (decode.context.proof.why_not or ""):
                await asyncio.sleep(0.02)
        told = await probe(cluster, "decode-0")
        assert told.status_code == 503 and "prefill-0: no link" in told.json()["reason"], told.text
        assert states(await cluster.router.status())["decode-0"] is WorkerState.STARTING
        refused = await cluster.http.get("/ready")
        assert refused.status_code == 503

        prefill._memory.canary.spoil()  # once more: it is what it was announced to be
        await until(cluster, {"prefill-0": WorkerState.READY, "decode-0": WorkerState.READY})
        assert (await probe(cluster, "decode-0")).status_code == (await probe(cluster, "prefill-0")).status_code == 200
        await cluster.complete("Rome is", max_tokens=2)
