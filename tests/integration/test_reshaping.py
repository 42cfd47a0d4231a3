"""Pools that change under load: who drains, flips or leaves takes nobody's answer with it."""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path

import pytest

from core.types import Role
from tests.support.churn import change_shape, terminate, under_load
from tests.support.cluster import MODEL, ProcessCluster

pytestmark = pytest.mark.processes

POOLS = (
    *("models.0.pools.prefill.replicas=2", "models.0.pools.decode.replicas=2", "router.mode=split"),
    *("worker.pin_threads=false", "router.placement_wait_s=300"),  # a slow machine takes long to start a worker
)


async def reshape(path: Path, num_changes: int, *, seed: int, drain_s: float) -> None:
    """So many scale-downs and flips; then a worker is told to end twice, and in the long run another one once."""
    draw, changes = random.Random(seed), Counter[str]()
    async with ProcessCluster(path, *POOLS, f"worker.drain_s={drain_s}", is_kept=True) as cluster:
        async with under_load(cluster, num_streams=4) as load:
            since = time.monotonic()
            for _ in range(num_changes):
                changes[await change_shape(cluster, MODEL, draw)] += 1
            lasted_s = time.monotonic() - since
            if num_changes > 4:
                await terminate(cluster, MODEL, Role.PREFILL, num_signals=1)
            await terminate(cluster, MODEL, Role.DECODE, num_signals=2)
        await cluster.wait_idle()
    print(
        f"{num_changes} changes in {lasted_s:.0f} s ({dict(changes)}): {dict(load.outcomes)}, "
        f"longest request {load.longest_s:.1f} s"
    )
    assert load.wrong == []
    assert load.num_answered > 0


@pytest.mark.timeout(900)
async def test_some_changes_of_shape_cost_no_request_and_no_token(tmp_path: Path) -> None:
    await reshape(tmp_path, 4, seed=2, drain_s=0.5)


@pytest.mark.soak
@pytest.mark.timeout(3600)
async def test_thirty_changes_of_shape_cost_no_request_and_no_token(tmp_path: Path) -> None:
    await reshape(tmp_path, 30, seed=1, drain_s=0.5)
