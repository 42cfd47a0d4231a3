"""A cluster within the test's process, of real engines, whose gateway listens on a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx

from engine.engine import Engine
from kvtransfer.backends.nixl import NixlBackend
from tests.support.caller import Caller
from tests.support.local_cluster import MODEL, LocalCluster
from tests.support.site import serve

IDLE_S = 10.0


@dataclass
class ServedCluster(Caller):
    cluster: LocalCluster

    async def until_idle(self) -> None:
        """Laws 1 and 2, well before a lease time could have cleaned up."""
        workers = self.cluster.workers.values()
        async with asyncio.timeout(IDLE_S):
            while not all(one.role.is_idle() and one.context.engine.pool.counts().is_idle() for one in workers):
                await asyncio.sleep(0.01)
            while (await self.cluster.router.status()).num_placements:
                await asyncio.sleep(0.01)
        for worker in workers:
            assert worker.context.engine.pool.counts().is_conserved()

    async def works(self) -> None:
        """What must hold after every refusal: the next request is answered, and nothing is left of it."""
        body = {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 3, "temperature": 0}
        answer = await self.good("/v1/completions", body)
        assert answer["choices"][0]["text"]
        await self.until_idle()

    def num_generated(self, worker: str) -> int:
        return self.cluster.workers[worker].context.engine.counters().tokens_generated


@asynccontextmanager
async def served_cluster(engines: Mapping[str, Engine] | None, *overrides: str) -> AsyncIterator[ServedCluster]:
    async with (
        LocalCluster(lambda worker_id: NixlBackend(), *overrides, engines=engines) as cluster,
        serve(cluster.gateway, cluster.config.gateway) as address,
        httpx.AsyncClient(base_url=f"http://{address}", timeout=120, trust_env=False) as http,
    ):
        served = ServedCluster(http=http, cluster=cluster)
        async with asyncio.timeout(60):
            while (await http.get("/ready")).status_code != 200:
                await asyncio.sleep(0.02)
        yield served
        await served.until_idle()
