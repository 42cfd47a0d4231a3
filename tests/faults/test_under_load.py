"""A cluster of real processes under load: workers that are restarted again and again at the same address, and two
minutes of more requests than the pool can hold, a part of them given up at any moment."""

import asyncio
import statistics
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from core.types import ClusterStatus
from tests.support.cluster import ProcessCluster
from tests.support.tiny_cluster import (
    FixedPorts,
    Load,
    Question,
    ask,
    incarnation,
    learn,
    questions,
    tiny_settings,
    wait_new,
)

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(1200)]
NUM_BLOCKS = 400
STEP_S = 0.02
"""So slow are steps made, that workers and not the machine's cores are what is short."""
POOLS = "{prefill: {replicas: 2, max_step_tokens: 1024}, decode: {max_step_tokens: 1024, max_sequences: 64}}"


@pytest.fixture(scope="module")
def ports() -> FixedPorts:
    return FixedPorts()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory, ports: FixedPorts) -> AsyncIterator[ProcessCluster]:
    settings = (
        *tiny_settings(tmp_path_factory.mktemp("model")),
        f"models.0.pools={POOLS}",
        f"models.0.kv.num_blocks={NUM_BLOCKS}",
        "worker.pin_threads=false",
        f"failpoints={{worker.step: 'pause:{STEP_S}'}}",
    )
    async with ProcessCluster(tmp_path_factory.mktemp("logs"), *settings, edit=ports) as cluster:
        yield cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def asked(cluster: ProcessCluster) -> list[Question]:
    made = questions(7, 24, longest=160, num_tokens=160)
    await learn(cluster, made)
    return made


@pytest.mark.parametrize(
    ("num_restarts", "limit_s"), [(50, 45.0), pytest.param(50, 1e9, marks=pytest.mark.soak)], ids=["sample", "all"]
)
async def test_restarts_at_the_same_address(
    cluster: ProcessCluster, asked: list[Question], ports: FixedPorts, num_restarts: int, limit_s: float
) -> None:
    """Two of three times the prefill worker, else the decode worker. Nobody else dies of it, nobody uses the old
    incarnation, no request fails, and within three seconds of being ready the new one is part of a good answer."""
    began = time.monotonic()
    steady = await incarnation(cluster, "prefill-1")
    short = min(asked, key=lambda question: question.num_tokens)
    served_s: list[float] = []
    async with Load(cluster, asked, 6, seed=1) as load:
        while len(served_s) < num_restarts and (time.monotonic() - began < limit_s or len(served_s) < 3):
            worker = "decode-0" if len(served_s) % 3 == 2 else "prefill-0"
            other = "prefill-0" if worker == "decode-0" else "decode-0"
            old, neighbour = await incarnation(cluster, worker), await incarnation(cluster, other)
            num_before = (await cluster.worker(other)).load.num_steps
            cluster.kill(worker)
            await wait_new(cluster, worker, old)
            ready_at = time.monotonic()
            assert (await cluster.worker(worker)).registration.address == ports.addresses[worker]
            # The load's callers may all be reading long answers: whoever asks now finds the new start.
            while True:
                assert (await ask(cluster, short))["choices"][0]["token_ids"] == short.answer
                if (await cluster.worker(worker)).load.num_steps > 0:
                    break
            served_s.append(time.monotonic() - ready_at)
            assert await incarnation(cluster, other) == neighbour, f"{other} died of it"
            assert (await cluster.worker(other)).load.num_steps >= num_before
            assert await incarnation(cluster, "prefill-1") == steady
    assert set(load.counts) == {"right"}, load.counts
    assert max(served_s) < 3.0, served_s
    await cluster.wait_idle()
    print(
        f"{len(served_s)} restarts under {load.counts['right']} requests: first good answer "
        f"{statistics.median(served_s):.2f} s after ready (worst {max(served_s):.2f})"
    )


def _occupancy(status: ClusterStatus) -> float:
    """Share of the decode worker's blocks that is held or promised."""
    for worker in status.workers:
        if worker.registration.worker_id == "decode-0":
            counts = worker.load.blocks
            assert counts.is_conserved(), counts
            return (counts.custody + counts.in_use + counts.leased + counts.reserved) / counts.total
    return 0.0


@pytest.mark.parametrize(
    "minutes", [pytest.param(2, id="two-minutes"), pytest.param(10, id="ten-minutes", marks=pytest.mark.soak)]
)
async def test_two_hundred_at_once_with_the_pool_full(
    cluster: ProcessCluster, asked: list[Question], minutes: int
) -> None:
    """A fifth of the callers hang up at any moment. Answers keep coming, all are right, the pool is full, and at the
    end nothing is left of all that anywhere."""
    occupancies: list[float] = []
    load = Load(cluster, asked, 200, seed=2, share_given_up=0.2, patience_s=3.0)
    async with load:
        ends_at = time.monotonic() + 60 * minutes
        num_right, progressed_at = 0, time.monotonic()
        while time.monotonic() < ends_at:
            occupancies.append(_occupancy(await cluster.status()))
            if load.counts["right"] > num_right:
                num_right, progressed_at = load.counts["right"], time.monotonic()
            assert time.monotonic() - progressed_at < 30, f"wedged: {await cluster.status()}"
            await asyncio.sleep(0.2)
    await cluster.wait_idle()
    assert set(load.counts) == {"right", "given up"}, load.counts
    quartiles = statistics.quantiles(occupancies)
    assert quartiles[1] >= 0.95, quartiles
    print(f"{dict(load.counts)}, the pool at {quartiles[1]:.0%} (median)")
    for name in dict.fromkeys(name for stages in load.timings for name in stages):
        values = sorted(stages.get(name, 0.0) for stages in load.timings)
        print(f"  {name}: p50 {values[len(values) // 2]:.1f} ms, p99 {values[len(values) * 99 // 100]:.1f} ms")
