"""Two prefill and two decode workers, a router and a gateway as processes, under eight streams: each of them is killed,
stopped, restarted or cut off, at each state of a request."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from core.errors import ServingError
from core.types import WorkerState
from tests.faults.matrix.callers import DEADLINE_S, GRACE_S, Callers, questions
from tests.faults.matrix.cells import POINTS, all_cells, sample
from tests.faults.matrix.play import Player, Summary
from tests.support.cluster import ProcessCluster
from tests.support.proxied_cluster import proxied_cluster
from tests.support.stream import Stream
from tests.support.tiny_cluster import TINY, tiny_settings

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]
SEED = 6
SAMPLE_S = 22.0
STEP_S = 0.012
"""So slow are steps made: the streams are to last, and to leave the machine's cores to whoever starts again."""
POOLS = "{prefill: {replicas: 2, max_step_tokens: 128}, decode: {replicas: 2, max_step_tokens: 256}}"


@dataclass(frozen=True, slots=True)
class Site:
    cluster: ProcessCluster
    player: Player
    logs: Path


@asynccontextmanager
async def open_site(folder: Path) -> AsyncIterator[Site]:
    """A cluster, and those who know its right answers."""
    settings = (
        *tiny_settings(folder / "model"),
        f"models.0.pools={POOLS}",
        f"gateway.limits.request_timeout_s={DEADLINE_S}",
        "transfer.lease_s=4",
        "transfer.renew_s=1",
        "worker.pin_threads=false",
        f"failpoints={{worker.step: 'pause:{STEP_S}'}}",
    )
    async with proxied_cluster(folder, *settings, points=POINTS) as proxied:
        callers = Callers(proxied.cluster, questions(SEED, 3), SEED)
        await callers.learn()
        logs = folder / "logs"
        yield Site(proxied.cluster, Player(proxied, callers, logs, SEED), logs)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    async with open_site(tmp_path_factory.mktemp("site")) as site:
        yield site


async def test_a_sample_of_the_matrix(site: Site) -> None:
    summary = Summary()
    for cell in sample(SEED, SAMPLE_S):
        await site.player.play(cell, summary)
    print(summary.table())
    assert not summary.damage, summary.table()


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("part", list(all_cells()))
async def test_the_whole_matrix(tmp_path: Path, part: str) -> None:
    """On one cluster as long as it becomes whole again; else the rest on a new one."""
    summary, left = Summary(), all_cells()[part]
    while left:
        home = tmp_path / str(len(left))
        home.mkdir()
        async with open_site(home) as site:
            while left:
                cell = left.pop(0)
                try:
                    await site.player.play(cell, summary)
                except (AssertionError, TimeoutError) as error:
                    summary.damage.append(f"{cell}: not whole again: {error}")
                    break
    print(summary.table())
    assert not summary.damage, summary.table()


@pytest.mark.parametrize(
    ("num_kills", "whole_s"), [(2, 20.0), pytest.param(10, 2.0, marks=pytest.mark.soak)], ids=["sample", "all"]
)
async def test_the_router_dies_again_and_again(site: Site, num_kills: int, whole_s: float) -> None:
    """Running streams do not notice. New requests wait, or are told when to try again; none hangs."""
    cluster, outcomes = site.cluster, Counter[str]()
    right = (await Stream(cluster, **_LONG).read()).token_ids
    took_s: list[float] = []
    for _ in range(num_kills):
        num_failed = _attempts_failed(site.logs)
        streams = [Stream(cluster, **_LONG) for _ in range(4)]
        running = [asyncio.create_task(stream.read()) for stream in streams]
        async with asyncio.timeout(DEADLINE_S):
            while any(len(stream.token_ids) < 5 for stream in streams):
                await asyncio.sleep(0.01)
        before = cluster.pid("router")
        cluster.kill("router")
        asking = [asyncio.create_task(_ask_until(cluster, before, outcomes)) for _ in range(4)]
        took_s.append(await _whole_after_return(cluster, before))
        await asyncio.gather(*running, *asking)
        assert all(stream.error is None and stream.token_ids == right for stream in streams)
        assert _attempts_failed(site.logs) == num_failed, "an answer was begun anew"
        await cluster.wait_ready(60)
    await cluster.wait_idle(60)
    print(f"{num_kills} kills of the router: whole {statistics.median(took_s):.2f} s after its return, {took_s}")
    print(f"what was asked meanwhile: {dict(outcomes)}")
    assert outcomes["answered"] and set(outcomes) <= {"answered", "told when to try again"}, outcomes
    assert statistics.median(took_s) <= whole_s, took_s


_LONG: dict[str, Any] = {"model": TINY, "prompt": [7, 8, 9] * 20, "temperature": 0, "max_tokens": 400}


def _attempts_failed(logs: Path) -> int:
    return (logs / "gateway.log").read_text(errors="replace").count('"attempt failed"')


async def _ask_until(cluster: ProcessCluster, before: int, outcomes: Counter[str]) -> None:
    """One small request after the other, until one that was asked after the router's return is answered."""
    is_last = False
    while not is_last:
        is_last = cluster.ready_pid("router") not in (None, before)
        body = {"model": TINY, "prompt": [5, 6, 7], "temperature": 0, "max_tokens": 3}
        async with asyncio.timeout(DEADLINE_S + GRACE_S):
            answer = await cluster.http.post("/v1/completions", json=body)
        if answer.status_code == 200:
            outcomes["answered"] += 1
            continue
        is_last = False
        is_told = answer.status_code == 503 and int(answer.headers.get("retry-after", 0)) >= 1
        outcomes["told when to try again" if is_told else answer.text] += 1
        await asyncio.sleep(0.1)


async def _whole_after_return(cluster: ProcessCluster, before: int) -> float:
    """Seconds from the moment in which the new router says that it serves."""
    async with asyncio.timeout(DEADLINE_S * 3):
        while cluster.ready_pid("router") in (None, before):
            await asyncio.sleep(0.005)
        returned_at = time.monotonic()
        while True:
            try:
                status = await cluster.status()
                ready = [worker for worker in status.workers if worker.state is WorkerState.READY]
                if len(ready) == 4 and status.gateways:
                    return time.monotonic() - returned_at
            except ServingError:
                pass  # our own connection to it comes back too
            await asyncio.sleep(0.01)
