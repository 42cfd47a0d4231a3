"""A mistake of ours inside a decode worker: the request is told and retried, and what it held comes back."""

import asyncio

import pytest

from decode_worker.intake import Admission
from decode_worker.service import DecodeRole
from engine.engine import Engine
from kvtransfer.backends.nixl import NixlBackend
from tests.support.local_cluster import LocalCluster

pytestmark = pytest.mark.timeout(120)


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
        async with asyncio.timeout(5):
            while not all(
                worker.role.is_idle() and worker.context.engine.pool.counts().is_idle()
                for worker in cluster.workers.values()
            ):
                await asyncio.sleep(0.01)
