"""A new revision under load: both roles are replaced in lockstep, no request fails, and no hand-off crosses."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from baton.cli import main
from baton.rollout import progress
from core.ids import Incarnation
from tests.support.cluster import ProcessCluster
from tests.support.tiny_cluster import Load, learn, questions, tiny_settings

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

SETTINGS = (
    *("router.mode=split", "router.placement_wait_s=300", "router.max_records=20000"),
    *("models.0.revision=one", "worker.drain_s=20", "worker.pin_threads=false"),
)
NUM_STREAMS = 8
Revisions = dict[Incarnation, str]


async def roll_out(path: Path, revisions: list[str], *, num_replicas: int) -> None:
    """Under streams, one revision after the other; then every record that there is is looked at."""
    sizes = (f"models.0.pools.{role}.replicas={num_replicas}" for role in ("prefill", "decode"))
    settings = (*tiny_settings(path), *SETTINGS, *sizes)
    async with ProcessCluster(path, *settings, is_kept=True) as cluster:
        seen: Revisions = {}
        await look(cluster, seen)
        asked = questions(seed=3, count=24, longest=200, num_tokens=40)
        await learn(cluster, asked)
        async with Load(cluster, asked, NUM_STREAMS, seed=5) as load:
            for revision in revisions:
                await start(cluster, settings, revision)
                while not await is_over(cluster, revision):
                    await look(cluster, seen)
                    await asyncio.sleep(0.1)
                await look(cluster, seen)
        assert set(load.counts) == {"right"}, load.counts
        assert load.counts["right"] > NUM_STREAMS
        await cluster.wait_idle()
        status = await cluster.status()
        assert {one.registration.revision for one in status.workers} == {revisions[-1]}
        assert {pool.ready for pool in status.pools} == {num_replicas}
        crossings = {
            (seen[place.prefill.incarnation], seen[place.decode.incarnation])
            for record in (await cluster.router.find_records(limit=20000)).records
            for place in (attempt.placement for attempt in record.history)
            if place is not None and place.prefill is not None
        }
        assert crossings == {(name, name) for name in ("one", *revisions)}, "each handed off, within itself only"


async def start(cluster: ProcessCluster, settings: tuple[str, ...], revision: str) -> None:
    """As an operator does it."""
    arguments = [f"--set={one}" for one in (*settings, f"router.listen={cluster.config.router.listen}")]
    command = ["rollout", "start", "--revision", revision, *arguments]
    assert await asyncio.to_thread(main, command) == 0


async def is_over(cluster: ProcessCluster, revision: str) -> bool:
    return progress(await cluster.status(), cluster.config.models[0].name, revision)[0]


async def look(cluster: ProcessCluster, seen: Revisions) -> None:
    """Note the revision of everybody who is there."""
    for worker in (await cluster.status()).workers:
        seen[worker.registration.incarnation] = worker.registration.revision


async def test_a_rollout_of_both_roles_under_streams_fails_nobody_and_crosses_nowhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await roll_out(tmp_path, ["two"], num_replicas=1)
    assert "rolling out revision two" in capsys.readouterr().out


@pytest.mark.soak
@pytest.mark.timeout(3600)
async def test_ten_rollouts_one_after_the_other(tmp_path: Path) -> None:
    await roll_out(tmp_path, [f"r{number}" for number in range(10)], num_replicas=2)
