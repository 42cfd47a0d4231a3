"""Where a decode worker could lose something: a mistake of ours in mid-admission, a queue that is full."""

import asyncio

import pytest

from core.failpoints import Failpoints
from decode_worker.intake import Admission
from decode_worker.service import DecodeRole
from engine.engine import Engine
from kvtransfer.backends.nixl import NixlBackend
from tests.support.local_cluster import LocalCluster

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]


async def test_an_admission_whose_task_dies_is_retried_and_holds_nothing(
    engines: dict[str, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ("router.heartbeat_timeout_s=0.5",)
    async with LocalCluster(lambda worker_id: NixlBackend(), *settings, engines=engines) as cluster:
        role = cluster.workers["decode-0"].role
        assert isinstance(role, DecodeRole)
        fetch, failures = role._intake.fetch, []

        async def fetch_badly(admission: Admission) -> object:
            if not failures:
                failures.append(admission)
                raise KeyError("a mistake")
            return await fetch(admission)

        monkeypatch.setattr(role._intake, "fetch", fetch_badly)
        async with asyncio.timeout(30):
            answer = await cluster.complete("The capital of France is", max_tokens=4)
        assert len(answer["choices"][0]["token_ids"]) == 4
        assert failures
        await _until_idle(cluster)


async def test_a_full_queue_is_not_overtaken_and_nothing_is_reserved_twice(engines: dict[str, Engine]) -> None:
    settings = ("models.0.pools.decode.max_queue=1",)
    async with LocalCluster(lambda worker_id: NixlBackend(), *settings, engines=engines) as cluster:
        context = cluster.workers["decode-0"].context
        pool = context.engine.pool
        others = pool.reserve(pool.num_unpromised - 4)  # what is cached can be had too
        try:
            long = asyncio.create_task(cluster.complete("Once upon a time", max_tokens=100, ignore_eos=True))
            failpoints = context.failpoints
            await _until_hit(failpoints, "decode.admit", long)
            short = asyncio.create_task(cluster.complete("The capital of France is", max_tokens=3))
            await _until_hit(failpoints, "decode.admit", short)
            assert not short.done() and pool.counts().reserved == others.remaining, "the longer one was there first"
        finally:
            others.release()
        for answer in (await long, await short):
            assert answer["choices"][0]["text"]
        await _until_idle(cluster)


async def _until_hit(failpoints: Failpoints, name: str, task: "asyncio.Task[object]") -> None:
    """Until the failpoint was reached once more (which does nothing there)."""
    failpoints.set(name, "pause:0")
    before = failpoints.num_hits(name)
    async with asyncio.timeout(20):
        while failpoints.num_hits(name) == before and not task.done():
            await asyncio.sleep(0.005)


async def _until_idle(cluster: LocalCluster) -> None:
    async with asyncio.timeout(5):
        while not all(
            worker.role.is_idle() and worker.context.engine.pool.counts().is_idle()
            for worker in cluster.workers.values()
        ):
            await asyncio.sleep(0.01)
