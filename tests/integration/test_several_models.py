"""Two models behind one gateway: each has its own pools, which change without the other's noticing."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from baton import pools
from core.errors import InvalidRequest
from core.types import ClusterStatus, Role, WorkerState
from tests.support.churn import settled
from tests.support.cluster import MODEL, ProcessCluster
from tests.support.tiny_model import CONFIG, write_folder

pytestmark = pytest.mark.processes

TINY = "tiny"
WAIT_S = 240.0
PROMPT = [5, 7, 11, 13] * 6


def sizes(status: ClusterStatus) -> dict[tuple[str, Role], tuple[int, int]]:
    return {(pool.model, pool.role): (pool.desired, pool.ready) for pool in status.pools}


def incarnations(status: ClusterStatus, model: str) -> set[int]:
    return {w.registration.incarnation for w in status.workers if w.registration.model.name == model}


async def answers(cluster: ProcessCluster) -> list[Any]:
    """Of each model."""
    tiny = cluster.complete(PROMPT, model=TINY, max_tokens=20, ignore_eos=True)
    real = cluster.complete("The capital of France is", model=MODEL, max_tokens=12)
    return [answer["choices"][0]["token_ids"] for answer in await asyncio.gather(tiny, real)]


@pytest.mark.timeout(900)
async def test_two_models_are_served_scaled_drained_and_flipped_independently(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_folder(tmp_path / TINY, config={**CONFIG, "max_position_embeddings": 2048})
    second = (f"models.1.path={tmp_path / TINY}", f"models.1.name={TINY}", "models.1.max_context=2048")
    settings = (
        *second,
        "models.1.kv.num_blocks=200",
        "worker.pin_threads=false",
        "worker.drain_s=0.5",
        "router.placement_wait_s=300",
    )
    async with ProcessCluster(tmp_path, *settings, is_kept=True) as cluster:
        router = cluster.config.router.listen
        expected = await answers(cluster)
        assert {model["id"] for model in (await cluster.http.get("/v1/models")).json()["data"]} == {MODEL, TINY}
        other = await cluster.http.post("/v1/completions", json={"model": "other", "prompt": "x"})
        assert (other.status_code, other.json()["error"]["code"]) == (404, "model_not_found")
        before = await cluster.status()

        assert await pools.scale(router, TINY, ["prefill=2"], wait_s=WAIT_S) == 0
        status = await cluster.status()
        assert sizes(status)[TINY, Role.PREFILL] == (2, 2)
        assert sizes(status)[MODEL, Role.PREFILL] == sizes(status)[MODEL, Role.DECODE] == (1, 1)
        assert "prefill=2" in capsys.readouterr().out

        long = asyncio.create_task(cluster.complete("Once upon a time", model=MODEL, max_tokens=120))
        decode = f"{MODEL}.decode-0"
        await cluster.wait_for(
            "an answer that runs",
            lambda status: any(w.load.num_running for w in status.workers if w.registration.worker_id == decode),
            30,
        )
        assert await pools.drain(router, decode, reason="a test", wait_s=WAIT_S) == 0
        said = capsys.readouterr().out
        assert f"no other decode worker of {MODEL} is ready: new requests wait for one" in said
        assert f"{decode} finishes: 1 running" in said and f"{decode} has left" in said
        drained = (await long)["choices"][0]["token_ids"]
        status = await settled(cluster)
        assert f"{MODEL}.decode-1" in {w.registration.worker_id for w in status.workers}
        assert incarnations(before, TINY) < incarnations(status, TINY), "the other model's workers are who they were"
        again = await cluster.complete("Once upon a time", model=MODEL, max_tokens=120)
        assert again["choices"][0]["token_ids"] == drained

        with pytest.raises(InvalidRequest, match="the last prefill worker"):
            await pools.flip(router, f"{MODEL}.prefill-0", reason="", wait_s=0)
        flipped = await cluster.worker(f"{TINY}.prefill-1")
        assert await pools.flip(router, f"{TINY}.prefill-1", reason="", wait_s=WAIT_S) == 0
        status = await settled(cluster)
        assert sizes(status)[TINY, Role.PREFILL] == (1, 1) and sizes(status)[TINY, Role.DECODE] == (2, 2)
        worker = await cluster.worker(f"{TINY}.prefill-1")
        assert (worker.registration.role, worker.registration.pid) == (Role.DECODE, flipped.registration.pid)
        assert worker.registration.incarnation != flipped.registration.incarnation
        assert worker.load.blocks.free == worker.load.blocks.total, "nothing is left of its time before"
        assert await answers(cluster) == expected

        cluster.kill("router")
        forgotten = await cluster.wait_for(
            "a new router", lambda status: status.router_incarnation != before.router_incarnation, 60
        )
        assert forgotten.router_pid != before.router_pid
        await cluster.wait_for("the sizes that were asked for", lambda now: sizes(now) == sizes(status), WAIT_S)
        assert not [w for w in (await cluster.status()).workers if w.state is WorkerState.DRAINING]
        assert await answers(cluster) == expected
        with pytest.raises(InvalidRequest, match="no worker 'nobody'; registered: "):
            await pools.drain(router, "nobody", reason="", wait_s=0)
        await cluster.wait_idle()
